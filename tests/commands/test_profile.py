"""`trainer.profile` with the command: on two ranks, on a resumed run, and by a signal."""

import gzip
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.clocked import timeless
from tests.helpers.processes import rl_run, waited
from tests.helpers.program import here, on_ranks, read_rows, refusal, write_recipe, write_rows
from tests.helpers.report_runs import Page

GRADER = "def f(prompts, completions, **_):\n    return [float(len(completions[0]) % 3)]\n"
NAMES = {
    "wait", "push", "rollout", "reward", "score", "update", "forward", "backward", "optimizer", "save", "gloo:all_reduce",
    "aten::mm", "aten::scaled_dot_product_attention",
}  # fmt: skip


def write_job(folder: Path, model: Path, **trainer: Any) -> Path:
    folder.mkdir()
    rows = write_rows(
        folder / "rows.jsonl",
        [{"prompt": "ab", "answer": "c"}, {"prompt": "longer", "answer": "d"}],
    )
    (folder / "grader.py").write_text(GRADER)
    sections = {
        "algorithm": {"name": "grpo", "kl_coef": 0.1},
        "reward": {"import": "grader:f", "workers": 1},
    }
    return write_recipe(
        folder / "r.yaml", model, rows, **sections, trainer={"save_every": 1, **trainer}
    )


def names_in(trace: Path) -> set[str]:
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        return {event["name"] for event in json.load(file)["traceEvents"]}


def test_two_profiled_steps_of_two_ranks(model: Path, tmp_path: Path) -> None:
    plain = write_job(tmp_path / "plain", model)
    recipe = write_job(tmp_path / "profiled", model, profile={"steps": [1, 2], "memory": True})
    assert [each.code for each in on_ranks(2, "train", plain, "--layout", "dp=2")] == [0, 0]
    first, other = on_ranks(2, "train", recipe, "--layout", "dp=2")
    run = recipe.parent / "run"
    assert (first.code, first.err, other.code, other.out) == (0, "", 0, "")
    assert f"profile of step 2: {run}/profile/step-2; dovetail report {run} shows it\n" in first.out
    rows = [read_rows(each / "metrics.jsonl") for each in (plain.parent / "run", run)]
    assert timeless(rows[1]) == timeless(rows[0]), "a profile changes no number"
    assert not any("profile" in name for row in rows[1] for name in row)
    for step in (1, 2):
        for rank in (0, 1):
            assert names_in(run / f"profile/step-{step}/rank-{rank}.trace.json.gz") >= NAMES
    assert here("report", run).code == 0
    (data,) = Page((run / "report.html").read_bytes()).data["runs"]
    assert [(row["step"], row["ranks"], row["device"]) for row in data["profiles"]] == [
        (1, 2, "cpu"),
        (2, 2, "cpu"),
    ]
    phases = {phase["name"]: phase for phase in data["profiles"][1]["phases"]}
    for name in ("rollout", "score"):  # the loop's clock and the trace say the same
        assert 0.8 < phases[name]["seconds"][0] / rows[1][1][f"seconds/{name}"] < 1.25
    assert phases["update"]["peak_gib"] > 0
    assert all(
        len(phase["waiting"]) == 2 and min(phase["waiting"]) >= 0 for phase in phases.values()
    )
    assert sum(phases["update"]["parts"].values()) <= phases["update"]["seconds"][0]


def test_a_resumed_run_profiles_what_it_takes(model: Path, tmp_path: Path) -> None:
    recipe = write_job(tmp_path / "job", model, steps=1)
    assert here("train", recipe).code == 0
    ended = here("train", recipe, "trainer.steps=2", "trainer.profile.steps=[1,2]")
    assert ended.code == 0, ended
    assert "note: not profiled, since the run takes steps 2 to 2: 1\n" in ended.out
    assert [path.name for path in (tmp_path / "job/run/profile").iterdir()] == ["step-2"]
    message = refusal(here("train", recipe, "trainer.steps=2", "trainer.profile.steps=[3]"))
    assert "trainer.profile.steps has 3, but trainer.steps is 2" in message


@pytest.mark.soak
def test_a_signal_profiles_the_next_step(model: Path, tmp_path: Path) -> None:
    process = rl_run(model, tmp_path, "--layout", "dp=2")
    run = tmp_path / "run"
    try:
        assert waited(lambda: (run / "metrics.jsonl").exists() and read_rows(run / "metrics.jsonl"))
        for count in (1, 2):
            process.send_signal(signal.SIGUSR2)
            assert waited(lambda: len([*run.glob("profile/step-*/rank-*.json")]) == 2 * count)  # noqa: B023
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert (process.returncode, err) == (143, "")
    assert out.count("profile of step ") == len([*run.glob("profile/step-*")]) == 2
    assert all("rollout" in names_in(trace) for trace in run.glob("profile/*/*.gz"))
