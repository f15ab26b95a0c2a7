"""Standard output that is closed, full or read by nobody, and limits of files and memory: one line, no traceback."""

import os
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from dovetail.errors import MachineError
from dovetail.launch.process import limit_behind, narrow_limits
from tests.helpers.program import program, read_rows, start, write_rows


def closed() -> None:
    os.close(1)


def full() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("put_out", "why", "argv"),
    [
        (closed, "Bad file descriptor", ["--help"]),
        (full, "No space left on device", ["doctor"]),
        pytest.param(full, "No space left on device", ["--help"], marks=pytest.mark.soak),
        pytest.param(closed, "Bad file descriptor", ["doctor"], marks=pytest.mark.soak),
    ],
)
def test_output_that_cannot_be_written_is_said(
    put_out: Callable[[], None], why: str, argv: list[str]
) -> None:
    ended = program(*argv, preexec_fn=put_out)
    assert (ended.code, ended.err) == (1, f"dovetail: standard output cannot be written: {why}\n")


def test_a_reader_that_is_gone_ends_the_program_quietly() -> None:
    """As `dovetail --help | true` does: with 128 + SIGPIPE, as a shell reports other programs."""
    process = start("--help", executed=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.stderr.read(), process.wait(60)) == ("", 141)


def test_commands_that_print_nothing_do_not_need_the_streams(model: Path, tmp_path: Path) -> None:
    """Nor do their files get the numbers of these."""
    rows, out = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5, 6]}]), tmp_path / "out.jsonl"
    argv = ["score", "--model", model, "--data", rows, "--out", out]
    assert program(*argv, preexec_fn=partial(os.closerange, 0, 3)).code == 0
    assert len(read_rows(out)) == 1


def test_a_mistake_keeps_its_exit_code_where_nobody_can_be_told() -> None:
    process = start("trian", executed=True)
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait(60) == 2


@pytest.mark.parametrize(
    ("number", "limit", "words"),
    [
        (
            resource.RLIMIT_AS,
            300 << 20,
            "memory ran out: this process is limited to 0.31 GB of address space (ulimit -v)",
        ),
        (
            resource.RLIMIT_NOFILE,
            5,
            "too many open files: this process may have 5 (ulimit -n); raise that limit",
        ),
    ],
)
def test_limits_of_the_process_are_named(number: int, limit: int, words: str) -> None:
    ended = program("doctor", preexec_fn=partial(resource.setrlimit, number, (limit, limit)))
    assert ended.code == 1
    assert ended.err.startswith(f"dovetail: {words}"), ended.err
    assert ended.err.count("\n") == 1


def test_which_failures_come_of_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo = RuntimeError("[enforce fail at gloo/device.cc:186] rv != -1. Too many open files")
    secondary = MachineError("the ranks could not meet")
    secondary.__cause__ = gloo
    assert all("(ulimit -n)" in (limit_behind(error) or "") for error in (gloo, secondary))
    device = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert (limit_behind(device) or "").startswith(
        "the device ran out of memory; lower trainer.tokens_per_batch"
    )
    assert limit_behind(ValueError("no limit")) is None
    assert limit_behind(MemoryError()) is None, "the machine's own memory"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10, 10))
    assert "of data (ulimit -d)" in (limit_behind(MemoryError()) or "")
    assert "10 open files (ulimit -n)" in narrow_limits()
