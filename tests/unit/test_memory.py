"""Arenas hand out aligned views that never overlap; what steps aside comes back bit for bit, and takes no room meanwhile."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor

from dovetail import memory
from dovetail.batch.packed import PackedBatch
from dovetail.engine.native import Engine
from dovetail.errors import ModelError
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.memory import (
    ALIGNMENT,
    CHUNK_BYTES,
    HOST_RESERVE,
    OffloadedState,
    PinnedArena,
    aligned,
    free_pinned_bytes,
    view_at,
)
from dovetail.optim.optimizer import OptimSettings
from dovetail.parallel.layout import Layout
from tests.helpers.checkpoints import write_tiny
from tests.helpers.harness import run
from tests.helpers.layout_bodies import ragged, tokenwise
from tests.helpers.parity_configs import VOCAB

DTYPES = st.sampled_from(
    [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
REQUESTS = st.lists(st.tuples(DTYPES, SHAPES), max_size=12)


@settings(max_examples=150, deadline=None)
@given(rounds=st.lists(REQUESTS, min_size=1, max_size=4))
def test_views_are_aligned_and_disjoint(
    rounds: list[list[tuple[torch.dtype, tuple[int, ...]]]],
) -> None:
    arena = PinnedArena()
    for requests in rounds:
        arena.reset()
        views = []
        for number, (dtype, shape) in enumerate(requests):
            view = arena.allocate(dtype, shape)
            assert (view.dtype, tuple(view.shape)) == (dtype, shape)
            assert view.is_contiguous()
            assert view.numel() == 0 or view.storage_offset() * dtype.itemsize % ALIGNMENT == 0
            view.fill_(number % 2)
            views.append(view)
        spans = sorted(
            (v.data_ptr(), v.data_ptr() + v.numel() * v.dtype.itemsize) for v in views if v.numel()
        )
        assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
        for number, view in enumerate(views):
            assert (view == number % 2).all()


@given(size=st.integers(0, 1 << 40))
def test_aligned_sizes(size: int) -> None:
    assert aligned(size) % ALIGNMENT == 0 and 0 <= aligned(size) - size < ALIGNMENT


def test_the_same_requests_take_the_same_memory_again() -> None:
    arena = PinnedArena()
    first = [arena.allocate(torch.float32, (n,)).data_ptr() for n in (3, 100, 17)]
    size = arena.num_bytes
    for _ in range(3):
        arena.reset()
        assert [arena.allocate(torch.float32, (n,)).data_ptr() for n in (3, 100, 17)] == first
    assert arena.num_bytes == size


def test_a_view_is_no_copy() -> None:
    data = torch.zeros(256, dtype=torch.uint8)
    view_at(data, 64, torch.float32, (2, 3)).fill_(1.0)
    assert int((data != 0).sum()) == 12


def test_shared_storages_are_parked_once() -> None:
    whole = torch.arange(10.0)
    half, empty = whole[:5], torch.empty(0)
    parked = OffloadedState([whole, half, whole, empty])
    assert parked.num_bytes == 40
    assert whole.untyped_storage().size() == 0
    parked.restore()
    assert torch.equal(whole, torch.arange(10.0)) and half.data_ptr() == whole.data_ptr()
    assert torch.equal(half, torch.arange(5.0))


def resident(engine: Engine) -> list[Tensor]:
    found = [
        param.to_local() if hasattr(param, "to_local") else param
        for param in engine.model.parameters()
    ]
    return [
        *found,
        *(t for tensors in engine.optimizer.state_tensors().values() for t in tensors.values()),
    ]


def aside(source: Path, layout: Layout, steps_aside: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of four steps, with the engine stepping aside between them; and what it holds in the end."""
    options = EngineOptions(optim=OptimSettings(lr=1e-2, weight_decay=0.1), tokens_per_batch=64)
    engine = from_pretrained(source, layout=layout, device="cpu", options=options)
    losses = []
    for step in range(4):
        losses.append(engine.train_step(ragged(step), tokenwise).loss)
        if steps_aside:
            before = [tensor.detach().clone() for tensor in resident(engine)]
            engine.offload()
            held = {
                tensor.untyped_storage().size() for tensor in resident(engine) if tensor.numel()
            }
            assert held == {0}, "its memory is free"
            engine.onload()
            assert all(torch.equal(a, b) for a, b in zip(before, resident(engine), strict=True))
        losses.append(float(engine.score(ragged(step)).logprob.sum()))
    return losses, {name: tensor.clone() for name, tensor in engine.weights()}


MORE = [
    pytest.param(each, marks=pytest.mark.soak)
    for each in (Layout(dp=2), Layout(pp=2), Layout(cp=2))
]


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), *MORE], ids=str)
def test_an_engine_steps_aside_and_comes_back_bit_for_bit(layout: Layout, tmp_path: Path) -> None:
    write_tiny(tmp_path / "source", "llama", vocab_size=VOCAB, tied=True)
    plain = run(layout.num_ranks, aside, tmp_path / "source", layout, False)
    moved = run(layout.num_ranks, aside, tmp_path / "source", layout, True)
    for (losses, weights), (others, found) in zip(plain, moved, strict=True):
        assert losses == others
        assert weights.keys() == found.keys() and all(
            torch.equal(weights[name], found[name]) for name in weights
        )


def test_an_engine_that_is_away_cannot_leave_twice(tmp_path: Path) -> None:
    run(1, _twice, write_tiny(tmp_path / "source", "llama"))


def _twice(source: Path) -> None:
    engine = from_pretrained(source, device="cpu")
    with pytest.raises(AssertionError, match="without offload"):
        engine.onload()
    engine.offload()
    with pytest.raises(AssertionError, match="twice"):
        engine.offload()
    engine.onload()


def test_an_engine_that_is_away_says_so(tmp_path: Path) -> None:
    """Whatever would read its weights."""
    run(1, _asked_while_away, write_tiny(tmp_path / "source", "llama"), tmp_path)


def _asked_while_away(source: Path, folder: Path) -> None:
    engine, batch = from_pretrained(source, device="cpu"), PackedBatch.pack([[1, 2, 3]])
    nobody: Any = None  # nothing is read
    before = engine.score(batch).logprob
    engine.offload()
    calls: list[Callable[[], object]] = [
        lambda: engine.score(batch),
        lambda: engine.train_step(batch, tokenwise),
        lambda: list(engine.weights()),
        lambda: engine.save_pretrained(folder / "hf"),
        lambda: engine.save_sharded(folder / "pieces"),
        lambda: engine.export_training("policy", with_model=True),
        lambda: engine.load_training("policy", nobody, 1),
        engine.check_replicas,
    ]
    for call in calls:
        with pytest.raises(
            ModelError, match=r"was moved to the host by offload\(\); call onload\(\) first"
        ):
            call()
    engine.onload()
    assert torch.equal(engine.score(batch).logprob, before)
    assert engine.updates == 0


class Promised(PinnedArena):
    """Pinned memory that is only counted."""

    def _add(self, num_bytes: int) -> None:
        self._chunks.append(torch.empty(num_bytes, dtype=torch.uint8, device="meta"))


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 3 << 30), max_size=40))
def test_pinned_chunks_are_powers_of_two(sizes: list[int]) -> None:
    """The allocator would round anything else up, and waste the difference."""
    arena = Promised("meta", pinned=True)
    arena.reserve(sum(sizes[: len(sizes) // 2]))
    for size in sizes:
        arena.allocate(torch.uint8, (size,))
    for chunk in arena._chunks:
        assert len(chunk) >= CHUNK_BYTES and len(chunk).bit_count() == 1


@settings(deadline=None)
@given(size=st.integers(1, 1 << 40))
def test_what_is_reserved_is_little_more_than_was_asked_for(size: int) -> None:
    for pinned, most in ((True, CHUNK_BYTES - 1), (False, 0)):
        arena = Promised("meta", pinned=pinned)
        arena.reserve(size)
        assert 0 <= arena.num_bytes - size <= most


@settings(deadline=None)
@given(size=st.integers((1 << 30) + 1, 1 << 34), count=st.integers(1, 40))
def test_large_requests_of_one_size_waste_an_eighth_of_their_chunks(size: int, count: int) -> None:
    arena = Promised("meta", pinned=True)
    for _ in range(count):
        arena.allocate(torch.uint8, (size,))
    *full, last = (len(chunk) for chunk in arena._chunks)
    assert all(chunk // size * size >= 7 / 8 * chunk for chunk in full)
    assert 7 / 8 * sum(full) <= count * aligned(size) and last < 16 * size


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 3 << 30), max_size=40), room=st.integers(0, 1 << 36))
def test_an_arena_grows_within_the_room(sizes: list[int], room: int) -> None:
    """In powers of two still, and as long as the smallest of them that takes the request fits."""
    arena = Promised("meta", pinned=True)
    for size in sizes:
        left, before = room - arena.num_bytes, arena.num_bytes
        if not arena.has(size):
            smallest = max(CHUNK_BYTES, 1 << (aligned(size) - 1).bit_length())
            assert arena.grow(size, left) == (smallest <= left)
            assert (arena.num_bytes > before) == (smallest <= left)
        if arena.has(size):
            grown = arena.num_bytes
            arena.allocate(torch.uint8, (size,))
            assert arena.num_bytes == grown, "it was there"
    assert arena.num_bytes <= room
    assert all(len(chunk).bit_count() == 1 for chunk in arena._chunks)


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 3 << 28), max_size=20), reserved=st.integers(0, 1 << 32))
@example(sizes=[3 << 28, 1 << 29], reserved=3 << 29)
def test_an_arena_has_what_it_gives_without_more_memory(sizes: list[int], reserved: int) -> None:
    """In chunks that lie ahead, too."""
    arena = Promised("meta", pinned=True)
    arena.reserve(reserved)
    for size in sizes:
        had, before = arena.has(size), arena.num_bytes
        arena.allocate(torch.uint8, (size,))
        assert had == (arena.num_bytes == before)


@pytest.mark.parametrize("free", [None, 0, HOST_RESERVE, HOST_RESERVE + 7])
def test_a_reserve_of_the_host_is_left_alone(
    free: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: free)
    assert free_pinned_bytes() == (None if free is None else max(free - HOST_RESERVE, 0))
