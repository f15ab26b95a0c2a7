"""The section `optim`."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from dovetail.recipe.types import (
    Listed,
    Momentum,
    NonNegativeFloat,
    NotStrict,
    OneOrMore,
    PositiveFloat,
    Section,
    Share,
    key,
)


class ParamGroupSection(Section):
    """Parameters of the policy with a learning rate or weight decay of their own."""

    pattern: str = Field(
        description="of the group's parameter names: `*.layers.0.*`; the first group that matches wins"
    )
    lr: PositiveFloat | None = key(None, "its peak learning rate; null: optim.lr")
    weight_decay: NonNegativeFloat | None = key(
        None, "for norms and biases, too; null: optim.weight_decay, not for those"
    )


class OptimSection(Section):
    """AdamW and its learning rate."""

    lr: PositiveFloat = key(1.0e-6, "peak learning rate")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = key("constant", "after the warmup")
    warmup_steps: NonNegativeInt = key(0, "steps of linear warmup; the first step's rate is not 0")
    decay_steps: PositiveInt | None = key(None, "steps of decay; null: to the end (wsd: the last tenth)")
    min_lr_ratio: Share = key(0.0, "the rate at the end, as a share of lr")
    weight_decay: NonNegativeFloat = key(0.0, "decoupled weight decay; not for norms and biases")
    clip_norm: PositiveFloat | None = key(1.0, "largest global gradient norm; null: no limit")
    betas: Annotated[tuple[Momentum, Momentum], NotStrict] = key((0.9, 0.999), "decay of the moments")
    eps: PositiveFloat = key(1.0e-8, "added to the root of the second moment")
    groups: Annotated[tuple[ParamGroupSection, ...], OneOrMore, NotStrict] = key(
        (), "parameters of the policy with their own lr or weight_decay, by patterns of their names"
    )
    frozen: Annotated[tuple[str, ...], Listed, NotStrict] = key((), "of the policy: patterns of names not to train")
