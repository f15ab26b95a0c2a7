"""Collectives on dim 0, which are the identity on an axis of size 1. With gradients:

forward             backward
------------------  ---------------
all_gather          reduce_scatter   sharded in, whole out; ranks compute different parts
gather_replicated   own slice        sharded in, whole out; ranks compute the same
reduce_scatter      all_gather       partial in, sharded out
gather_in_order     all_to_all, sum  as all_gather; summed in rank order
tokens_to_heads     heads_to_tokens  tokens of all heads in, all tokens of some heads (dim 1) out
heads_to_tokens     tokens_to_heads
all_reduce          identity         partial in, whole out; ranks compute the same
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.parallel.axes import Axis

# torch 2.13's names, else those of 2.11
_FLAT_GATHER = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)
_FLAT_SCATTER = (
    dist.reduce_scatter_single
    if hasattr(dist, "reduce_scatter_single")
    else dist.reduce_scatter_tensor
)
Exchange = Callable[[Tensor, Axis], Tensor]


@dataclass(eq=False)
class Handle:
    """A collective in flight. source: kept alive until `wait`."""

    result: Tensor
    complete: Callable[[], object] | None = None
    source: Tensor | None = None

    def wait(self) -> Tensor:
        """Return the result. Only the current stream waits."""
        if self.complete is not None:
            self.complete()
            self.complete = None
            self.source = None
        return self.result


def _begin(collective: Callable[..., Any], x: Tensor, rows: int, axis: Axis) -> Handle:
    x = x.contiguous()
    if axis.size == 1:
        return Handle(x)
    out = x.new_empty((rows, *x.shape[1:]))
    work = collective(out, x, group=axis.group, async_op=True)
    return Handle(out, work.wait, x)


def begin_gather(x: Tensor, axis: Axis) -> Handle:
    """Gather [n, ...] -> [n * size, ...]."""
    return _begin(_FLAT_GATHER, x, len(x) * axis.size, axis)


def begin_scatter(x: Tensor, axis: Axis) -> Handle:
    """Sum [n, ...] -> [n / size, ...]."""
    return _begin(_FLAT_SCATTER, x, len(x) // axis.size, axis)


def begin_all_to_all(
    x: Tensor, to: list[int], by: list[int], axis: Axis, room: int | None = None
) -> Handle:
    """Send the first `to[r]` rows to rank r, and receive `by[r]` from it.

    room: the rows of the result, if there are more than those that are received.
    """
    received = sum(by)
    out = x.new_empty((received if room is None else room, *x.shape[1:]))
    x = x[: sum(to)].contiguous()
    group = axis.group
    work = dist.all_to_all_single(out[:received], x, by, to, group=group, async_op=True)
    return Handle(out, work.wait, x)


def begin_exchange(x: Tensor, axis: Axis) -> Handle:
    """Exchange `size` equal blocks."""
    return _begin(dist.all_to_all_single, x, len(x), axis)


def begin_sum_in_order(parts: Tensor, axis: Axis, add: Callable[..., Tensor]) -> Handle:
    """Sum [size, ...] -> [...], added in rank order by `KernelSet.sum_deterministic`."""
    parts = parts.contiguous()
    if axis.size == 1:
        return Handle(parts[0])
    out = parts.new_empty(parts.shape[1:])
    exchange = begin_exchange(parts, axis)
    return Handle(out, lambda: add(exchange.wait(), out=out))


class _Collective(torch.autograd.Function):
    """A collective and its gradient. forward: `forth(x, axis)`. backward: `back(grad, axis)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, forth: Exchange, back: Exchange) -> Tensor:
        ctx.axis = axis
        ctx.back = back
        return forth(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grads[0], ctx.axis), None, None, None


def _gather(x: Tensor, axis: Axis) -> Tensor:
    return begin_gather(x, axis).wait()


def _scatter(x: Tensor, axis: Axis) -> Tensor:
    return begin_scatter(x, axis).wait()


def _to_heads(x: Tensor, axis: Axis) -> Tensor:
    blocks = x.unflatten(1, (axis.size, -1)).movedim(1, 0)
    return begin_exchange(blocks.flatten(0, 1), axis).wait()


def _to_tokens(x: Tensor, axis: Axis) -> Tensor:
    blocks = begin_exchange(x, axis).wait().unflatten(0, (axis.size, -1))
    return blocks.movedim(0, 1).flatten(1, 2)


def _own_slice(x: Tensor, axis: Axis) -> Tensor:
    return x.chunk(axis.size)[axis.rank].contiguous()


def _apply(x: Tensor, axis: Axis, forth: Exchange, back: Exchange) -> Tensor:
    if axis.size == 1:
        return x
    return _Collective.apply(x, axis, forth, back)


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    return _apply(x, axis, _gather, _scatter)


def gather_replicated(x: Tensor, axis: Axis) -> Tensor:
    return _apply(x, axis, _gather, _own_slice)


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    return _apply(x, axis, _scatter, _gather)


def gather_in_order(x: Tensor, axis: Axis, add: Callable[..., Tensor]) -> Tensor:
    """Gather as `all_gather`, with gradients summed by `add`, `KernelSet.sum_deterministic`."""

    def back(grad: Tensor, axis: Axis) -> Tensor:
        parts = grad.unflatten(0, (axis.size, -1))
        return begin_sum_in_order(parts, axis, add).wait()

    return _apply(x, axis, _gather, back)


def tokens_to_heads(x: Tensor, axis: Axis) -> Tensor:
    return _apply(x, axis, _to_heads, _to_tokens)


def heads_to_tokens(x: Tensor, axis: Axis) -> Tensor:
    return _apply(x, axis, _to_tokens, _to_heads)


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    return _apply(x, axis, sum_over, lambda grad, _: grad)


def gather_mirrored(x: Tensor, axis: Axis) -> Tensor:
    """Gather [2 n, ...] -> [2 n * size, ...]: first halves in rank order, second ones in reverse."""
    if axis.size == 1:
        return x
    first, second = x.contiguous().chunk(2)
    out = x.new_empty((len(x) * axis.size, *x.shape[1:]))
    half = len(out) // 2
    seconds = begin_gather(second, axis)
    firsts = _FLAT_GATHER(out[:half], first, group=axis.group, async_op=True)
    # reordered while the first halves arrive
    torch.cat(seconds.wait().chunk(axis.size)[::-1], out=out[half:])
    firsts.wait()
    return out


def sum_over(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum, without a gradient; `x` itself where the size is 1."""
    if axis.size == 1:
        return x
    # NCCL sums memory, whatever the strides
    x = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=axis.group)
    return x


def stack_over(x: Tensor, axis: Axis) -> Tensor:
    """Stack [...] -> [size, ...], without a gradient."""
    if axis.size == 1:
        return x[None]
    return _gather(x.detach()[None], axis)


class AsyncHostCopy:
    """Numbers on their way to the host."""

    def __init__(self, x: Tensor) -> None:
        self.numbers = x.to("cpu", non_blocking=True)
        self.copied = None
        if x.device.type != "cpu":
            stream = torch.get_device_module(x.device).current_stream(x.device)
            self.copied = stream.record_event()

    def wait(self) -> Any:
        if self.copied is not None:
            self.copied.synchronize()
        return self.numbers.tolist()


def gather_objects(value: Any, axis: Axis, device: torch.device | str = "cpu") -> list[Any]:
    """Return the values of all ranks, which pass through JSON."""
    text = json.dumps(value)
    if axis.size == 1:
        return [json.loads(text)]
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    sizes = stack_over(torch.tensor(len(data), device=device), axis).tolist()
    padded = torch.nn.functional.pad(data, (0, max(sizes) - len(data)))
    rows = stack_over(padded, axis).cpu()
    texts = [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]
    return [json.loads(text) for text in texts]


def stack_numbers(
    numbers: list[int], axis: Axis, device: torch.device | str = "cpu"
) -> list[list[int]]:
    """Return the numbers of all ranks, over gloo where the group has it."""
    if axis.group is None or "cpu:" in dist.get_backend_config(axis.group):
        device = "cpu"
    return stack_over(torch.tensor(numbers, device=device), axis).tolist()


def all_reduce_(tensors: list[Tensor], axis: Axis) -> None:
    """Sum the tensors in place, those of a dtype together."""
    if axis.size == 1:
        return
    for dtype in sorted({x.dtype for x in tensors}, key=str):
        same = [x for x in tensors if x.dtype == dtype]
        flat = torch.cat([x.reshape(-1) for x in same])
        dist.all_reduce(flat, group=axis.group)
        sums = flat.split([x.numel() for x in same])
        for x, summed in zip(same, sums, strict=True):
            x.copy_(summed.view_as(x))
