"""FSDP2's gathers and sums by the copy engines of GPUs that reach each other: see `peers`.

Piece by piece, so that rings of slots are small: pieces wait for those before them, in streams of FSDP2's own.
"""

from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from dovetail.mesh import USES, Mesh
from dovetail.peers import Peers


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
    """The sum over the ranks of a part for each."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        size = self.peers.size
        most = self.peers.memory.slot_bytes // (size * input_tensor.itemsize)
        if async_op or op != type(op).SUM or not self.peers.takes(input_tensor[: size * most]):
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        parts = input_tensor.view(size, -1)
        for out, pieces in zip(output_tensor.split(most), parts.split(most, dim=1), strict=True):
            self.peers.scatter(out, list(pieces)).wait()
        return None


class Copies(NamedTuple):
    """What moves a group's parameters, and what its gradients: each with a ring of its own, for neither waits for the other."""

    gather: PeerGather
    scatter: PeerScatter


def copies_of(mesh: Mesh, name: str) -> Copies | None:
    """Those of an axis whose ranks reach each other; None of others."""
    gathers, sums = (mesh.rings.get(f"{name} {use}") for use in USES)
    return None if gathers is None or sums is None else Copies(PeerGather(gathers), PeerScatter(sums))
