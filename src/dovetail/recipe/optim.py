"""The section `optim`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from dovetail.recipe.functions import FunctionName
from dovetail.recipe.optimizers import RuleName, refuse_name
from dovetail.recipe.types import (
    Listed,
    Momentum,
    NotStrict,
    OneOrMore,
    Options,
    Section,
    Share,
    key,
)


class ParamGroupSection(Section):
    """Parameters of the policy with a learning rate or weight decay of their own."""

    pattern: str = Field(
        description="of the group's parameter names: `*.layers.0.*`; the first that matches wins"
    )
    lr: PositiveFloat | None = key(None, "its peak learning rate; null: optim.lr")
    weight_decay: NonNegativeFloat | None = key(
        None, "also of norms and biases; null: optim.weight_decay, not theirs"
    )


class OptimSection(Section):
    """The optimizer and its learning rate."""

    name: Annotated[
        RuleName | None,
        pydantic.BeforeValidator(lambda x: refuse_name(x) if isinstance(x, str) else x),
    ] = key(
        "adamw",
        "adamw, muon, adamw8bit (needs torchao), or an elementwise class of torch.optim; null: "
        "the import",
    )
    function: FunctionName | None = Field(
        None, alias="import", description="an optimizer class of yours: module:Class"
    )
    options: Options = key({}, "its other keyword arguments, such as momentum")
    lr: PositiveFloat = key(1.0e-6, "peak learning rate")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = key("constant", "after the warmup")
    warmup_steps: NonNegativeInt = key(0, "steps of linear warmup; the first step's rate is not 0")
    decay_steps: PositiveInt | None = key(
        None, "steps of decay; null: to the end (wsd: the last tenth)"
    )
    min_lr_ratio: Share = key(0.0, "the rate at the end, as a share of lr")
    weight_decay: NonNegativeFloat = key(
        0.0, "decoupled, or as the class has it; not for norms and biases"
    )
    clip_norm: PositiveFloat | None = key(1.0, "largest global gradient norm; null: no limit")
    betas: Annotated[tuple[Momentum, Momentum], NotStrict] = key(
        (0.9, 0.999),
        "of AdamW's moments, also those of muon and adamw8bit, and of classes that take betas",
    )
    eps: PositiveFloat = key(1.0e-8, "as betas; a class keeps its own unless this is changed")
    groups: Annotated[tuple[ParamGroupSection, ...], OneOrMore, NotStrict] = key(
        (), "parameters of the policy with their own lr or weight_decay, by patterns of their names"
    )
    frozen: Annotated[tuple[str, ...], Listed, NotStrict] = key(
        (), "of the policy: patterns of names not to train"
    )

    @model_validator(mode="before")
    @classmethod
    def _imported(cls, given: Any) -> Any:
        """`name: {import: module:Class, options: {...}}` is `import` and `options`."""
        if not isinstance(given, Mapping):
            return given
        name = given.get("name")
        own = {}
        if isinstance(name, Mapping):
            own = {"name": None, **name}
        elif "name" not in given and ("import" in given or "function" in given):
            own = {"name": None}
        if twice := [each for each in own if each != "name" and each in given]:
            raise ValueError(f"{twice[0]} is given in optim and in optim.name; give it once")
        return {**given, **own}

    @model_validator(mode="after")
    def _one_rule(self) -> "OptimSection":
        if (self.name is None) == (self.function is None):
            raise ValueError("give name or import, and not both")
        return self
