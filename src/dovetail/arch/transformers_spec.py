"""The sizes of a model of the transformers engine. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeGuard

from dovetail.arch.spec import ArchSpec
from dovetail.errors import ModelError, quoted


@dataclass(frozen=True)
class TransformersHeads:
    num_heads: int
    num_kv_heads: int


@dataclass(frozen=True, kw_only=True)
class TransformersSpec:
    """The sizes of the text backbone, as in `ArchSpec`, and what a model of it can do.

    native: runs on our layers, so by every layout. engine: the name of the engine that runs it.
    moe: the experts that our router chooses. missing_features: why a family that we know is not
    native, or "".
    """

    native: ClassVar[Literal[False]] = False
    engine: ClassVar[Literal["transformers"]] = "transformers"
    moe: ClassVar[None] = None

    family: str
    vocab_size: int
    width: int
    depth: int
    ffn_width: int
    attention: TransformersHeads
    tie_embeddings: bool
    ignored: tuple[str, ...] = ()
    missing_features: str = ""

    @property
    def layer_params(self) -> tuple[int, ...]:
        """An estimate of the weights of each layer."""
        shared = self.attention.num_kv_heads / self.attention.num_heads
        attention = int(self.width * self.width * (2 + 2 * shared))
        mlp = 3 * self.width * self.ffn_width
        return (attention + mlp,) * self.depth

    @property
    def head_params(self) -> int:
        return self.width * self.vocab_size

    def flops(self, length: int) -> float:
        products = 2.0 * (sum(self.layer_params) + self.head_params) * length
        return products + 2.0 * length * length * self.width * self.depth


AnySpec = ArchSpec | TransformersSpec
MAX_SIZE = 1 << 31
MAX_LAYERS = 1 << 16
LIMITS: Mapping[str, int] = {
    "vocab_size": MAX_SIZE, "hidden_size": MAX_SIZE, "num_hidden_layers": MAX_LAYERS,
    "num_attention_heads": MAX_SIZE,
}  # fmt: skip


def transformers_spec(config: Mapping[str, Any]) -> TransformersSpec:
    """Return the sizes in a config. ModelError for a missing or invalid one."""
    family = config.get("model_type")
    inner = config.get("text_config")
    text = dict(config)
    if isinstance(inner, Mapping):
        text |= inner
    text.setdefault("num_hidden_layers", _depth(text))
    problems = []
    for name, limit in LIMITS.items():
        value = text.get(name)
        if not _is_size(value, limit):
            problems.append(f"no {name}" if value is None else f"{name} {value!r:.40}")
    if not isinstance(family, str) or problems:
        problem = f"its config has {', '.join(problems)}" if problems else "that is no name"
        raise ModelError(
            f"config.json: model_type is {quoted(family)}; the transformers engine runs causal "
            f"language models, alone or inside a vision-language model, but {problem}"
        )
    width = text["hidden_size"]
    heads = text["num_attention_heads"]
    kv_heads = text.get("num_key_value_heads")
    ffn_width = text.get("intermediate_size")  # some families have a list
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return TransformersSpec(
        family=family,
        vocab_size=text["vocab_size"],
        width=width,
        depth=text["num_hidden_layers"],
        ffn_width=ffn_width if _is_size(ffn_width) else 4 * width,
        attention=TransformersHeads(heads, kv_heads if _is_size(kv_heads) else heads),
        tie_embeddings=bool(tied),
    )


def _depth(text: Mapping[str, Any]) -> Any:
    """Returns the number of layers of families that call it otherwise (longcat_flash, nemotron_h)."""
    kinds = text.get("layers_block_type")
    return len(kinds) if isinstance(kinds, list) else text.get("num_layers")


def _is_size(value: Any, limit: int = MAX_SIZE) -> TypeGuard[int]:
    return type(value) is int and 1 <= value <= limit
