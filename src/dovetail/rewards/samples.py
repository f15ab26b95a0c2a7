"""What a reward is asked for, and what it answers. Imports no torch."""

from collections import deque
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from dovetail.errors import DataError, MachineError

FIRST_SAMPLES = 8
MAX_REWARD_ERRORS = 0.05  # of the last `WINDOW` samples, or of a step with more
WINDOW = 64


@dataclass(frozen=True, kw_only=True)
class RewardInput:
    """One completion, and what its row holds."""

    completion: str
    completion_ids: Seq[int] = ()
    answer: Any = None
    finish: str = "stop"  # or "length"
    prompt: str | list[dict[str, Any]] = ""
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardResult:
    """The reward of one sample; None drops it."""

    value: float | None
    error: str | None = None
    scored: bool = True  # False if `score` gave up before
    parts: Mapping[str, float | None] = field(default_factory=dict)  # of a sum, without weights
    killed: bool = False  # the system ended its process
    extra: Mapping[str, Any] = field(default_factory=dict)  # by `log_extra`


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """The fields of transformers' TrainerState that are known here; `trainer_state` of a reward."""

    global_step: int = 0  # steps done
    max_steps: int = 0
    epoch: float = 0.0  # passes over the rows done
    num_train_epochs: int = 0
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True


def too_many_errors(results: Seq[RewardResult | None], max_share: float) -> bool:
    """Whether more than `max_share` failed, or all of the first `FIRST_SAMPLES`.

    The share is of all samples, or of `WINDOW` where there are fewer.
    """
    failed = [result.error is not None for result in results if result is not None]
    allowed = max_share * max(len(results), WINDOW)
    return sum(failed) > allowed or (all(failed) and len(failed) >= FIRST_SAMPLES)


class RecentFailures:
    """Failures among the last `WINDOW` samples of a run."""

    def __init__(self) -> None:
        self._last: deque[bool] = deque(maxlen=WINDOW)

    def count(
        self, results: Seq[RewardResult], ids: Seq[Any], where: str
    ) -> tuple[int, str | None]:
        """Returns the failed samples of a step and the first cause.

        Raises if too many failed: MachineError if the first one's process was killed, else DataError.
        """
        failed = [result.error is not None for result in results]
        self._last.extend(failed)
        total = len(results)
        scored = sum(result.scored for result in results)
        if not any(failed):
            return 0, None
        first = failed.index(True)
        cause = results[first].error
        counted = failed if total > WINDOW else list(self._last)
        errors = sum(counted)
        if errors > MAX_REWARD_ERRORS * max(total, WINDOW):
            limit = f"more than {MAX_REWARD_ERRORS:.0%} of {max(total, WINDOW)}"
            share = f"{errors} of the last {len(counted)} samples, {limit}"
        elif scored < total:
            share = f"all of the first {scored} of {total} samples"
        else:
            return sum(failed), cause
        rest = "" if scored == total else " (the others were not scored)"
        row = f"{ids[first]!r:.100}"
        what = f"{where}: the reward failed on {share}{rest}; first cause, on row {row}: {cause}"
        if results[first].killed:
            raise MachineError(what)
        raise DataError(f"{what}; fix the reward function, or the rows that it fails on")
