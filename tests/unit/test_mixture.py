"""Rows to experts and back where some go nowhere, against plain loops; and experts over several ranks of ep in one process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Barrier
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.arch.registry import spec_from_config
from dovetail.kernels.reference_experts import permute, permute_tokens, round_rows, unpermute
from dovetail.kernels.registry import KernelSet
from dovetail.nn.layers import WgradQueue
from dovetail.nn.moe import Experts
from dovetail.nn.products import Products
from dovetail.parallel.axes import Axis
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.overlap import interleave, run_sync
from tests.helpers.held import HandingOver
from tests.helpers.parity_configs import moe_configs
from tests.helpers.tolerances import EXACT, GRADCHECK, OP_FP64, SUM_ORDER, assert_close

E, K, D, F = 4, 3, 6, 5
HERE = torch.tensor(
    [[0, 4, 3], [9, 4, 4], [3, 0, 0], [4, 5, 1]]
)  # six of twelve, one of them again; expert 2 has none


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def somewhere(chosen: Tensor) -> int:
    return int((chosen < E).sum())


@pytest.mark.parametrize("room", [6, 7, 12])
def test_copies_lie_by_expert_and_who_is_nowhere_has_none(room: int) -> None:
    chosen, x, total = HERE, drawn(len(HERE), D).requires_grad_(), somewhere(HERE)
    copies, rows, ends = permute(x, chosen, E, room)
    assert copies.shape == (room, D) and total <= room
    found = [
        (t, e)
        for e in range(E)
        for t in range(len(chosen))
        for k in range(K)
        if int(chosen[t, k]) == e
    ]
    assert torch.equal(copies[:total], x[[t for t, _ in found]])
    assert ends.tolist() == [sum(1 for _, e in found if e <= last) for last in range(E)]
    there = chosen.flatten() < E
    assert bool((rows[~there] >= room).all())
    assert torch.equal(rows[there].sort().values, torch.arange(total))
    assert torch.equal(permute_tokens(x, rows, K, room)[:total], copies[:total])
    up = torch.full_like(copies, float("nan"))  # what nobody wrote
    up[:total] = drawn(total, D, seed=1)
    (grad,) = torch.autograd.grad(copies, x, up)
    expected = torch.zeros_like(grad)
    for (t, _), row in zip(found, up, strict=False):
        expected[t] += row
    assert_close(grad, expected, OP_FP64)


@pytest.mark.parametrize("weighted", [True, False])
def test_sums_of_copies_leave_out_who_is_nowhere(weighted: bool) -> None:
    _, rows, _ = permute(drawn(len(HERE), D), HERE, E, 6)
    x, weights = drawn(6, D).requires_grad_(), drawn(*HERE.shape, seed=1).requires_grad_()
    there, places = HERE < E, rows.view(HERE.shape)
    y = unpermute(x, rows, weights) if weighted else unpermute(x, places, None)
    for t in range(len(HERE)):
        mine = [
            (weights[t, k] if weighted else 1) * x[places[t, k]] for k in range(K) if there[t, k]
        ]
        assert_close(y[t], sum(mine, torch.zeros(D, dtype=torch.float64)), OP_FP64)
    if weighted:
        assert torch.autograd.gradcheck(
            lambda x, w: unpermute(x, rows, w), (x, weights), atol=GRADCHECK
        )
        (grad,) = torch.autograd.grad(y.sum(), weights)
        assert bool((grad[~there] == 0).all()) and bool((grad[there] != 0).all())
    else:
        assert torch.autograd.gradcheck(lambda x: unpermute(x, places, None), x, atol=GRADCHECK)


def by_loop(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    y = []
    for t in range(len(x)):
        total = 0 * x[t]
        for k, e in enumerate(chosen[t].tolist()):
            if e < len(gate_up):
                gate, up = (gate_up[e] @ x[t]).chunk(2)
                total = total + weights[t, k] * (down[e] @ (torch.nn.functional.silu(gate) * up))
        y.append(total)
    return torch.stack(y) if y else x


def inputs(tokens: int) -> list[Tensor]:
    shapes = ((tokens, D), (tokens, K), (E, 2 * F, D), (E, D, F))
    return [drawn(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


CHOICES = {
    "some": HERE,
    "all": HERE % E,
    "nobody": torch.full((4, K), E),
    "of no tokens": torch.empty(0, K, dtype=torch.int64),
    "int32": HERE.to(torch.int32),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_mixture_is_the_weighted_sum_of_the_experts_that_are_there(name: str) -> None:
    chosen = CHOICES[name]
    leaves, copies = inputs(len(chosen)), somewhere(chosen)
    expected = by_loop(leaves[0], chosen, *leaves[1:])
    up = drawn(*expected.shape, seed=9)
    expected_grads = torch.autograd.grad(expected, leaves, up, allow_unused=True)
    x, *others = leaves
    for given in (copies, None) if name == "all" else (copies,):
        y = Products(KernelSet()).mixture_of_experts(
            x, chosen, others[0], (others[1], others[2]), given
        )
        assert_close(y, expected, OP_FP64)
        for a, b in zip(torch.autograd.grad(y, leaves, up), expected_grads, strict=True):
            assert_close(a, torch.zeros_like(a) if b is None else b, OP_FP64)


@dataclass
class Room:
    """Where the threads of one process meet as ranks: collectives of one at a time, and the rows of each that went."""

    size: int
    given: dict[int, Any] = field(default_factory=dict)
    rows: list[tuple[int, int]] = field(default_factory=list)  # width and rows of each send

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.size)

    def all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        by: list[int] | None = None,
        to: list[int] | None = None,
        *,
        group: Any,
        async_op: bool,
    ) -> SimpleNamespace:
        assert async_op
        even = [len(x) // self.size] * self.size
        self.given[group.rank] = x.detach().clone().split(to or even)
        if x.is_floating_point():
            self.rows.append((x.shape[1], sum(to or even)))
        self.barrier.wait()
        parts = [self.given[other][group.rank] for other in range(self.size)]
        assert [len(part) for part in parts] == (by or even) and len(out) == sum(by or even)
        out.copy_(torch.cat(parts))
        self.barrier.wait()
        return SimpleNamespace(wait=lambda: None)

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """What each rank's thread returns."""

        def safely(rank: int) -> Any:
            try:
                return body(rank)
            except BaseException:
                self.barrier.abort()  # the others do not wait for this one
                raise

        with (
            mock.patch.object(dist, "all_to_all_single", self.all_to_all),
            ThreadPoolExecutor(self.size) as pool,
        ):
            return list(pool.map(safely, range(self.size)))


def experts_of(room: Room | None, rank: int, count: int, top: int) -> Experts:
    """Some of `count` experts, whose numbers depend on which they are only."""
    spec = spec_from_config(moe_configs()["qwen3_moe"].to_dict())
    assert spec.moe is not None
    size, group = (1, None) if room is None else (room.size, SimpleNamespace(rank=rank))
    solo = Mesh.solo()
    ep = Axis("ep", size, rank, group)  # type: ignore[arg-type]
    moe = replace(spec.moe, num_experts=count, top_k=top)
    made = Experts(spec, moe, replace(solo, axes={**solo.axes, "ep": ep}), KernelSet()).to(
        torch.float64
    )
    with torch.no_grad():
        for seed, parameter in enumerate(made.parameters()):
            whole = drawn(count, *parameter.shape[1:], seed=seed + 5) / 8
            parameter.copy_(whole.chunk(size)[rank])
    return made


def both_ways(experts: Experts, x: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_(), weights.detach().clone().requires_grad_()]
    y = run_sync(experts.forward_async(leaves[0], chosen, leaves[1]))
    up = y.detach().cos()  # what a sum of sines asks for, however it is cut
    return y.detach(), *torch.autograd.grad(y, (*leaves, *experts.parameters()), up)


SHAPES = {  # ranks, experts, K, tokens of each rank
    "two": (2, 8, 3, (11, 11)),
    "as many choices as ranks": (4, 8, 4, (5, 9, 1, 7)),
    "more ranks than choices": (4, 8, 2, (6, 3, 2, 5)),
    "more ranks than tokens": (8, 8, 3, (1, 0, 2, 0, 0, 1, 0, 0)),
    "one expert a rank, one choice": (3, 3, 1, (4, 0, 3)),
    "nobody has tokens": (2, 4, 2, (0, 0)),
    "so many that there is room behind them": (2, 8, 3, (83, 90)),
}


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_experts_over_ranks_are_those_of_one(name: str, skewed: bool) -> None:
    """skewed: all tokens go to the first experts, so the other ranks get no rows."""
    size, count, top, tokens = SHAPES[name]
    x, weights = drawn(sum(tokens), 64), drawn(sum(tokens), top, seed=1)
    scores = drawn(sum(tokens), count, seed=2)
    chosen = torch.arange(top).expand(sum(tokens), top) if skewed else scores.topk(top).indices
    expected = both_ways(experts_of(None, 0, count, top), x, chosen, weights)
    parts = [*zip(*(whole.split(tokens) for whole in (x, chosen, weights)), strict=True)]
    rooms = [Room(size), Room(size)]

    def rank_in(room: Room, rank: int) -> tuple[Tensor, ...]:
        return both_ways(experts_of(room, rank, count, top), *parts[rank])

    runs = [room.run(partial(rank_in, room)) for room in rooms]
    for a, b in zip(*runs, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(a, b, strict=True))
    for part, whole in zip(zip(*runs[0], strict=True), expected, strict=True):
        assert_close(torch.cat(part), whole, SUM_ORDER)
    sent = sum(len(set((row // (count // size)).tolist())) for row in chosen)
    for width, each_way in (
        (64, 2),
        (2 * top, 1),
    ):  # rows there and back, notes there; backward the same
        assert sum(n for w, n in rooms[0].rows if w == width) == 2 * each_way * sent


def handing(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: Any, copies: Any, add: Any
) -> Tensor:
    def compute(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return Products(KernelSet()).mixture_of_experts(x, chosen, weights, (gate_up, down), copies)

    y: Tensor = HandingOver.apply(x, weights, *experts, compute, (add, plain_add_))
    return y


EVENTS = threading.local()


def plain_add_(total: Tensor, dw: Tensor, _x: Tensor, *, first: bool = False) -> None:
    EVENTS.seen.append("add")
    total.copy_(dw) if first else total.add_(dw)


class LoggedRoom(Room):
    """A room that tells each rank's thread what it began and waited for."""

    def all_to_all(self, out: Tensor, x: Tensor, *how: Any, **which: Any) -> Any:
        seen, rows = EVENTS.seen, x.is_floating_point()
        super().all_to_all(out, x, *how, **which)
        if rows:
            seen.append("begin")
        return SimpleNamespace(wait=lambda: seen.append("wait") if rows else None)


@pytest.mark.parametrize("halves", [1, 2])
def test_gradients_that_are_handed_over_come_beside_the_last_exchange(halves: int) -> None:
    """And are the others' sums: of both halves of a batch, and of a part that autograd has."""
    size, count, top, n = 2, 8, 3, 12
    x, weights, scores = (
        drawn(size * n, 64),
        drawn(size * n, top, seed=1),
        drawn(size * n, count, seed=2),
    )
    chosen = scores.topk(top).indices
    _, _, _, *expected = both_ways(experts_of(None, 0, count, top), x, chosen, weights)

    def rank_in(room: Room, rank: int) -> tuple[list[str], list[Tensor | None]]:
        EVENTS.seen = []
        experts = experts_of(room, rank, count, top)
        experts.wgrad_queue = WgradQueue()
        experts.products = Products(replace(KernelSet(), mixture=handing))
        mine = [whole.chunk(size)[rank].chunk(halves) for whole in (x, chosen, weights)]
        leaves = [
            (a.clone().requires_grad_(), b, c.clone().requires_grad_())
            for a, b, c in zip(*mine, strict=True)
        ]
        y = torch.cat(interleave([experts.forward_async(*one) for one in leaves]))
        EVENTS.seen.clear()
        y.backward(y.detach().cos())
        assert not experts.wgrad_queue.deferred
        return EVENTS.seen, [parameter.grad for parameter in experts.parameters()]

    room = LoggedRoom(size)
    for rank, (seen, grads) in enumerate(room.run(partial(rank_in, room))):
        for got, whole in zip(grads, expected, strict=True):
            assert got is not None
            assert_close(got, whole.chunk(size)[rank], SUM_ORDER)
        assert seen.count("add") == 2 * halves
        last = len(seen) - seen[::-1].index("begin")
        assert seen[last : last + 2 * halves] == ["add"] * 2 * halves, seen
        assert seen[last + 2 * halves] == "wait", seen


def test_there_is_room_for_an_eighth_more_rows_at_most() -> None:
    for n in range(5000):
        assert n <= round_rows(n) <= n + n // 8
    assert [round_rows(n) for n in (0, 15, 17, 43000)] == [0, 15, 18, 45056]
    assert len({round_rows(n) for n in range(40000, 50000)}) <= 4


def test_a_token_whose_experts_share_a_rank_goes_there_once() -> None:
    room, chosen = (
        Room(2),
        torch.tensor([[0, 1, 3], [2, 3, 1], [4, 5, 3]]),
    )  # of eight: ranks 0; 0; 1 and 0
    x, weights = drawn(3, 64), drawn(3, 3, seed=1)
    none = torch.empty(0, 3)
    given = [(x, chosen, weights), (x[:0], none.to(torch.int64), none.to(torch.float64))]
    with torch.no_grad():
        found = room.run(
            lambda rank: run_sync(experts_of(room, rank, 8, 3).forward_async(*given[rank]))
        )
    assert sorted(n for width, n in room.rows if width == 64) == [
        0,
        1,
        3,
        4,
    ]  # back from both, and there
    assert_close(
        found[0], run_sync(experts_of(None, 0, 8, 3).forward_async(x, chosen, weights)), SUM_ORDER
    )
    assert_close(found[1], x[:0], EXACT)
