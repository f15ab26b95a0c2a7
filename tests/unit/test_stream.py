"""The asynchronous loop on a CPU: the real trainer, and the embedded sampler on a thread of its own in place of engines."""

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from dovetail.factory.job import Builder
from dovetail.factory.trainer import run_job
from dovetail.launch.progress import Progress
from dovetail.parallel.process_group import StopSignal, temporary_process_group
from dovetail.recipe.schema import load_recipe
from dovetail.rl.experience import Sample
from dovetail.rl.tasks import RLTask, step_rows
from dovetail.rollout.base import Completion, Prompt, SamplingParams
from dovetail.rollout.feed import Feed
from dovetail.rollout.journal import Answer, Journal
from dovetail.rollout.pool import Pool
from dovetail.rollout.stream import StreamSampler
from tests.checkpoints import assert_same_tensors, tensors_of
from tests.commands.program import _captured, make_model, read_rows, write_recipe, write_rows

BATCH, SAMPLES = 2, 2


class ThreadedSampler:
    """Stands in for engines: draws whole steps, in order, on a thread; weights change between two of them."""

    def __init__(self, task: RLTask, version: int) -> None:
        """version: that the first weights will have."""
        self.task, self.sampler, self.dtype = task, task.sampler, task.sampler.dtype
        self.lock, self.asked = threading.Condition(), list[tuple[int, int, Future[Answer]]]()
        self.version, self.drawn = version - 1, ((-1, -1), list[Completion]())
        threading.Thread(target=self._run, daemon=True).start()

    def refill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        with self.lock:
            self.sampler.refill(weights)
            self.version += 1

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        with self.lock:
            return self.sampler.sample(prompts, params)

    def submit(self, group: int, sample: int) -> "Future[Answer]":
        future: Future[Answer] = Future()
        with self.lock:
            self.asked.append((group, sample, future))
            self.lock.notify()
        return future

    def _run(self) -> None:
        while True:
            with self.lock:
                self.lock.wait_for(lambda: self.asked)
                group, sample, future = self.asked.pop(0)
                step, row = divmod(group, BATCH)
                if self.drawn[0] != (step, self.version):
                    rows = step_rows(self.task.recipe, len(self.task.prompts), step)
                    prompts = [Prompt(row, self.task.prompts[i].ids) for row, i in enumerate(rows)]
                    drawn = self.sampler.sample(prompts, replace(self.task.sampling, step=step))
                    self.drawn = (step, self.version), drawn
                c = self.drawn[1][row * SAMPLES + sample]
                assert (row, sample) == (c.row, c.sample)
                answer = Answer(sample, c.ids, c.log_probs, ((self.version, 0, len(c.ids)),), c.finish)
            future.set_result(answer)


class Killed(Exception):
    pass


def train(
    recipe: Path, run_dir: Path, max_lag: int | None, kill_at: int | None = None, steps: int = 5
) -> list[dict[str, Any]]:
    """Metrics by step. max_lag None: the synchronous loop. kill_at: ends without a word when it has the samples of this step."""
    made = load_recipe(str(recipe), [f"run_dir={run_dir}", f"trainer.steps={steps}"])
    device = torch.device("cpu")
    with _captured(), temporary_process_group(device):
        job = Builder(made, device, recipe.parent, lambda: 0).job()
        task, lags = cast(RLTask, job.task), set[int]()
        if max_lag is not None:
            step = 0 if job.run.resumed is None else job.run.resumed.state.step
            engine = ThreadedSampler(task, step)
            feed = Feed(Pool(BATCH, SAMPLES, max_lag, steps), Journal(run_dir.with_suffix(".pool"), ""), engine.submit)
            assert feed.resume(step) == []
            stream = StreamSampler(engine, feed, job.run.mesh, task.sampling, BATCH, step)
            task.sampler = stream

            def note(samples: list[Sample]) -> list[Sample]:
                if stream.step == kill_at:
                    feed.close()
                    raise Killed
                for sample in samples:
                    lags.update(stream.step - 1 - version for version, _, _ in sample.completion.versions)
                return samples

            task.rollout_end = note
        run_job(job, StopSignal(), Progress())
        assert lags <= set(range((max_lag or 0) + 1)) and (not max_lag or max(lags) > 0)
    return read_rows(run_dir / "metrics.jsonl")


NUMBERS = ("step", "loss", "reward_mean", "grad_norm", "tokens", "eval_reward_mean")


def numbers(rows: Sequence[dict[str, Any]]) -> list[list[Any]]:
    return [[row.get(name) for name in NUMBERS] for row in rows]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{i} ab", "answer": "c"} for i in range(7)])
    (tmp_path / "mine.py").write_text(
        "def spread(data_source, solution_str, ground_truth):\n    return len(set(solution_str))\n"
    )
    return write_recipe(
        tmp_path / "r.yaml",
        make_model(tmp_path / "model"),
        rows,
        algorithm={"name": "grpo"},
        data={"eval": str(rows)},
        reward={"import": "mine:spread"},
        rollout={"samples_per_prompt": SAMPLES, "max_new_tokens": 6},
        trainer={"prompts_per_step": BATCH, "eval_every": 2, "save_every": 2},
    )


@pytest.mark.parametrize("steps", [4, pytest.param(20, marks=pytest.mark.soak)])
def test_it_trains_on_the_rows_of_the_synchronous_run_and_without_lag_equals_it(
    steps: int, recipe: Path, tmp_path: Path
) -> None:
    def samples(name: str, step: int) -> list[dict[str, Any]]:
        rows = read_rows(tmp_path / name / "rollouts" / f"step_{step:06}.jsonl")
        return [{key: value for key, value in row.items() if key != "versions"} for row in rows]

    lags = {"sync": None, "none": 0, "two": 2}
    rows = {name: train(recipe, tmp_path / name, lag, steps=steps) for name, lag in lags.items()}
    assert numbers(rows["none"]) == numbers(rows["sync"])
    assert_same_tensors(tensors_of(tmp_path / "none" / "hf"), tensors_of(tmp_path / "sync" / "hf"))
    for step in range(1, steps + 1):
        assert samples("none", step) == samples("sync", step)
        ids = [[(row["id"], row["sample"]) for row in samples(name, step)] for name in ("two", "sync")]
        assert ids[0] == ids[1]


def test_a_run_that_was_killed_repeats_the_steps_after_its_checkpoint(recipe: Path, tmp_path: Path) -> None:
    """Saved after step 2, killed in step 4: step 3 has the samples that it had, of policies that are made again bit for bit."""
    with pytest.raises(Killed):
        train(recipe, tmp_path / "run", 2, kill_at=4)
    before = read_rows(tmp_path / "run" / "metrics.jsonl")
    rows = train(recipe, tmp_path / "run", 2)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert numbers(before) == numbers(rows[:3])
    folders = tmp_path / "run" / "superseded" / "001", tmp_path / "run" / "rollouts"
    first, second = (read_rows(folder / "step_000003.jsonl") for folder in folders)
    assert first == second
