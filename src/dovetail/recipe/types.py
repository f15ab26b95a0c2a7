"""Types of recipe values."""

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import to_jsonable_python

from dovetail.errors import quoted


def _listed(given: Any) -> Any:
    return (given,) if isinstance(given, str) else given


def _whole(path: str) -> str:
    if path == "~" or path.startswith("~/"):
        raise ValueError(f"{quoted(path)} begins with ~, which only a shell replaces; write the whole path")
    try:
        named = "\0" not in path and os.fsencode(path) is not None
    except UnicodeEncodeError:
        named = False
    if not named:
        raise ValueError(f"{quoted(path)} holds a character that no name of a file may have; take it out")
    return path


def _plain(options: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        to_jsonable_python(options)
    except ValueError as error:
        raise ValueError(f"expected text, numbers, lists and mappings, as JSON has them ({error})") from None
    return options


Dtype = Literal["float32", "bfloat16"]
RowFormat = Literal["auto", "verl", "trl", "openai", "sharegpt", "alpaca", "gsm8k", "slime", "openrlhf"]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]  # of 1 nothing would ever be learned
PathText = Annotated[str, AfterValidator(_whole)]
Options = Annotated[Mapping[str, Any], AfterValidator(_plain)]  # which go to other processes and into checkpoints
Listed = BeforeValidator(_listed)  # one name stands for a list of it


class Section(BaseModel):
    """Frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
