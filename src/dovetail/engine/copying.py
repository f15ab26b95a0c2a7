"""FSDP2's gathers and sums by the copy engines of GPUs that reach each other: see `peers`.

Piece by piece, so that rings of slots are small: pieces wait for those before them, in streams of FSDP2's own. What a piece
asks of multiprocessors, to lay a shard down or to add up, waits for the end of a kernel of the computation that has all of
them. So pieces are large, and a layer has fewer of them than kernels.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from dovetail.parallel.mesh import USES, Mesh
from dovetail.parallel.peers import Peers, Piece


class PeerGather(DefaultAllGather):
    """A shard from every rank."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        most = self.peers.memory.ring.slot_bytes // input_tensor.itemsize
        if async_op or not self.peers.takes(input_tensor[:most]):
            return super().__call__(output_tensor, input_tensor, group, async_op)
        shards = output_tensor.view(self.peers.size, -1)
        for x, places in zip(input_tensor.split(most), shards.split(most, dim=1), strict=True):
            self.peers.gather(list(places), x).wait()
        return None


class PeerScatter(DefaultReduceScatter):
    """The sum over the ranks of a part for each, copied from where the gradients lie."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self._laid: Callable[[], Gradients | None] = lambda: None  # what was asked for first, while anybody has it

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 asks for memory to lay gradients down in, and then for that of their sum. Should an error come between and keep
        the first alive, the next gradients are laid down as FSDP2 would.
        """
        if self._laid() is None:
            laid = Gradients.like(size, dtype, device)
            self._laid = ref(laid)
            return laid
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self._laid, size = lambda: None, self.peers.size
        most = self.peers.memory.ring.slot_bytes // (size * output_tensor.itemsize)
        if async_op or op != type(op).SUM or not self.peers.takes(output_tensor[:most], size):
            return super().__call__(output_tensor, together(input_tensor, size), group, op, async_op)
        parts = parts_of(input_tensor, size)
        for start in range(0, len(output_tensor), most):
            out = output_tensor[start : start + most]
            self.peers.scatter(out, [cut(part, start, start + len(out)) for part in parts]).wait()
        return None


class Gradients(Tensor):
    """What FSDP2 takes for the one tensor in which it lays down a group's gradients, rank by rank; it keeps them as they are."""

    each: list[Tensor]

    @classmethod
    def like(cls, size: Sequence[int | torch.SymInt], dtype: torch.dtype, device: torch.device) -> "Gradients":
        made: Gradients = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        made.each = []
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the base has one that does nothing
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func == torch.ops.aten.view.default:
            whole, shape = args
            seen = cls.like(torch.empty(whole.shape, device="meta").view(shape).shape, whole.dtype, whole.device)
            seen.each = whole.each
            return seen
        if func == torch.ops.fsdp.chunk_cat.default:
            laid = kwargs["out"]
            laid.each[:] = (gradient.to(laid.dtype).contiguous() for gradient in args[0])
            return None
        raise NotImplementedError(f"layout.copy_engines: this version of torch asks for {func} of gradients")


def together(laid: Tensor, size: int) -> Tensor:
    """The tensor that was asked for."""
    if not isinstance(laid, Gradients):
        return laid
    found = torch.empty(laid.shape, dtype=laid.dtype, device=laid.device)
    torch.ops.fsdp.chunk_cat(laid.each, dim=0, num_chunks=size, out=found.view(size, -1))
    return found


def parts_of(laid: Tensor, size: int) -> list[list[Piece]]:
    """What each rank is to get: of each gradient's rows its share, as FSDP2 divides them, one after the other.

    The last ranks may have fewer rows, or none; their places are as long.
    """
    each = laid.each if isinstance(laid, Gradients) else [laid]
    parts: list[list[Piece]] = [[] for _ in range(size)]
    at = 0
    for gradient in each:
        share, flat = -(-len(gradient) // size) * gradient[0].numel(), gradient.view(-1)
        for part, mine in zip(parts, flat.split(share), strict=False):
            part.append(Piece(at, mine))
        at += share
    return parts


def cut(part: Sequence[Piece], start: int, stop: int) -> list[Piece]:
    """From start to stop."""
    found = []
    for i in range(max(0, bisect_right(part, start, key=lambda piece: piece.at) - 1), len(part)):
        at, numbers = part[i]
        if at >= stop:
            break
        if (mine := numbers[max(0, start - at) : stop - at]).numel():
            found.append(Piece(max(0, at - start), mine))
    return found


class Copies(NamedTuple):
    """What moves a group's parameters, and what its gradients: each with a ring of its own, for neither waits for the other."""

    gather: PeerGather
    scatter: PeerScatter


def copies_of(mesh: Mesh, name: str) -> Copies | None:
    """Those of an axis whose ranks reach each other; None of others."""
    gathers, sums = (mesh.rings.get(f"{name} {use}") for use in USES)
    return None if gathers is None or sums is None else Copies(PeerGather(gathers), PeerScatter(sums))
