"""`trainer.time_budget_seconds`: after every step, whether the next one and the last evaluation still fit."""

import time
from collections.abc import Callable


class TimeBudget:
    """Counts from its making, so that the evaluation before training is part of it; `seconds` None: no limit.

    shared: gives every rank the first rank's number, a collective. say: prints a line.
    """

    def __init__(self, seconds: float | None, shared: Callable[[float], float], say: Callable[[str], None]) -> None:
        self.seconds, self.shared, self.say = seconds, shared, say
        self._begun = self._trained_from = time.monotonic()
        self._done = self._steps = 0

    def start(self, steps: int) -> None:
        """The evaluation before training is over; `steps` are to be done."""
        self._steps, self._trained_from = steps, time.monotonic()

    def has_room(self) -> bool:
        """After a step: whether another one ends in time, with an evaluation as long as the first. Collective."""
        self._done += 1
        if self.seconds is None or self._done == self._steps:
            return True
        now = time.monotonic()
        spent, mean = now - self._begun, (now - self._trained_from) / self._done
        evaluation = self._trained_from - self._begun
        room = max(0, int((self.seconds - spent - evaluation) / max(mean, 1e-9)))
        room = int(self.shared(min(room, self._steps)))
        budget = f"trainer.time_budget_seconds={self.seconds:g}"
        if room == 0:
            self.say(
                f"stopping after {self._done} of {self._steps} steps, which took {mean:.1f} s each: {spent:.0f} s of {budget} "
                f"are spent, and the last evaluation takes about {evaluation:.0f} s"
            )
        elif self._done == 1 and room + 1 < self._steps:
            self.say(
                f"the first step took {mean:.1f} s, so {self._steps} would take about {mean * self._steps:.0f} s; {budget} has "
                f"room for about {room + 1}"
            )
        return room > 0
