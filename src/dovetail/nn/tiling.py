"""MLPs by tiles of tokens: what one keeps for its backward pass is its input, whatever its width.

Backward computes each tile again, so the MLP runs twice, also inside a block that is recomputed as a whole: a
checkpoint stops once it has all that was saved, and the input is saved before the MLP runs. Only where the block keeps
the MLP's output too (Gemma's norm after it) does recomputing it take a third run.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dovetail.errors import ModelError
from dovetail.kernels.reference import wide
from dovetail.nn.beside import DelayedWgrad
from dovetail.nn.linear import Linear
from dovetail.nn.saved_tensor import SavedTensor, keep
from dovetail.parallel.overlap import AsyncForward


class Tiled(nn.Module):
    """[..., t, D] -> [..., t, D], by tiles of tokens. Its parts are the MLP's own, under their names.

    Ranks of tp have equally many tokens, so equally many tiles and collectives.
    """

    def __init__(self, mlp: nn.Module, tokens: int) -> None:
        super().__init__()
        self.whole = (mlp,)  # in a tuple, so as not to be a part by that name
        self.tokens = tokens
        for name, part in mlp.named_children():
            self.add_module(name, part)

    def turns(self, x: Tensor, _beside: DelayedWgrad | None = None) -> AsyncForward[Tensor]:
        """As of any MLP; tiles take no turns, and put nothing off."""
        yield from ()
        return self(x)

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:  # or `keep` would save nothing
            x = x.detach().requires_grad_()
        x, kept = keep(x)
        y: Tensor = _Tiles.apply(x, self, kept, *self.summed_here())
        return y

    def summed_here(self) -> list[nn.Parameter]:
        """The parameters whose gradients the products inside do not add themselves."""
        adding = {id(part.weight) for part in self.modules() if isinstance(part, Linear) and part.adds is not None}
        return [weight for weight in self.parameters() if id(weight) not in adding]

    def tile(self, x: Tensor) -> Tensor:
        """Some tokens' share."""
        y: Tensor = self.whole[0](x)
        return y


class _Tiles(torch.autograd.Function):
    """forward: the MLP of every tile. backward: dx of every tile; dw summed over the tiles in the wide dtype, but for
    weights whose products add it themselves.

    The collectives of the MLP, both directions, once a tile.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, mlp: Tiled, kept: SavedTensor, *_: Tensor) -> Tensor:
        ctx.mlp, ctx.kept = mlp, kept
        y = torch.empty_like(x)
        for ours, tile in zip(y.split(mlp.tokens, -2), x.split(mlp.tokens, -2), strict=True):
            ours.copy_(mlp.tile(tile))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), x, mlp = grads, ctx.kept.take(), ctx.mlp
        _, _, _, *wanted = ctx.needs_input_grad
        weights = [p for p, one in zip(mlp.summed_here(), wanted, strict=True) if one]
        dx, dw = torch.empty_like(x), [torch.zeros_like(weight, dtype=wide(weight.dtype)) for weight in weights]
        for start in range(0, max(x.shape[-2], 1), mlp.tokens):
            rows = (..., slice(start, start + mlp.tokens), slice(None))
            with torch.enable_grad():
                tile = x[rows].detach().requires_grad_()
                y = mlp.tile(tile)
            dx[rows], *parts = torch.autograd.grad(y, (tile, *weights), dy[rows])
            for total, part in zip(dw, parts, strict=True):
                total += part
        found = iter(dw)
        given = (next(found).to(p.dtype) if one else None for p, one in zip(mlp.summed_here(), wanted, strict=True))
        return dx, None, None, *given


def tile_mlps(model: nn.Module, tokens: int, *, elsewhere: bool = False) -> None:
    """Have every dense MLP of a model's blocks run by tiles of that many tokens. Raises ModelError if there is none.

    elsewhere: other pipeline stages have some, so there need not be one here.
    """
    found = [
        (block, mlp) for block in model.modules() if (mlp := block._modules.get("mlp")) is not None and _dense(mlp)
    ]
    for block, mlp in found:
        block.add_module("mlp", Tiled(mlp, tokens))
    if not found and not elsewhere:
        raise ModelError(
            f"mlp_tile_tokens={tokens}, but the model has no MLP of up_proj and down_proj alone; leave it out or set 0"
        )


def _dense(mlp: nn.Module) -> bool:
    """Whether it is made of products that work on each token alone, and of nothing that has weights of its own."""
    products = (mlp._modules.get(name) for name in ("up_proj", "gate_up_proj", "down_proj"))
    return not mlp._parameters and sum(isinstance(p, (nn.Linear, Linear)) for p in products) == 2
