"""`trainer.time_budget_seconds`, with tasks that only pretend to work."""

import pytest

from dovetail.run import budget, trainer
from dovetail.run.outcome import Row
from tests.helpers.loops import LOOP, Clock, PretendedRun, PretendedTask, loop, train


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(budget, "time", clock)
    monkeypatch.setattr(trainer, "time", clock)
    return clock


def test_a_time_budget_shortens_the_run_and_says_so(clock: Clock) -> None:
    run = PretendedRun()
    outcome = train(PretendedTask(clock, 10.0), run, loop(steps=100, time_budget_seconds=75.0))
    assert outcome.early == "trainer.time_budget_seconds=75 is spent"
    assert len(run.rows) == 7 and run.rows[-1]["eval_reward_mean"] == 7.0
    first, last = run.said
    assert (
        "the first step took 10.0 s, so 100 would take about 1000 s; trainer.time_budget_seconds=75 has room"
        in first
    )
    assert first.endswith("about 7") and last.startswith(
        "stopping after 7 of 100 steps, which took 10.0 s each"
    )


@pytest.mark.parametrize(
    ("seconds", "steps"), [(1.0, 1), (19.0, 1), (30.0, 3), (50.0, 5), (1e9, 5)]
)
def test_a_time_budget_never_adds_steps_nor_undoes_one(
    clock: Clock, seconds: float, steps: int
) -> None:
    run = PretendedRun()
    outcome = train(PretendedTask(clock, 10.0), run, loop(time_budget_seconds=seconds))
    assert bool(outcome.early) == (steps < LOOP.steps)
    assert len(run.rows) == steps
    assert bool(run.said) == (steps < LOOP.steps)


def test_evaluations_count_towards_the_time_budget(clock: Clock) -> None:
    """The one before training, those between, and the last, which is still to come."""

    class Slow(PretendedTask):
        def evaluate(self, step: int) -> Row:
            self.clock.now += 10.0
            return super().evaluate(step)

    run = PretendedRun()
    train(Slow(clock, 10.0), run, loop(steps=100, eval_every=1, time_budget_seconds=100.0))
    assert len(run.rows) == 4 and clock.now == 90.0
    run = PretendedRun()
    train(Slow(clock, 10.0), run, loop(steps=100, time_budget_seconds=100.0))
    assert len(run.rows) == 8 and clock.now == 90.0 + 100.0
    run = PretendedRun()
    train(Slow(clock, 10.0), run, loop(steps=100, time_budget_seconds=15.0))
    assert len(run.rows) == 1
    assert run.said == [
        "the first evaluation took 10 s of trainer.time_budget_seconds=15: one step follows, and the last evaluation",
        "stopping after 1 of 100 steps, which took 10.0 s each: 20 s of trainer.time_budget_seconds=15 are spent, and the "
        "last evaluation takes about 10 s",
    ]
