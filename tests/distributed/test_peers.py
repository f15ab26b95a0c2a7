"""Collectives by slots that all ranks reach (`peers`), with the slots in files that all ranks map. Copies run beside the
computation, at random moments, as a GPU's streams would run them. Whole models take them for tp and for FSDP2. On GPUs it is
tests/gpu/test_peers.py and test_layouts.py that say the same.
"""

import queue
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.build import engine
from dovetail.kernels.reference import sum_in_order
from dovetail.layout import Layout
from dovetail.mesh import Axis
from dovetail.peers import MOST, SLOTS, Peers
from tests.distributed.matrix import Case, Figures, compare, write_alone, write_models
from tests.harness import run
from tests.peer_collectives import any_order
from tests.tolerances import EXACT, OP_FP32, SUM_ORDER

ROUNDS = 80
SECONDS = 60.0  # for copies to end, on a busy machine


class FileSlots:
    """`peers.Memory`, in a file a rank. A thread does what is asked for beside the computation, in its order."""

    def __init__(self, folder: Path, group: dist.ProcessGroup | None, rank: int, size: int, slot_bytes: int) -> None:
        self.slot_bytes, self.rank = slot_bytes, rank
        self.others = [other for other in range(size) if other != rank]
        all_slots, everyone = SLOTS * slot_bytes, []
        folder.mkdir(parents=True, exist_ok=True)
        for other in range(size):
            with open(path := folder / f"{slot_bytes}-{other}", "ab") as file:
                file.truncate(all_slots + 4 * size)
            everyone.append(torch.from_file(str(path), shared=True, size=all_slots + 4 * size, dtype=torch.uint8))
        self._slots = [memory[:all_slots].view(SLOTS, slot_bytes) for memory in everyone]
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
        return self._slots[rank][number % SLOTS]

    def follow(self) -> None:
        time.sleep(self._draw.choice((0, 0, 0.004)))

    def copy(self, to: Tensor, source: Tensor) -> None:
        self._jobs.put(partial(to.copy_, source))

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


def axis_of(folder: Path) -> Axis:
    """All ranks, with slots of their own."""
    size, rank = dist.get_world_size(), dist.get_rank()
    return Axis(
        "tp",
        size,
        rank,
        dist.group.WORLD,
        Peers(rank, size, partial(FileSlots, folder, None, rank, size), sum_in_order, 1),
    )


def each_gives_what_it_should(folder: Path) -> None:
    torch.set_num_threads(1)
    assert any_order(axis_of(folder), torch.device("cpu"), ROUNDS, 64, torch.float32, OP_FP32) == ROUNDS


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_gives_what_it_should(ranks: int, tmp_path: Path) -> None:
    run(ranks, each_gives_what_it_should, tmp_path)


def test_what_is_left_to_the_group() -> None:
    asked = list[int]()
    peers = Peers(0, 2, asked.append, sum_in_order)  # slots that cannot be had
    assert not peers.takes(100), "too small"
    assert not peers.takes(MOST + 1), "too large"
    assert not asked
    for _ in range(2):
        assert not peers.takes(3 << 20)
    assert asked == [4 << 20], "asked again, or for another size"


MODELS = (
    (Layout(tp=2, dp=2), Case("llama", "ragged", "grpo", 1, in_turns=True)),
    (
        Layout(tp=2, pp=2, schedule="zero_bubble", copy_engines=True),
        Case("qwen2_tied", "ragged", "sft", 2, in_turns=True),
    ),
    (Layout(dp=4, ep=2, copy_engines=True), Case("qwen2_moe", "ragged", "ppo", 2, recompute="full")),
    (Layout(tp=2, dp=2, ep=2, copy_engines=True), Case("deepseek_v3", "few", "sft", 1, in_turns=True)),
)


def whole_model(folder: Path, slots: Path, layout: Layout, case: Case) -> tuple[Figures, int]:
    """How far a layout whose ranks reach each other is from one rank, and how many collectives went that way."""
    made = list[Peers]()

    def peers(group: dist.ProcessGroup, rank: int, size: int, *_: Any) -> Peers | None:
        if size == 1:
            return None
        name = f"{len(made)}-{'-'.join(map(str, dist.get_process_group_ranks(group)))}"
        made.append(Peers(rank, size, partial(FileSlots, slots / name, group, rank, size), sum_in_order, 1))
        return made[-1]

    with mock.patch.object(engine, "peers_of", peers):
        (found,) = compare(str(folder), layout, (case,)).values()
    return found, sum(each.begun for each in made)


@pytest.mark.parametrize(("layout", "case"), MODELS, ids=map(str, range(len(MODELS))))
def test_whole_models_equal_one_rank(layout: Layout, case: Case, tmp_path: Path) -> None:
    write_models(tmp_path, [case.model])
    run(1, write_alone, str(tmp_path), (case.alone,))
    for figures, begun in run(layout.num_ranks, whole_model, tmp_path, tmp_path / "slots", layout, case):
        assert figures.worst <= SUM_ORDER and figures.stray == EXACT, figures
        assert begun > 20
