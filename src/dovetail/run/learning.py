"""Notes on how a run learns."""

import math
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from dovetail.recipe.schema import Recipe

APART = 20  # steps between two of the same note
FIRST = 3  # steps of the start
EQUAL_STEPS = 3  # in a row
LOW_ENTROPY = 0.2  # of the start
TRUNCATED = 0.5
CLIPPED = 0.3  # shares
RISEN = 5.0
MIN_KL = 0.1
MIN_MISMATCH = 0.01  # times the start, and at least
LARGE_GAP = 0.05  # nats a token; bfloat16 alone makes about a fifth
EQUAL = (
    "take prompts that the model solves sometimes (data.train), raise rollout.samples_per_prompt "
    "or rollout.temperature, "
    "or give rewards in between (reward)"
)


class LearningNotes:
    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._said: dict[int, int] = {}  # step of the last note of a kind
        self._starts: dict[str, list[float]] = {}
        self._equal = 0

    def of(self, row: Mapping[str, Any]) -> list[str]:
        """Call for every step, in order."""
        if not self.recipe.algorithm.rewarded:
            return []
        row = {
            name: value for name, value in row.items() if value is not None
        }  # as an earlier start wrote NaN
        step = row["step"]
        kinds = enumerate(self._kinds(row))
        texts = {kind: text for kind, (applies, text) in kinds if applies}
        due = [kind for kind in texts if step >= self._said.get(kind, -APART) + APART]
        self._said |= dict.fromkeys(due, step)
        return [texts[kind] for kind in due]

    def _kinds(self, row: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
        """Whether each note applies, and its text."""
        self._equal = self._equal + 1 if row.get("equal_groups") == 1.0 else 0
        entropy, entropy0 = self._against_start(row, "entropy_mean")
        kl, kl0 = self._against_start(row, "kl_mean")
        k3, k30 = self._against_start(row, "mismatch_k3")
        cut = row.get("truncated_fraction", 0.0)
        limit = self.recipe.rollout.max_new_tokens
        gap = row.get("mismatch_mean", 0.0)
        clipped = row.get("clip_fraction", 0.0)
        text = f"{self._equal} steps in a row had equal rewards in every group, and taught nothing: {EQUAL}"
        yield self._equal >= EQUAL_STEPS, text
        remedy = "raise algorithm.entropy_coef or algorithm.clip_high, or lower optim.lr"
        yield (
            entropy < LOW_ENTROPY * entropy0,
            f"entropy fell from {entropy0:.3g} to {entropy:.3g}: {remedy}",
        )
        where = f"rollout.max_new_tokens={limit}: raise it, or reward shorter ones"
        yield cut >= TRUNCATED, f"{cut:.0%} of the completions were cut at {where}"
        remedy = "lower optim.lr, or raise algorithm.kl_coef"
        yield kl > max(MIN_KL, RISEN * kl0), f"KL rose from {kl0:.3g} to {kl:.3g}: {remedy}"
        causes = "a stale prefix cache, log-probs at another temperature, weights that did not arrive, or another model"
        text = f"sampler and policy differ by {gap:.3g} nats a token (mean) with the same weights: look for {causes}"
        yield gap > LARGE_GAP, text
        remedy = "set model.dtype=float32, or rollout.router_replay=rollout for experts"
        text = f"the sampler's log-probs moved away from the policy's, k3 from {k30:.3g} to {k3:.3g}: {remedy}"
        yield k3 > max(MIN_MISMATCH, RISEN * k30), text
        remedy = "lower optim.lr, algorithm.epochs or algorithm.num_mini_batches"
        yield clipped > CLIPPED, f"{clipped:.0%} of the tokens were clipped: {remedy}"

    def _against_start(self, row: Mapping[str, Any], name: str) -> tuple[float, float]:
        """Value now, mean of the first steps; NaN: unknown."""
        now = row.get(name)
        if now is None or not math.isfinite(now):
            return math.nan, math.nan
        starts = self._starts.setdefault(name, [])
        if len(starts) < FIRST:
            starts.append(now)
            return math.nan, math.nan
        return now, fmean(starts)
