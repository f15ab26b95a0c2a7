"""Collectives with gradients, each named by what it does to the tensor; each backward is its named inverse.

    forward             backward
    ------------------  ---------------
    all_gather          reduce_scatter   sharded in, whole out; consumers compute different parts, so gradients are partial
    gather_replicated   own slice        sharded in, whole out; consumers compute the same thing, so gradients are equal
    reduce_scatter      all_gather       partial in, sharded out
    gather_in_order     all_to_all, sum  as all_gather; gradients are summed in rank order
    tokens_to_heads     heads_to_tokens  some tokens of all heads in, all tokens of some heads out
    heads_to_tokens     tokens_to_heads
    all_reduce          identity         partial in, whole out; consumers compute the same thing

Those of heads work on dims 0 and 1, the others on dim 0, and each is the identity on an axis of size 1, so callers never
test sizes. What has no gradient (`begin_gather` and its like, `gather_mirrored`, `sum_over`, `stack_over`,
`gather_text`, `stack_numbers` and `all_reduce_`) is for statistics, for agreeing on errors and counts, for gradients
themselves, and for those who have their own (`crossing`).

All that have gradients run in the order in which they were begun, on the group's own stream, or a ring's (`peers`).
"""

import json
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.parallel.mesh import Axis
from dovetail.parallel.peers import Peers, Piece, rows_of

# torch 2.13 renames the two flat collectives and warns about the names that 2.11 has.
_FLAT_GATHER = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_FLAT_SCATTER = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


class Work(Protocol):
    """What is under way."""

    def wait(self) -> object:
        """Have what comes after go on with its result."""


class Pending:
    """The result of a collective that has begun; other work may go on until `take`."""

    def __init__(self, result: Tensor, work: Work | None = None, source: Tensor | None = None) -> None:
        self.result, self.work = result, work
        self.source = source  # the device may read it until the end

    def take(self) -> Tensor:
        """The result, complete for whatever comes after; on a GPU only its stream waits."""
        if self.work is not None:
            self.work.wait()
            self.work = self.source = None
        return self.result


def nothing() -> None:
    """What goes on beside a collective that has nothing beside it."""


def begin_gather(x: Tensor, axis: Axis) -> Pending:
    """Begin to concatenate the shards [n, ...] of dim 0 -> [n * size, ...], without a gradient."""
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    out = x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
    if axis.peers is not None and axis.peers.takes(x):
        return Pending(out, axis.peers.gather(out.chunk(axis.size), x), x)
    return Pending(out, _FLAT_GATHER(out, x, group=axis.group, async_op=True), x)


def begin_scatter(x: Tensor, axis: Axis) -> Pending:
    """Begin to sum over the axis and keep this rank's slice of dim 0: [n, ...] -> [n / size, ...], without a gradient."""
    x = x.contiguous()
    if axis.size == 1:
        return Pending(x)
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    if axis.peers is not None and axis.peers.takes(x):
        return Pending(out, axis.peers.scatter(out, rows_of(x, axis.size)), x)
    return Pending(out, _FLAT_SCATTER(out, x, group=axis.group, async_op=True), x)


def begin_all_to_all(x: Tensor, to: list[int], by: list[int], axis: Axis, room: int | None = None) -> Pending:
    """Begin to send rows in rank order, `to[r]` of them to rank r; `by[r]` of them come from rank r, in rank order.

    Behind them x may have room that does not travel; with `room` the result has so many rows, and nobody may read those behind
    what came. Without a gradient.
    """
    coming = sum(by)
    out = x.new_empty((coming if room is None else room, *x.shape[1:]))
    x = x[: sum(to)].contiguous()
    return Pending(out, dist.all_to_all_single(out[:coming], x, by, to, group=axis.group, async_op=True), x)


def _gather(x: Tensor, axis: Axis) -> Tensor:
    return begin_gather(x, axis).take()


def _scatter_sum(x: Tensor, axis: Axis) -> Tensor:
    return begin_scatter(x, axis).take()


def begin_sum_in_order(parts: Tensor, axis: Axis, add: Callable[..., Tensor]) -> Pending:
    """Begin to add up what the ranks have for this one, in rank order and rounded once: of parts [size, ...], by rank, which
    is what this one has -> [...]. Without a gradient. add: `kernels.reference.sum_deterministic`.
    """
    parts = parts.contiguous()
    if axis.size == 1:
        return Pending(parts[0])
    out = parts.new_empty(parts.shape[1:])
    if axis.peers is not None:
        flat, rows = out.view(-1), parts.view(axis.size, -1)
        most = axis.peers.memory.ring.slot_bytes // (axis.size * out.itemsize)
        if axis.peers.takes(flat[:most], axis.size):
            return Pending(out, _Pieces(axis.peers, flat.split(most), rows.split(most, dim=1)), parts)
    return Pending(out, _Adding(begin_exchange(parts, axis), add, out))


class _Pieces:
    """A sum of more than a slot of a ring holds: as many pieces at once as it has room for, the others in the end."""

    def __init__(self, peers: Peers, to: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """to: dense parts of the result; rows [size, n] for each."""
        self.peers, self.left = peers, deque(zip(to, rows, strict=True))
        self.begun: list[Work] = []
        while self.left and len(self.begun) < peers.memory.ring.slots - 1:
            self._begin()

    def _begin(self) -> None:
        to, rows = self.left.popleft()
        self.begun.append(self.peers.scatter(to, [[Piece(0, row)] for row in rows]))

    def wait(self) -> None:
        while self.left:
            self._begin()
        for work in self.begun:
            work.wait()


class _Adding:
    """An exchange, and the sum of what comes."""

    def __init__(self, coming: Pending, add: Callable[..., Tensor], out: Tensor) -> None:
        self.coming, self.add, self.out = coming, add, out

    def wait(self) -> None:
        self.add(self.coming.take(), out=self.out)


def begin_exchange(x: Tensor, axis: Axis) -> Pending:
    """Begin to send the i-th of `size` equal blocks of dim 0 to rank i; what comes lies in rank order. Without a gradient."""
    x = x.contiguous()
    if axis.size == 1:
        return Pending(x)
    out = torch.empty_like(x)
    return Pending(out, dist.all_to_all_single(out, x, group=axis.group, async_op=True), x)


class _AllGather(torch.autograd.Function):
    """forward: all_gather on dim 0. backward: reduce_scatter. One collective each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _gather(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _scatter_sum(grads[0], ctx.axis), None


class _GatherReplicated(torch.autograd.Function):
    """forward: all_gather on dim 0. backward: this rank's slice of the gradient, which every rank holds whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _gather(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].chunk(ctx.axis.size)[ctx.axis.rank].contiguous(), None


class _ReduceScatter(torch.autograd.Function):
    """forward: reduce_scatter (sum) on dim 0. backward: all_gather. One collective each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _scatter_sum(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gather(grads[0], ctx.axis), None


class _GatherInOrder(torch.autograd.Function):
    """forward: all_gather on dim 0. backward: all_to_all, then the sum of what came, in rank order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, add: Callable[..., Tensor]) -> Tensor:
        ctx.axis, ctx.add = axis, add
        return _gather(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        parts = grads[0].unflatten(0, (ctx.axis.size, -1))
        return begin_sum_in_order(parts, ctx.axis, ctx.add).take(), None, None


class _AllReduce(torch.autograd.Function):
    """forward: the sum over the axis. backward: the gradient as it is, which every rank holds whole."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return sum_over(x, axis)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _TokensToHeads(torch.autograd.Function):
    """forward: all_to_all, [n, H, C] -> [n * size, H / size, C]. backward: the inverse all_to_all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, during: Callable[[], None]) -> Tensor:
        ctx.axis, ctx.during = axis, during
        return _to_heads(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _to_tokens(grads[0], ctx.axis, ctx.during), None, None


class _HeadsToTokens(torch.autograd.Function):
    """forward: all_to_all, [n * size, h, C] -> [n, h * size, C]. backward: the inverse all_to_all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, during: Callable[[], None]) -> Tensor:
        ctx.axis, ctx.during = axis, during
        return _to_tokens(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _to_heads(grads[0], ctx.axis, ctx.during), None, None


def _to_heads(x: Tensor, axis: Axis, during: Callable[[], None] = nothing) -> Tensor:
    begun = begin_exchange(x.unflatten(1, (axis.size, -1)).movedim(1, 0).flatten(0, 1), axis)
    during()
    return begun.take()


def _to_tokens(x: Tensor, axis: Axis, during: Callable[[], None] = nothing) -> Tensor:
    begun = begin_exchange(x, axis)
    during()
    return begun.take().unflatten(0, (axis.size, -1)).movedim(0, 1).flatten(1, 2)


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Concatenate the shards [n, ...] of dim 0 -> [n * size, ...]; gradients of the whole are summed over the axis."""
    return x if axis.size == 1 else _AllGather.apply(x, axis)


def gather_replicated(x: Tensor, axis: Axis) -> Tensor:
    """Concatenate the shards of dim 0 for consumers that compute the same on every rank: gradients are not summed."""
    return x if axis.size == 1 else _GatherReplicated.apply(x, axis)


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis and keep this rank's slice of dim 0: [n, ...] -> [n / size, ...]."""
    return x if axis.size == 1 else _ReduceScatter.apply(x, axis)


def gather_in_order(x: Tensor, axis: Axis, add: Callable[..., Tensor]) -> Tensor:
    """As `all_gather`, with gradients that do not depend on how a reduction is scheduled.

    add: `kernels.reference.sum_deterministic`.
    """
    return x if axis.size == 1 else _GatherInOrder.apply(x, axis, add)


def gather_mirrored(x: Tensor, axis: Axis) -> tuple[Tensor, Callable[[], None]]:
    """Concatenate the first halves of the shards [2 n, ...] of dim 0 in rank order, and then the second ones from the last
    rank to the first: [2 n * size, ...], without a gradient. Two collectives.

    The first half of the result is there. What is returned with it has to be called before anything reads the second one.
    """
    if axis.size == 1:
        return x, nothing
    first, second = x.contiguous().chunk(2)
    out = x.new_empty((len(x) * axis.size, *x.shape[1:]))
    peers = axis.peers
    if peers is not None and peers.takes(first.view(-1)[: (most := peers.memory.ring.slot_bytes // x.itemsize)]):
        # of `data`: attention saves views of the first half while the second is still being written, and autograd would take
        # that for a change of what it saved
        places = list(out.data.view(2 * axis.size, -1))
        begun = _gathers(peers, places[: axis.size], first, most)
        rest = _gathers(peers, places[: axis.size - 1 : -1], second, most)
        begun()
        return out, rest
    # NCCL would not begin the second one before attention to the first half ends: the second one first, and turned round
    # while the first halves come, which lie as they should
    half, late = len(out) // 2, begin_gather(second, axis)
    early = Pending(out, _FLAT_GATHER(out[:half], first, group=axis.group, async_op=True), first)
    torch.cat(late.take().chunk(axis.size)[::-1], out=out[half:])
    return early.take(), nothing


def _gathers(peers: Peers, places: Sequence[Tensor], x: Tensor, most: int) -> Callable[[], None]:
    """Begin to fill the flat places, one a rank, with dense x of all ranks, so many numbers at a time; what waits for them."""
    parts = zip(x.view(-1).split(most), *(place.split(most) for place in places), strict=True)
    begun = [peers.gather(to, part) for part, *to in parts]

    def wait() -> None:
        for work in begun:
            work.wait()

    return wait


def tokens_to_heads(x: Tensor, axis: Axis, during: Callable[[], None] = nothing) -> Tensor:
    """Trade heads for tokens: [n, H, C] -> [n * size, H / size, C], tokens in rank order.

    during: what goes on beside the collective of the backward pass.
    """
    return x if axis.size == 1 else _TokensToHeads.apply(x, axis, during)


def heads_to_tokens(x: Tensor, axis: Axis, during: Callable[[], None] = nothing) -> Tensor:
    """Trade tokens for heads: [n * size, h, C] -> [n, h * size, C], heads in rank order. As `tokens_to_heads`."""
    return x if axis.size == 1 else _HeadsToTokens.apply(x, axis, during)


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The elementwise sum over the axis for consumers that compute the same on every rank: gradients are not summed."""
    return x if axis.size == 1 else _AllReduce.apply(x, axis)


def sum_over(x: Tensor, axis: Axis) -> Tensor:
    """The elementwise sum over the axis, without a gradient; `x` itself where the axis has size 1."""
    if axis.size == 1:
        return x
    x = x.detach().clone(memory_format=torch.contiguous_format)  # NCCL sums memory, whatever the strides of others
    dist.all_reduce(x, group=axis.group)
    return x


def stack_over(x: Tensor, axis: Axis) -> Tensor:
    """Every rank's `x`, in rank order: [...] -> [size, ...], without a gradient."""
    return x[None] if axis.size == 1 else _gather(x.detach()[None], axis)


class AsyncHostCopy:
    """Numbers that leave for the host: whoever takes them waits for them, and not for what the device was given since."""

    def __init__(self, x: Tensor) -> None:
        self.numbers, self.copied = x.to("cpu", non_blocking=True), None
        if x.device.type != "cpu":
            self.copied = torch.get_device_module(x.device).current_stream(x.device).record_event()

    def take(self) -> Any:
        """As lists of Python's numbers."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.numbers.tolist()


def gather_text(text: str, axis: Axis, device: torch.device | str = "cpu") -> list[str]:
    """Every rank's `text`, in rank order, for agreeing on errors and small facts before anything depends on them."""
    if axis.size == 1:
        return [text]
    data = torch.frombuffer(bytearray(json.dumps(text).encode()), dtype=torch.uint8).to(device)
    sizes = stack_over(torch.tensor(len(data), device=device), axis)
    padded = torch.nn.functional.pad(data, (0, int(sizes.max()) - len(data)))
    rows = stack_over(padded, axis).cpu()
    return [json.loads(row[:n].numpy().tobytes()) for row, n in zip(rows, sizes.tolist(), strict=True)]


def stack_numbers(numbers: list[int], axis: Axis, device: torch.device | str = "cpu") -> list[list[int]]:
    """Every rank's whole numbers, in rank order; between hosts, where the group has a way, so that no device is waited for."""
    between_hosts = axis.group is None or "cpu:" in dist.get_backend_config(axis.group)
    return stack_over(torch.tensor(numbers, device="cpu" if between_hosts else device), axis).tolist()


def all_reduce_(tensors: list[Tensor], axis: Axis) -> None:
    """Sum every tensor over the axis in place, without a gradient, as one collective a dtype."""
    if axis.size == 1:
        return
    for dtype in sorted({x.dtype for x in tensors}, key=str):
        same = [x for x in tensors if x.dtype == dtype]
        flat = torch.cat([x.reshape(-1) for x in same])
        dist.all_reduce(flat, group=axis.group)
        for x, summed in zip(same, flat.split([x.numel() for x in same]), strict=True):
            x.copy_(summed.view_as(x))
