"""Where the time of a GRPO step goes, and how fast ragged samples are scored: -m bench.rl_step --shape 1.5b

The step is the trainer's own, with random weights, random prompts and a reward that costs nothing; its phases are those
that it tells whoever watches it. A random policy ends a response wherever one of many ids comes up, so that responses
are a quarter of the longest in the mean. Scoring: tokens/s on lengths as RL has them over those of full-length rows.
"""

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from bench.engines import (
    SHAPES,
    Session,
    add_options,
    dense_batch,
    layout_of,
    name_of,
    ragged_batch,
    random_engine,
    spec_of,
    timed,
    wait,
)
from bench.given import positive, run_main
from dovetail.arch.spec import ArchSpec
from dovetail.data.examples import Prompt
from dovetail.device import peak_memory_gib
from dovetail.engine.native import Engine
from dovetail.engine.nonfinite import StepWatch
from dovetail.factory.engine import make_mesh
from dovetail.factory.layouts import sampling_layout
from dovetail.kernels.registry import kernels_for
from dovetail.launch.progress import Phase, Progress
from dovetail.rewards.samples import RewardResult
from dovetail.rl.algorithms.fields import BatchFields
from dovetail.rl.algorithms.grpo import GRPO
from dovetail.rl.collect import SampleCollector
from dovetail.rl.losses import PolicyLoss
from dovetail.rl.reward_manager import RewardManager
from dovetail.rl.tasks import RLTask
from dovetail.sampler.base import SamplingParams
from dovetail.sampler.native import NativeSampler
from dovetail.sampler.turn import Turn

PARTS = {"push": "weight push", "rollout": "rollout", "reward": "reward", "score": "old log-probs", "update": "update",
         "optimizer": "optimizer"}  # fmt: skip


class Clock(Progress):
    """A progress that adds up how long each phase takes, until the device is done with it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.since, self.now = device, 0.0, ""
        self.seconds: dict[str, float] = defaultdict(float)
        super().__init__()

    def phase(self, name: Phase, step: int | None = None) -> None:
        wait(self.device)
        here = time.perf_counter()
        if self.now:
            self.seconds[self.now] += here - self.since
        self.now, self.since = name, here
        super().phase(name, step)


class Coin(RewardManager):
    """A reward: by chance, the same on every rank."""

    def __init__(self) -> None:
        super().__init__({})

    def __call__(
        self, prompts: Sequence[Prompt], completions: Sequence[Turn], texts: Sequence[str]
    ) -> list[RewardResult]:
        return [
            RewardResult(float(random.Random(f"{c.row}/{c.sample}").random() < 0.5), None)
            for c in completions
        ]


def main() -> int:
    """Two rows."""
    parser = argparse.ArgumentParser(prog="python -m bench.rl_step", description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="1.5b")
    parser.add_argument("--layout", default="dp=1")
    parser.add_argument("--prompts", type=positive, default=16)
    parser.add_argument("--samples", type=positive, default=8, help="of a prompt")
    parser.add_argument("--prompt-length", type=positive, default=256)
    parser.add_argument("--new-tokens", type=positive, default=1024, help="of a response, at most")
    parser.add_argument("--tokens-per-batch", type=positive, default=16384)
    parser.add_argument("--length", type=positive, default=8192, help="of the scored rows, at most")
    parser.add_argument("--steps", type=positive, default=2, help="measured, after one that is not")
    add_options(parser, "rl_step")
    given = parser.parse_args()
    session = Session.start(given)
    session.begin(f"{given.shape} {given.layout}")
    spec, layout = spec_of(given.shape), layout_of(given.layout)
    dtype = torch.float32 if session.device.type == "cpu" else torch.bfloat16
    budget = max(given.tokens_per_batch, given.length)
    engine = random_engine(spec, layout, session.device, dtype=dtype, tokens_per_batch=budget)
    session.limit.at("scoring")
    score(engine, spec, session)
    session.limit.at("RL steps")
    step(engine, spec, session, dtype)
    session.finish()
    return 0


def score(engine: Engine, spec: ArchSpec, session: Session) -> None:
    """Ragged against dense, interleaved."""
    given, device = session.given, session.device
    total = 4 * max(given.tokens_per_batch, given.length) * (engine.mesh.layout.dp or 1)
    batches = {"dense": dense_batch(spec, given.length, total // given.length)}
    batches["ragged"] = ragged_batch(spec, given.length, total)
    seconds: dict[str, list[float]] = {name: [] for name in batches}
    for _ in range(4):
        for name, batch in batches.items():
            seconds[name].append(timed(device, lambda batch=batch: engine.score(batch)))
    rates = {
        name: total / median(times[1:]) / engine.mesh.layout.num_ranks
        for name, times in seconds.items()
    }
    _keep(
        session,
        f"score, {given.shape}, {name_of(engine.mesh.layout)}, lengths to {given.length}",
        f"ragged {rates['ragged']:.0f} tokens/s a rank, dense {rates['dense']:.0f}: "
        f"{rates['ragged'] / rates['dense']:.2f} x, goal 0.9",
        {
            "tokens_per_second_per_rank": rates,
            "ratio": rates["ragged"] / rates["dense"],
            "seconds": seconds,
        },
    )


def step(engine: Engine, spec: ArchSpec, session: Session, dtype: torch.dtype) -> None:
    """GRPO's, by phases: medians over the steps."""
    given, device = session.given, session.device
    clock = Clock(device)
    engine.watch = StepWatch(clock)
    sampler = NativeSampler(
        spec,
        make_mesh(sampling_layout(spec, engine.mesh.layout), device),
        kernels_for(device),
        dtype,
    )
    draw = torch.Generator().manual_seed(1)
    prompts = [
        Prompt(
            id=i,
            ids=tuple(
                torch.randint(spec.vocab_size, (given.prompt_length,), generator=draw).tolist()
            ),
        )
        for i in range(given.prompts)
    ]
    stops = tuple(range(0, spec.vocab_size, max(1, given.new_tokens // 4)))
    sampling = SamplingParams(
        samples=given.samples, max_new_tokens=given.new_tokens, stop_ids=stops
    )
    recipe: Any = SimpleNamespace(  # this machine may have no pydantic
        algorithm=SimpleNamespace(
            name="grpo", epochs=1, num_mini_batches=1, aggregation="token", kl_in="loss", kl_coef=0.0, scale_by_std=True,
            drops_groups=False, max_generations=1, compares_samples=True, normalize_advantage=False, overlong_buffer=0,
            steps_without_policy=0,
        ),
        rollout=SimpleNamespace(
            temperature=sampling.temperature, max_new_tokens=given.new_tokens, router_replay="none", mismatch_metrics=False
        ),
        trainer=SimpleNamespace(seed=0, prompts_per_step=given.prompts),
        data=SimpleNamespace(shuffle=True),
        correction=None,
    )  # fmt: skip
    collector = SampleCollector(
        recipe=recipe,
        policy=engine,
        sampler=sampler,
        sampling=sampling,
        prompts=prompts,
        held_out=[],
        rewards=Coin(),
        decode=lambda _: "",
        progress=clock,
    )
    algorithm = GRPO(
        section=recipe.algorithm,
        fields=BatchFields(old_logprob="policy"),  # as in a step of several updates
        loss=PolicyLoss(clip_high=0.28),
    )
    task = RLTask(
        recipe=recipe,
        policy=engine,
        algorithm=algorithm,
        collector=collector,
        progress=clock,
    )
    found: list[dict[str, float]] = []
    tokens = responses = 0
    for i in range(1 + given.steps):
        clock.seconds.clear()
        total = timed(device, lambda i=i: task.step(i))
        clock.phase("exit")
        found.append({**{part: clock.seconds[name] for name, part in PARTS.items()}, "step": total})
        responses = sum(len(sample.completion.ids) for sample in collector.samples)
        tokens = responses + sum(len(sample.prompt.ids) for sample in collector.samples)
    middle = {part: median(each[part] for each in found[1:]) for part in found[0]}
    shown = ", ".join(f"{part} {seconds:.2f}" for part, seconds in middle.items() if part != "step")
    _keep(
        session,
        f"GRPO step, {given.shape}, {name_of(engine.mesh.layout)}, {given.prompts} x {given.samples} responses",
        f"{middle['step']:.2f} s ({shown}) for {tokens} tokens, {responses} of them drawn "
        f"({responses / max(middle['rollout'], 1e-9):.0f} a second); {peak_memory_gib(device):.1f} GiB",
        {"seconds": middle, "all_seconds": found, "tokens": tokens, "drawn": responses},
    )


def _keep(session: Session, title: str, figure: str, others: dict[str, Any]) -> None:
    session.keep({"title": title, "figure": figure, **others})
    session.say(f"{title}: {figure}")


if __name__ == "__main__":
    run_main(main)
