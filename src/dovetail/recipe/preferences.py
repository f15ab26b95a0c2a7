"""Algorithms of preferences: keys, names and defaults are TRL's where it has them."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from dovetail.recipe.types import Updates, key

Smoothing = Annotated[float, Field(ge=0, lt=0.5)]


class Preferences(Updates):
    """Keys of every algorithm of preferences."""

    @model_validator(mode="after")
    def _smoothed(self) -> "Preferences":
        given = dict(self)
        if given.get("label_smoothing") and given.get("loss") in ("hinge", "ipo"):
            raise ValueError(
                f"label_smoothing has no meaning for the loss {given['loss']}; leave it out"
            )
        return self


class DPO(Preferences):
    """Direct preference optimization: log-probs against the reference's (reference.path), by pair."""

    wants_reference: ClassVar[bool] = True
    name: Literal["dpo"] = "dpo"
    loss: Literal["sigmoid", "hinge", "ipo", "robust"] = key("sigmoid", "of a pair's margin")
    beta: PositiveFloat = key(
        0.1, "scale of implicit rewards; ipo: its tau; jsd: 0 is forward_kl and 1 reverse_kl"
    )
    label_smoothing: Smoothing = key(0.0, "share of pairs with the wrong order; sigmoid: cDPO")
    precompute_ref_log_probs: bool = key(
        False, "score the reference once, before training, and free it"
    )


class KTO(Preferences):
    """Kahneman-Tversky optimization: completions that are marked as good or bad, without pairs."""

    wants_reference: ClassVar[bool] = True
    name: Literal["kto"] = "kto"
    beta: PositiveFloat = key(0.1, "scale of implicit rewards")
    desirable_weight: NonNegativeFloat = key(1.0, "weight of good completions")
    undesirable_weight: NonNegativeFloat = key(1.0, "weight of bad completions")


class CPO(Preferences):
    """Contrastive preference optimization: pairs without a reference."""

    name: Literal["cpo"] = "cpo"
    loss: Literal["sigmoid", "hinge", "ipo"] = key("sigmoid", "of a pair's margin")
    beta: PositiveFloat = key(0.1, "scale of implicit rewards")
    label_smoothing: Smoothing = key(0.0, "share of pairs with the wrong order")
    cpo_alpha: NonNegativeFloat = key(
        1.0, "weight of the chosen completions' negative log-likelihood"
    )


class SimPO(Preferences):
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


class ORPO(Preferences):
    """Odds-ratio preference optimization: supervised training of chosen rows with a penalty, without a reference."""

    name: Literal["orpo"] = "orpo"
    beta: PositiveFloat = key(0.1, "weight of the odds ratio's loss; lambda in the paper")


class Reward(Preferences):
    """A reward model by Bradley-Terry: a score at the last token, trained on pairs."""

    name: Literal["reward"] = "reward"
    center_rewards_coefficient: NonNegativeFloat = key(
        0.0, "weight of the squared sum of a pair's scores"
    )


AnyPreference = DPO | KTO | CPO | SimPO | ORPO | Reward
