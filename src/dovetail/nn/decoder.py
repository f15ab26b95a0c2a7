"""The one decoder: embedding, blocks, norm, head. Families differ by their `ArchSpec`, actor and critic by the head.

Packed tokens T come in; between blocks activations are [t, D], t = T / tp.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dovetail.arch.spec import ArchSpec
from dovetail.batch import Loss, LossFn, MicroBatch
from dovetail.kernels.reference import Spans
from dovetail.kernels.registry import KernelSet
from dovetail.mesh import Mesh
from dovetail.nn.attention import Attention, Context, PackedContext
from dovetail.nn.embedding import VocabEmbedding
from dovetail.nn.heads import LMHead, ValueHead
from dovetail.nn.mlp import MLP
from dovetail.nn.norm import RMSNorm
from dovetail.nn.rope import rope_tables
from dovetail.tokenstats import TokenStats

Recompute = Literal["none", "full", "selective"]
Head = Literal["lm", "value", "value_without_bias"]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: ArchSpec, layer: int, mesh: Mesh, kernels: KernelSet) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.width, spec.norm_eps, kernels)
        self.self_attn = Attention(spec, layer, mesh, kernels)
        self.post_attention_layernorm = RMSNorm(spec.width, spec.norm_eps, kernels)
        self.mlp = MLP(spec, mesh, kernels)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Embedding, blocks and final norm: tokens [T] -> hidden states [t, D].

    `recompute` trades memory for time in the backward pass: full keeps only each block's input, selective also keeps
    the attention's output, so attention never runs twice.
    """

    def __init__(self, spec: ArchSpec, mesh: Mesh, kernels: KernelSet, recompute: Recompute = "none") -> None:
        super().__init__()
        self.recompute = recompute
        self.embed_tokens = VocabEmbedding(spec.vocab_size, spec.width, mesh)
        self.layers = nn.ModuleList(Block(spec, layer, mesh, kernels) for layer in range(spec.depth))
        self.norm = RMSNorm(spec.width, spec.norm_eps, kernels)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        run = self._runner()
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = run(layer, x, context)
        return self.norm(x)

    def _runner(self) -> Callable[..., Tensor]:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return lambda layer, x, context: layer(x, context)
        if self.recompute == "full":
            return partial(checkpoint, use_reentrant=False)
        contexts = partial(create_selective_checkpoint_contexts, _keep_attention)
        return partial(checkpoint, use_reentrant=False, context_fn=contexts)


class Decoder(nn.Module):
    """A whole model under HF's names: `model` is the trunk, `lm_head` or `score` the head. One call runs both.

    head = "lm": statistics or loss of the counted tokens; "value", "value_without_bias": values [T], or their loss.
    """

    def __init__(
        self,
        spec: ArchSpec,
        mesh: Mesh,
        kernels: KernelSet,
        head: Head = "lm",
        recompute: Recompute = "none",
    ) -> None:
        super().__init__()
        self.spec, self.kernels = spec, kernels
        self.model = Trunk(spec, mesh, kernels, recompute)
        if head == "lm":
            self.lm_head = LMHead(spec.vocab_size, spec.width, mesh, kernels)
            if spec.tie_embeddings:
                self.lm_head.weight = self.model.embed_tokens.weight
        else:
            self.score = ValueHead(spec.width, mesh, bias=head == "value")

    @property
    def head(self) -> LMHead | ValueHead:
        return self.lm_head if "lm_head" in self._modules else self.score

    def forward(self, micro: MicroBatch, loss: LossFn | None = None) -> TokenStats | Loss | Tensor:
        batch = micro.batch
        spans = Spans(batch.cu_seqlens, batch.lengths)
        cos, sin = rope_tables(self.spec.rope, batch.positions, batch.lengths, self.model.norm.weight.dtype)
        x = self.model(batch.tokens, PackedContext(cos, sin, spans, self.kernels))
        result: TokenStats | Loss | Tensor = self.head(x, micro, loss)
        return result


def _keep_attention(_context: object, op: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    """Save what attention kernels return; recompute everything else."""
    name = str(op)
    kept = "attention" in name or "varlen_attn" in name
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
