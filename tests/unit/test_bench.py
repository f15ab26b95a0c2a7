"""What benchmarks on GPUs rest on: how work is counted, what batches they make, and that no rank outlives its limit."""

import time
from pathlib import Path

import pytest
import torch

from bench.engines import PEERS, dense_batch, flops_of, layout_of, name_of, ragged_batch, random_tokens, spec_of
from bench.long_context import moments_seconds
from bench.ranks import run_ranks
from dovetail.batch import PackedBatch
from tests.tolerances import OP_FP64

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
    for text in ("pp=4,dp=2,virtual_stages=2,schedule=interleaved", "cp=8,cp_mode=gather", "dp=8,ep=8", *PEER_LAYOUTS):
        layout = layout_of(text).resolve(8)
        assert layout_of(name_of(layout)).resolve(8) == layout
        assert str(layout) in PEER_LAYOUTS or text not in PEER_LAYOUTS  # else a row would miss its peers


def test_moments_of_a_7b_take_a_second_from_the_host() -> None:
    """7.6e9 parameters, vectors aside; a tied table is there once."""
    assert 1.21 < moments_seconds(spec_of("7b"), 1) < 1.22
    assert moments_seconds(spec_of("7b"), 8) == moments_seconds(spec_of("7b"), 1) / 8
    tied, apart = (moments_seconds(spec_of("3b", tie_word_embeddings=tie), 1) for tie in (True, False))
    assert apart - tied == pytest.approx(8 * 151936 * 2048 / 50e9)


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
