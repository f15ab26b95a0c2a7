"""The training loop, with tasks that only pretend to work."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from dovetail.errors import CallbackError, NumericsError
from dovetail.recipe.schema import make_recipe
from dovetail.rl.step_metrics import Row
from dovetail.run.callbacks import TrainerCallback, TrainerState
from dovetail.run.outcome import Outcome
from dovetail.run.trainer import StepGuard
from tests.helpers.loops import (
    LOOP,
    Clock,
    PretendedRun,
    PretendedTask,
    clock as clock,
    loop,
    train,
)

RECIPE = make_recipe({"model": {"path": "m"}, "data": {"train": "rows"}, "run_dir": "run"})


def test_steps_are_numbered_from_one_and_timed(clock: Clock) -> None:
    run = PretendedRun()
    outcome = train(PretendedTask(clock, 2.0), run, LOOP)
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4, 5] and outcome.rows == run.rows
    assert all(row["step_seconds"] == 2.0 and row["tokens_per_second"] == 5.0 for row in run.rows)
    assert not outcome.stopped and run.checkpoints == []


def test_the_model_is_evaluated_before_between_and_after_once_each(clock: Clock) -> None:
    task, run = PretendedTask(clock), PretendedRun()
    outcome = train(task, run, loop(eval_every=2))
    assert task.evaluated == [0, 2, 4, 5]
    assert run.started == [outcome.before] == [{"eval_reward_mean": 0.0}] and outcome.after == {
        "eval_reward_mean": 5.0
    }
    assert [row.get("eval_reward_mean") for row in run.rows] == [None, 2.0, None, 4.0, 5.0]
    task = PretendedTask(clock)
    assert train(task, PretendedRun(), loop(eval_every=5)).after == {"eval_reward_mean": 5.0}
    assert task.evaluated == [0, 5], "the last step's evaluation is the one after"


def test_evaluations_before_and_after_are_in_the_rows(clock: Clock) -> None:
    """Without trainer.eval_every, too: what a logger or a reader of metrics.jsonl sees is all that is kept of them."""
    run = PretendedRun()
    train(PretendedTask(clock), run, LOOP)
    told = [
        {key: value for key, value in row.items() if key.startswith("eval")} for row in run.rows
    ]
    assert told == [{"eval_reward_mean_before": 0.0}, {}, {}, {}, {"eval_reward_mean": 5.0}]
    run = PretendedRun()
    train(PretendedTask(clock), run, loop(stop_at_reward=0.2))
    assert run.rows[-1]["step"] == 2 and run.rows[-1]["eval_reward_mean"] == 2.0
    run = PretendedRun(done=[{"step": 1, "tokens": 10, "loss": 0.0}])
    train(PretendedTask(clock), run, LOOP)
    assert not any("eval_reward_mean_before" in row for row in run.rows), (
        "the first start has written it"
    )


def test_without_held_out_rows_nothing_is_evaluated(clock: Clock) -> None:
    outcome = train(PretendedTask(clock, held_out=False), PretendedRun(), LOOP)
    assert (outcome.before, outcome.after) == ({}, {})


def test_a_reached_reward_ends_the_run(clock: Clock) -> None:
    run = PretendedRun()
    outcome = train(PretendedTask(clock), run, loop(stop_at_reward=0.3, save_every=2))
    assert len(run.rows) == 3 and not outcome.stopped and outcome.after
    assert outcome.early == "trainer.stop_at_reward=0.3 is reached"
    assert run.checkpoints == [2, 3], "the last state is saved whatever its number"


@pytest.mark.parametrize(("reward", "steps"), [(0.3, 0), (0.2, 1), (None, 1)])
def test_a_run_that_goes_on_knows_that_its_reward_was_reached(
    clock: Clock, reward: float | None, steps: int
) -> None:
    """It was stopped, or killed, between its last step and its final model."""
    done = [
        {"step": n, "tokens": 10, "loss": 0.0, "reward_mean": r}
        for n, r in ((1, 0.9), (2, 0.1), (3, reward))
    ]
    run, task = PretendedRun(done=done), PretendedTask(clock)
    outcome = train(task, run, loop(stop_at_reward=0.3))
    assert (
        len(run.rows) == steps
        and not outcome.stopped
        and outcome.after == {"eval_reward_mean": 3.0 + steps}
    )
    assert len(run.said) == (not steps)


def test_a_last_evaluation_that_was_no_number_is_made_again(clock: Clock) -> None:
    """metrics.jsonl says null for it, which the summary of a run that goes on could not print."""
    done = [{"step": 5, "tokens": 10, "loss": 0.0, "eval_reward_mean": None}] * 5
    assert train(PretendedTask(clock), PretendedRun(done=done), LOOP).after == {
        "eval_reward_mean": 5.0
    }


def test_a_stop_that_is_asked_for_ends_after_the_step_with_a_checkpoint(clock: Clock) -> None:
    task, run = PretendedTask(clock), PretendedRun(stop_after=3)
    outcome = train(task, run, loop(save_every=50))
    assert outcome.stopped and len(run.rows) == 3 and run.checkpoints == [3]
    assert outcome.after == {} and task.evaluated == [0], "a stop waits for nothing"


@pytest.mark.parametrize(
    ("save_every", "save_on_stop", "saved"),
    [(0, True, [3]), (0, False, []), (2, True, [2, 3]), (2, False, [2])],
)
def test_a_stop_saves_unless_the_recipe_says_otherwise(
    save_every: int, save_on_stop: bool, saved: list[int], clock: Clock
) -> None:
    run = PretendedRun(stop_after=3)
    assert train(
        PretendedTask(clock), run, loop(save_every=save_every, save_on_stop=save_on_stop)
    ).stopped
    assert run.checkpoints == saved


def test_a_stop_before_the_first_step_does_none(clock: Clock) -> None:
    outcome = train(PretendedTask(clock), PretendedRun(stop_after=0), loop(save_every=50))
    assert outcome.stopped and (outcome.rows, outcome.after) == ([], {})


def test_the_loop_skips_and_compares_by_the_recipe(clock: Clock) -> None:
    """trainer.max_skipped_steps and trainer.check_replicas_every reach the guard of a run."""
    task, engine = PretendedTask(clock), mock.Mock()
    task.trained = [engine]
    train(task, PretendedRun(), loop(check_replicas_every=2))
    assert engine.check_replicas.call_count == 2
    task, run = PretendedTask(clock), PretendedRun()
    step, skipped = task.step, {"skipped": True, "fault": "a reason"}
    with (
        mock.patch.object(task, "step", lambda *given: step(*given) | skipped),
        pytest.raises(NumericsError, match="a reason"),
    ):
        train(task, run, loop(max_skipped_steps=4))
    assert len(run.rows) == 4


def test_skipped_updates_end_a_run_where_they_come_in_a_row() -> None:
    guard, skipped = StepGuard(2, 0), {"skipped": True, "fault": "a reason"}
    for row in (skipped, {}, skipped, {}, skipped):
        guard.check({"step": 1, **row}, [])
    with pytest.raises(
        NumericsError, match=r"the updates of 2 steps in a row were skipped: a reason"
    ):
        guard.check({"step": 6, **skipped}, [])


def test_copies_are_compared_every_so_many_steps() -> None:
    guard, engines = StepGuard(3, 2), [mock.Mock(), mock.Mock()]
    compared = []
    for step in (1, 2, 3, 4):
        guard.check({"step": step}, engines)
        compared.append([engine.check_replicas.call_count for engine in engines])
    assert compared == [[0, 0], [1, 1], [1, 1], [2, 2]]


def test_copies_may_never_be_compared() -> None:
    engine = mock.Mock()
    StepGuard(3, 0).check({"step": 1}, [engine])
    engine.check_replicas.assert_not_called()


class Steering(TrainerCallback):
    """Writes down what it is called for; `flags`: set at an event after a step."""

    def __init__(self, **flags: tuple[str, int]) -> None:
        self.flags, self.events = flags, list[tuple[Any, ...]]()

    def note(self, event: str, state: TrainerState) -> None:
        self.events.append((event, state.global_step))
        for flag, when in self.flags.items():
            if when == (event, state.global_step):
                setattr(state, flag, True)

    def on_train_begin(self, state: TrainerState) -> None:
        self.note("train_begin", state)

    def on_step_begin(self, state: TrainerState) -> None:
        self.note("step_begin", state)

    def on_step_end(self, state: TrainerState, metrics: Row) -> None:
        self.note("step_end", state)
        metrics["added"] = state.global_step / 2

    def on_evaluate(self, state: TrainerState, metrics: Row) -> None:
        self.note("evaluate", state)
        metrics["eval_double"] = 2 * metrics["eval_reward_mean"]


def steered(
    clock: Clock, run: PretendedRun, **flags: tuple[str, int]
) -> tuple[Steering, PretendedTask, Outcome]:
    task, callback = PretendedTask(clock), Steering(**flags)
    run.callbacks.callbacks = [callback]
    return callback, task, train(task, run, LOOP)


def test_callbacks_are_called_in_turn_and_add_columns(clock: Clock) -> None:
    run = PretendedRun()
    callback, _, outcome = steered(clock, run)
    steps = [
        (event, n + (event == "step_end")) for n in range(5) for event in ("step_begin", "step_end")
    ]
    assert callback.events == [("train_begin", 0), ("evaluate", 0), *steps, ("evaluate", 5)]
    assert [row["added"] for row in run.rows] == [0.5, 1.0, 1.5, 2.0, 2.5]
    assert outcome.before == {"eval_reward_mean": 0.0, "eval_double": 0.0}
    assert (
        outcome.after["eval_double"],
        run.rows[-1]["eval_double"],
        run.rows[0]["eval_double_before"],
    ) == (10, 10, 0)
    assert (run.callbacks.state.max_steps, run.callbacks.state.log_history) == (5, run.rows)
    callback, _, _ = steered(
        clock, PretendedRun(done=[{"step": n, "loss": 0.0} for n in (1, 2, 3)])
    )
    assert callback.events[:2] == [("train_begin", 3), ("step_begin", 3)], "a resumed run goes on"


def test_flags_of_callbacks_steer_the_loop(clock: Clock) -> None:
    run = PretendedRun()
    _, task, outcome = steered(
        clock,
        run,
        should_training_stop=("step_end", 3),
        should_save=("step_begin", 0),
        should_evaluate=("step_end", 2),
    )
    assert (run.callbacks.state.global_step, task.evaluated, run.checkpoints) == (3, [0, 2, 3], [1])
    assert not outcome.stopped and outcome.after["eval_reward_mean"] == 3.0
    for when in (("step_begin", 1), ("train_begin", 0)):
        _, task, _ = steered(clock, PretendedRun(), should_training_stop=when)
        assert task.evaluated == [0, when[1] + 1]
    _, task, outcome = steered(
        clock, PretendedRun(), should_training_stop=("evaluate", 2), should_evaluate=("step_end", 2)
    )
    assert task.evaluated == [0, 2] and outcome.after["eval_reward_mean"] == 2.0


def test_what_a_callback_may_not_do_is_named(clock: Clock) -> None:
    def failing(event: str, method: Callable[..., Any]) -> str:
        run = PretendedRun()
        run.callbacks.callbacks = [type("Mine", (TrainerCallback,), {event: method})()]
        with pytest.raises(CallbackError) as raised:
            train(PretendedTask(clock), run, LOOP)
        return str(raised.value)

    def added(name: str, value: object) -> Callable[..., Any]:
        return lambda _, __, metrics: metrics.update({name: value})

    divided = failing("on_step_begin", lambda *_: 1 // 0)
    assert divided == (
        "Mine.on_step_begin failed, after step 0 of 5: ZeroDivisionError: integer division or modulo by zero; what the run "
        "has saved is whole"
    )
    assert "after step 1 of 5: ValueError: 'loss' is a column of the run" in failing(
        "on_step_end", added("loss", 1.0)
    )
    assert "'mine': str; expected a number" in failing("on_step_end", added("mine", "x"))
    assert "'mine': float; expected a name that begins with eval_" in failing(
        "on_evaluate", added("mine", 1.0)
    )
