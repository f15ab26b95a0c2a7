"""FSDP2 around blocks, experts and untied ends; gradients are summed, not averaged."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from dovetail.device import memory_of
from dovetail.kernels.reference import wide
from dovetail.nn.layers import GradAccumulator, Linear
from dovetail.nn.model import StagedModel
from dovetail.parallel.collectives import stack_over
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import placements_of
from dovetail.weights.shards import reshard

MEMORY_SHARE = 1 / 3  # of a device's memory, unsharded


@dataclass(frozen=True)
class ReshardPolicy:
    """What stays unsharded between micro-batches: parameters (gathered), gradients (summed)."""

    gathered: bool
    summed: bool

    @classmethod
    def within(
        cls, elements: int, parameter: int, gradient: int, memory: int | None
    ) -> "ReshardPolicy":
        """memory: of a device; None: a host."""
        if memory is None:
            return cls(gathered=False, summed=True)
        summed = elements * gradient <= MEMORY_SHARE * memory
        return cls(
            gathered=elements * (parameter + gradient) <= MEMORY_SHARE * memory, summed=summed
        )

    @classmethod
    def of(cls, model: StagedModel, mesh: Mesh, dtype: torch.dtype) -> "ReshardPolicy":
        """Collective over dp x cp."""
        if mesh["pp"].size > 1 or mesh["fsdp"].size == 1:
            return cls(gathered=True, summed=True)
        first = next(model.parameters())
        memory = memory_of(mesh.device)
        if memory is not None:
            memories = stack_over(torch.tensor(memory, device=mesh.device), mesh["data"])
            memory = int(memories.min())
        elements = sum(parameter.numel() for parameter in model.parameters())
        return cls.within(elements, dtype.itemsize, wide(first.dtype).itemsize, memory)


def shard_over_data(model: StagedModel, mesh: Mesh, dtype: torch.dtype) -> None:
    """Shards a model in place over `fsdp`, its experts over `expert_fsdp`.

    It computes in `dtype` and reduces gradients in the wide one.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    first, *_ = trained or model.parameters()
    # stages run many times a step; one rank would only cast again
    keep = mesh["pp"].size > 1 or (mesh["fsdp"].size == 1 and dtype != first.dtype)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if dtype != first.dtype else None,
        reduce_dtype=wide(first.dtype),
        cast_forward_inputs=False,
    )
    options: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": not keep}
    for module in (*model.groups(), model):
        axes = {placement.sharded_over for placement in placements_of(module).values()}
        axis = "expert_fsdp" if axes == {"expert_fsdp"} and mesh["ep"].size > 1 else "fsdp"
        fully_shard(module, mesh=mesh.fsdp[axis], **options)
        if mesh[axis].size * mesh["dp_replicate"].size > 1:  # else FSDP copies every gradient
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def reset_after_failure(model: StagedModel, mesh: Mesh) -> None:
    """Drops what a failed step has left, without collectives.

    A step may fail between any two of FSDP2's hooks: parameters gathered or on their way, gradients
    summed but not reduced, and a root that waits for the end of its backward. FSDP2 has no public
    call to leave that state before torch 2.15 (`reset_iter_state`, which also drops gradients), so
    this sets by hand what its hooks would have set at the end of the step:

    _training_state     POST_BACKWARD: the root's callback must not reduce half a gradient
    wait_for_unshard    a gather in flight ends; else the next pass would compute with old weights
    unsharded_accumulated_grad, _unsharded_param.grad   sums over micro-batches go
    iter_forward_root   the next forward pass finds its root anew
    """
    model.wgrad_queue.clear()
    assert isinstance(model, FSDPModule)
    state = model._get_fsdp_state()
    resets = torch.__version__ >= "2.15"
    for module in model.modules():  # FSDP2 lists them in its first forward pass
        if not isinstance(module, FSDPModule):
            continue
        group = module._get_fsdp_state()._fsdp_param_group
        if group is None:
            continue
        if not resets:
            group._training_state = TrainingState.POST_BACKWARD
        group.wait_for_unshard()
        for param in group.fsdp_params:
            if not resets:
                param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None
    state._state_ctx.iter_forward_root = None
    model.set_is_last_backward(True)
    if state._state_ctx.all_states:
        model.reset_iter_state() if resets else state._root_post_backward_final_callback()
    if mesh["pp"].size == 1 and mesh["fsdp"].size > 1:
        model.set_reshard_after_forward(True)
    reshard(model)


def enable_grad_accumulation_fusion(model: StagedModel) -> None:
    """Our layers add weight gradients to `.grad` of gathered parameters, in the dtype that FSDP reduces."""
    accumulators = [module for module in model.modules() if isinstance(module, GradAccumulator)]
    if not any(isinstance(module, Linear) for module in accumulators):
        return
    for accumulator in accumulators:
        accumulator.wgrad_queue = model.wgrad_queue
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _use_wide_grads(module)


def _use_wide_grads(module: nn.Module) -> None:
    def widen(_module: nn.Module, _inputs: object) -> None:
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor):
                parameter.grad_dtype = wide(parameter.dtype)
        handle.remove()

    handle = module.register_forward_pre_hook(widen)
