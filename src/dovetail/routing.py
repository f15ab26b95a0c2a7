"""Which experts tokens go to: as a value that any pass can return and any other can take (router replay), and in flight."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class RoutingTrace:
    """The experts of T tokens in the layers that route, named by their numbers in the whole model.

    indices: int32 [T, M, K] for the M layers `layers`. valid: bool [T]; where it is False nothing is known, and a layer that
    is given the trace routes the token itself.
    """

    layers: tuple[int, ...]
    indices: Tensor
    valid: Tensor

    def __len__(self) -> int:
        return int(self.valid.shape[0])

    def of(self, layer: int) -> Tensor:
        """[T, K]: the experts in one layer."""
        return self.indices[:, self.layers.index(layer)]

    def map(self, fn: Callable[[Tensor], Tensor]) -> "RoutingTrace":
        """The same for other tokens, or elsewhere: `fn` acts on dim 0."""
        return replace(self, indices=fn(self.indices), valid=fn(self.valid))

    def padded(self, missing: int) -> "RoutingTrace":
        """Tokens at the end of which nothing is known."""
        return self.map(lambda x: F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)))

    @classmethod
    def cat(cls, traces: Iterable["RoutingTrace"]) -> "RoutingTrace":
        """One after the other; all have the same layers."""
        first, *others = traces
        assert all(other.layers == first.layers for other in others)
        indices = torch.cat([first.indices, *(other.indices for other in others)])
        return replace(first, indices=indices, valid=torch.cat([first.valid, *(other.valid for other in others)]))


@dataclass
class Routes:
    """The routing of one rank's tokens [t] of one micro-batch, while its layers are computed.

    given: experts to take instead of choosing. chosen: layer -> int32 [t, K]; what a layer chose at first stays, so that
    whatever computes it again (activation checkpointing) takes the same path, come what may of its logits.
    """

    given: RoutingTrace | None = None
    chosen: dict[int, Tensor] = field(default_factory=dict)

    def choose(self, layer: int, live: Callable[[], Tensor]) -> Tensor:
        """int64 [t, K]: the experts of every token. `live` ranks them by this layer's own scores."""
        if layer not in self.chosen:
            indices = live().to(torch.int32)
            if self.given is not None:
                indices = torch.where(self.given.valid[:, None], self.given.of(layer), indices)
            self.chosen[layer] = indices
        return self.chosen[layer].long()
