"""Which fields the batch of an RL step has before its advantages, and where they come from."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dovetail.recipe.algorithms import PolicyGradientSection
    from dovetail.recipe.schema import Recipe


@dataclass(frozen=True)
class BatchFields:
    """Fields besides `rollout_logprob`, which every sampled batch has.

    old_logprob: from a pass of the policy before the updates, or the sampler's. Without it, the
        only update of the batch takes its own log-probs.
    importance: the weights p_old / p_sampler are a field of the batch (`rollout_weight`), or the
        loss computes them in the only update.
    """

    old_logprob: Literal["policy", "sampler"] | None = None
    importance: Literal["batch", "loss"] | None = None
    reference_logprob: bool = False
    old_value: bool = False
    temperature: bool = False
    lag: bool = False

    @property
    def names(self) -> list[str]:
        has = {**vars(self), "rollout_weight": self.importance == "batch", "importance": False}
        return ["rollout_logprob", *(name for name, is_there in has.items() if is_there)]


def rl_fields(section: "PolicyGradientSection", recipe: "Recipe") -> BatchFields:
    """Returns the fields that an RL algorithm needs in a run."""
    correction = recipe.correction
    kl_in_reward = section.kl_in == "reward" and section.kl_coef > 0
    routes_of_scoring = recipe.rollout.router_replay == "trainer"
    old: Literal["policy", "sampler"] | None = None
    if section.updates > 1 or kl_in_reward or routes_of_scoring:
        old = "policy"
    importance: Literal["batch", "loss"] | None = None
    if correction is not None and correction.old == "sampler":
        old = "sampler"
    elif correction is not None:
        by_token = correction.ratio == "token" and correction.outside != "drop"
        is_custom = section.custom_loss is not None or section.custom_advantage is not None
        if by_token and old is None and not is_custom:
            importance = "loss"
        else:
            importance = "batch"
            old = "policy"
    return BatchFields(
        old_logprob=old,
        importance=importance,
        reference_logprob=section.needs_reference or recipe.reference.path is not None,
        old_value=section.needs_critic,
        temperature=recipe.rollout.temperature != 1.0,
        lag=not recipe.rollout.inside,
    )
