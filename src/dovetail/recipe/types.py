"""Types of recipe keys, and the base of sections."""

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field, PositiveInt
from pydantic_core import to_jsonable_python

from dovetail.errors import quoted
from dovetail.parallel.layout import Layout


def _valid_path(path: str) -> str:
    if path == "~" or path.startswith("~/"):
        raise ValueError(
            f"{quoted(path)} begins with ~, which only a shell replaces; write the whole path"
        )
    try:
        if b"\0" not in os.fsencode(path):
            return path
    except UnicodeEncodeError:
        pass
    raise ValueError(
        f"{quoted(path)} holds a character that no name of a file may have; take it out"
    )


def _valid_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        to_jsonable_python(options)
    except ValueError as error:
        raise ValueError(
            f"expected text, numbers, lists and mappings, as JSON has them ({error})"
        ) from None
    return options


RowFormat = Literal[
    "auto", "verl", "trl", "openai", "sharegpt", "alpaca", "gsm8k", "slime", "openrlhf"
]
Listed = pydantic.BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)
OneOrMore = pydantic.BeforeValidator(lambda given: [given] if isinstance(given, Mapping) else given)
NotStrict = Field(strict=False)  # YAML has lists, no tuples
Share = Annotated[float, Field(ge=0, le=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
Estimator = Literal["k1", "k2", "k3"]
PathText = Annotated[str, pydantic.AfterValidator(_valid_path)]
Options = Annotated[
    Mapping[str, Any], pydantic.AfterValidator(_valid_options)
]  # goes into checkpoints


def key(default: Any, description: str) -> Any:
    return Field(default, description=description)


class Section(BaseModel):
    """Frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, populate_by_name=True
    )

    def values_for(self, settings: type) -> dict[str, Any]:
        """Returns the values whose keys are fields of the dataclass `settings`."""
        names = {field.name for field in fields(settings)}
        return {name: value for name, value in self if name in names}


class LayoutSection(Section):
    """How a model is cut over ranks: ranks = tp x pp x cp x dp."""

    tp: PositiveInt = key(1, "tensor parallel degree")
    pp: PositiveInt = key(1, "pipeline stages")
    cp: PositiveInt = key(1, "context parallel degree")
    dp: PositiveInt | Literal["auto"] = key("auto", "replicas; auto: ranks / (tp x pp x cp)")
    ep: PositiveInt = key(1, "expert parallel degree; divides dp x cp and adds no ranks")
    virtual_stages: PositiveInt = key(1, "pipeline chunks per rank")
    cp_mode: Literal["auto", "ulysses", "gather", "product"] = key(
        "auto", "how context parallel works"
    )
    pp_split: Annotated[tuple[PositiveInt, ...], NotStrict] | Literal["auto"] = key(
        "auto", "layers of each stage"
    )
    schedule: Literal["1f1b", "interleaved", "gpipe", "zero_bubble"] = key(
        "1f1b", "pipeline schedule"
    )

    def to_layout(self) -> Layout:
        degrees = self.model_dump()
        degrees["dp"] = None if self.dp == "auto" else self.dp
        return Layout(**degrees)


OwnLayout = Annotated[
    LayoutSection | None, pydantic.BeforeValidator(lambda given: None if given == {} else given)
]
