"""`dovetail train` with engines that sample ahead, killed at drawn moments: no group is trained twice, and none is lost."""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.checkpoint.retention import saved_steps
from dovetail.inference_servers.protocol import ServerRequest
from dovetail.recipe.schema import load_recipe
from dovetail.rl.collect import step_rows
from dovetail.sampler.base import SamplingParams
from dovetail.sampler.turn import RolloutId
from dovetail.system import children_of
from tests.helpers.model_engine import ModelEngine
from tests.helpers.processes import all_gone
from tests.helpers.program import read_rows, start, write_recipe, write_rows

BATCH, SAMPLES, ROWS, STEPS = 2, 2, 7, 8
SECONDS = 120.0


def seeds_of(groups: set[int]) -> Iterator[int]:
    for group in groups:
        step, row = divmod(group, BATCH)
        for sample in range(SAMPLES):
            yield ServerRequest(
                id=RolloutId(step, row, sample), prompt_ids=[1], params=SamplingParams(), salt=""
            ).seed(0)


def live(recipe: Path, engine: ModelEngine, requests: int, seconds: float) -> bool:
    """One start, killed so many seconds after so many requests. Whether it has ended by itself."""
    asked, end = len(engine.requests), time.monotonic() + SECONDS
    process = start("train", recipe, f"rollout.engines={engine.url}", "trainer.max_lag=2")
    while process.poll() is None and len(engine.requests) < asked + requests:
        assert time.monotonic() < end
        time.sleep(0.005)
    time.sleep(seconds)
    below = children_of([process.pid])
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    _, err = process.communicate(timeout=SECONDS)
    assert all_gone(below, SECONDS)
    assert process.returncode in (0, -signal.SIGKILL), err
    return process.returncode == 0


@pytest.mark.parametrize("wanted", [2, pytest.param(50, marks=pytest.mark.soak)])
def test_kills_lose_no_finished_group_and_train_none_twice(
    wanted: int, model: Path, tmp_path: Path
) -> None:
    luck, kills, runs = random.Random(wanted), 0, 0
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": f"{i} ab", "answer": "c"} for i in range(ROWS)]
    )
    while kills < wanted:
        run_dir, ended = tmp_path / f"run-{runs}", False
        recipe = write_recipe(
            tmp_path / "r.yaml",
            model,
            rows,
            algorithm={"name": "grpo"},
            rollout={
                "samples_per_prompt": SAMPLES,
                "max_new_tokens": 6,
                "push": {"directory": str(tmp_path / "push")},
            },
            trainer={"prompts_per_step": BATCH, "save_every": 1, "steps": STEPS},
            run_dir=str(run_dir),
        )
        with ModelEngine(model=model, seconds=0.005) as engine:
            while not ended:
                checkpoints, _ = saved_steps(run_dir / "checkpoints")
                first = checkpoints[0].step * BATCH if checkpoints else 0
                pool = {int(file.stem[6:]) for file in (run_dir / "pool").glob("group_*")}
                asked = len(engine.requests)
                requests = luck.randint(1, 2 * BATCH * SAMPLES) if kills < wanted else 1 << 30
                ended = live(recipe, engine, requests, luck.uniform(0.0, 0.3))
                kills += not ended
                sampled = {body["sampling_params"].get("seed") for body in engine.requests[asked:]}
                known = {group for group in pool if group >= first} if checkpoints else set[int]()
                assert not sampled & {*seeds_of(known)}, "a finished group was sampled again"
        order = [step_rows(load_recipe(str(recipe)), ROWS, step) for step in range(STEPS)]
        trained = [
            read_rows(run_dir / "rollouts" / f"step_{step + 1:06}.jsonl") for step in range(STEPS)
        ]
        assert [[row["id"] for row in step] for step in trained] == [
            [i for i in ids for _ in range(SAMPLES)] for ids in order
        ]
        assert [row["step"] for row in read_rows(run_dir / "metrics.jsonl")] == list(
            range(1, STEPS + 1)
        )
        for step, samples in enumerate(trained):
            assert all(
                step - 2 <= version <= step for row in samples for version, _, _ in row["versions"]
            )
        runs += 1
