"""FSDP2 around a model: each block a group, its experts and untied ends apart, sums not means."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from dovetail.device import memory_of
from dovetail.engine.copying import copies_of
from dovetail.kernels.reference import wide
from dovetail.nn.grad_accumulation import GradAccumulator
from dovetail.nn.linear import Linear
from dovetail.nn.model import StagedModel
from dovetail.parallel.collectives import stack_over
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import placements_of
from dovetail.weights.shards import reshard

SHARE = 1 / 3  # of a device's memory, for what a step may keep whole to spare communication


@dataclass(frozen=True)
class ReshardPolicy:
    """What stays whole between the micro-batches of a step.

    gathered: parameters, so that they are gathered once a step; else by every pass, and so also in a step of one micro-batch
    whose blocks spare memory. summed: the sums of gradients, so that they are reduced once a step; else after every micro-batch.
    """

    gathered: bool
    summed: bool

    @classmethod
    def within(cls, elements: int, parameter: int, gradient: int, memory: int | None) -> "ReshardPolicy":
        """For so many elements, of so many bytes each, in a device's memory: both, gradients alone, or neither.

        None: nobody knows the memory, as on a host. There gathering is a copy within it; a sum spares more than that.
        """
        if memory is None:
            return cls(gathered=False, summed=True)
        summed = elements * gradient <= SHARE * memory
        return cls(gathered=elements * (parameter + gradient) <= SHARE * memory, summed=summed)

    @classmethod
    def of(cls, model: StagedModel, mesh: Mesh, dtype: torch.dtype) -> "ReshardPolicy":
        """That of a sharded model which computes in `dtype`. Collective over dp x cp, whose ranks must do the same.

        A pipeline's stages run many times a step and may add weight gradients after their last backward pass; one rank
        alone reduces nothing, and gathers by copying.
        """
        if mesh["pp"].size > 1 or mesh["fsdp"].size == 1:
            return cls(gathered=True, summed=True)
        first, memory = next(model.parameters()), memory_of(mesh.device)
        if memory is not None:
            everyone = stack_over(torch.tensor(memory, device=mesh.device), mesh["fsdp"])
            memory = int(everyone.min())
        elements = sum(parameter.numel() for parameter in model.parameters())
        return cls.within(elements, dtype.itemsize, wide(first.dtype).itemsize, memory)


def shard_over_data(model: StagedModel, mesh: Mesh, dtype: torch.dtype) -> None:
    """Shard the parameters' rows over dp x cp, in place. They compute in `dtype`, gradients are reduced in the wide one.

    One process is a group of one rank, not a second path. Gradients are summed: the engine divides once, by the count.
    Experts are groups of their own, over the ranks that hold the same ones. Blocks are gathered again in backward, but for
    pipeline stages, which run many times a step, and for one rank that computes in a dtype of its own: there a gather is
    a cast of the whole model, done once a step.
    """
    first = next(model.parameters())
    keep = mesh["pp"].size > 1 or (mesh["fsdp"].size == 1 and dtype != first.dtype)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if dtype != first.dtype else None,
        reduce_dtype=wide(first.dtype),
        cast_forward_inputs=False,
    )
    options: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": not keep}
    copies = {name: copies_of(mesh, name) for name in mesh.fsdp}
    for module in (*model.groups(), model):
        axes = {placement.sharded_over for placement in placements_of(module).values()}
        axis = "expert_fsdp" if axes == {"expert_fsdp"} and mesh["ep"].size > 1 else "fsdp"  # or else the same ranks
        fully_shard(module, mesh=mesh.fsdp[axis], **options)
        if mesh[axis].size > 1:  # the sum of one is itself, and FSDP would divide by 1.0 into a copy of every gradient
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if (between := copies[axis]) is not None:
                module.set_custom_all_gather(between.gather)
                module.set_custom_reduce_scatter(between.scatter)


def begin_gathers(model: StagedModel, mesh: Mesh) -> None:
    """Have the parameters that a forward pass needs first on their way, so that the host prepares its batch meanwhile.

    Collective. These are the gathers with which the pass would begin, in its order, and FSDP2 takes what has come: a rank that
    begins them late, or in the pass, still meets the others. Who raises before the pass drops them by `forget_step`.
    """
    for module in (model, *model.first_groups()):
        if isinstance(module, FSDPModule):
            # of one rank it is a copy, which the device makes at once; and `copying` has no gathers that nobody waits for
            module.unshard(async_op=mesh["fsdp"].size > 1 and copies_of(mesh, "fsdp") is None)


def forget_step(model: StagedModel, mesh: Mesh) -> None:
    """Drop what a step that raised has left: gradients, products that wait, what is gathered or on its way, and where FSDP2
    thinks it is.

    No collectives: the other ranks may be anywhere. FSDP2's own `reset_iter_state` is younger than torch 2.11, and keeps
    gradients that are not reduced; its last callback of a backward pass does the rest in every version.
    """
    model.wgrad_queue.clear()
    assert isinstance(model, FSDPModule)
    state = model._get_fsdp_state()
    context = state._state_ctx
    for module in model.modules():  # not FSDP2's list of them, which its first forward pass makes
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        if group is None:
            continue
        group._training_state = TrainingState.POST_BACKWARD  # or the callback would reduce what is there
        group.wait_for_unshard()  # or the next pass would take what was on its way, whatever the weights are by then
        for param in group.fsdp_params:
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None
    context.iter_forward_root = None
    model.set_is_last_backward(True)
    if context.all_states:
        state._root_post_backward_final_callback()
    if mesh["pp"].size == 1 and mesh["fsdp"].size > 1:
        model.set_reshard_after_forward(True)
    reshard(model)


def enable_grad_accumulation_fusion(model: StagedModel) -> None:
    """Have our layers' gradients summed in `.grad` of what FSDP gathers, in the dtype in which it reduces them.

    It then takes them as they are; left to itself it copies every one into such a sum. Foreign layers leave theirs to it.
    """
    accumulators = [module for module in model.modules() if isinstance(module, GradAccumulator)]
    if not any(isinstance(module, Linear) for module in accumulators):
        return
    for accumulator in accumulators:
        accumulator.wgrad_queue = model.wgrad_queue
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _use_fp32_grads(module)


def _use_fp32_grads(module: nn.Module) -> None:
    """Of the parameters that are gathered for this module: FSDP makes them in its next forward pass, and keeps them."""

    def widen(_module: nn.Module, _inputs: object) -> None:
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor):
                parameter.grad_dtype = wide(parameter.dtype)
        handle.remove()

    handle = module.register_forward_pre_hook(widen)
