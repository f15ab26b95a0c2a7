"""An engine's interface to a model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dovetail.arch.spec import MoeSpec
from dovetail.arch.transformers_spec import AnySpec
from dovetail.batch.packed import PackedBatch
from dovetail.batch.routing import RoutingTrace
from dovetail.bounds import MAX_TEMPERATURE, MIN_TEMPERATURE
from dovetail.errors import ConfigError, DataError
from dovetail.kernels.registry import KernelSet
from dovetail.memory import reserve_device_memory
from dovetail.nn.activation_checkpoint import PinnedPool, Recompute
from dovetail.nn.adapter_options import AdapterOptions
from dovetail.nn.heads import LMHead, ValueHead
from dovetail.nn.layers import WgradQueue
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import placements_of

# forms of a layer's experts in a checkpoint: `weights.shards`
ExpertForm = Literal["fused", "transposed", "per_expert", "mixtral"]


@dataclass(frozen=True)
class StageRange:
    """Layers of a rank's stages, and whether they include the model's ends."""

    stages: tuple[range, ...]
    first: bool = True
    last: bool = True

    @classmethod
    def whole(cls, spec: AnySpec) -> "StageRange":
        return cls((range(spec.depth),))


class StagedModel(nn.Module):
    """Parameters under the checkpoint's names; head: `lm_head` or `score`. forward: `Decoder.forward`."""

    kernels: KernelSet
    is_critic: bool
    recompute: Recompute = "none"
    supports_dual_batch: bool = False  # takes micro-batches in halves

    def __init__(self, spec: AnySpec, mesh: Mesh, cut: StageRange, *, tied: bool) -> None:
        super().__init__()
        self.spec = spec
        self.mesh = mesh
        self.cut = cut
        self.tied = tied
        self.experts: ExpertForm = "fused"
        self.wgrad_queue = WgradQueue()
        self.adapter: AdapterOptions | None = None

    @property
    def head(self) -> LMHead | ValueHead:
        head = self._modules.get("lm_head") or self._modules["score"]
        assert isinstance(head, (LMHead, ValueHead))
        return head

    @property
    def moe(self) -> MoeSpec | None:
        return self.spec.moe

    @property
    def text(self) -> nn.Module:
        raise NotImplementedError

    def offload_activations(self, host: PinnedPool) -> None:
        """Keeps what recomputation starts from in host memory."""
        raise ConfigError(
            "offload_activations works with model.engine=native only; leave it out or set false"
        )

    def check(self, batch: PackedBatch) -> None:
        if batch.media:
            raise DataError(
                f"the batch has images or videos, but {self.spec.family} reads text only; leave "
                "them out"
            )
        if batch.tokens.device.type == "cpu":  # elsewhere it would wait
            self._check_ids(batch.tokens)
            self._check_ids(batch.targets, batch.mask)
            if not self.is_critic:
                _check_temperature(batch)
        if batch.routing is not None:
            self._check_routing(batch.routing)

    def _check_ids(self, ids: Tensor, mask: Tensor | None = None) -> None:
        """A sharded embedding gives zeros for an unknown id."""
        low, high = torch.aminmax(ids) if ids.numel() else (0, 0)
        if low >= 0 and high < self.spec.vocab_size:
            return None
        if mask is not None:
            return self._check_ids(ids[mask])
        raise DataError(
            f"the batch has ids {int(low)} to {int(high)}, but this {self.spec.family} model has "
            "ids 0 to "
            f"{self.spec.vocab_size - 1}; tokenize with the model's own tokenizer"
        )

    def _check_routing(self, trace: RoutingTrace) -> None:
        if (moe := self.moe) is None:
            lacks = f"this {self.spec.family} model has no experts of ours"
            raise DataError(f"the batch has routing, but {lacks}; take batch.with_routing(None)")
        if trace.layers != moe.numbers or trace.indices.shape[1:] != (len(moe.numbers), moe.top_k):
            at = f"layers {list(trace.layers)} with {trace.indices.shape[-1]} experts a token"
            own = f"layers {list(moe.numbers)} to {moe.top_k}"
            raise DataError(
                f"the batch has routing for {at}, this model routes in {own}; record it with the "
                "same one"
            )
        known = trace.indices[trace.valid]
        if known.numel() and not 0 <= int(known.min()) <= int(known.max()) < moe.num_experts:
            to = f"experts {int(known.min())} to {int(known.max())}"
            raise DataError(
                f"the batch has routing to {to} of {moe.num_experts}; was it stored in too "
                "narrow a type?"
            )

    def stored_name(self, name: str) -> str:
        return name

    def groups(self) -> Iterator[nn.Module]:
        """Modules that FSDP2 gathers as one, children first."""
        raise NotImplementedError

    def first_groups(self) -> Iterator[nn.Module]:
        """Groups that a forward pass gathers first, where their order is known."""
        return iter(())

    def materialize(self, device: torch.device) -> None:
        """Padding is 0, the rest uninitialized."""
        with torch.no_grad():
            stored = [
                param.to_local() if isinstance(param, DTensor) else param
                for param in self.parameters()
            ]
        reserve_device_memory([x.numel() * x.element_size() for x in stored], device)
        self.to_empty(device=device)
        params = dict(self.named_parameters())
        for name, placement in placements_of(self).items():
            if any(part.padding for split in placement.splits for part in split.parts):
                params[name].detach().zero_()


def _check_temperature(batch: PackedBatch) -> None:
    if "temperature" not in batch.fields:
        return
    counted = batch.fields["temperature"][batch.mask]
    fits = (counted >= MIN_TEMPERATURE) & (counted <= MAX_TEMPERATURE)
    if not bool(fits.all()):
        limits = f"{MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
        raise DataError(
            f"the batch has a token of temperature {float(counted[~fits][0]):g}; expected {limits}"
        )
