"""`dovetail train` as a user runs it, on ranks that it starts itself: the numbers and the files of one rank in process."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from dovetail.engine.native import Engine
from dovetail.rl.tasks import SupervisedTask
from dovetail.weights.shards import local_tensor
from tests.golden.job import MODEL, Played, play, sampled_ids, sft, write_inputs
from tests.helpers.checkpoints import tensors_of
from tests.helpers.harness import run
from tests.helpers.program import Ended, _as_rank as as_rank, program
from tests.helpers.training_layouts import assert_same_rl, assert_same_sft, rl_recipe


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("command") / "inputs")


def train(given: dict[str, Any], inputs: Path, *more: str) -> tuple[str, Path]:
    """Run the command; its standard output, and the run's directory."""
    recipe = inputs / f"{Path(given['run_dir']).name}.yaml"
    recipe.write_text(yaml.safe_dump(given), encoding="utf-8")
    done = program("train", recipe, *more)
    assert done.code == 0, done.err
    return done.out, Path(given["run_dir"])


def read(run_dir: Path) -> Played:
    """A finished run from what it wrote."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return Played(rows, sampled_ids(run_dir), {}, {}, stopped=False)


ALL = pytest.param("pp=2,cp=2,dp=2", marks=pytest.mark.soak)


@pytest.mark.parametrize("layout", ["tp=2", ALL])
def test_sft(inputs: Path, layout: str, tmp_path: Path) -> None:
    alone = run(1, play, sft(inputs, tmp_path / "one"))[0]
    shown, run_dir = train(
        sft(inputs, tmp_path / "cut"), inputs, "--layout", layout, "--device", "cpu"
    )
    assert_same_sft(read(run_dir), alone)
    assert shown.count("step 10/10") == 1 and "tokens/s" in shown and str(run_dir / "hf") in shown


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["tp=2,dp=2", ALL])
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_rl(inputs: Path, name: str, layout: str, tmp_path: Path) -> None:
    alone = run(1, play, rl_recipe(inputs, name, tmp_path / "one"))[0]
    given = rl_recipe(inputs, name, tmp_path / "cut")
    _, run_dir = train(given, inputs, "--layout", layout, "--device", "cpu", "trainer.save_every=1")
    assert_same_rl(read(run_dir), alone)
    assert sorted(p.name for p in (run_dir / "checkpoints").glob("step_??????")) == [
        "step_000001",
        "step_000002",
    ]
    written = yaml.safe_load((run_dir / "config.yaml").read_text())["layout"]
    assert (
        ",".join(
            f"{axis}={written[axis]}" for axis in ("tp", "pp", "cp", "dp") if written[axis] != 1
        )
        == layout
    )
    model = AutoModelForCausalLM.from_pretrained(run_dir / "hf", dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(run_dir / "hf")("3+4=").input_ids
    before = tensors_of(inputs / MODEL)
    assert any(
        not torch.equal(tensor, before[name]) for name, tensor in tensors_of(run_dir / "hf").items()
    )
    assert model.config.num_key_value_heads == 2


def train_with_a_flip(argv: list[str]) -> Ended:
    """One rank of a run; before the second step, one bit of a norm's gain is another on the second rank."""
    step = SupervisedTask.step

    def flipped(task: SupervisedTask, number: int, *given: Any) -> Any:
        if number == 1 and dist.get_rank() == 1:
            assert isinstance(task.policy, Engine)
            gain = local_tensor(task.policy.model.get_parameter("model.norm.weight"))
            gain.data.view(torch.int32)[3] ^= 1 << 20
        return step(task, number, *given)

    with mock.patch.object(SupervisedTask, "step", flipped):
        return as_rank(argv)


def test_a_copy_that_differs_ends_a_run_where_copies_are_compared(
    inputs: Path, tmp_path: Path
) -> None:
    """By trainer.check_replicas_every; the same run without comparing goes on to its end."""
    for every, code in ((1, 1), (0, 0)):
        run_dir = tmp_path / f"every-{every}"
        recipe = tmp_path / f"{every}.yaml"
        trainer = {"steps": 2, "check_replicas_every": every}
        recipe.write_text(
            yaml.safe_dump(sft(inputs, run_dir, layout={"tp": 2}, trainer=trainer)),
            encoding="utf-8",
        )
        ended = run(2, train_with_a_flip, ["train", str(recipe), "--device", "cpu"])
        assert {rank.code for rank in ended} == {code}, ended
        named = [
            "model.norm.weight" in rank.err and "copies that must be equal differ" in rank.err
            for rank in ended
        ]
        assert any(named) == (every == 1), ended
        assert [row["step"] for row in read(run_dir).rows] == [1, 2]
