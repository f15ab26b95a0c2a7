"""The executor carries out any plan: values that no message can cross, and the times that the simulation promises."""

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.parallel.axes import P2PChannel
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.pipeline import executor
from dovetail.pipeline.schedule import Action, Costs, Kind, Plan, make_plan, num_stages, simulate
from tests.helpers.harness import RankFailed, distributed, run
from tests.helpers.plans import (
    any_plan,
    check,
    check_all,
    every_schedule,
    in_the_receivers_order,
    random_plans,
)
from tests.helpers.tolerances import BUBBLE


@pytest.mark.parametrize(
    "ranks",
    [2, pytest.param(3, marks=pytest.mark.soak), 4, pytest.param(8, marks=pytest.mark.soak)],
)
def test_every_schedule_gives_the_values_of_one_process(ranks: int) -> None:
    run(ranks, check_all, ranks, every_schedule(ranks))


@pytest.mark.parametrize(
    "ranks", [3, 4, *(pytest.param(n, marks=pytest.mark.soak) for n in (2, 8))]
)
def test_random_plans_give_the_values_of_one_process(ranks: int) -> None:
    run(ranks, check_all, ranks, random_plans(ranks))


@pytest.mark.parametrize("gradient", [False, True])
def test_random_plans_need_messages_in_another_order_than_they_send_them(gradient: bool) -> None:
    """Else they would prove little."""
    plan = any_plan(2, 2, 8, seed=8)
    for rank in (0, 1):
        sends, needs = (
            [
                message
                for some in which(plan, rank)
                for message in some
                if message.gradient == gradient
            ]
            for which in (executor.receives, in_the_receivers_order)
        )
        assert sorted(needs) == sorted(sends)
        assert needs != sends


def crossed() -> Plan:
    """Two ranks, four stages: rank 1 needs micro-batch 0 at stage 3 before 1 at stage 1, which rank 0 sends first."""
    first = ("f 0 0", "f 0 1", "f 2 0", "f 2 1", "b 2 1", "b 2 0", "b 0 0", "b 0 1")
    second = ("f 1 0", "f 3 0", "f 1 1", "f 3 1", "b 3 0", "b 3 1", "b 1 0", "b 1 1")
    kinds: dict[str, Kind] = {"f": "forward", "b": "backward"}
    words = ([text.split() for text in actions] for actions in (first, second))
    return tuple(
        tuple(Action(kinds[kind], int(stage), int(micro)) for kind, stage, micro in some)
        for some in words
    )


@distributed(world=2)
def test_neighbors_with_different_orders_cross_nothing() -> None:
    check(crossed(), Mesh.build(Layout(pp=2, virtual_stages=2)))


def mutated() -> None:
    with mock.patch.object(executor, "receives", in_the_receivers_order):
        check(crossed(), Mesh.build(Layout(pp=2, virtual_stages=2)))


def test_receives_in_the_receivers_order_are_noticed() -> None:
    """The mutation: equal shapes, so that everything arrives, and the values are wrong."""
    with pytest.raises(RankFailed, match="wrong values"):
        run(2, mutated)


def connect_everywhere(ranks: int) -> None:
    """`connect` where both ends of a road wait for each other before anything is sent, as NCCL's do."""
    start = executor._start

    def meet(transfer, tensor: Tensor, link: P2PChannel) -> dist.Work:
        dist.barrier(group=link.group)
        return start(transfer, tensor, link)

    for virtual in (1, 2):
        mesh = Mesh.build(Layout(pp=ranks, virtual_stages=virtual))
        with mock.patch.object(executor, "_start", meet):
            executor.connect(mesh)


@pytest.mark.parametrize(
    "ranks", [1, 2, 3, 4, *(pytest.param(n, marks=pytest.mark.soak) for n in (5, 8))]
)
def test_connecting_never_waits_in_a_circle(ranks: int) -> None:
    run(ranks, connect_everywhere, ranks)


class Sleeper:
    """Stages that take the time they are said to take, or so many times of it, and no processor."""

    def __init__(self, stages: int, costs: Costs, longer: float = 1.0) -> None:
        self.end, self.costs, self.longer = stages - 1, costs, longer

    def buffer(self, micro: int) -> Tensor:
        return torch.zeros(1)

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor | None:
        time.sleep(self.longer * self.costs.of("forward", stage))
        return None if stage == self.end else torch.zeros(1)

    def backward(self, action: Action, grad: Tensor | None, *, last: bool) -> Tensor | None:
        time.sleep(self.longer * self.costs.of(action.kind, action.stage))
        return torch.zeros(1) if action.stage else None

    def weight(self, stage: int, micro: int) -> None:
        time.sleep(self.longer * self.costs.of("weight", stage))


def best_share(plan: Plan, virtual: int, costs: Costs, expected: float) -> float:
    """The time from the first rank's start to the last one's end over the expected one: the least of a few tries.

    On a busy machine a rank wakes up late, so stages sleep longer from try to try, until that is a small part of it.
    """
    mesh, best = Mesh.build(Layout(pp=len(plan), virtual_stages=virtual)), float("inf")
    executor.connect(mesh)
    for longer in (1.0, 1.0, 2.0, 4.0, 8.0, 16.0):
        dist.barrier()
        start = time.monotonic()
        executor.run(plan, Sleeper(num_stages(plan), costs, longer), mesh)
        times = torch.tensor(
            [-start, time.monotonic()], dtype=torch.float64
        )  # one clock for all processes
        dist.all_reduce(times, dist.ReduceOp.MAX)
        best = min(best, float(times.sum()) / (longer * expected))
        if best <= 1 + BUBBLE:
            break
    return best


SLEEPERS = [("1f1b", 1, 8), ("interleaved", 2, 2), ("zero_bubble", 1, 4)]


@pytest.mark.parametrize(
    ("schedule", "virtual", "ranks"),
    [
        *SLEEPERS,
        *(
            pytest.param(name, virtual, ranks, marks=pytest.mark.soak)
            for name, virtual, _ in SLEEPERS
            for ranks in (2, 4, 8)
            if (name, virtual, ranks) not in SLEEPERS
        ),
    ],
)
def test_stages_that_sleep_take_the_simulated_time(schedule: str, virtual: int, ranks: int) -> None:
    """Stages of different lengths, the last one longest, in no other order than the simulation's."""
    stages = ranks * virtual
    forward = tuple(0.03 if stage == stages - 1 else 0.02 for stage in range(stages))  # seconds
    costs = Costs(forward, input=0.02, weight=0.02)
    plan = make_plan(schedule, ranks, virtual, 8, costs)
    expected = simulate(plan, costs).total
    (found, *_) = run(ranks, best_share, plan, virtual, costs, expected)
    assert 1.0 <= found <= 1 + BUBBLE, f"{found:.3f} of the simulated {expected:.3f} s"


def most_held(plan: Plan) -> tuple[int, int]:
    """The most receives that this rank has under way at a time, and the most sent tensors that it holds."""
    mesh, coming, held = Mesh.build(Layout(pp=len(plan))), [0], [0]

    class Watched(executor.Mailbox):
        def post(self, i: int) -> None:
            super().post(i)
            coming.append(len(self.arrived))

        def send(self, message: executor.Message | None, tensor: Tensor | None) -> None:
            super().send(message, tensor)
            held.append(len(self.leaving))

    with mock.patch.object(executor, "Mailbox", Watched):
        executor.run(plan, Sleeper(len(plan), Costs(0.0, 0.0, 0.0)), mesh)
    return max(coming), max(held)


def test_few_receives_are_under_way_and_sent_tensors_are_held_while_activations_live() -> None:
    """Even by gloo, whose handles never tell: not one a micro-batch."""
    plan = make_plan("1f1b", 4, 1, 32)
    found = run(4, most_held, plan)
    assert all(coming <= 3 for coming, _ in found), found
    assert all(n <= live + 1 for (_, n), live in zip(found, simulate(plan).live, strict=True)), (
        found
    )
