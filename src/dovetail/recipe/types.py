"""Types of recipe keys, and the base of sections."""

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_jsonable_python

from dovetail.errors import quoted


def _valid_path(path: str) -> str:
    if path == "~" or path.startswith("~/"):
        raise ValueError(f"{quoted(path)} begins with ~, which only a shell replaces; write the whole path")
    try:
        named = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        named = False
    if not named:
        raise ValueError(f"{quoted(path)} holds a character that no name of a file may have; take it out")
    return path


def _valid_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        to_jsonable_python(options)
    except ValueError as error:
        raise ValueError(f"expected text, numbers, lists and mappings, as JSON has them ({error})") from None
    return options


Dtype = Literal["float32", "bfloat16"]
RowFormat = Literal["auto", "verl", "trl", "openai", "sharegpt", "alpaca", "gsm8k", "slime", "openrlhf"]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
NotStrict = Field(strict=False)  # YAML has lists, no tuples
Share = Annotated[float, Field(ge=0, le=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
Estimator = Literal["k1", "k2", "k3"]
PathText = Annotated[str, pydantic.AfterValidator(_valid_path)]
Options = Annotated[Mapping[str, Any], pydantic.AfterValidator(_valid_options)]  # goes into checkpoints
Listed = pydantic.BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)


def key(default: Any, description: str) -> Any:
    return Field(default, description=description)


class Section(BaseModel):
    """Frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
