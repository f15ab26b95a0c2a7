"""The key `algorithm.correction`."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from dovetail.bounds import MAX_FLOAT
from dovetail.recipe.rollout import EMBEDDED, RolloutSection
from dovetail.recipe.types import NonNegativeFloat, NotStrict, Section, key

UNCUT: Mapping[str, float] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
HighRatio = Annotated[float, Field(gt=0, le=MAX_FLOAT)]


class CorrectionSection(Section):
    """Weights of the policy-gradient term by the ratio of the old policy's probabilities to the sampler's."""

    ratio: Literal["token", "sequence", "geometric", "none"] = key(
        "token", "of each token; sequence: the product over a response; geometric: its geometric mean; none: no weights"
    )
    bounds: Annotated[tuple[NonNegativeFloat, HighRatio], NotStrict] = key((0.0, 2.0), "lowest and highest ratio")
    outside: Literal["clamp", "mask", "drop"] = key(
        "clamp", "a ratio beyond the bounds: the nearest bound; weight 0, still counted; its whole response left out"
    )
    old: Literal["recomputed", "sampler"] = key(
        "recomputed", "old log-probs: from a pass before the updates; sampler: the sampler's, without pass and weights"
    )

    @model_validator(mode="after")
    def _possible(self) -> "CorrectionSection":
        low, high = self.bounds
        if not low <= 1 <= high:
            raise ValueError(f"bounds is [{low:g}, {high:g}]; expected a range around 1, as in [0.5, 5]")
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        idle = [name for name, value in self if name != "old" and value not in (defaults[name], "none")]
        if self.old == "sampler" and idle:
            why = "the clipped ratio of the loss is to the sampler itself, and there are no weights"
            raise ValueError(f"with old: sampler {why}; leave out {', '.join(idle)}, or set old: recomputed")
        return self


def check_correction(correction: CorrectionSection, rollout: RolloutSection) -> None:
    if correction.old == "sampler" and rollout.router_replay == "trainer":
        raise ValueError(
            "algorithm.correction.old is sampler, without a pass for old log-probs, but rollout.router_replay=trainer takes "
            "the routes of that pass; set old: recomputed, or rollout.router_replay=none"
        )
    cuts = [f"rollout.{name}={value}" for name, value in rollout if name in UNCUT and value != UNCUT[name]]
    if rollout.backend not in EMBEDDED and cuts:
        raise ValueError(
            f"rollout.backend={rollout.backend} samples from the distribution as changed by {', '.join(cuts)}, which the ratios "
            "of algorithm.correction leave out of account; leave that out, or set algorithm.correction: {ratio: none}"
        )
