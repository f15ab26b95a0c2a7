"""Notes on how a run learns, each with the keys that change it."""

import math
from collections.abc import Callable, Mapping, Sequence as Seq
from statistics import fmean
from typing import Any

from dovetail.recipe.algorithms import PolicyGradient
from dovetail.recipe.schema import Recipe

APART = 20  # steps between two of the same note
FIRST = 3  # steps whose mean is the start of a metric
EQUAL_STEPS = 3  # in a row
LOW_ENTROPY = 0.2  # of the start
TRUNCATED, CLIPPED = 0.5, 0.3  # shares
RISEN, LEAST_KL, LEAST_MISMATCH = 5.0, 0.1, 0.01  # times the start, and at least
LARGE_GAP = 0.05  # nats a token, of the same weights: bfloat16 alone makes about a fifth
EQUAL = (
    "take prompts that the model solves sometimes (data.train), raise rollout.samples_per_prompt or rollout.temperature, "
    "or give rewards in between (reward)"
)


class LearningNotes:
    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._said: dict[int, int] = {}  # the step of the last note of a kind
        self._starts: dict[str, list[float]] = {}
        self._equal = 0
        self._kinds: Seq[Callable[[Mapping[str, Any]], str]] = (
            self._equal_rewards, self._entropy, self._truncated, self._kl, self._gap, self._mismatch, self._clipped,
        )  # fmt: skip

    def of(self, row: Mapping[str, Any]) -> list[str]:
        """For every step, in order. Each kind at most once in `APART` steps."""
        if not isinstance(self.recipe.algorithm, PolicyGradient):
            return []
        row = {name: value for name, value in row.items() if value is not None}  # as an earlier start wrote NaN
        step, texts = row["step"], dict(enumerate(note(row) for note in self._kinds))
        due = [kind for kind, text in texts.items() if text and step >= self._said.get(kind, -APART) + APART]
        self._said |= dict.fromkeys(due, step)
        return [texts[kind] for kind in due]

    def _equal_rewards(self, row: Mapping[str, Any]) -> str:
        self._equal = self._equal + 1 if row.get("equal_groups") == 1.0 else 0
        if self._equal < EQUAL_STEPS:
            return ""
        return f"{self._equal} steps in a row had equal rewards in every group, and taught nothing: {EQUAL}"

    def _entropy(self, row: Mapping[str, Any]) -> str:
        now, start = self._against_start(row, "entropy_mean")
        if not now < LOW_ENTROPY * start:
            return ""
        remedy = "raise algorithm.entropy_coef or algorithm.clip_high, or lower optim.lr"
        return f"entropy fell from {start:.3g} to {now:.3g}: {remedy}"

    def _truncated(self, row: Mapping[str, Any]) -> str:
        share, limit = row.get("truncated_fraction", 0.0), self.recipe.rollout.max_new_tokens
        if not share >= TRUNCATED:
            return ""
        return f"{share:.0%} of the completions were cut at rollout.max_new_tokens={limit}: raise it, or reward shorter ones"

    def _kl(self, row: Mapping[str, Any]) -> str:
        now, start = self._against_start(row, "kl_mean")
        if not now > max(LEAST_KL, RISEN * start):
            return ""
        return f"KL rose from {start:.3g} to {now:.3g}: lower optim.lr, or raise algorithm.kl_coef"

    def _gap(self, row: Mapping[str, Any]) -> str:
        gap = row.get("mismatch_mean", 0.0)
        if not gap > LARGE_GAP:
            return ""
        causes = "a stale prefix cache, log-probs at another temperature, weights that did not arrive, or another model"
        return f"sampler and policy differ by {gap:.3g} nats a token (mean) with the same weights: look for {causes}"

    def _mismatch(self, row: Mapping[str, Any]) -> str:
        now, start = self._against_start(row, "mismatch_k3")
        if not now > max(LEAST_MISMATCH, RISEN * start):
            return ""
        remedy = "set model.dtype=float32, or rollout.router_replay=rollout for experts"
        return f"the sampler's log-probs moved away from the policy's, k3 from {start:.3g} to {now:.3g}: {remedy}"

    def _clipped(self, row: Mapping[str, Any]) -> str:
        share = row.get("clip_fraction", 0.0)
        if not share > CLIPPED:
            return ""
        return f"{share:.0%} of the tokens were clipped: lower optim.lr, algorithm.epochs or algorithm.num_mini_batches"

    def _against_start(self, row: Mapping[str, Any], name: str) -> tuple[float, float]:
        """Now, and the mean of the first steps; NaN: unknown."""
        now = row.get(name)
        if now is None or not math.isfinite(now):
            return math.nan, math.nan
        starts = self._starts.setdefault(name, [])
        if len(starts) < FIRST:
            starts.append(now)
            return math.nan, math.nan
        return now, fmean(starts)
