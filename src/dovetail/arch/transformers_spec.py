"""Sizes of a model of the transformers engine. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from dovetail.arch.spec import ArchSpec
from dovetail.errors import ModelError, quoted


@dataclass(frozen=True, kw_only=True)
class TransformersHeads:
    num_heads: int
    num_kv_heads: int


@dataclass(frozen=True, kw_only=True)
class TransformersSpec:
    """Sizes of the text backbone, as in `ArchSpec`."""

    family: str
    vocab_size: int
    width: int
    depth: int
    ffn_width: int
    attention: TransformersHeads
    tie_embeddings: bool
    ignored: tuple[str, ...] = ()
    lacking: str = ""  # for the native engine

    @property
    def layer_params(self) -> tuple[int, ...]:
        """An estimate."""
        shared = self.attention.num_kv_heads / self.attention.num_heads
        return (
            int(self.width * self.width * (2 + 2 * shared)) + 3 * self.width * self.ffn_width,
        ) * self.depth

    @property
    def head_params(self) -> int:
        return self.width * self.vocab_size

    def flops(self, length: int) -> float:
        products = 2.0 * (sum(self.layer_params) + self.head_params) * length
        return products + 2.0 * length * length * self.width * self.depth


AnySpec = ArchSpec | TransformersSpec
MAX_SIZE = 1 << 31
MAX_LAYERS = 1 << 16


def transformers_spec(config: Mapping[str, Any]) -> TransformersSpec:
    """ModelError for a missing or invalid size."""
    family = config.get("model_type")
    inner = config.get("text_config")
    text = {**config, **(inner if isinstance(inner, Mapping) else {})}
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    limits = {"num_hidden_layers": MAX_LAYERS}
    wrong = [name for name in sizes if not _is_size(text.get(name), limits.get(name, MAX_SIZE))]
    if not isinstance(family, str) or wrong:
        values = [
            f"no {name}" if text.get(name) is None else f"{name} {text[name]!r:.40}"
            for name in wrong
        ]
        lacks = f"its config has {', '.join(values)}" if wrong else "that is no name"
        raise ModelError(
            f"config.json: model_type is {quoted(family)}; the transformers engine runs causal language models, alone or "
            f"inside a vision-language model, but {lacks}"
        )
    heads: int = text["num_attention_heads"]
    kv_heads = text.get("num_key_value_heads")
    ffn_width = text.get("intermediate_size")
    return TransformersSpec(
        family=family,
        vocab_size=text["vocab_size"],
        width=text["hidden_size"],
        depth=text["num_hidden_layers"],
        ffn_width=ffn_width
        if _is_size(ffn_width)
        else 4 * text["hidden_size"],  # some families have a list
        attention=TransformersHeads(
            num_heads=heads, num_kv_heads=kv_heads if _is_size(kv_heads) else heads
        ),
        tie_embeddings=bool(
            config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        ),
    )


def _is_size(value: Any, limit: int = MAX_SIZE) -> TypeGuard[int]:
    return type(value) is int and 1 <= value <= limit
