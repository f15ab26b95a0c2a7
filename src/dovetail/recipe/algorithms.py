"""The section `algorithm`: what every algorithm has, and the keys of SFT and RL."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from dovetail.bounds import MAX_FLOAT
from dovetail.recipe.functions import CustomFunction, FunctionSection, LossSection, PolicyTerm
from dovetail.recipe.types import Estimator, NotStrict, Section, Share, key

if TYPE_CHECKING:
    from dovetail.recipe.schema import Recipe

# What a row of data.train is.
RowKind = Literal["prompt", "completion", "pair", "marked completion"]
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


class AlgorithmSection(Section):
    """Keys of every algorithm, and what it needs besides the policy.

    rewarded: it trains on samples with rewards. trains_values: the policy has a value head.
    """

    rewarded: ClassVar[bool] = False
    trains_values: ClassVar[bool] = False
    needs_critic: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = False
    epochs: PositiveInt = key(1, "passes over the rows of a step")
    num_mini_batches: PositiveInt = key(1, "optimizer steps in one pass")

    @property
    def rows(self) -> RowKind:
        raise NotImplementedError

    @property
    def samples(self) -> bool:
        """Whether it trains on completions of the policy."""
        return self.rewarded

    @property
    def needs_reference(self) -> bool:
        return False

    @property
    def updates(self) -> int:
        """Optimizer steps on the rows of a step."""
        return self.epochs * self.num_mini_batches

    @property
    def steps_without_policy(self) -> int:
        """First steps that leave the policy as it is."""
        return 0

    @property
    def custom_loss(self) -> LossSection | FunctionSection | None:
        """A function of the user in place of the loss."""
        return None

    @property
    def custom_advantage(self) -> FunctionSection | None:
        """A function of the user in place of the advantage."""
        return None

    def correction_of(self, *, by_default: bool) -> CorrectionSection | None:
        """Returns the importance weights of samples, if there are any."""
        return None

    def check(self, recipe: "Recipe") -> None:
        """Raises ValueError for keys that do not fit the rest of the recipe."""

    def notes(self, recipe: "Recipe") -> list[str]:
        """Returns what a user should know of keys that are allowed but odd."""
        return []


class AggregatedSection(AlgorithmSection):
    """Keys of algorithms whose losses are means over tokens: SFT, RL and distillation."""

    aggregation: Literal["token", "sequence", "sequence_sum"] = key(
        "token",
        "token: mean over all tokens; sequence: mean over sequences of their means; "
        "sequence_sum: mean over sequences "
        "of the sum over tokens divided by a constant, the longest response (Dr. GRPO)",
    )


class SFTSection(AggregatedSection):
    """Supervised fine-tuning: the negative log-likelihood of the completions."""

    name: Literal["sft"] = "sft"
    loss: CustomFunction = key(
        None, "ppo, cispo, gmpo, sapo, or a function {import, options}; of sft a function alone"
    )

    @property
    def rows(self) -> RowKind:
        return "completion"

    @property
    def custom_loss(self) -> FunctionSection | None:
        return self.loss


class PolicyGradientSection(AggregatedSection):
    """Keys of every RL algorithm. compares_samples: a reward counts against others of its prompt."""

    rewarded: ClassVar[bool] = True
    compares_samples: ClassVar[bool] = True
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
    def rows(self) -> RowKind:
        return "prompt"

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def needs_groups(self) -> bool:
        """Whether a single sample of a prompt would teach nothing."""
        return self.compares_samples

    @property
    def max_generations(self) -> int:
        """Rounds of sampling in a step, at most."""
        return 1

    @property
    def drops_groups(self) -> bool:
        """Whether groups with equal rewards are left out."""
        return False

    @property
    def custom_loss(self) -> LossSection | None:
        return self.loss if self.loss.function is not None else None

    def correction_of(self, *, by_default: bool) -> CorrectionSection | None:
        correction = self.correction
        if correction is None and by_default:
            correction = CorrectionSection()
        if correction is None or (correction.ratio == "none" and correction.old == "recomputed"):
            return None
        return correction

    def check(self, recipe: "Recipe") -> None:
        samples = recipe.rollout.samples_per_prompt
        if self.needs_groups and samples < 2:
            why = f"{dict(self)['name']} compares a prompt's samples with each other"
            raise ValueError(f"rollout.samples_per_prompt is {samples}; {why}, so give 2 or more")
        longest = recipe.rollout.max_new_tokens
        if self.overlong_buffer > longest:
            raise ValueError(
                f"algorithm.overlong_buffer is {self.overlong_buffer}, more than "
                f"rollout.max_new_tokens={longest}"
            )

    def notes(self, recipe: "Recipe") -> list[str]:
        if not self.kl_coef or (self.kl_estimator == "k1") == (self.kl_in == "reward"):
            return []
        keys = f"algorithm.kl_estimator={self.kl_estimator} with kl_in={self.kl_in}"
        edit = "take k1 in the reward, k2 or k3 in the loss"
        return [f"{keys} hardly pulls towards the reference; {edit}"]

    @model_validator(mode="after")
    def _terms(self) -> "PolicyGradientSection":
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


class CriticFreeSection(PolicyGradientSection):
    """Keys of algorithms without a critic."""

    advantage: CustomFunction = key(
        None, "a function of yours: f(rewards, groups, batch) -> a number a response or token"
    )

    @property
    def custom_advantage(self) -> CustomFunction:
        return self.advantage


class GRPOSection(CriticFreeSection):
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

    @property
    def max_generations(self) -> int:
        return self.max_num_gen_batches if self.drop_zero_std_groups else 1

    @property
    def drops_groups(self) -> bool:
        return self.drop_zero_std_groups


class RLOOSection(CriticFreeSection):
    """Leave-one-out advantages: a reward against the mean of its prompt's other samples."""

    name: Literal["rloo"] = "rloo"


class ReinforcePlusPlusSection(CriticFreeSection):
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

    @property
    def needs_groups(self) -> bool:
        return self.group_baseline

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


class PPOSection(PolicyGradientSection):
    """Advantages from a critic by generalized advantage estimation."""

    compares_samples: ClassVar[bool] = False
    needs_critic: ClassVar[bool] = True
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

    @property
    def steps_without_policy(self) -> int:
        return self.critic_warmup

    def notes(self, recipe: "Recipe") -> list[str]:
        lines = super().notes(recipe)
        if self.critic_warmup >= recipe.trainer.steps:
            warmup = f"algorithm.critic_warmup={self.critic_warmup} steps train the critic alone"
            steps = f"trainer.steps is {recipe.trainer.steps}"
            lines.append(f"the policy is never trained: {warmup}, and {steps}")
        return lines


AnyRL = GRPOSection | PPOSection | RLOOSection | ReinforcePlusPlusSection
