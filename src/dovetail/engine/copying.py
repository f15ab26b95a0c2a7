"""FSDP2's gathers and sums by the copy engines of GPUs that reach each other: see `peers`.

Piece by piece, so that rings of slots are small: pieces wait for those before them, in streams of FSDP2's own.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from dovetail.mesh import USES, Mesh
from dovetail.peers import Peers, Piece


class PeerGather(DefaultAllGather):
    """A shard from every rank."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        most = self.peers.memory.slot_bytes // input_tensor.itemsize
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
        self._laid: Gradients | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 asks for memory to lay gradients down in, and then for that of their sum."""
        if self._laid is None:
            self._laid = Gradients.like(size, dtype, device)
            return self._laid
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self._laid, size = None, self.peers.size
        most = self.peers.memory.slot_bytes // (size * output_tensor.itemsize)
        if async_op or op != type(op).SUM or not self.peers.takes(output_tensor[:most], size):
            return super().__call__(output_tensor, together(input_tensor, size), group, op, async_op)
        for start in range(0, len(output_tensor), most):
            out = output_tensor[start : start + most]
            pieces = [list(pieces_of(input_tensor, rank, size, start, start + len(out))) for rank in range(size)]
            self.peers.scatter(out, pieces).wait()
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


def pieces_of(laid: Tensor, rank: int, size: int, start: int, stop: int) -> Iterator[Piece]:
    """What a rank is to get, from start to stop: of each gradient's rows its share, as FSDP2 divides them, one after the other.

    The last ranks may have fewer rows, or none; their places are as long.
    """
    each, at = (laid.each, 0) if isinstance(laid, Gradients) else ([laid], 0)
    for gradient in each:
        share = -(-len(gradient) // size) * gradient[0].numel()
        mine = gradient.view(-1)[rank * share : (rank + 1) * share]
        begin, end = max(start, at), min(stop, at + len(mine))
        if begin < end:
            yield Piece(begin - start, mine[begin - at : end - at])
        at += share


class Copies(NamedTuple):
    """What moves a group's parameters, and what its gradients: each with a ring of its own, for neither waits for the other."""

    gather: PeerGather
    scatter: PeerScatter


def copies_of(mesh: Mesh, name: str) -> Copies | None:
    """Those of an axis whose ranks reach each other; None of others."""
    gathers, sums = (mesh.rings.get(f"{name} {use}") for use in USES)
    return None if gathers is None or sums is None else Copies(PeerGather(gathers), PeerScatter(sums))
