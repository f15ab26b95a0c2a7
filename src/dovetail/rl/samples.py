"""Rewarded completions, before they are a batch."""

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from dovetail.data.examples import Prompt
from dovetail.sampler.turn import Turn


@dataclass(frozen=True)
class Sample:
    """A turn with its reward.

    rewards: terms of the sum by label, if several. extra: what reward functions log for it, by
    column.
    """

    prompt: Prompt
    completion: Turn
    text: str
    reward: float
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def group(self) -> int:
        """The place of its prompt in the step."""
        return self.completion.id.row


def sample_row(sample: Sample) -> dict[str, Any]:
    """Returns a row of `run_dir/rollouts`; `routing` is written to a file of its own."""
    prompt = sample.prompt
    completion = sample.completion
    row: dict[str, Any] = {
        "id": prompt.id,
        "sample": completion.sample,
        "prompt": prompt.prompt,
        "completion": sample.text,
        "answer": prompt.answer,
        "reward": sample.reward,
    }
    if sample.rewards:
        row["rewards"] = dict(sample.rewards)
    if sample.extra:
        row["extra"] = dict(sample.extra)
    row |= {
        "finish": completion.finish,
        "token_ids": list(completion.ids),
        "log_probs": list(completion.log_probs),
        "routing": completion.routing,
    }
    if completion.versions:
        row["versions"] = [list(span) for span in completion.versions]
    return row


def zero_std_groups(samples: Seq[Sample]) -> dict[int, bool]:
    """Returns for each group whether all its rewards are equal."""
    rewards: dict[int, set[float]] = {}
    for sample in samples:
        rewards.setdefault(sample.group, set()).add(sample.reward)
    return {group: len(values) == 1 for group, values in rewards.items()}


def without_zero_std_groups(samples: Seq[Sample]) -> list[Sample]:
    """Drops the groups whose rewards are all equal."""
    has_zero_std = zero_std_groups(samples)
    return [sample for sample in samples if not has_zero_std[sample.group]]


def with_overlong_penalty(
    samples: Seq[Sample], longest: int, buffer: int, penalty: float
) -> list[Sample]:
    """Adds a penalty that grows over the last `buffer` of `longest` tokens (Yu et al. 2025, eq. 13)."""
    changed = []
    for sample in samples:
        left = longest - buffer - len(sample.completion.ids)
        overlong = min(0.0, left / buffer) * penalty
        terms = {**(sample.rewards or {"reward": sample.reward}), "overlong": overlong}
        changed.append(replace(sample, reward=sample.reward + overlong, rewards=terms))
    return changed
