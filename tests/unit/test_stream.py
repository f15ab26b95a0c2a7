"""An asynchronous run: the real trainer and a stand-in for vLLM that serves the run's model, at any lag."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dovetail.errors import MachineError
from dovetail.factory.remote import make_async_sampler
from dovetail.factory.run import Run, build_run
from dovetail.factory.setup import Start, prepare
from dovetail.factory.trainer import train_run
from dovetail.inference_servers.protocol import ServerRequest
from dovetail.launch.progress import Progress
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.process_group import StopSignal, temporary_process_group
from dovetail.recipe.schema import load_recipe
from dovetail.rl.asynchronous.sampler import AsyncSampler
from dovetail.rl.collect import step_rows
from dovetail.rl.samples import Sample
from dovetail.rl.tasks import RLTask
from dovetail.run.directory import POLICY
from dovetail.sampler.base import SamplingParams, TokenPrompt, requests_of
from dovetail.sampler.turn import RolloutId, generate_all
from tests.helpers.checkpoints import assert_same_tensors, tensors_of
from tests.helpers.drawn import DrawnSampler
from tests.helpers.harness import run
from tests.helpers.model_engine import ModelEngine
from tests.helpers.program import (
    _as_rank,
    _captured,
    make_model,
    read_rows,
    write_recipe,
    write_rows,
)

BATCH, SAMPLES, ROWS = 2, 2, 7
NUMBERS = (
    "step",
    "loss",
    "reward_mean",
    "grad_norm",
    "tokens",
    "eval_reward_mean",
    "correction_weight",
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("stream") / "model")


@pytest.fixture
def recipe(policy: Path, tmp_path: Path) -> Path:
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": f"{i} ab", "answer": "c"} for i in range(ROWS)]
    )
    (tmp_path / "mine.py").write_text(
        "def spread(data_source, solution_str, ground_truth):\n    return len(set(solution_str))\n"
    )
    return write_recipe(
        tmp_path / "r.yaml",
        policy,
        rows,
        algorithm={"name": "grpo"},
        data={"eval": str(rows)},
        reward={"import": "mine:spread"},
        rollout={
            "samples_per_prompt": SAMPLES,
            "max_new_tokens": 6,
            "push": {"directory": str(tmp_path / "push")},
        },
        trainer={"prompts_per_step": BATCH, "eval_every": 2, "save_every": 2, "steps": 5},
    )


class Killed(Exception):
    pass


def train(recipe: Path, *overrides: str, kill_at: int | None = None) -> None:
    """kill_at: ends without a word when it has the samples of this step, as a kill would."""
    made, device, progress = load_recipe(str(recipe), overrides), torch.device("cpu"), Progress()
    with _captured(), temporary_process_group(device):
        start = Start(device, recipe.parent, progress=progress)
        job = build_run(prepare(made, start))
        task = job.task
        assert isinstance(task, RLTask)

        def note(samples: list[Sample]) -> list[Sample]:
            if kill_at is not None and job.stream is not None and job.stream.step == kill_at:
                raise Killed
            return samples

        task.collector.rollout_end = note
        train_run(job, StopSignal(), progress)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return read_rows(run_dir / "metrics.jsonl")


def numbers(rows: Sequence[dict[str, Any]]) -> list[list[Any]]:
    return [[row.get(name) for name in NUMBERS] for row in rows]


def drawn(run_dir: Path, step: int) -> list[dict[str, Any]]:
    return read_rows(run_dir / "rollouts" / f"step_{step:06}.jsonl")


def unversioned(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "versions"} for row in rows]


def salts(engine: ModelEngine, step: int) -> set[int]:
    """Versions of the prefix cache of the requests of a step, counted from 0."""
    asked = [
        body for body in engine.requests if body["sampling_params"].get("seed") in seeds_of(step)
    ]
    return {int(body["cache_salt"].rpartition("-")[2]) for body in asked}


def lags(run_dir: Path, step: int) -> list[int]:
    """Of every token of a step."""
    spans = [span for row in drawn(run_dir, step) for span in row["versions"]]
    return [step - 1 - version for version, start, end in spans for _ in range(start, end)]


@pytest.mark.parametrize("steps", [4, pytest.param(20, marks=pytest.mark.soak)])
def test_it_trains_on_the_rows_of_the_synchronous_run_and_without_lag_equals_it(
    steps: int, recipe: Path, policy: Path, tmp_path: Path
) -> None:
    runs = {"sync": ("null", 2), "none": ("0", 2), "two": ("2", 0)}
    for name, (lag, save_every) in runs.items():
        given = (
            f"trainer.max_lag={lag}",
            f"trainer.save_every={save_every}",
            f"trainer.steps={steps}",
        )
        with ModelEngine(model=policy) as engine:
            train(recipe, f"rollout.engines={engine.url}", f"run_dir={tmp_path / name}", *given)
        if name == "two":
            assert [salts(engine, step) for step in range(steps)] == [
                {max(0, step - 2)} for step in range(steps)
            ]
        if name != "sync":
            assert engine.pushes == [str(version) for version in range(steps + 1)], (
                "one push for a step"
            )
    sync, none, two = (tmp_path / name for name in runs)
    assert numbers(metrics(none)) == numbers(metrics(sync))
    assert_same_tensors(tensors_of(none / "hf"), tensors_of(sync / "hf"))
    for step in range(1, steps + 1):
        assert unversioned(drawn(none, step)) == unversioned(drawn(sync, step))
        assert lags(none, step) == [0] * len(lags(none, step))
        ids = [[(row["id"], row["sample"]) for row in drawn(run, step)] for run in (two, sync)]
        assert ids[0] == ids[1]
    for step, row in enumerate(metrics(two), 1):
        own, later = lags(two, step), BATCH * min(2, steps - step)
        assert max(own) <= 2 and (row["lag_mean"], row["lag_max"]) == (
            pytest.approx(sum(own) / len(own)),
            max(own),
        )
        assert row["pool_running"] + row["pool_finished"] == later and 0 <= row["trainer_idle"] <= 1
        assert "tokens_per_second/rollout" not in row and "correction_weight" in row
    assert any(max(lags(two, step)) > 0 for step in range(1, steps + 1))
    assert saved_steps(none) == {steps - 2, steps - 1}, (
        "of the older of two checkpoints, saved after step steps - 2"
    )
    assert saved_steps(two) == {steps - 1}, "without checkpoints what was trained is of no use"


def saved_steps(run_dir: Path) -> set[int]:
    return {int(file.stem[6:]) // BATCH for file in (run_dir / "pool").iterdir()}


def test_a_run_that_was_killed_repeats_the_steps_after_its_checkpoint(
    recipe: Path, policy: Path, tmp_path: Path
) -> None:
    """Saved after step 2, killed in step 4: step 3 has the samples that it had, of policies that are made again bit for bit."""
    with ModelEngine(model=policy) as engine:
        given = (f"rollout.engines={engine.url}", "trainer.max_lag=2")
        with pytest.raises(Killed):
            train(recipe, *given, kill_at=4)
        before, asked = metrics(tmp_path / "run"), len(engine.requests)
        train(recipe, *given)
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert numbers(before) == numbers(rows[:3])
    folders = tmp_path / "run" / "superseded" / "001", tmp_path / "run" / "rollouts"
    first, second = (read_rows(folder / "step_000003.jsonl") for folder in folders)
    assert first == second
    again = seeds(engine.requests[asked:])
    assert not again & {seed for step in (2, 3) for seed in seeds_of(step)}, (
        "finished groups are not sampled again"
    )


def seeds(requests: Sequence[dict[str, Any]]) -> set[int]:
    return {
        body["sampling_params"]["seed"] for body in requests if "seed" in body["sampling_params"]
    }


def seeds_of(step: int) -> set[int]:
    """Of the requests of a step, counted from 0."""
    places = product(range(BATCH), range(SAMPLES))
    return {
        ServerRequest(
            id=RolloutId(step, row, sample), prompt_ids=[1], params=SamplingParams(), salt=""
        ).seed(0)
        for row, sample in places
    }


def test_a_changed_run_keeps_the_groups_of_policies_that_it_has(
    recipe: Path, policy: Path, tmp_path: Path
) -> None:
    """Saved after step 4, which made the newest policy; the groups of step 5 are older."""
    with ModelEngine(model=policy) as engine:
        given = (f"rollout.engines={engine.url}", "trainer.max_lag=2", "data.eval=null")
        with pytest.raises(Killed):
            train(recipe, *given, kill_at=5)
        asked = len(engine.requests)
        train(recipe, *given, "trainer.max_lag=3")
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert not seeds(engine.requests[asked:]) & seeds_of(4)


@pytest.mark.parametrize(
    ("deterministic", "resumed", "repeats"),
    [
        (True, SimpleNamespace(repeats=True), True),
        (True, SimpleNamespace(repeats=False), False),
        (False, SimpleNamespace(repeats=True), False),
        (True, None, False),
    ],
)
def test_groups_of_later_policies_stay_where_these_are_made_again(
    deterministic: bool, resumed: Any, repeats: bool, tmp_path: Path
) -> None:
    recipe: Any = SimpleNamespace(trainer=SimpleNamespace(deterministic=deterministic))
    stream = mock.Mock()
    stream.resume.return_value = ["3 groups"]
    run = mock.Mock(resumed=resumed, path=tmp_path)
    contents: Any = SimpleNamespace(engines={POLICY: mock.Mock()})
    given: Any = {"recipe": recipe, "directory": run, "contents": contents, "stream": stream}
    with mock.patch("dovetail.factory.run.compile_kernels"):
        Run(task=mock.Mock(), rewards=None, at_close=ExitStack(), **given).start()
    stream.resume.assert_called_once_with(repeats=repeats)
    run.say.assert_called_once_with("sampled again: 3 groups")


def test_a_step_alone_takes_its_groups() -> None:
    """An evaluation before the first step has as many prompts, and step 0, as that step."""
    params = SamplingParams(samples=SAMPLES, seed=3)
    requests = requests_of([TokenPrompt(row, (5, 6)) for row in range(BATCH)], params)
    remote: Any = DrawnSampler(lambda *_: (1,))
    remote.mesh = Mesh.solo()
    remote.share = mock.Mock(return_value=["of the buffer"])
    stream = AsyncSampler(remote, None, 0)
    found: Any = stream.generate_step(requests)
    assert found == ["of the buffer"] and stream.step == 1 and not remote.asked
    turns = generate_all(stream, requests)
    assert [turn.id for turn in turns] == [request.id for request in requests]
    assert stream.step == 1 and remote.asked == [[*range(BATCH)]]


def test_finished_groups_are_of_the_same_inputs_and_sampling(recipe: Path, tmp_path: Path) -> None:
    def key(*changes: str, inputs: Sequence[str] = ("model", "rows"), **sampling: Any) -> str:
        made = load_recipe(
            str(recipe), [*changes, "trainer.max_lag=1", "rollout.engines=http://127.0.0.1:9"]
        )
        first_row = sampling.pop("first_row", 0)
        run: Any = SimpleNamespace(path=tmp_path, first_row=first_row, resumed=None, mesh=None)
        sampler: Any = SimpleNamespace(servers=object(), watch=None, dtype=torch.float32)
        stream = make_async_sampler(sampler, made, run, SamplingParams(**sampling), [], (), inputs)
        assert stream.make_buffer is not None
        buffer = stream.make_buffer()
        buffer.close()
        return buffer.checkpoint.key

    others = [
        key("trainer.prompts_per_step=3"), key("data.shuffle=false"), key(inputs=("model", "other")),
        key(inputs=("other", "rows")), key(first_row=1), key(temperature=0.5), key(seed=1), key(samples=3),
        key(max_new_tokens=9), key(stop_ids=(1,)), key(banned_ids=(1,)), key(),
    ]  # fmt: skip
    assert len({*others}) == len(others)
    assert key("trainer.max_lag=4", "trainer.steps=9", "optim.lr=1") == key()


def test_a_step_that_needs_more_groups_has_these_without_lag(
    recipe: Path, policy: Path, tmp_path: Path
) -> None:
    """DAPO: groups with equal rewards are left out, and the rows of later steps fill the step."""
    with ModelEngine(model=policy) as engine:
        more = (
            "algorithm.drop_zero_std_groups=true",
            "algorithm.max_num_gen_batches=3",
            "trainer.steps=3",
        )
        train(
            recipe,
            f"rollout.engines={engine.url}",
            "trainer.max_lag=1",
            "rollout.max_new_tokens=2",
            *more,
        )
    found = False
    for step in (1, 2, 3):
        spans = {row["id"]: row["versions"] for row in drawn(tmp_path / "run", step)}
        late = [*spans.values()][BATCH:]
        found |= bool(late)
        assert all(version == step - 1 for own in late for version, _, _ in own)
    assert found


def test_an_engine_that_refuses_a_push_serves_no_more_and_its_requests_go_on_elsewhere(
    recipe: Path, policy: Path, tmp_path: Path
) -> None:
    """A push is longer than the silence after which an engine counts as lost. The answers of step 3 run through one."""
    good, bad = (
        ModelEngine(model=policy, push_seconds=0.6),
        ModelEngine(model=policy, refuses=("1",)),
    )

    def until_the_second_push(engine: ModelEngine, seed: int, length: int) -> bool:
        return length > 12 and seed in seeds_of(2) and len(engine.pushes) < 2

    for engine in (good, bad):
        engine.holds = partial(until_the_second_push, engine)
    with good, bad:
        given = (
            f"rollout.engines=[{good.url},{bad.url}]",
            "trainer.max_lag=2",
            "trainer.steps=3",
            "data.eval=null",
        )
        train(
            recipe,
            *given,
            "rollout.request_timeout=0.5",
            "rollout.max_new_tokens=20",
            "rollout.ignore_eos=true",
        )
    assert good.pushes == ["0", "1", "2"] and bad.pushes == ["0", "2"]
    lost = (tmp_path / "run" / "console.log").read_text()
    assert (
        lost.count("the run goes on without this engine") == 1
        and "these weights are refused" in lost
    )
    spans = [row["versions"] for row in drawn(tmp_path / "run", 3)]
    assert all(len(own) > 1 and own[0][0] == 0 and own[-1][2] == 20 for own in spans)


def test_a_run_without_engines_ends_and_goes_on_later(
    recipe: Path, policy: Path, tmp_path: Path
) -> None:
    with ModelEngine(model=policy, refuses=("2",)) as engine:
        given = (
            f"rollout.engines={engine.url}",
            "trainer.max_lag=1",
            "trainer.steps=3",
            "trainer.save_every=1",
        )
        with pytest.raises(MachineError, match="these weights are refused"):
            train(recipe, *given)
        engine.refuses = ()
        train(recipe, *given)
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3]


SHORT = ("trainer.steps=3", "trainer.save_every=0", "data.eval=null")


def served(recipe: Path, policy: Path) -> list[str]:
    """A rank of a run whose engine the first one starts."""
    address = [""]
    with ExitStack() as stack:
        if dist.get_rank() == 0:
            address = [stack.enter_context(ModelEngine(model=policy)).url]
        dist.broadcast_object_list(address)
        ended = _as_rank(
            [
                "train",
                str(recipe),
                "--layout",
                "dp=2",
                f"rollout.engines={address[0]}",
                "trainer.max_lag=1",
                *SHORT,
            ]
        )
        dist.barrier()
    assert ended.code == 0, ended
    return [ended.out]


def test_the_first_of_two_ranks_keeps_the_pool(recipe: Path, policy: Path, tmp_path: Path) -> None:
    run(2, served, recipe, policy)
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for step in (1, 2, 3):
        assert [row["id"] for row in drawn(tmp_path / "run", step)] == [
            row
            for row in step_rows(load_recipe(str(recipe)), ROWS, step - 1)
            for _ in range(SAMPLES)
        ]
