"""Algorithms of preferences: keys, names and defaults are TRL's where it has them."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from dovetail.recipe.algorithms import AlgorithmSection, RowKind
from dovetail.recipe.types import key

if TYPE_CHECKING:
    from dovetail.recipe.schema import Recipe

Smoothing = Annotated[float, Field(ge=0, lt=0.5)]


class PreferenceSection(AlgorithmSection):
    """Keys of every algorithm of preferences."""

    @property
    def rows(self) -> RowKind:
        return "pair"

    @model_validator(mode="after")
    def _smoothed(self) -> "PreferenceSection":
        given = dict(self)
        if given.get("label_smoothing") and given.get("loss") in ("hinge", "ipo"):
            raise ValueError(
                f"label_smoothing has no meaning for the loss {given['loss']}; leave it out"
            )
        return self


class DPOSection(PreferenceSection):
    """Direct preference optimization: log-probs against the reference's (reference.path), by pair."""

    needs_reference: ClassVar[bool] = True
    name: Literal["dpo"] = "dpo"
    loss: Literal["sigmoid", "hinge", "ipo", "robust"] = key("sigmoid", "of a pair's margin")
    beta: PositiveFloat = key(
        0.1, "scale of implicit rewards; ipo: its tau; jsd: 0 is forward_kl and 1 reverse_kl"
    )
    label_smoothing: Smoothing = key(0.0, "share of pairs with the wrong order; sigmoid: cDPO")
    precompute_ref_log_probs: bool = key(
        False, "score the reference once, before training, and free it"
    )


class KTOSection(PreferenceSection):
    """Kahneman-Tversky optimization: completions that are marked as good or bad, without pairs."""

    needs_reference: ClassVar[bool] = True
    name: Literal["kto"] = "kto"
    beta: PositiveFloat = key(0.1, "scale of implicit rewards")
    desirable_weight: NonNegativeFloat = key(1.0, "weight of good completions")
    undesirable_weight: NonNegativeFloat = key(1.0, "weight of bad completions")

    @property
    def rows(self) -> RowKind:
        return "marked completion"

    def check(self, recipe: "Recipe") -> None:
        rows = recipe.trainer.prompts_per_step
        if rows < 2 * self.num_mini_batches:
            why = "kto compares the rows of an optimizer step with each other"
            edit = "give 2 or more for each of algorithm.num_mini_batches"
            raise ValueError(f"trainer.prompts_per_step is {rows}; {why}, so {edit}")


class CPOSection(PreferenceSection):
    """Contrastive preference optimization: pairs without a reference."""

    name: Literal["cpo"] = "cpo"
    loss: Literal["sigmoid", "hinge", "ipo"] = key("sigmoid", "of a pair's margin")
    beta: PositiveFloat = key(0.1, "scale of implicit rewards")
    label_smoothing: Smoothing = key(0.0, "share of pairs with the wrong order")
    cpo_alpha: NonNegativeFloat = key(
        1.0, "weight of the chosen completions' negative log-likelihood"
    )


class SimPOSection(PreferenceSection):
    """SimPO: mean log-probs of completions, with a target margin, without a reference."""

    name: Literal["simpo"] = "simpo"
    beta: PositiveFloat = key(2.0, "scale of implicit rewards")
    label_smoothing: Smoothing = key(0.0, "share of pairs with the wrong order")
    simpo_gamma: NonNegativeFloat = key(1.0, "target margin of rewards")
    cpo_alpha: NonNegativeFloat = key(
        0.0, "weight of the chosen completions' negative log-likelihood (CPO-SimPO)"
    )

    @property
    def loss(self) -> Literal["simpo"]:
        return "simpo"


class ORPOSection(PreferenceSection):
    """Odds-ratio preference optimization: supervised training of chosen rows with a penalty, without a reference."""

    name: Literal["orpo"] = "orpo"
    beta: PositiveFloat = key(0.1, "weight of the odds ratio's loss; lambda in the paper")


class RewardTrainingSection(PreferenceSection):
    """A reward model by Bradley-Terry: a score at the last token, trained on pairs."""

    trains_values: ClassVar[bool] = True
    name: Literal["reward"] = "reward"
    center_rewards_coefficient: NonNegativeFloat = key(
        0.0, "weight of the squared sum of a pair's scores"
    )


AnyPreference = (
    DPOSection | KTOSection | CPOSection | SimPOSection | ORPOSection | RewardTrainingSection
)
