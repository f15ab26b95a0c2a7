"""The loop around the steps, with tasks that only pretend to work; and the batches that a step makes of its samples."""

import math
from collections import Counter
from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from dovetail.batch.loss import TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.data.examples import Prompt
from dovetail.engine.base import Engine, StepReport
from dovetail.errors import DataError
from dovetail.rl import trainer
from dovetail.rl.experience import AdvantageSettings, Sample, drop_equal_groups, pack_samples, with_advantages
from dovetail.rl.rewards import RewardResult
from dovetail.rl.router_replay import mismatch
from dovetail.rl.step_metrics import Row, mean, sample_metrics
from dovetail.rl.tasks import LoopSettings, RLModels, RLSettings, RLTask, inner_batches, never, weighted
from dovetail.rl.trainer import train
from dovetail.rollout.base import Completion, SamplingParams
from tests.tolerances import OP_FP32, assert_close

LOOP = LoopSettings(steps=5, seed=0, rows_per_step=4, epochs=1, minibatches=1, aggregation="token")


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class PretendedTask:
    """Takes `seconds` a step; its reward is the step's number over ten."""

    def __init__(self, clock: Clock, seconds: float = 1.0, *, held_out: bool = True) -> None:
        self.clock, self.seconds, self.held_out = clock, seconds, held_out
        self.samples: list[Sample] = []
        self.trained: list[Engine] = []
        self.evaluated: list[int] = []

    def step(self, step: int, stopping: Callable[[], bool] = never) -> Row:
        self.clock.now += self.seconds
        return {"tokens": 10, "loss": 0.0, "reward_mean": (step + 1) / 10}

    def evaluate(self, step: int) -> Row:
        if not self.held_out:
            return {}
        self.evaluated.append(step)
        return {"eval_reward_mean": float(step)}


class PretendedRun:
    def __init__(self, stop_after: int = 1000, done: Seq[Row] = ()) -> None:
        self.done = list(done)
        self.rows: list[Row] = []
        self.said: list[str] = []
        self.checkpoints: list[int] = []
        self.started: list[Row] = []
        self.stop_after = stop_after

    def earlier(self) -> tuple[int, list[Row], Row] | None:
        """Nothing where a run begins anew."""
        return (len(self.done), list(self.done), {"eval_reward_mean": 0.0}) if self.done else None

    def start(self, evaluation: Row) -> None:
        self.started.append(evaluation)

    def record(self, row: Row, samples: Seq[Sample]) -> None:
        self.rows.append(row)

    def checkpoint(self, step: int) -> None:
        self.checkpoints.append(step)

    def stopping(self) -> bool:
        return len(self.rows) >= self.stop_after

    def shared(self, seconds: float) -> float:
        return seconds

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(trainer, "time", clock)
    return clock


def test_steps_are_numbered_from_one_and_timed(clock: Clock) -> None:
    run = PretendedRun()
    outcome = train(PretendedTask(clock, 2.0), run, LOOP)
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4, 5] and outcome.rows == run.rows
    assert all(row["step_seconds"] == 2.0 and row["tokens_per_second"] == 5.0 for row in run.rows)
    assert not outcome.stopped and run.checkpoints == []


def test_the_model_is_evaluated_before_between_and_after_once_each(clock: Clock) -> None:
    task, run = PretendedTask(clock), PretendedRun()
    outcome = train(task, run, replace(LOOP, eval_every=2))
    assert task.evaluated == [0, 2, 4, 5]
    assert run.started == [outcome.before] == [{"eval_reward_mean": 0.0}] and outcome.after == {"eval_reward_mean": 5.0}
    assert [row.get("eval_reward_mean") for row in run.rows] == [None, 2.0, None, 4.0, 5.0]
    task = PretendedTask(clock)
    assert train(task, PretendedRun(), replace(LOOP, eval_every=5)).after == {"eval_reward_mean": 5.0}
    assert task.evaluated == [0, 5], "the last step's evaluation is the one after"


def test_evaluations_before_and_after_are_in_the_rows(clock: Clock) -> None:
    """Without trainer.eval_every, too: what a logger or a reader of metrics.jsonl sees is all that is kept of them."""
    run = PretendedRun()
    train(PretendedTask(clock), run, LOOP)
    told = [{key: value for key, value in row.items() if key.startswith("eval")} for row in run.rows]
    assert told == [{"eval_reward_mean_before": 0.0}, {}, {}, {}, {"eval_reward_mean": 5.0}]
    run = PretendedRun()
    train(PretendedTask(clock), run, replace(LOOP, stop_at_reward=0.2))
    assert run.rows[-1]["step"] == 2 and run.rows[-1]["eval_reward_mean"] == 2.0
    run = PretendedRun(done=[{"step": 1, "tokens": 10, "loss": 0.0}])
    train(PretendedTask(clock), run, LOOP)
    assert not any("eval_reward_mean_before" in row for row in run.rows), "the first start has written it"


def test_without_held_out_rows_nothing_is_evaluated(clock: Clock) -> None:
    outcome = train(PretendedTask(clock, held_out=False), PretendedRun(), LOOP)
    assert (outcome.before, outcome.after) == ({}, {})


def test_a_reached_reward_ends_the_run(clock: Clock) -> None:
    run = PretendedRun()
    outcome = train(PretendedTask(clock), run, replace(LOOP, stop_at_reward=0.3, save_every=2))
    assert len(run.rows) == 3 and not outcome.stopped and outcome.after
    assert run.checkpoints == [2, 3], "the last state is saved whatever its number"


@pytest.mark.parametrize(("reward", "steps"), [(0.3, 0), (0.2, 1), (None, 1)])
def test_a_run_that_goes_on_knows_that_its_reward_was_reached(clock: Clock, reward: float | None, steps: int) -> None:
    """It was stopped, or killed, between its last step and its final model."""
    done = [{"step": n, "tokens": 10, "loss": 0.0, "reward_mean": r} for n, r in ((1, 0.9), (2, 0.1), (3, reward))]
    run, task = PretendedRun(done=done), PretendedTask(clock)
    outcome = train(task, run, replace(LOOP, stop_at_reward=0.3))
    assert len(run.rows) == steps and not outcome.stopped and outcome.after == {"eval_reward_mean": 3.0 + steps}
    assert len(run.said) == (not steps)


def test_a_last_evaluation_that_was_no_number_is_made_again(clock: Clock) -> None:
    """metrics.jsonl says null for it, which the summary of a run that goes on could not print."""
    done = [{"step": 5, "tokens": 10, "loss": 0.0, "eval_reward_mean": None}] * 5
    assert train(PretendedTask(clock), PretendedRun(done=done), LOOP).after == {"eval_reward_mean": 5.0}


def test_a_stop_that_is_asked_for_ends_after_the_step_with_a_checkpoint(clock: Clock) -> None:
    task, run = PretendedTask(clock), PretendedRun(stop_after=3)
    outcome = train(task, run, replace(LOOP, save_every=50))
    assert outcome.stopped and len(run.rows) == 3 and run.checkpoints == [3]
    assert outcome.after == {} and task.evaluated == [0], "a stop waits for nothing"


@pytest.mark.parametrize(
    ("save_every", "save_on_stop", "saved"), [(0, True, [3]), (0, False, []), (2, True, [2, 3]), (2, False, [2])]
)
def test_a_stop_saves_unless_the_recipe_says_otherwise(
    save_every: int, save_on_stop: bool, saved: list[int], clock: Clock
) -> None:
    run = PretendedRun(stop_after=3)
    assert train(PretendedTask(clock), run, replace(LOOP, save_every=save_every, save_on_stop=save_on_stop)).stopped
    assert run.checkpoints == saved


def test_a_stop_before_the_first_step_does_none(clock: Clock) -> None:
    outcome = train(PretendedTask(clock), PretendedRun(stop_after=0), replace(LOOP, save_every=50))
    assert outcome.stopped and (outcome.rows, outcome.after) == ([], {})


def sample(group: int, index: int, prompt: Seq[int], response: Seq[int], reward: float) -> Sample:
    completion = Completion(group, index, tuple(response), tuple(-1.0 for _ in response), "stop")
    return Sample(Prompt(id=group, ids=tuple(prompt)), group, completion, "", reward)


SAMPLES = [
    sample(0, 0, [5, 6], [1, 2, 3], 1.0),
    sample(0, 1, [5, 6], [4], 0.0),  # an empty response: its EOS alone
    sample(1, 0, [7], [8, 9], 0.5),
    sample(1, 1, [7], [8, 8, 8, 8], 0.5),
    sample(2, 0, [1, 1, 1], [2, 4], 0.25),
]


def batch_of(samples: Seq[Sample] = SAMPLES, temperature: float = 1.0) -> PackedBatch:
    return pack_samples(samples, temperature)


def test_the_mask_covers_the_predictions_of_the_response() -> None:
    batch = batch_of()
    assert batch.targets[batch.mask].tolist() == [1, 2, 3, 4, 8, 9, 8, 8, 8, 8, 2, 4]
    assert "temperature" not in batch.fields
    hot = batch_of(temperature=0.5)
    assert hot.fields["temperature"][hot.mask].tolist() == [0.5] * 12


@pytest.mark.parametrize(("epochs", "parts"), [(1, 1), (2, 1), (1, 2), (3, 4), (1, 5)])
def test_every_epoch_deals_every_sequence_once(epochs: int, parts: int) -> None:
    batch = weighted(batch_of().with_fields(number=batch_of().sequence_ids.to(torch.float32)), LOOP)
    loop = replace(LOOP, epochs=epochs, minibatches=parts)
    inner = list(inner_batches(batch, loop, step=3))
    assert len(inner) == epochs * parts
    orders = []
    for epoch in range(epochs):
        mine = inner[epoch * parts : (epoch + 1) * parts]
        dealt = [int(x) for part in mine for x in part.fields["number"][part.cu_seqlens[:-1].long()]]
        assert sorted(dealt) == [0, 1, 2, 3, 4]
        assert max(part.num_sequences for part in mine) - min(part.num_sequences for part in mine) <= 1
        assert sum((part.fields["weight"].sum() for part in mine), torch.zeros(())) == batch.mask.sum()
        orders.append(dealt)
    again = [int(x) for part in inner_batches(batch, loop, step=3) for x in part.fields["number"]]
    assert again == [int(x) for part in inner for x in part.fields["number"]]
    if parts == 4:
        assert len({tuple(order) for order in orders}) > 1, "every epoch is dealt anew"


def test_more_parts_than_sequences_leave_none_empty() -> None:
    inner = list(inner_batches(batch_of(), replace(LOOP, minibatches=8), step=0))
    assert [part.num_sequences for part in inner] == [1] * 5


def test_rows_of_a_step_come_from_one_stream() -> None:
    seen: Counter[int] = Counter()
    for step in range(5):
        seen.update(LOOP.rows(10, step))
    assert set(seen.values()) == {2} and len(seen) == 10
    assert replace(LOOP, shuffle=False).rows(10, 2) == [8, 9, 0, 1]


def test_what_the_sampler_drew_from_is_compared_with_the_policy() -> None:
    """Schulman's k3 is of KL(sampler || policy): the tokens are the sampler's."""
    batch = batch_of().with_fields(rollout_logprob=torch.full((len(batch_of()),), -1.0))
    stats = TokenStats(torch.full((len(batch),), -1.5), torch.zeros(len(batch)))
    found = mismatch(batch, stats, "replayed_")
    expected = {"mean": 0.5, "p99": 0.5, "k3": math.exp(-0.5) - 1 + 0.5}
    assert found == {f"replayed_mismatch_{name}": pytest.approx(x, rel=OP_FP32) for name, x in expected.items()}


def report(flops: float) -> StepReport:
    return StepReport(1.0, 1.0, 0.1, 5, flops, skipped=False, metrics={})


def pretended_ppo(policy: StepReport, critic: StepReport) -> RLTask:
    """Whose engines do nothing but report so."""

    def engine(told: StepReport) -> mock.Mock:
        return mock.Mock(train_step=mock.Mock(return_value=told), values=lambda batch: torch.zeros(len(batch)))

    prompts = [Prompt(id=i, ids=(5, 6)) for i in range(4)]
    sampler = mock.Mock(sample=lambda asked, _: [Completion(p.row, 0, (1, 2), (-1.0, -1.0), "stop") for p in asked])
    settings = RLSettings(sampling=SamplingParams(), advantages=AdvantageSettings(kind="ppo"), old_logprobs=False)
    return RLTask(
        RLModels(policy=engine(policy), sampler=sampler, critic=engine(critic)),
        (mock.Mock(), mock.Mock()),
        prompts,
        [],
        mock.Mock(return_value=[RewardResult(1.0)] * 4),
        lambda _: "",
        settings,
        replace(LOOP, epochs=2, minibatches=2),
    )


def test_operations_of_a_step_are_those_of_policy_and_critic() -> None:
    """Of all their updates; mfu is made of them."""
    row = pretended_ppo(report(1.0), report(10.0)).step(0)
    assert row is not None and row["flops"] == 4 * 1.0 + 4 * 10.0
    assert "critic_flops" not in row and row["critic_loss"] == 1.0
    assert "skipped" not in row


def test_evaluation_stops_and_bans_as_training_does() -> None:
    task = pretended_ppo(report(1.0), report(1.0))
    given = replace(task.settings.sampling, stop_ids=(2, 5), banned_ids=(7, 9))
    task.settings = replace(task.settings, sampling=given)
    task.held_out, sampler = task.prompts, task.models.sampler
    with mock.patch.object(sampler, "sample", wraps=sampler.sample) as sampled:
        task.step(0)
        task.evaluate(10)
    trained, evaluated = (call.args[1] for call in sampled.call_args_list)
    assert trained.stop_ids == evaluated.stop_ids == (2, 5)
    assert trained.banned_ids == evaluated.banned_ids == (7, 9)
    assert (trained.temperature, evaluated.temperature, evaluated.samples) == (given.temperature, 0.0, 1)


def test_too_many_failed_rewards_of_an_evaluation_are_told_as_such() -> None:
    task = pretended_ppo(report(1.0), report(1.0))
    task.held_out, task.judge = task.prompts[:1], mock.Mock(return_value=[RewardResult(None, "a cause")])
    with pytest.raises(DataError, match=r"^the evaluation after step 10: the reward failed on 1 of 1 .* a cause"):
        task.evaluate(10)


def test_a_reward_that_gives_no_number_for_three_steps_ends_the_run() -> None:
    task = pretended_ppo(report(1.0), report(1.0))
    nothing = mock.Mock(return_value=[RewardResult(None)] * 4)
    nothing.name = "grader:f"
    judges: list[Any] = [nothing, nothing, task.judge, nothing, nothing]
    for step, task.judge in enumerate(judges):
        task.step(step)
    with pytest.raises(
        DataError, match=r"^step 6: 3 steps in a row have no sample with a reward.* grader:f returned None"
    ):
        task.step(5)


def test_a_skipped_update_of_the_critic_is_one_of_its_step() -> None:
    """A critic whose gradients are never finite would learn nothing, and the policy from what it says."""
    task = pretended_ppo(report(1.0), replace(report(10.0), skipped=True, faults={1: ["gradient"]}))
    row = task.step(0)
    assert row is not None and row["skipped"] is True
    assert row["fault"] == "the critic's update: not finite: rank 1: gradient"


def test_equal_rewards_have_themselves_for_a_mean() -> None:
    for count in (3, 10, 32):
        assert mean([0.7] * count) == 0.7, "or trainer.stop_at_reward=0.7 is missed by a rounding"
    assert mean([1.0, 2.0]) == 1.5
    assert math.isnan(mean([])) and math.isnan(mean([math.nan, 1.0]))


def test_groups_of_equal_rewards_are_dropped() -> None:
    assert [s.group for s in drop_equal_groups(SAMPLES)] == [0, 0]
    assert drop_equal_groups(SAMPLES[2:]) == []
    assert sample_metrics(SAMPLES, compared=True)["equal_groups"] == 2 / 3
    assert "equal_groups" not in sample_metrics(SAMPLES, compared=False)


def reference_gae(samples: Seq[Sample], batch: PackedBatch, gamma: float, lam: float, penalty: Any) -> list[float]:
    """Advantage plus value of every response token by the definition: sums of discounted errors, in plain Python."""
    found, start = [], 0
    values = batch.fields["old_value"].tolist()
    for s in samples:
        n = len(s.completion.ids)
        first = start + len(s.prompt.ids) - 1  # where the response's first token is predicted
        v = [values[first + t] for t in range(n)] + [0.0]
        r = [(s.reward if t == n - 1 else 0.0) - penalty[first + t] for t in range(n)]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(n)]
        found += [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
        start += len(s.prompt.ids) + n
    return found


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.5, 0.0)])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_values_advantages_and_returns_lie_where_the_prediction_is_made(
    gamma: float, lam: float, kl_coef: float
) -> None:
    torch.manual_seed(1)
    batch = batch_of()
    drawn = {name: torch.randn(len(batch)) for name in ("old_value", "old_logprob", "reference_logprob")}
    settings = AdvantageSettings(kind="ppo", gamma=gamma, lam=lam, kl_coef=kl_coef)
    found = with_advantages(batch.with_fields(**drawn), SAMPLES, settings)
    penalty = (kl_coef * (drawn["old_logprob"] - drawn["reference_logprob"])).tolist()
    expected = torch.tensor(reference_gae(SAMPLES, batch.with_fields(**drawn), gamma, lam, penalty))
    mask = batch.mask
    assert_close(found.fields["advantage"][mask], expected, OP_FP32)
    assert_close(found.fields["return"][mask], expected + drawn["old_value"][mask], OP_FP32)
    assert not found.fields["advantage"][~mask].any() and not found.fields["return"][~mask].any()


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_a_kl_term_in_the_reward_is_summed_over_the_response(kind: str) -> None:
    """The same as a lower reward; and without a coefficient there is none."""
    batch = batch_of()
    fields = {"old_logprob": torch.full((len(batch),), -1.0), "reference_logprob": torch.full((len(batch),), -1.5)}
    with_kl = with_advantages(batch.with_fields(**fields), SAMPLES, AdvantageSettings(kind=kind, kl_coef=0.1))
    lower = [replace(s, reward=s.reward - 0.1 * 0.5 * len(s.completion.ids)) for s in SAMPLES]
    plain = with_advantages(batch, lower, AdvantageSettings(kind=kind))
    assert_close(with_kl.fields["advantage"], plain.fields["advantage"], OP_FP32)
    assert not torch.equal(
        plain.fields["advantage"], with_advantages(batch, SAMPLES, AdvantageSettings(kind=kind)).fields["advantage"]
    )


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_large_rewards_that_differ_little_are_told_apart(kind: str) -> None:
    """In float32, sums and means of such rewards would round their differences away."""
    settings = AdvantageSettings(kind=kind)
    far = with_advantages(batch_of(), [replace(s, reward=s.reward + 1e8) for s in SAMPLES], settings)
    assert_close(far.fields["advantage"], with_advantages(batch_of(), SAMPLES, settings).fields["advantage"], OP_FP32)
    assert far.fields["advantage"].dtype == torch.float32


def test_a_sample_whose_group_was_dropped_around_it_learns_nothing() -> None:
    found = with_advantages(batch_of(), SAMPLES, AdvantageSettings(kind="grpo"))
    assert not found.fields["advantage"][found.sequence_ids == 4].any()
    assert found.fields["advantage"][(found.sequence_ids == 0) & found.mask].min() > 0
