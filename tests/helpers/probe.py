"""Whole gradients and parameters of a sharded engine, read from what the engine shows to everybody.

With beta1 = 0 AdamW's first moment is the last gradient itself: summed, divided by the count and clipped. So a real
`train_step` at learning rate 0 measures gradients, and production code needs no hook.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.engine.native import Engine
from dovetail.optim.optimizer import OptimSettings, Shard
from dovetail.parallel.placement import as_index
from tests.helpers.tolerances import max_abs

PROBE = OptimSettings(lr=0.0, betas=(0.0, 0.95), clip_norm=None)


def gradients(engine: Engine) -> tuple[dict[str, Tensor], float]:
    """The gradients of the last step of an engine made with `PROBE`, and by how much ranks disagree. Collective."""
    state = engine.optimizer.rule.state
    return assemble(engine, lambda shard: state[shard.local]["exp_avg"])


def parameters(engine: Engine) -> tuple[dict[str, Tensor], float]:
    """The parameters as they are held, and by how much ranks disagree on those that several hold. Collective."""
    return assemble(engine, lambda shard: shard.local.detach())


def assemble(engine: Engine, read: Callable[[Shard], Tensor]) -> tuple[dict[str, Tensor], float]:
    """Whole tensors under checkpoint names from the owners' regions; and the largest distance of a copy from them."""
    shards = engine.optimizer.shards
    mine = {
        region.checkpoint_name: region.checkpoint_shape
        for shard in shards
        for region in shard.regions
    }
    everyone: list[dict[str, tuple[int, ...]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    shapes = {name: shape for shapes in everyone for name, shape in shapes.items()}
    dtype = next(engine.model.parameters()).dtype
    whole = {name: torch.zeros(shapes[name], dtype=dtype) for name in sorted(shapes)}
    for shard in shards:
        for region in shard.regions:
            if region.owned:
                whole[region.checkpoint_name][as_index(region.checkpoint_slice)] = read(shard)[
                    as_index(region.local_slice)
                ]
    flat = torch.cat([tensor.flatten() for tensor in whole.values()])
    dist.all_reduce(flat)
    pieces = flat.split([tensor.numel() for tensor in whole.values()])
    whole = {name: piece.view(shapes[name]) for name, piece in zip(whole, pieces, strict=True)}
    stray = 0.0
    for shard in shards:
        for region in shard.regions:
            here, there = read(shard)[as_index(region.local_slice)], whole[region.checkpoint_name]
            stray = max(stray, max_abs(here - there[as_index(region.checkpoint_slice)]))
    return whole, stray
