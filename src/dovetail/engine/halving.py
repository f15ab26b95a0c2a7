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

    def cuts(self, lengths: Sequence[Sequence[int]], multiple: int = 1, budget: int | None = None) -> bool:
        """Whether a micro-batch is cut, given its sequences' lengths in every replica: ranks of ep are in several of them, and
        exchange tokens once for each half.

        multiple: of tokens, to which each half is padded. budget: most tokens of both.
        """
        return self.least is not None and all(self._cuts(each, multiple, budget) for each in lengths)

    def _cuts(self, lengths: Sequence[int], multiple: int, budget: int | None) -> bool:
        if len(lengths) < 2:
            return False
        cut = middle(lengths)
        halves = [sum(lengths[:cut]), sum(lengths[cut:])]
        held = sum(-(-half // multiple) * multiple for half in halves)
        return self.least is not None and min(halves) >= self.least and (budget is None or held <= budget)
