"""What one rank does in the tests of a real run's parts: small jobs, looked at between their steps."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dovetail.batch.loss import LossFn
from dovetail.batch.packed import PackedBatch
from dovetail.engine.base import StepReport
from dovetail.engine.native import Engine
from dovetail.errors import UserError
from dovetail.rl.collect import requests_for
from dovetail.rl.reward_manager import FunctionReward
from dovetail.rl.step_metrics import Row
from dovetail.rl.tasks import RLTask
from dovetail.run.trainer import train
from dovetail.sampler.turn import generate_all
from tests.golden.job import built
from tests.helpers.probe import parameters


@dataclass
class Recorder:
    """An engine that writes down its updates, and otherwise does what the real one does."""

    engine: Engine
    batches: list[PackedBatch] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)

    def train_step(self, batch: PackedBatch, loss: LossFn) -> StepReport:
        self.batches.append(batch)
        self.reports.append(self.engine.train_step(batch, loss))
        return self.reports[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class Watched:
    """A task that also says after every step which engines' weights have moved."""

    def __init__(self, task: RLTask, engines: Mapping[str, Engine]) -> None:
        self.task, self.engines, self.trained = task, engines, list(engines.values())
        self.moved: dict[str, list[bool]] = {name: [] for name in engines}

    def step(self, step: int, stopping: Callable[[], bool] = bool) -> Row | None:
        before = {name: _flat(engine) for name, engine in self.engines.items()}
        row = self.task.step(step, stopping)
        for name, engine in self.engines.items():
            self.moved[name].append(not torch.equal(before[name], _flat(engine)))
        return row

    def evaluate(self, step: int) -> Row:
        return self.task.evaluate(step)

    def sample_rows(self) -> list[Row]:
        return self.task.sample_rows()


@dataclass
class Recorded:
    """A run with every update of its policy, and in which steps whose weights moved."""

    rows: list[Row]
    reports: list[StepReport]
    batches: list[PackedBatch]
    moved: dict[str, list[bool]]
    optimizer_steps: int


def record(given: Mapping[str, Any]) -> Recorded:
    """Run a recipe on this one rank."""
    job = built(given)
    task = job.task
    assert isinstance(task, RLTask)
    policy = task.policy
    assert isinstance(policy, Engine)
    recorder, critic = Recorder(policy), task.critic
    task.policy = cast(Any, recorder)
    watched = Watched(
        task, {"policy": policy, **({"critic": critic} if isinstance(critic, Engine) else {})}
    )
    try:
        job.start()
        rows = train(watched, job.directory, job.recipe.trainer).rows
    finally:
        job.close()
    return Recorded(rows, recorder.reports, recorder.batches, watched.moved, policy.optimizer.steps)


def closed_after_failure(given: Mapping[str, Any]) -> tuple[str, bool, bool]:
    """How a run fails, and whether its metrics and its reward processes are closed afterwards."""
    job = built(given)
    assert job.rewards is not None
    (reward,) = job.rewards.rewards.values()
    assert isinstance(reward, FunctionReward) and reward.runner is not None
    failure = ""
    try:
        job.start()
        train(job.task, job.directory, job.recipe.trainer)
    except UserError as error:
        failure = str(error)
    finally:
        job.close()
    return failure, job.directory._metrics is None, not reward.runner._processes


def one_update(given: Mapping[str, Any], noise: float, steps: int = 0) -> dict[str, Any]:
    """A batch with old log-probs that are off by `noise`, and what its update reports, after `steps` whole steps."""
    job = built(given)
    task = job.task
    assert isinstance(task, RLTask)
    try:
        for step in range(steps):
            task.step(step)
        collector = task.collector
        collector.push()
        prompts = collector.prompts[:6]
        turns = generate_all(collector.sampler, requests_for(prompts, collector.sampling))
        samples, *_ = collector.reward(prompts, turns, "")
        batch, _ = task.prepare(samples, steps)
        scored = task.policy.score(batch).logprob
        generator = torch.Generator().manual_seed(3)
        batch = batch.with_fields(
            old_logprob=scored + noise * torch.randn(scored.shape, generator=generator)
        )
        report = task.policy.train_step(batch, task.algorithm.loss)
    finally:
        job.close()
    return {
        "batch": batch,
        "report": report,
        "scored": scored[batch.mask].tolist(),
        "sampled": [x for sample in samples for x in sample.completion.log_probs],
        "rewards": [sample.reward for sample in samples],
        "groups": [sample.group for sample in samples],
    }


def plain_gspo(
    model: Path, batch: PackedBatch, clip: tuple[float, float], temperature: float
) -> tuple[float, float]:
    """Loss and gradient norm of GSPO (Zheng et al. 2025, equations 5-7) in plain torch with transformers' model."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    losses = []
    for s in range(batch.num_sequences):
        row = batch.select([s])
        logits = policy(input_ids=row.tokens[None]).logits[0] / temperature
        log_probs = logits.log_softmax(-1).gather(1, row.targets[:, None])[:, 0][row.mask]
        ratio = (log_probs - row.fields["old_logprob"][row.mask]).mean().exp()
        advantage = row.fields["advantage"][row.mask][0]
        losses.append(
            -torch.minimum(ratio * advantage, ratio.clamp(1 - clip[0], 1 + clip[1]) * advantage)
        )
    loss = torch.stack(losses).mean()
    loss.backward()
    squares = [p.grad.square().sum() for p in policy.parameters() if p.grad is not None]
    return float(loss.detach()), float(torch.stack(squares).sum().sqrt())


def held_out_loss(model: Path, rows: Path) -> float:
    """The mean negative log-likelihood of the completions and their EOS, by transformers alone."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    from_text = {c: i for i, c in enumerate("0123456789+-*/=<>()?., \n:;!%^_")}
    total, count = 0.0, 0
    for line in rows.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt, completion = ([from_text[c] for c in row[key]] for key in ("prompt", "completion"))
        ids = torch.tensor([*prompt, *completion, policy.config.eos_token_id])
        with torch.no_grad():
            log_probs = policy(input_ids=ids[None]).logits[0].log_softmax(-1)
        picked = log_probs[:-1].gather(1, ids[1:, None])[len(prompt) - 1 :]
        total, count = total - float(picked.sum()), count + len(picked)
    return total / count


def critic_weights(given: Mapping[str, Any]) -> tuple[dict[str, Tensor], float, dict[str, Tensor]]:
    """The fresh critic's parameters, by how much ranks disagree on them, and the policy's. Collective."""
    job = built(given)
    task = job.task
    assert isinstance(task, RLTask)
    critic, policy = task.critic, task.policy
    assert isinstance(critic, Engine) and isinstance(policy, Engine)
    found, stray = parameters(critic)
    whole, _ = parameters(policy)
    job.close()
    return found, stray, whole


def _flat(engine: Engine) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in parameters(engine)[0].values()])
