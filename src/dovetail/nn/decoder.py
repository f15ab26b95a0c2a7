"""The decoder: packed tokens [T] -> head. Between blocks activations are [t, D], t = T / (cp tp)."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dovetail.arch.spec import ArchSpec
from dovetail.batch.loss import Loss, LossFn, TokenStats
from dovetail.batch.micro import MicroBatch
from dovetail.kernels.registry import KernelSet
from dovetail.nn.activation_checkpoint import PinnedPool, Recompute, runner
from dovetail.nn.attention import Attention, BatchContext, Context, context_of
from dovetail.nn.heads import LMHead, ValueHead, gather_over_cp
from dovetail.nn.layers import RMSNorm, VocabEmbedding
from dovetail.nn.mla import LatentAttention
from dovetail.nn.mlp import make_mlp
from dovetail.nn.model import StagedModel, StageRange
from dovetail.nn.moe import Experts, MoE, Router
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.overlap import AsyncForward, interleave, lead_of_first_half

Head = Literal["lm", "value", "value_without_bias"]
# by `AttentionSpec.kind`
MIXERS: Mapping[str, type[Attention] | type[LatentAttention]] = {
    "attention": Attention,
    "latent_attention": LatentAttention,
}


class Block(nn.Module):
    def __init__(self, spec: ArchSpec, layer: int, mesh: Mesh, kernels: KernelSet) -> None:
        super().__init__()
        self.norm_names = spec.norm_names
        self.lead = lead_of_first_half(mesh["tp"])
        first, second = self.norm_names
        self.add_module(first, RMSNorm(spec.width, spec.norm_eps, kernels))
        mixer = MIXERS[spec.mixers[layer].kind]
        self.self_attn = mixer(spec, layer, mesh, kernels)
        self.add_module(second, RMSNorm(spec.width, spec.norm_eps, kernels))
        self.mlp = (
            MoE(spec, layer, mesh, kernels) if spec.is_moe(layer) else make_mlp(spec, mesh, kernels)
        )

    def forward(self, *arguments: Any) -> tuple[Tensor, ...]:
        """x [t, D] of a micro-batch or each half, and their contexts -> as many [t, D]."""
        if isinstance(self.mlp, MoE):
            # FSDP2 gathers a module's parameters around its forward. Experts are a group of their
            # own, so the whole block runs within theirs: one gather serves both halves.
            out: tuple[Tensor, ...] = self.mlp.experts(self._interleaved, *arguments)
            return out
        return self._interleaved(*arguments)

    def _interleaved(self, *arguments: Any) -> tuple[Tensor, ...]:
        *halves, contexts = arguments
        forwards = []
        for x, context in zip(halves, contexts, strict=True):
            forwards.append(self.forward_async(x, context))
        return interleave(forwards, self.lead)

    def forward_async(self, x: Tensor, context: Context) -> AsyncForward[Tensor]:
        first_name, second_name = self.norm_names
        first = self.get_submodule(first_name)
        second = self.get_submodule(second_name)
        assert isinstance(first, RMSNorm)
        assert isinstance(second, RMSNorm)
        x, normed = first.add_norm(x)
        out = yield from self.self_attn.forward_async(normed, context)
        x, normed = second.add_norm(x, out)
        routes = (context.routes,) if isinstance(self.mlp, MoE) else ()
        y = yield from self.mlp.forward_async(normed, *routes)
        return x + y


class Trunk(nn.Module):
    embed_tokens: VocabEmbedding
    norm: RMSNorm

    def __init__(
        self,
        spec: ArchSpec,
        mesh: Mesh,
        kernels: KernelSet,
        recompute: Recompute,
        cut: StageRange,
        *,
        tied: bool,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.host: PinnedPool | None = None
        if cut.first or (tied and cut.last):
            size = (spec.vocab_size, spec.width)
            self.embed_tokens = VocabEmbedding(*size, mesh, tied=tied, pad=spec.pad_id)
        self.layers = nn.ModuleDict()
        for stage in cut.stages:
            for layer in stage:
                self.layers[str(layer)] = Block(spec, layer, mesh, kernels)
        if cut.last:
            self.norm = RMSNorm(spec.width, spec.norm_eps, kernels)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        x = self.embed_tokens(tokens)
        layers = range(len(self.layers))
        (x,) = self.blocks(layers, (x,), (context,))
        return self.norm(x)

    def blocks(
        self, layers: Iterable[int], halves: tuple[Tensor, ...], contexts: tuple[Context, ...]
    ) -> tuple[Tensor, ...]:
        run: Callable[..., Any] = nn.Module.__call__
        if self.recompute != "none":
            run = runner(self.recompute, self.host)
        for layer in layers:
            block = self.layers[str(layer)]
            halves = run(block, *halves, contexts)
        return halves


class Decoder(StagedModel):
    """A model, or pipeline stages of it; both ends hold a tied table."""

    spec: ArchSpec
    supports_dual_batch = True

    def __init__(
        self,
        spec: ArchSpec,
        mesh: Mesh,
        kernels: KernelSet,
        head: Head = "lm",
        recompute: Recompute = "none",
        cut: StageRange | None = None,
    ) -> None:
        tied = head == "lm" and spec.tie_embeddings
        super().__init__(spec, mesh, cut or StageRange.whole(spec), tied=tied)
        self.rope = spec.rope
        self.kernels = kernels
        self.is_critic = head != "lm"
        self.recompute = recompute
        self.model = Trunk(spec, mesh, kernels, recompute, self.cut, tied=tied)
        if head == "lm" and (self.cut.last or (tied and self.cut.first)):
            self.lm_head = LMHead(spec.vocab_size, spec.width, mesh, kernels, tied=tied)
        if head != "lm" and self.cut.last:
            self.score = ValueHead(spec.width, mesh, bias=head == "value")
        if tied and (self.cut.first or self.cut.last):
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        micro: MicroBatch | None,
        loss: LossFn | None = None,
        stage: int = 0,
        x: Tensor | None = None,
    ) -> TokenStats | Loss | Tensor:
        """One of `cut.stages`: x [t, D] or None -> x for the next, or the head's result. No micro-batch: FSDP2's hooks alone."""
        if micro is None:
            return torch.zeros((), device=self.mesh.device, requires_grad=True)
        if x is None:
            x = self.embed(micro)
            if self.adapter is not None and torch.is_grad_enabled():
                x.requires_grad_()  # of a frozen table; the first block's adapters are trained
        x = self._blocks(micro, stage, x)
        if not (self.cut.last and stage == len(self.cut.stages) - 1):
            return x
        if loss is not None:
            loss = gather_over_cp(loss, micro, self.mesh["cp"])
        result: TokenStats | Loss | Tensor = self.head(self.model.norm(x), micro, loss)
        return result

    def embed(self, micro: MicroBatch) -> Tensor:
        """Returns the first stage's input [t, D]: rows of the table, or the embeddings given."""
        if micro.embeddings is None:
            return self.model.embed_tokens(micro.tokens)
        return micro.embeddings[micro.rows(self.mesh["tp"])]

    def _blocks(self, micro: MicroBatch, stage: int, x: Tensor) -> Tensor:
        layers = self.cut.stages[stage]
        if not micro.halves:
            context = self._context(micro, x)
            (x,) = self.model.blocks(layers, (x,), (context,))
            return x
        tp = self.mesh["tp"].size
        rows = [len(half) // tp for half in micro.halves]
        contexts = tuple(self._context(half, x) for half in micro.halves)
        halves = self.model.blocks(layers, x.split(rows), contexts)
        return torch.cat(halves)

    def _context(self, micro: MicroBatch, x: Tensor) -> BatchContext:
        return context_of(micro, self.rope, x.dtype, self.mesh, self.kernels)

    def hold_in(self, dtype: torch.dtype) -> "Decoder":
        """Routers' biases stay float32."""
        self.to(dtype)
        for module in self.modules():
            if isinstance(module, Router) and module.moe.bias:
                module.e_score_correction_bias = module.e_score_correction_bias.to(torch.float32)
        return self

    def offload_activations(self, host: PinnedPool) -> None:
        self.model.host = host

    @property
    def text(self) -> Trunk:
        return self.model

    def groups(self) -> Iterator[nn.Module]:
        yield from (module for module in self.model.modules() if isinstance(module, Experts))
        yield from self.model.layers.values()
        if not self.tied and self.cut.first:
            yield self.model.embed_tokens
        if not self.tied and self.cut.last:
            yield self.head

    def first_groups(self) -> Iterator[nn.Module]:
        if self.cut.first:
            yield self.model.embed_tokens
        for layer in self.cut.stages[0][:1]:
            yield self.model.layers[str(layer)]
