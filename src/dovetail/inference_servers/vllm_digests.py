"""Answers of vLLM's /weight_checker for decoders like Llama: SHA-256 of fused, sharded parameters."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from dovetail.weights.safetensors import memory_of

FUSED: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    dict.fromkeys(("q_proj", "k_proj", "v_proj"), ("qkv_proj", ("q_proj", "k_proj", "v_proj")))
    | dict.fromkeys(("gate_proj", "up_proj"), ("gate_up_proj", ("gate_proj", "up_proj")))
)
LAYER = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.(\w+)\.(weight|bias)")
VOCAB = ("model.embed_tokens.weight", "lm_head.weight")
WHOLE = re.compile(r"model\.(layers\.\d+\.(\w+_layernorm|self_attn\.[qk]_norm)|norm)\.weight")
VOCAB_MULTIPLE = 64  # vLLM pads with rows of zeros
EMPTY = hashlib.sha256().hexdigest()
PLACE = re.compile(r"dp(\d+):pp(\d+):pcp(\d+):tp(\d+):(.+)")


class ExpectedDigests:
    """SHA-256 of each shard that a server should hold. kv_heads: needed for q, k, v where tp > 1."""

    def __init__(self, tp_sizes: Iterable[int], kv_heads: int | None = None) -> None:
        self.tp_sizes = sorted(set(tp_sizes))
        self.kv_heads = kv_heads
        self._found: dict[tuple[int, int, str], str] = {}  # by tp, rank, parameter
        self._parts: dict[str, dict[str, Tensor]] = {}  # of fused parameters

    def watched(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self.add(name, tensor.detach())
            yield name, tensor

    def add(self, name: str, tensor: Tensor) -> None:
        match = LAYER.fullmatch(name)
        part = match[2] if match else ""
        if part in FUSED:
            target, parts = FUSED[part]
            whole = name.replace(part, target)
            waiting = self._parts.setdefault(whole, {})
            waiting[part] = tensor.cpu()
            if len(waiting) == len(parts):
                self._keep(whole, [waiting[one] for one in parts], 0)
                del self._parts[whole]
        elif name in VOCAB:
            padding = tensor.new_zeros(-len(tensor) % VOCAB_MULTIPLE, *tensor.shape[1:])
            self._keep(name, [torch.cat([tensor, padding])], 0)
        elif part in ("o_proj", "down_proj"):
            self._keep(name, [tensor], 1 if name.endswith(".weight") else None)
        elif WHOLE.fullmatch(name):
            self._keep(name, [tensor], None)

    def problems(self, tp: int, answer: Mapping[str, str]) -> tuple[list[str], set[str]]:
        """Returns wrong parameters, and unknown ones, also those that a CPU emptied."""
        wrong = []
        unknown = set()
        for key, digest in answer.items():
            place = PLACE.fullmatch(key)
            expected = self._found.get((tp, int(place[4]), place[5])) if place else None
            if expected is None or digest == EMPTY:
                unknown.add(key)
            elif expected != digest:
                wrong.append(key)
        return wrong, unknown

    def _keep(self, name: str, parts: Sequence[Tensor], dim: int | None) -> None:
        parts = [part.cpu() for part in parts]
        for tp in self.tp_sizes:
            if (
                tp > 1
                and name.endswith(("qkv_proj.weight", "qkv_proj.bias"))
                and self.kv_heads is None
            ):
                continue
            for rank in range(tp):
                cut = torch.cat(
                    [self._cut(part, i, dim, tp, rank, name) for i, part in enumerate(parts)]
                )
                self._found[tp, rank, name] = hashlib.sha256(
                    memory_of(cut.contiguous())
                ).hexdigest()

    def _cut(
        self, part: Tensor, index: int, dim: int | None, tp: int, rank: int, name: str
    ) -> Tensor:
        if dim is None:
            return part
        if index and ".qkv_proj." in name and self.kv_heads is not None and self.kv_heads < tp:
            return part.chunk(self.kv_heads, 0)[
                rank * self.kv_heads // tp
            ]  # a head on several ranks
        return part.chunk(tp, dim)[rank]
