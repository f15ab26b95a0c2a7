"""Collectives by slots that all ranks reach (`peers`), with the slots in files that all ranks map. Copies run beside the
computation, at random moments, as a GPU's streams would run them. Whole models take them for tp and for FSDP2. On GPUs it is
tests/gpu/test_peers.py and test_layouts.py that say the same.
"""

import queue
import random
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from dovetail.factory import engine
from dovetail.kernels import reference
from dovetail.kernels.registry import KernelSet
from dovetail.parallel import symmetric
from dovetail.parallel.collectives import begin_sum_in_order, gather_mirrored
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import USES, Axis
from dovetail.parallel.peers import Peers, Ring, rows_of
from tests.distributed.matrix import Case, Figures, compare, write_alone, write_models
from tests.harness import run
from tests.peer_collectives import any_order
from tests.tolerances import EXACT, OP_FP32, SUM_ORDER

ROUNDS = 80
FOUR, TWO = Ring(4, 1 << 16), Ring(2, 1 << 16)
SECONDS = 60.0  # for copies to end, on a busy machine


class FileSlots:
    """`peers.Memory`, in a file a rank. A thread does what is asked for beside the computation, in its order."""

    def __init__(self, folder: Path, group: dist.ProcessGroup | None, rank: int, size: int, ring: Ring) -> None:
        self.device, self.ring, self.rank = torch.device("cpu"), ring, rank
        self.others = [other for other in range(size) if other != rank]
        all_slots, everyone = ring.slots * ring.slot_bytes, []
        folder.mkdir(parents=True, exist_ok=True)
        for other in range(size):
            with open(path := folder / f"{all_slots}-{other}", "ab") as file:
                file.truncate(all_slots + 4 * size)
            everyone.append(torch.from_file(str(path), shared=True, size=all_slots + 4 * size, dtype=torch.uint8))
        self._mapped = {memory.untyped_storage().data_ptr() for memory in everyone}
        self._slots = [memory[:all_slots].view(*ring) for memory in everyone]
        self._told = [memory[all_slots:].view(torch.int32) for memory in everyone]
        self._draw, self._jobs = random.Random(rank), queue.Queue[Callable[[], object]]()
        threading.Thread(target=self._serve, daemon=True).start()
        dist.barrier(group)

    @torch.no_grad()
    def _serve(self) -> None:
        while True:
            job = self._jobs.get()
            time.sleep(self._draw.choice((0, 0, 0, 0.002)))
            job()

    def slot(self, rank: int, number: int) -> Tensor:
        return self._slots[rank][number % self.ring.slots]

    def follow(self) -> None:
        time.sleep(self._draw.choice((0, 0, 0.004)))

    def copy(self, to: Tensor, source: Tensor) -> None:
        """What nobody keeps until it is copied is lost."""
        there = source if source.untyped_storage().data_ptr() in self._mapped else None
        kept = ref(source)

        def copy() -> None:
            found = kept() if there is None else there
            to.fill_(float("nan")) if found is None else to.copy_(found)

        self._jobs.put(copy)

    def tell(self, number: int) -> None:
        for other in self.others:
            self._jobs.put(partial(self._told[other][self.rank].fill_, number))

    def wait(self, number: int) -> None:
        def wait() -> None:
            while any(int(self._told[self.rank][other]) < number for other in self.others):
                time.sleep(0.0001)

        self._jobs.put(wait)

    def mark(self) -> Callable[[], None]:
        done = threading.Event()
        self._jobs.put(done.set)

        def wait() -> None:
            assert done.wait(SECONDS), "copies that never end"

        return wait

    def here(self) -> Callable[[], None]:
        return lambda: None  # here the computation does at once what it is asked for


def axis_of(folder: Path, ring: Ring = FOUR) -> Axis:
    """All ranks, with slots of their own."""
    size, rank = dist.get_world_size(), dist.get_rank()
    slots = FileSlots(folder, None, rank, size, ring)
    return Axis("tp", size, rank, dist.group.WORLD, Peers(rank, size, slots, KernelSet(), 1))


def each_gives_what_it_should(folder: Path, ring: Ring) -> None:
    torch.set_num_threads(1)
    assert any_order(axis_of(folder, ring), torch.device("cpu"), ROUNDS, 64, torch.float32, OP_FP32) == ROUNDS


@pytest.mark.parametrize(("ranks", "ring"), [(2, FOUR), (3, FOUR), (3, TWO)])
def test_each_gives_what_it_should(ranks: int, ring: Ring, tmp_path: Path) -> None:
    run(ranks, each_gives_what_it_should, tmp_path, ring)


def keys_come_and_gradients_return(folder: Path) -> None:
    """As by the group, bit for bit: the first half of the keys before the second, and sums of more than a slot holds."""
    torch.set_num_threads(1)
    axis, draw = axis_of(folder), torch.Generator().manual_seed(dist.get_rank())
    assert axis.peers is not None
    plain = replace(axis, peers=None)
    for chunk in (1, 7, 64, 300, 4000):
        x = torch.randn(2 * chunk, 4, 5, generator=draw).to(torch.bfloat16)
        (found, arrive), (expected, _) = gather_mirrored(x, axis), gather_mirrored(x, plain)
        half = len(found) // 2
        assert torch.equal(found[:half], expected[:half]), f"first half, {chunk}"
        arrive()
        assert torch.equal(found, expected), f"second half, {chunk}"
    for tokens in (3, 500, 6000):
        parts = torch.randn(axis.size, 2, tokens, 8, generator=draw).to(torch.bfloat16)
        before = axis.peers.begun
        found = begin_sum_in_order(parts, axis, reference.sum_deterministic).take()
        assert torch.equal(found, begin_sum_in_order(parts, plain, reference.sum_deterministic).take()), tokens
        pieces = axis.peers.begun - before
        assert pieces == -(-found.nbytes // (axis.peers.memory.ring.slot_bytes // axis.size)), tokens
    assert pieces > FOUR.slots, "more than a ring has room for"


@pytest.mark.parametrize("ranks", [2, 3])
def test_keys_come_and_their_gradients_return(ranks: int, tmp_path: Path) -> None:
    run(ranks, keys_come_and_gradients_return, tmp_path)


def test_what_is_left_to_the_group() -> None:
    memory = mock.Mock(device=torch.device("cuda"), ring=Ring(2, 1 << 20))
    peers = Peers(0, 2, memory, KernelSet(), 1 << 10)
    for num_bytes, taken in ((1 << 10, True), (1 << 20, True), (1023, False), ((1 << 20) + 1, False)):
        x = mock.Mock(device=torch.device("cuda"), nbytes=num_bytes)
        assert peers.takes(x) == taken, num_bytes
    assert not peers.takes(torch.empty(1 << 12, dtype=torch.uint8)), "what is not on the GPU"
    for times, taken in ((1, False), (2, True), (1 << 11, True), ((1 << 11) + 1, False)):
        part = mock.Mock(device=torch.device("cuda"), nbytes=1 << 9)
        assert peers.takes(part, times) == taken, "a slot holds the parts of all ranks"


def test_what_is_asked_for_after_what() -> None:
    """The slots in files have a computation that is always at its end; a GPU's may be anywhere. Where it is waited for, the order
    tells.
    """
    asked = list[str]()

    def note(name: str, later: str = "") -> mock.Mock:
        def noting(*_: object, **__: object) -> Callable[[], None]:
            asked.append(name)
            return partial(asked.append, later)

        return mock.Mock(side_effect=noting)

    memory = mock.Mock(device=torch.device("cpu"), ring=Ring(3, 64), follow=note("follow"), tell=note("tell"))
    memory.slot.side_effect = lambda *_: torch.zeros(64, dtype=torch.uint8)
    memory.wait, memory.copy = note("told"), note("copy")
    memory.mark, memory.here = note("mark", "copied"), note("here", "added")
    peers = Peers(0, 2, memory, mock.Mock(copy_to_both=note("lay"), sum_deterministic=note("add")))
    gathered = peers.gather(list(torch.empty(2, 4)), torch.ones(4))
    assert asked == ["lay", "follow", "tell", "told", "copy", "mark"]
    asked.clear()
    gathered.wait()
    assert asked == ["copied"]
    asked.clear()
    summed = peers.scatter(torch.empty(4), rows_of(torch.ones(8), 2))
    assert asked == ["follow", "copy", "tell", "told", "mark"]
    asked.clear()
    summed.wait()
    assert asked == ["copied", "add", "follow", "here"]
    asked.clear()
    summed.wait()
    assert asked == ["added"], "whoever takes it once more waits for the sum"


FSDP, EXPERTS = ({f"{axis} {use}" for use in USES} for axis in ("fsdp", "expert_fsdp"))
MODELS = (
    (Layout(tp=2, dp=2), Case("llama", "ragged", "grpo", 1, in_turns=True), {"tp", *FSDP}),
    (
        Layout(tp=2, pp=2, schedule="zero_bubble"),
        Case("qwen2_tied", "ragged", "sft", 2, in_turns=True),
        {"tp"},
    ),
    (Layout(dp=4, ep=2), Case("qwen2_moe", "ragged", "ppo", 2, recompute="full"), {*FSDP, *EXPERTS}),
    (Layout(dp=3), Case("qwen2_tied", "ragged", "value", 2), {*FSDP}),
    (Layout(dp=2), Case("qwen2_moe", "ragged", "grpo", 2), {*FSDP}),
    (Layout(cp=2, cp_mode="gather"), Case("qwen3_window", "ragged", "grpo", 2), {"cp", *FSDP}),
    pytest.param(
        *(Layout(tp=2, dp=2, ep=2), Case("deepseek_v3", "few", "sft", 1, in_turns=True), {"tp", *FSDP}),
        marks=pytest.mark.soak,
    ),
)


def whole_model(folder: Path, slots: Path, layout: Layout, case: Case) -> tuple[Figures, dict[str, int]]:
    """How far a layout whose ranks reach each other is from one rank, and how many collectives went by each ring.

    What FSDP2 has to move goes by rings alone, where there are any.
    """
    made = dict[str, Peers]()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("FSDP2 asked the group")

    def rings(_world: Axis, axes: Mapping[str, Axis], sizes: Mapping[str, Ring], *_: object) -> dict[str, Peers]:
        assert not made, "rings are made once"
        for name, axis in axes.items():
            if axis.group is not None and axis.size > 1:
                ranks = "-".join(map(str, dist.get_process_group_ranks(axis.group)))
                ring = sizes[name]._replace(slot_bytes=1 << 14)
                memory = FileSlots(slots / f"{name} {ranks}", axis.group, axis.rank, axis.size, ring)
                made[name] = Peers(axis.rank, axis.size, memory, KernelSet(), 1)
        return made

    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(engine, "rings", rings))
        if layout.num_ranks > layout.tp * layout.pp:
            for default in (DefaultAllGather, DefaultReduceScatter):
                patched.enter_context(mock.patch.object(default, "__call__", refuse))
        (found,) = compare(str(folder), layout, (case,)).values()
    return found, {name: each.begun for name, each in made.items()}


@pytest.mark.parametrize(("layout", "case", "expected"), MODELS, ids=map(str, range(len(MODELS))))
def test_whole_models_equal_one_rank(layout: Layout, case: Case, expected: set[str], tmp_path: Path) -> None:
    write_models(tmp_path, [case.model])
    run(1, write_alone, str(tmp_path), (case.alone,))
    for figures, begun in run(layout.num_ranks, whole_model, tmp_path, tmp_path / "slots", layout, case):
        assert figures.worst <= SUM_ORDER and figures.stray == EXACT, figures
        assert set(begun) == expected and min(begun.values()) > 5, begun


def one_rank_has_no_room() -> None:
    axis = Axis("tp", 2, dist.get_rank(), dist.group.WORLD)
    told = partial(symmetric._everyone, world=axis, device=torch.device("cpu"))

    def empty(*size: int, **_: object) -> Tensor:
        if axis.rank == 1:
            raise RuntimeError("no room\nand why")
        return torch.empty(*size, dtype=torch.uint8)

    with mock.patch.object(_symmetric_memory, "empty", empty), mock.patch.object(torch.cuda, "empty_cache"):
        assert symmetric._slots(axis, Ring(2, 1024), torch.device("cpu"), told) == (None, "no room")


def test_all_ranks_go_without_where_one_has_no_room() -> None:
    run(2, one_rank_has_no_room)


HERE = symmetric.Facts("a host", "GPU 0", seen=2, able=True)


@pytest.mark.parametrize(
    ("other", "near"),
    [
        (HERE._replace(gpu="GPU 1"), True),
        (HERE, False),  # two processes of one GPU
        (symmetric.Facts("another", "GPU 1", seen=2, able=True), False),
        (symmetric.Facts("a host", "GPU 1", seen=2, able=False), False),
    ],
)
def test_who_is_near(other: symmetric.Facts, near: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 2])
    facts = [HERE, symmetric.Facts("a third", "GPU 5", seen=2, able=False), other]
    assert symmetric._is_near(Axis("tp", 2, 0, mock.Mock()), facts) == near
    assert not symmetric._is_near(Axis("tp"), facts)


def test_ranks_that_see_one_gpu_each_leave_all_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(symmetric, "_facts", lambda _: HERE._replace(seen=1))
    monkeypatch.setattr(symmetric, "_everyone", lambda mine, **_: [mine, mine])
    monkeypatch.setattr(symmetric, "_is_near", lambda *_: True)
    two = Axis("tp", 2, 0, mock.Mock())
    with pytest.warns(UserWarning, match="NCCL moves everything, .*: a rank sees no other's"):
        assert symmetric.rings(two, {"tp": two}, {}, torch.device("cuda", 0), KernelSet()) == {}
    assert not symmetric.FAILED.is_set()


@pytest.mark.parametrize(("signatures", "whole"), [((0, 1, 2), True), ((0, 0, 2), False), ((0, 0, 0), False)])
def test_a_ring_is_used_where_all_have_signed(signatures: tuple[int, ...], whole: bool) -> None:
    slots = object.__new__(symmetric.SymmetricSlots)
    slots.rank, slots._slots = 1, [torch.zeros(2, 8, dtype=torch.uint8) for _ in signatures]
    slots._slots[1][0, :3] = torch.tensor(signatures, dtype=torch.uint8)
    assert slots.signed() == whole


def test_a_cpu_has_no_rings() -> None:
    assert symmetric.rings(Axis("world"), {"tp": Axis("tp", 2)}, {"tp": FOUR}, torch.device("cpu"), KernelSet()) == {}
