"""The section `algorithm` of SFT and RL."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from dovetail.bounds import MAX_FLOAT
from dovetail.recipe.functions import LossSection, OwnFunction, PolicyTerm
from dovetail.recipe.types import Estimator, NotStrict, Section, Share, Updates, key

HighRatio = Annotated[float, Field(gt=0, le=MAX_FLOAT)]


class CorrectionSection(Section):
    """Weights of the policy-gradient term by the ratio of the old policy's probabilities to the sampler's."""

    ratio: Literal["token", "sequence", "geometric", "none"] = key(
        "token",
        "of each token; sequence: the product over a response; geometric: its geometric mean; "
        "none: no weights",
    )
    bounds: Annotated[tuple[NonNegativeFloat, HighRatio], NotStrict] = key(
        (0.0, 2.0), "lowest and highest ratio"
    )
    outside: Literal["clamp", "mask", "drop"] = key(
        "clamp",
        "a ratio beyond the bounds: the nearest bound; weight 0, still counted; its whole "
        "response left out",
    )
    old: Literal["recomputed", "sampler"] = key(
        "recomputed",
        "old log-probs: from a pass before the updates; sampler: the sampler's, without pass and "
        "weights",
    )

    @model_validator(mode="after")
    def _possible(self) -> "CorrectionSection":
        low, high = self.bounds
        if not low <= 1 <= high:
            raise ValueError(
                f"bounds is [{low:g}, {high:g}]; expected a range around 1, as in [0.5, 5]"
            )
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        idle = [
            name for name, value in self if name != "old" and value not in (defaults[name], "none")
        ]
        if self.old == "sampler" and idle:
            why = "the clipped ratio of the loss is to the sampler itself, and there are no weights"
            raise ValueError(
                f"with old: sampler {why}; leave out {', '.join(idle)}, or set old: recomputed"
            )
        return self


class Algorithm(Updates):
    """Keys of SFT and RL."""

    aggregation: Literal["token", "sequence", "sequence_sum"] = key(
        "token",
        "token: mean over all tokens; sequence: mean over sequences of their means; "
        "sequence_sum: mean over sequences "
        "of the sum over tokens divided by a constant, the longest response (Dr. GRPO)",
    )


class SFT(Algorithm):
    """Supervised fine-tuning: the negative log-likelihood of the completions."""

    name: Literal["sft"] = "sft"
    loss: OwnFunction = key(
        None, "ppo, cispo, gmpo, sapo, or a function {import, options}; of sft a function alone"
    )


class PolicyGradient(Algorithm):
    """Keys of every RL algorithm."""

    samples: ClassVar[bool] = True
    loss: PolicyTerm = key(LossSection(), "ppo, cispo, gmpo, sapo, or a function {import, options}")
    clip_low: Share = key(0.2, "the ratio is clipped below 1 - clip_low")
    clip_high: Annotated[float, Field(ge=0, le=MAX_FLOAT)] = key(
        0.2, "the ratio is clipped above 1 + clip_high"
    )
    dual_clip: Annotated[float, Field(gt=1)] | None = key(
        None, "bound of the loss for negative advantages"
    )
    ratio: Literal["token", "sequence"] = key("token", "sequence: one ratio for a response (GSPO)")
    entropy_coef: float = key(0.0, "weight of the entropy bonus")
    kl_coef: NonNegativeFloat = key(0.0, "weight of the KL term to the reference")
    kl_estimator: Estimator = key("k3", "of the KL term; default: k1 in the reward, k3 in the loss")
    kl_in: Literal["reward", "loss"] = key("loss", "where the KL term is added")
    normalize_advantage: bool = key(False, "whiten advantages over all tokens of a step")
    correction: CorrectionSection | None = key(
        None,
        "importance weights; null: none for rollout.backend native and transformers, else those "
        "of the defaults",
    )
    overlong_buffer: NonNegativeInt = key(
        0, "last tokens of rollout.max_new_tokens that are punished (DAPO); 0: none"
    )
    overlong_penalty: PositiveFloat = key(
        1.0, "taken from the reward of a longest completion, less of shorter ones"
    )

    @property
    def wants_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def needs_old_logprobs(self) -> bool:
        return (
            self.kl_in == "reward" and self.kl_coef > 0
        ) or self.epochs * self.num_mini_batches > 1

    @model_validator(mode="after")
    def _terms(self) -> "PolicyGradient":
        term = self.loss.function or self.loss.name or "ppo"
        if term != "ppo" and self.dual_clip is not None:
            raise ValueError(f"dual_clip is a bound of the loss ppo; drop it, or loss ({term})")
        if (term == "gmpo" or self.loss.function is not None) and self.ratio != "token":
            raise ValueError(f"the loss {term} has a ratio of its own; drop ratio={self.ratio}")
        return self

    @model_validator(mode="before")
    @classmethod
    def _estimator(cls, given: Any) -> Any:  # see `rl.losses.kl_estimate`
        if not isinstance(given, Mapping) or "kl_in" not in given:
            return given
        return {"kl_estimator": "k1" if given["kl_in"] == "reward" else "k3", **given}


class CriticFree(PolicyGradient):
    """Keys of algorithms without a critic."""

    advantage: OwnFunction = key(
        None, "a function of yours: f(rewards, groups, batch) -> a number a response or token"
    )


class GRPO(CriticFree):
    """Group-relative advantages: a reward against the mean of its prompt's samples."""

    name: Literal["grpo"] = "grpo"
    scale_by_std: bool = key(True, "divide by the group's standard deviation; false: Dr. GRPO")
    drop_zero_std_groups: bool = key(
        False, "leave groups with all-equal rewards out of the loss (DAPO)"
    )
    max_num_gen_batches: Annotated[int, Field(ge=1, le=1 << 10)] = key(
        1,
        "with drop_zero_std_groups: sample more prompts until a step is full, as many times as "
        "this in all (DAPO)",
    )


class RLOO(CriticFree):
    """Leave-one-out advantages: a reward against the mean of its prompt's other samples."""

    name: Literal["rloo"] = "rloo"


class ReinforcePlusPlus(CriticFree):
    """REINFORCE++: rewards to go with the KL penalty of each token, whitened over all tokens of a step."""

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    kl_estimator: Estimator = key("k1", "of the KL term; with group_baseline k2")
    kl_in: Literal["reward", "loss"] = key(
        "reward", "where the KL term is added; with group_baseline loss"
    )
    normalize_advantage: bool = key(True, "whiten advantages over all tokens of a step")
    gamma: Share = key(1.0, "discount of later rewards")
    group_baseline: bool = key(
        False, "subtract the mean reward of a prompt's samples (REINFORCE++-baseline)"
    )

    @model_validator(mode="before")
    @classmethod
    def _baseline(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("group_baseline") is True:
            return {
                "kl_in": "loss",
                **({} if "kl_in" in given else {"kl_estimator": "k2"}),
                **given,
            }
        return given


class PPO(PolicyGradient):
    """Advantages from a critic by generalized advantage estimation."""

    name: Literal["ppo"] = "ppo"
    kl_estimator: Estimator = key("k1", "estimator of the KL term")
    kl_in: Literal["reward", "loss"] = key("reward", "where the KL term is added")
    normalize_advantage: bool = key(True, "whiten advantages over all tokens of a step")
    gamma: Share = key(1.0, "discount of later rewards")
    lam: Share = key(1.0, "lambda of generalized advantage estimation")
    value_clip: Annotated[float, Field(gt=0, le=MAX_FLOAT)] | None = key(
        0.2, "largest move of a value; null: no limit"
    )
    value_coef: PositiveFloat = key(1.0, "weight of the value loss")
    critic_warmup: NonNegativeInt = key(0, "first steps that train the critic alone")


AnyRL = GRPO | PPO | RLOO | ReinforcePlusPlus
