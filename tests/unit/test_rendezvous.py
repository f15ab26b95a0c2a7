"""No plan deadlocks on NCCL, whose transfers occupy the device until both ends are there.

The real executor is run once for every rank with transfers that are only noted. Then all ranks go through their notes
together: the n-th send and the n-th receive on a road end when both have begun, and in the strictest of three models a
rank that computes, or takes memory, first waits for all that it has begun, as when its host waits for its whole device.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from dovetail.parallel.axes import Axis, P2PChannel, P2PChannels
from dovetail.pipeline import executor
from dovetail.pipeline.schedule import Action, Costs, Plan, make_plan, num_stages
from tests.helpers.plans import any_plan, in_the_receivers_order

NOTHING = torch.zeros(0)
Model = Literal["streams", "device"]


class Note(NamedTuple):
    """What a rank does. isend, irecv: on a road. wait: for the note of that number. memory, compute."""

    kind: str
    road: Any = None
    number: int = 0


class Handle(NamedTuple):
    """Of a transfer that is never complete, and whose `wait` is noted."""

    notes: list[Note]
    number: int

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        self.notes.append(Note("wait", number=self.number))


class Noted:
    """A stage of no computation, a mesh of no groups, and transfers that never happen, of one rank of a plan."""

    def __init__(self, plan: Plan, rank: int) -> None:
        size = len(plan)
        previous, self.rank, self.size, self.notes = (rank - 1) % size, rank, size, list[Note]()
        self.first, self.last = 0, num_stages(plan) - 1
        roads = (("down", rank), ("down", previous), ("up", rank), ("up", (rank + 1) % size))
        self.channels = P2PChannels(*(P2PChannel(0, road) for road in roads))  # type: ignore[arg-type]  # a road's name for its group

    def __getitem__(self, name: str) -> Axis:
        return Axis(name, self.size, self.rank)

    def start(self, transfer: Callable[..., Any], tensor: Tensor, link: P2PChannel) -> Any:
        self.notes.append(Note(transfer.__name__, link.group))
        return Handle(self.notes, len(self.notes) - 1)

    def buffer(self, micro: int) -> Tensor:
        self.notes.append(Note("memory"))
        return NOTHING

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor | None:
        self.notes.append(Note("compute"))
        return None if stage == self.last else NOTHING

    def backward(self, action: Action, grad: Tensor | None, *, last: bool) -> Tensor | None:
        self.notes.append(Note("compute"))
        return None if action.stage == self.first else NOTHING

    def weight(self, stage: int, micro: int) -> None:
        self.notes.append(Note("compute"))


def notes_of(plan: Plan) -> list[list[Note]]:
    """What each rank does, as its host asks for it."""
    found = []
    for rank in range(len(plan)):
        noted: Any = Noted(plan, rank)
        with mock.patch.object(executor, "_start", noted.start):
            executor.run(plan, noted, noted)
        found.append(noted.notes)
    return found


def stuck(notes: list[list[Note]], model: Model) -> list[int]:
    """The ranks that never end."""
    at = [0] * len(notes)
    begun: Counter[tuple[str, Any]] = Counter()
    places: list[dict[int, tuple[Any, int]]] = [
        {} for _ in notes
    ]  # of each transfer by its note: the n-th on a road
    open_: list[set[tuple[Any, int]]] = [set() for _ in notes]

    def ended(place: tuple[Any, int]) -> bool:
        road, n = place
        return min(begun["isend", road], begun["irecv", road]) > n

    def can_go_on(rank: int, note: Note) -> bool:
        if note.kind == "wait":
            return ended(places[rank][note.number])
        if model == "device" and note.kind in ("memory", "compute"):
            open_[rank] = {place for place in open_[rank] if not ended(place)}
            return not open_[rank]
        return True

    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(notes):
            while at[rank] < len(mine) and can_go_on(rank, note := mine[at[rank]]):
                if note.kind in ("isend", "irecv"):
                    place = note.road, begun[note.kind, note.road]
                    places[rank][at[rank]] = place
                    open_[rank].add(place)
                    begun[note.kind, note.road] += 1
                at[rank], moved = at[rank] + 1, True
    return [rank for rank, mine in enumerate(notes) if at[rank] < len(mine)]


def plans(ranks: int, micros: tuple[int, ...]) -> dict[str, Plan]:
    """Every schedule, and random plans, which interleave what no schedule does."""
    found = {}
    for n in micros:
        for virtual in (1, 2, 3, 4):
            for name in ("forward", "gpipe", "1f1b" if virtual == 1 else "interleaved"):
                found[f"{name} {virtual} {n}"] = make_plan(name, ranks, virtual, n)
            if n <= 8 and virtual <= 3:
                found[f"random {virtual} {n}"] = any_plan(ranks, virtual, n, seed=n)
        last_is_long = Costs(tuple(1.0 + (rank == ranks - 1) for rank in range(ranks)), 1.0, 1.0)
        for i, costs in enumerate((Costs(), Costs(1.0, 2.0, 0.5), last_is_long)):
            found[f"zero_bubble {i} {n}"] = make_plan("zero_bubble", ranks, 1, n, costs)
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_no_plan_deadlocks_where_every_host_waits_for_its_device(ranks: int) -> None:
    for name, plan in plans(ranks, (1, 2, 5) if ranks < 8 else (1, 9)).items():
        notes = notes_of(plan)
        assert {model: stuck(notes, model) for model in ("streams", "device")} == {
            "streams": [],
            "device": [],
        }, name


@pytest.mark.soak
@pytest.mark.parametrize("ranks", range(2, 9))
def test_no_plan_deadlocks_however_many_micro_batches(ranks: int) -> None:
    for name, plan in plans(ranks, tuple(range(1, 33))).items():
        notes = notes_of(plan)
        assert not stuck(notes, "streams") and not stuck(notes, "device"), name


def one_need_ahead(plan: Plan, rank: int) -> list[list[executor.Message]]:
    """A mutation of `receives` that keeps every transfer from being waited for: what is needed next is on its way."""
    needs = in_the_receivers_order(plan, rank)
    found: list[list[executor.Message]] = [[] for _ in needs]
    ahead = 0
    for i, need in enumerate(needs):
        for message in need:
            found[ahead].append(message)
            ahead = i
    return found


def test_receives_that_are_posted_at_will_deadlock() -> None:
    """The mutations: earlier, and a message waits for a host that waits for it; or where needed, and sends cross."""
    expected = {one_need_ahead: "1f1b 1 5", in_the_receivers_order: "zero_bubble 0 5"}
    for receives, name in expected.items():
        with mock.patch.object(executor, "receives", receives):
            notes = notes_of(plans(3, (5,))[name])
            assert not stuck(notes, "streams"), name
            assert stuck(notes, "device"), name
