"""The key `algorithm.correction`."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dovetail.bounds import MAX_FLOAT
from dovetail.recipe.rollout import RolloutSection
from dovetail.recipe.types import NonNegativeFloat, NotStrict, Section, key

EMBEDDED = ("native", "transformers")  # rollout backends that compute log-probs as training does


class CorrectionSection(Section):
    """Weights of the policy-gradient term by the ratio of the old policy's probabilities to the sampler's."""

    ratio: Literal["token", "sequence", "geometric", "none"] = key(
        "token", "of each token; sequence: the product over a response; geometric: its geometric mean; none: no weights"
    )
    bounds: Annotated[tuple[NonNegativeFloat, Annotated[float, Field(gt=0, le=MAX_FLOAT)]], NotStrict] = key(
        (0.0, 2.0), "lowest and highest ratio"
    )
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
            raise ValueError(
                f"bounds is [{low:g}, {high:g}]; expected a range around 1, the ratio of equal policies, as in [0.5, 5]"
            )
        idle = self.model_fields_set & (
            {"bounds", "outside"} if self.ratio == "none" else {"ratio", "bounds", "outside"}
        )
        if self.old == "sampler" and idle:
            raise ValueError(
                f"with old: sampler the clipped ratio of the loss is to the sampler itself, and there are no weights; "
                f"leave out {', '.join(sorted(idle))}, or set old: recomputed"
            )
        return self


def check_correction(correction: CorrectionSection, rollout: RolloutSection) -> None:
    """Raises ValueError."""
    if correction.old == "sampler" and rollout.router_replay == "trainer":
        raise ValueError(
            "algorithm.correction.old is sampler, without a pass for old log-probs, but rollout.router_replay=trainer takes "
            "the routes of that pass; set old: recomputed, or rollout.router_replay=none"
        )
    if rollout.backend not in EMBEDDED and (rollout.top_p < 1 or rollout.top_k > 0):
        raise ValueError(
            f"rollout.backend={rollout.backend} returns log-probs of the distribution cut by rollout.top_p={rollout.top_p} "
            f"and top_k={rollout.top_k}, training those of the whole one, so their ratio corrects nothing; set top_p: 1 and "
            "top_k: 0, or algorithm.correction: {ratio: none}"
        )
