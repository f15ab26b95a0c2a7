"""MLPs by tiles of tokens: only the input is saved; backward computes each tile again."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.errors import ModelError
from dovetail.kernels.reference import wide
from dovetail.nn.activation_checkpoint import SavedTensor, save_for_backward_early
from dovetail.nn.layers import GradAccumulator, Linear
from dovetail.parallel.overlap import AsyncForward


class Tiled(GradAccumulator):
    """An MLP that computes a tile of tokens at a time. Its children are the MLP's.

    The MLP itself is no child: a module under another name would rename the parameters, which
    checkpoints, FSDP2 and the optimizer know by name, or list them twice. `nn.Module` makes a child
    of every module that is an attribute, so the MLP lies in a tuple, and its parts are added here
    under the names that they had.
    """

    def __init__(self, mlp: nn.Module, tokens: int) -> None:
        super().__init__()
        self.mlp = (mlp,)
        self.tokens = tokens
        for name, part in mlp.named_children():
            self.add_module(name, part)

    def forward_async(self, x: Tensor) -> AsyncForward[Tensor]:
        yield from ()
        return self(x)

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:  # or nothing would be saved
            x = x.detach().requires_grad_()
        x, saved = save_for_backward_early(x)
        y: Tensor = _Tiles.apply(x, self, saved, *self.tile_weights())
        return y

    def tile_weights(self) -> list[nn.Parameter]:
        queued = set[int]()
        for part in self.modules():
            if isinstance(part, Linear) and (part.wgrad_queue or part.products.trains_adapters):
                named = part.named_parameters()
                queued.update(id(weight) for name, weight in named if name != "bias")
        return [weight for weight in self.parameters() if id(weight) not in queued]

    def tile(self, x: Tensor) -> Tensor:
        (mlp,) = self.mlp
        y: Tensor = mlp(x)
        return y


class _Tiles(torch.autograd.Function):
    """forward: each tile's MLP. backward: dx, and dw summed in the wide dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tiled: Tiled, saved: SavedTensor, *_: Tensor) -> Tensor:
        ctx.tiled = tiled
        ctx.saved = saved
        y = torch.empty_like(x)
        tokens = tiled.tokens
        tiles = zip(y.split(tokens, -2), x.split(tokens, -2), strict=True)
        for out, tile in tiles:
            out.copy_(tiled.tile(tile))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x = ctx.saved.get()
        tiled = ctx.tiled
        _, _, _, *needed = ctx.needs_input_grad
        pairs = list(zip(tiled.tile_weights(), needed, strict=True))
        weights = [weight for weight, need in pairs if need]
        dx = torch.empty_like(x)
        dw = [torch.zeros_like(weight, dtype=wide(weight.dtype)) for weight in weights]
        queue = tiled.wgrad_queue
        tokens = max(x.shape[-2], 1)
        with nullcontext() if queue is None else queue.immediate():
            for first in range(0, tokens, tiled.tokens):
                rows = (..., slice(first, first + tiled.tokens), slice(None))
                with torch.enable_grad():
                    tile = x[rows].detach().requires_grad_()
                    y = tiled.tile(tile)
                dx[rows], *parts = torch.autograd.grad(y, (tile, *weights), dy[rows])
                for total, part in zip(dw, parts, strict=True):
                    total += part
        totals = iter(dw)
        grads_of_weights = []
        for weight, need in pairs:
            grads_of_weights.append(next(totals).to(weight.dtype) if need else None)
        return dx, None, None, *grads_of_weights


def tile_mlps(model: nn.Module, tokens: int, *, elsewhere: bool = False) -> None:
    """ModelError if there is no dense MLP, here or `elsewhere`."""
    blocks = [block for block in model.modules() if _is_dense(block._modules.get("mlp"))]
    for block in blocks:
        mlp = block.get_submodule("mlp")
        block.add_module("mlp", Tiled(mlp, tokens))
    if not blocks and not elsewhere:
        raise ModelError(
            f"mlp_tile_tokens={tokens}, but the model has no MLP of up_proj and down_proj alone; "
            "set 0"
        )


def _is_dense(mlp: nn.Module | None) -> bool:
    if mlp is None:
        return False
    count = 0
    for name in ("up_proj", "gate_up_proj", "down_proj"):
        layer = mlp._modules.get(name)
        count += isinstance(layer, (nn.Linear, Linear))
    return count == 2 and not mlp._parameters
