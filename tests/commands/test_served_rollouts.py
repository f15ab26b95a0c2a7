"""A run whose samples come from the embedded sampler as a server, also ahead of time: bit for bit the run that samples itself."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.factory.serving import make_server
from dovetail.serving.http_server import listen
from tests.helpers.program import here, program, read_rows, write_recipe, write_rows
from tests.helpers.served import running

CLOCKS = ("seconds", "per_second", "time", "memory", "mfu", "lag", "idle", "pool")


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": "ab" * i, "answer": "c"} for i in range(1, 8)]
    )
    (tmp_path / "mine.py").write_text(
        "def spread(data_source, solution_str, ground_truth):\n    return len(set(solution_str))\n"
    )
    return write_recipe(
        tmp_path / "r.yaml",
        model,
        rows,
        algorithm={"name": "grpo"},
        data={"eval": str(rows)},
        reward={"import": "mine:spread"},
        rollout={
            "samples_per_prompt": 4,
            "max_new_tokens": 8,
            "temperature": 0.9,
            "push": {"directory": str(tmp_path)},
        },
        trainer={"steps": 3, "eval_every": 2},
    )


def result(run: Path) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]], bytes]:
    """Metrics but for times, samples but for versions, weights."""
    metrics = read_rows(run / "metrics.jsonl")
    kept = [
        {k: v for k, v in row.items() if not any(word in k for word in CLOCKS)} for row in metrics
    ]
    files = sorted((run / "rollouts").iterdir())
    samples = [
        [{k: v for k, v in row.items() if k != "versions"} for row in read_rows(file)]
        for file in files
    ]
    (weights,) = run.rglob("model.safetensors")
    return kept, samples, weights.read_bytes()


def test_a_server_gives_the_bits_of_the_sampler_inside(
    recipe: Path, model: Path, tmp_path: Path
) -> None:
    listener = listen("127.0.0.1", 0)
    with running(make_server(str(model), torch.device("cpu"), torch.float32, listener)) as server:
        engine = ("rollout.backend=native", f"rollout.engines={server.url}")
        served = here("train", recipe, *engine, f"run_dir={tmp_path}/s")
        ahead = here("train", recipe, *engine, "trainer.max_lag=0", f"run_dir={tmp_path}/a")
        foreign = here(
            "train",
            recipe,
            "rollout.backend=sglang",
            f"rollout.engines={server.url}",
            f"run_dir={tmp_path}/f",
        )
    assert served.code == ahead.code == 0, (served, ahead)
    assert foreign.code == 2 and "has no /generate" in str(foreign), foreign
    inside = here("train", recipe)
    assert inside.code == 0, inside
    expected = result(tmp_path / "run")
    for run in ("s", "a"):
        found = result(tmp_path / run)
        assert len(found[0]) == 3 and found[0] == expected[0]
        assert found[1] == expected[1]
        assert found[2] == expected[2]


@pytest.mark.soak
def test_a_run_that_starts_its_server_has_the_bits_of_one_that_does_not(
    recipe: Path, tmp_path: Path
) -> None:
    """20 steps, each run a program of its own."""
    inside = program("train", recipe, "trainer.steps=20", "--device", "cpu")
    assert inside.code == 0, inside
    start = (
        "rollout.backend=native",
        "rollout.start.gpus_each=0",
        "trainer.steps=20",
        "--device",
        "cpu",
    )
    for run, more in (("s", ()), ("a", ("trainer.max_lag=0",))):
        served = program("train", recipe, *start, *more, f"run_dir={tmp_path}/{run}", executed=True)
        assert served.code == 0, served
        assert result(tmp_path / run) == result(tmp_path / "run")
