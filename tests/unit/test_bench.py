"""What benchmarks on GPUs rest on: how work is counted, what batches they make, and that no rank outlives its limit."""

import argparse
import importlib
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn
from unittest import mock

import pytest
import torch

from bench import all_gpus, long_context
from bench.all_gpus import BENCHES, CPU_RANKS, Bench, arguments_of, pack
from bench.engines import (
    PEERS,
    Session,
    dense_batch,
    flops_of,
    layout_of,
    name_of,
    ragged_batch,
    random_tokens,
    spec_of,
)
from bench.given import run_main
from bench.limit import ENDED
from bench.long_context import moments_seconds
from bench.ranks import ROOT, run_ranks
from dovetail.batch.packed import PackedBatch
from dovetail.factory.layouts import check_layout, sampling_layout
from tests.helpers.forked import output_of
from tests.helpers.harness import template
from tests.helpers.tolerances import OP_FP64

PEER_LAYOUTS = sorted({peer.layout for peer in PEERS})


def test_flops_are_those_of_the_peers_formula() -> None:
    """6 (N - V D) + 6 L D T a token, N all parameters of a 7B with its table and its head."""
    spec, length = spec_of("7b"), 8192
    vocab, width, depth = 152064, 3584, 28
    layer = width * (3584 + 2 * 512) + width * width + 3 * width * 18944
    parameters = depth * layer + 2 * vocab * width
    expected = 6 * (parameters - vocab * width) + 6 * depth * width * length
    batch = dense_batch(spec, length, 2)
    assert abs(flops_of(spec, batch) / len(batch) / expected - 1) < OP_FP64


def test_ragged_lengths_are_a_quarter_of_the_longest_in_the_mean() -> None:
    batch = ragged_batch(spec_of("tiny"), 4096, 1 << 20)
    assert len(batch) == 1 << 20
    assert max(batch.lengths) <= 4096
    assert 0.22 < len(batch) / batch.num_sequences / 4096 < 0.28


def test_batches_are_made_as_pack_makes_them() -> None:
    lengths = [5, 1, 9]
    batch = random_tokens(spec_of("tiny"), lengths)
    packed = PackedBatch.pack(batch.tokens.split(lengths))
    for name in ("tokens", "positions", "cu_seqlens", "targets", "mask"):
        assert torch.equal(getattr(batch, name), getattr(packed, name)), name
        assert getattr(batch, name).dtype == getattr(packed, name).dtype, name
    assert batch.lengths == packed.lengths


def test_layouts_are_read_as_they_are_written() -> None:
    for text in (
        "pp=4,dp=2,virtual_stages=2,schedule=interleaved",
        "cp=8,cp_mode=gather",
        "dp=8,ep=8",
        *PEER_LAYOUTS,
    ):
        layout = layout_of(text).resolve(8)
        assert layout_of(name_of(layout)).resolve(8) == layout
        assert (
            str(layout) in PEER_LAYOUTS or text not in PEER_LAYOUTS
        )  # else a row would miss its peers


def test_moments_of_a_7b_take_a_second_from_the_host() -> None:
    """7.6e9 parameters, vectors aside; a tied table is there once."""
    assert 1.21 < moments_seconds(spec_of("7b"), 1) < 1.22
    assert moments_seconds(spec_of("7b"), 8) == moments_seconds(spec_of("7b"), 1) / 8
    tied, apart = (
        moments_seconds(spec_of("3b", tie_word_embeddings=tie), 1) for tie in (True, False)
    )
    assert apart - tied == pytest.approx(8 * 151936 * 2048 / 50e9)


@pytest.mark.soak
def test_a_rank_that_fails_or_is_late_ends_all(tmp_path: Path) -> None:
    """The standard library's timeit stands for a benchmark: rank 0 fails, or all sleep."""
    sleep = ["-n1", "-r1", "import time; time.sleep(300)"]
    fail = ["-n1", "-r1", "import os, time; time.sleep(300 * int(os.environ['RANK'])); os._exit(3)"]
    start = time.monotonic()
    assert run_ranks("timeit", sleep, 2, 1.0, tmp_path / "late.log") is None
    assert run_ranks("timeit", fail, 2, 60.0, tmp_path / "failed.log", sessions=True) == 3
    assert run_ranks("timeit", ["-n1", "-r1", "pass"], 2, 60.0, tmp_path / "good.log") == 0
    assert (tmp_path / "good.log").read_text().startswith("1 loop")
    assert time.monotonic() - start < 100


@pytest.mark.soak
@pytest.mark.parametrize(
    ("last", "status", "told"),
    [
        ("raise ValueError('what went wrong')", 1, "ValueError: what went wrong\n"),
        (
            "os.kill(os.getpid(), signal.SIGTERM); time.sleep(300)",
            ENDED,
            "slow: before the first row: cut off by SIGTERM",
        ),
    ],
)
def test_a_rank_that_fails_or_is_ended_tells_why_and_waits_for_nothing(
    last: str, status: int, told: str, tmp_path: Path
) -> None:
    """A thread that never ends stands for a device that waits for other ranks: an interpreter that ends waits for it."""
    program = (
        "import argparse, os, pathlib, signal, threading, time\n"
        "from bench.engines import Session\n"
        f"out = pathlib.Path({str(tmp_path)!r})\n"
        "Session.start(argparse.Namespace(row_seconds=300.0, device='cpu', name='slow', out=out))\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        f"{last}\n"
    )
    run = [sys.executable, "-c", program]
    ended = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == status and told in ended.stderr.splitlines(keepends=True)[-1], (
        ended.stderr
    )


SLOW = """
import sys, threading
from pathlib import Path
from bench.limit import Limit

limit = Limit("layouts", int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]) / f"layouts.stacks.log.{sys.argv[1]}")
limit.begin("7b tp=2")
limit.begin("7b dp=8")
limit.at("its steps")
limit.at("the trace of a step")
print("begun", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("seconds", "status", "why"),
    [(1.0, 1, r"not done within 1 s"), (300.0, ENDED, r"cut off by SIGTERM after \d+ s")],
)
def test_a_row_that_takes_too_long_is_named_once(
    seconds: float, status: int, why: str, tmp_path: Path
) -> None:
    """Of two ranks that wait for ever, the first one says which row; where each was is in files."""
    with open(tmp_path / "terminal", "w") as terminal:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", SLOW, str(number), str(seconds), str(tmp_path)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=terminal,
            )
            for number in range(2)
        ]
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == b"begun\n"
            if status == ENDED:
                rank.terminate()
        assert [rank.wait(60) for rank in ranks] == [status] * 2
    told = (tmp_path / "terminal").read_text()
    assert re.fullmatch(
        rf"layouts: 7b dp=8: the trace of a step: {why}; where it was: \S+/layouts.stacks.log.0\n",
        told,
    )
    for number in range(2):
        stacks = (tmp_path / f"layouts.stacks.log.{number}").read_text()
        assert re.search(r"line 1[12] in <module>", stacks), (
            stacks
        )  # after it has said that it begins


class Parsed(BaseException):
    """What a benchmark was given, instead of its run."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given


def stop(given: argparse.Namespace) -> NoReturn:
    raise Parsed(given)


def taken(module: str, arguments: list[str]) -> argparse.Namespace:
    """What a benchmark's command line makes of its arguments."""
    with (
        mock.patch.object(sys, "argv", [module, *arguments]),
        mock.patch.object(Session, "start", side_effect=stop),
        pytest.raises(Parsed) as stopped,
    ):
        importlib.import_module(module).main()
    given = stopped.value.given
    assert isinstance(given, argparse.Namespace)
    return given


def runs(bench: Bench, folder: Path, *, smoke: bool) -> Iterator[tuple[int, argparse.Namespace]]:
    """On how many ranks what is run, whoever starts it."""
    arguments = arguments_of(bench, 100.0, folder, smoke=smoke)
    if bench.module != "bench.long_context":
        yield min(bench.gpus, CPU_RANKS) if smoke else bench.gpus, taken(bench.module, arguments)
        return
    with mock.patch.object(long_context, "run_ranks", return_value=None) as started:
        asked = mock.patch.object(sys, "argv", [bench.module, *arguments])
        with asked, mock.patch.object(long_context, "check_visible"):
            long_context.main()
    module, inner, ranks, *_ = started.call_args.args
    yield ranks, taken(module, list(inner))


@pytest.mark.parametrize("gpus", BENCHES)
def test_benchmarks_of_gpus_get_what_they_take_and_layouts_that_fit(
    gpus: int, tmp_path: Path
) -> None:
    """A wrong word would show on the machine alone, and cost the call."""
    for bench in BENCHES[gpus]:
        assert bench.gpus == gpus and bench.least <= bench.seconds
        for smoke in (
            (False, True)[: 1 + bool(bench.smoke)]
            if bench.module not in ("pytest", "bench.parity")
            else ()
        ):
            for ranks, given in runs(bench, tmp_path, smoke=smoke):
                found = vars(given)
                for text in found.get("layouts") or [
                    found[key] for key in ("layout",) if key in found
                ]:
                    layout, spec = layout_of(text).resolve(ranks), spec_of(given.shape)
                    check_layout(spec, layout)
                    if bench.module == "bench.rl_step":
                        sampling_layout(spec, layout)


def test_an_archive_has_results_first_and_an_end(tmp_path: Path) -> None:
    sizes = {
        "b.json": 10,
        "a.log": 10,
        "a.log.1": 10,
        "a.trace.json.gz": 10,
        "long.log": 100,
        ".a.json": 10,
    }
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    with mock.patch.object(all_gpus, "PACKED_BYTES", 40):
        for _ in range(2):
            pack(tmp_path, tmp_path / "all.tar.gz")
    with tarfile.open(tmp_path / "all.tar.gz") as archive:
        assert archive.getnames() == ["b.json", "a.log", "a.log.1", "a.trace.json.gz"]


@pytest.mark.parametrize(
    ("module", "arguments", "told"),
    [
        ("__main__", "--tokens -5", "'-5': expected a whole number, 1 or more"),
        ("__main__", "--rounds 0", "'0': expected a whole number, 1 or more"),
        ("all_gpus", "--only nosuch", "no benchmark nosuch; known: "),
        ("transformers_engine", "nosuch --device cpu", "no family nosuch; known: "),
        ("transformers_engine", "--device cpu", "--layers 1"),
        ("sampler", "--device nosuch", "device 'nosuch'; expected auto"),
        ("sampler", "--device cpu", "--shape 7b needs a GPU"),
        ("layouts", "dp=1 --device cpu", "--shape 7b needs a GPU"),
        ("long_context", "--device cpu", "--shape 7b needs a GPU"),
    ],
)
def test_what_a_benchmark_cannot_do_is_told_in_one_message(
    module: str,
    arguments: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [module, *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        run_main(importlib.import_module(f"bench.{module}").main)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
@pytest.mark.parametrize(
    "module",
    [
        "all_gpus",
        "attention",
        "block",
        "block_sizes",
        "transformers_engine",
        "head",
        "long_context",
        "moe_layer",
    ],
)
def test_a_benchmark_for_gpus_says_that_there_are_none(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module])
    with pytest.raises(SystemExit) as ended:
        run_main(importlib.import_module(f"bench.{module}").main)
    assert ended.value.code == 2
    assert " sees " in capsys.readouterr().err


def test_every_kernel_of_block_sizes_is_called_as_it_is_now() -> None:
    """By Triton's interpreter, the first choice of each: their arguments are given by hand there."""
    pytest.importorskip("triton")
    assert output_of(template, "tests.helpers.block_size_launches", TRITON_INTERPRET="1") == ""
