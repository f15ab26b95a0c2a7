"""The end of a run by `trainer.time_budget_seconds`."""

import time
from collections.abc import Callable


class TimeBudget:
    """Whether another step and the last evaluation fit into the budget.

    seconds: None for no limit. shared: returns rank 0's number on every rank (collective).
    spent: why there is no room for a further step.
    """

    def __init__(
        self, seconds: float | None, shared: Callable[[float], float], say: Callable[[str], None]
    ) -> None:
        self.seconds = seconds
        self.shared = shared
        self.say = say
        self.spent = ""
        self._begun = self._trained_from = time.monotonic()
        self._done = self._steps = 0

    def start(self, steps: int) -> None:
        """Called after the first evaluation."""
        self._steps = steps
        self._trained_from = time.monotonic()
        evaluation = self._trained_from - self._begun
        if self.seconds is not None and steps and 2 * evaluation >= self.seconds:
            spent = f"{evaluation:.0f} s of trainer.time_budget_seconds={self.seconds:g}"
            follows = "one step follows, and the last evaluation"
            self.say(f"the first evaluation took {spent}: {follows}")

    def has_room(self) -> bool:
        """Called after each step. Collective."""
        self._done += 1
        if self.seconds is None or self._done == self._steps:
            return True
        now = time.monotonic()
        spent = now - self._begun
        mean = (now - self._trained_from) / self._done
        evaluation = self._trained_from - self._begun
        more_steps = max(0, int((self.seconds - spent - evaluation) / max(mean, 1e-9)))
        more_steps = int(self.shared(min(more_steps, self._steps)))
        budget = f"trainer.time_budget_seconds={self.seconds:g}"
        if more_steps == 0:
            self.spent = f"{budget} is spent"
            done = f"{self._done} of {self._steps} steps, which took {mean:.1f} s each"
            rest = f"the last evaluation takes about {evaluation:.0f} s"
            self.say(f"stopping after {done}: {spent:.0f} s of {budget} are spent, and {rest}")
        elif self._done == 1 and more_steps + 1 < self._steps:
            whole = f"{self._steps} would take about {mean * self._steps:.0f} s"
            room = f"{budget} has room for about {more_steps + 1}"
            self.say(f"the first step took {mean:.1f} s, so {whole}; {room}")
        return more_steps > 0
