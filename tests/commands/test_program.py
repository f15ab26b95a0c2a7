"""The program from outside: help, its time, exit codes, launchers, and messages that come once."""

import resource
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.processes import listens, waited
from tests.helpers.program import (
    here,
    make_model,
    program,
    read_rows,
    refusal,
    start,
    write_recipe,
    write_rows,
)
from tests.helpers.tolerances import MODEL_FP32

COMMANDS = (
    "train",
    "score",
    "generate",
    "convert",
    "inspect",
    "report",
    "rollouts",
    "plan",
    "import-config",
    "doctor",
)


def cpu_seconds_of(*argv: str) -> tuple[float, int, str]:
    """Processor time of the program, which a busy machine does not lengthen much, its code and its output."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = program(*argv, executed=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used, ended.code, ended.out


@pytest.mark.parametrize("command", [[], *[[name] for name in COMMANDS]])
def test_help_is_quick(command: list[str]) -> None:
    used: list[float] = []
    while (
        len(used) < 10 and min(used, default=1.0) >= 0.5
    ):  # the least of a few: others share the caches and the core
        seconds, code, out = cpu_seconds_of(*command, "--help")
        assert code == 0
        assert all(word in out for word in command or COMMANDS)
        used.append(seconds)
    assert min(used) < 0.5


def test_a_mistake_on_two_ranks_of_our_own_is_told_once(model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5]}, {"input_ids": [-5]}])
    ended = program(
        "score", "--model", model, "--data", rows, "--out", tmp_path / "o", "--layout", "tp=2"
    )
    told = refusal(ended)
    assert told.startswith(f"{rows}:2: token id -5 lies outside")
    assert told.count("\n") == 1
    assert ended.out == ""


def test_torchrun(model: Path, tmp_path: Path) -> None:
    """Two ranks that torch starts, dp unnamed; no word of its restarts or of ours."""
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    out = tmp_path / "out.jsonl"
    (tmp_path / "torchrun.py").write_text("from torch.distributed.run import main\nmain()\n")
    launcher = [
        str(tmp_path / "torchrun.py"),
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "dovetail",
    ]
    ended = program(
        "score", "--model", model, "--data", rows, "--out", out, "--device", "cpu", python=launcher
    )
    assert ended.code == 0, ended.err
    assert here("score", "--model", model, "--data", rows, "--out", tmp_path / "one").code == 0
    for ours, one in zip(read_rows(out), read_rows(tmp_path / "one"), strict=True):
        assert ours["id"] == one["id"]
        assert ours["log_probs"] == pytest.approx(one["log_probs"], abs=MODEL_FP32)


def test_a_product_other_than_the_launchers_ranks_names_both_numbers(
    model: Path, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5]}])
    argv = [
        "score",
        "--model",
        model,
        "--data",
        rows,
        "--out",
        tmp_path / "o",
        "--layout",
        "tp=2,dp=2",
    ]
    both = [start(*argv, env={"RANK": str(rank), "WORLD_SIZE": "2"}) for rank in range(2)]
    told = [(*process.communicate(timeout=300), process.returncode) for process in both]
    message = "dovetail: layout tp=2,dp=2 needs 4 ranks (tp x pp x cp x dp), but the job has 2; change the degrees"
    assert told[0][1].startswith(message)
    assert (told[0][2], told[1]) == (2, ("", "", 2))
    recipe = write_recipe(tmp_path / "r.yaml", model, rows, layout={"dp": 3})
    ended = program("train", recipe, env={"RANK": "0", "WORLD_SIZE": "2"})
    assert "layout dp=3 needs 3 ranks (tp x pp x cp x dp), but the job has 2" in refusal(ended)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "two"},
            "RANK=0 and WORLD_SIZE=two: expected whole numbers, RANK below WORLD_SIZE",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "1"},
            "MASTER_ADDR and MASTER_PORT is not set; set it, start with torchrun",
        ),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK=one and WORLD_SIZE=2: expected whole numbers"),
        ({"RANK": "", "WORLD_SIZE": ""}, "RANK= and WORLD_SIZE=: expected whole numbers"),
        (
            {"RANK": "3", "WORLD_SIZE": "2"},
            "RANK=3 and WORLD_SIZE=2: expected whole numbers, RANK below WORLD_SIZE",
        ),
    ],
)
def test_half_a_launcher_is_refused(
    env: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert words in refusal(here("score", "--model", "m", "--data", "d", "--out", "o"))


def test_a_rank_without_a_world_is_no_launcher(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5]}])
    assert here("score", "--model", model, "--data", rows, "--out", tmp_path / "o").well
    monkeypatch.setenv("RANK", "3")  # and speaks for itself
    assert "no such data file" in refusal(
        here("score", "--model", model, "--data", "none.jsonl", "--out", tmp_path / "o")
    )


def test_unknown_commands_and_flags() -> None:
    assert "invalid choice: 'trian'" in refusal(here("trian"))
    assert "unrecognized arguments: --modle" in refusal(here("doctor", "--modle"))
    assert "invalid choice: 'fp16'" in refusal(
        here("score", "--model", "m", "--data", "d", "--out", "o", "--dtype", "fp16")
    )


def test_more_ranks_than_devices_are_refused_by_the_rank_that_speaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    told = refusal(here("score", "--model", "m", "--data", "d", "--out", "o", "--device", "cuda"))
    assert (
        "2 ranks on this machine need a cuda device each, there are 1; use fewer ranks a machine, or"
        in told
    )


@pytest.mark.parametrize("layout", [pytest.param("tp=1", marks=pytest.mark.soak), "tp=2"])
def test_sigterm_ends_any_command_with_143_and_leaves_nothing(
    layout: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("endless")
    model = make_model(
        folder / "model", tokenizer=False, eos_token_id=None, max_position_embeddings=10**6
    )
    rows = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5, 6, 7]}])
    argv = [
        "generate",
        "--model",
        model,
        "--data",
        rows,
        "--out",
        tmp_path / "out.jsonl",
        "--layout",
        layout,
    ]
    process = start(*argv, "--max-new-tokens", 10**5, "--samples", 64)
    assert waited(lambda: process.poll() is not None or listens(process.pid, signal.SIGTERM))
    time.sleep(1.5)  # whatever it has come to by then
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (143, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
