"""Which micro-batches are computed as two halves in turns, each while the other waits for collectives (`nn.turns`)."""

from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.dealing import middle
from dovetail.mesh import Mesh
from dovetail.nn.decoder import Decoder
from dovetail.nn.model import StagedModel

LEAST = 2048  # tokens of a half: products of fewer lose more than their collectives cost


@dataclass(frozen=True)
class Halving:
    """least: tokens of the smaller half; None: no micro-batch is cut."""

    least: int | None

    @classmethod
    def of(cls, model: StagedModel, mesh: Mesh, in_turns: bool | None) -> "Halving":
        """in_turns: whether to cut at all, then whatever the size; None: on accelerators, where tp has collectives, and ep none.

        Experts over ep in turns were slower where they were measured: docs/performance.md.
        """
        if in_turns is None:
            pays = isinstance(model, Decoder) and mesh["tp"].size > 1 and mesh["ep"].size == 1
            return cls(LEAST if pays and mesh.device.type != "cpu" else None)
        return cls(1 if in_turns and isinstance(model, Decoder) else None)

    def cuts(self, lengths: Sequence[Sequence[int]]) -> bool:
        """Whether a micro-batch is cut, given its sequences' lengths in every replica: ranks of ep are in several of them, and
        exchange tokens once for each half.
        """
        return self.least is not None and all(smaller_half(each) >= self.least for each in lengths)


def smaller_half(lengths: Sequence[int]) -> int:
    """Its tokens; 0 where sequences cannot be parted."""
    if len(lengths) < 2:
        return 0
    first = sum(lengths[: middle(lengths)])
    return min(first, sum(lengths) - first)
