"""What planning needs to know of a model that our decoder does not describe: sizes, from any config.json. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from dovetail.arch.spec import ArchSpec
from dovetail.errors import ModelError, quoted


@dataclass(frozen=True, kw_only=True)
class TransformersHeads:
    """Heads of the text backbone's attention."""

    num_heads: int
    num_kv_heads: int


@dataclass(frozen=True, kw_only=True)
class TransformersSpec:
    """A model of transformers' own code: the sizes of its text backbone, under the names that `ArchSpec` has for them."""

    family: str
    vocab_size: int
    width: int
    depth: int
    ffn_width: int
    attention: TransformersHeads
    tie_embeddings: bool
    ignored: tuple[str, ...] = ()
    lacking: str = ""  # why the native engine, which knows the family, does not run the model

    @property
    def layer_params(self) -> tuple[int, ...]:
        """About the weights of each layer's products: four square projections and a gated feed-forward block."""
        shared = self.attention.num_kv_heads / self.attention.num_heads
        return (int(self.width * self.width * (2 + 2 * shared)) + 3 * self.width * self.ffn_width,) * self.depth

    @property
    def head_params(self) -> int:
        return self.width * self.vocab_size

    def flops(self, length: int) -> float:
        """About the operations of one forward pass over a sequence, as `ArchSpec.flops` counts them."""
        products = 2.0 * (sum(self.layer_params) + self.head_params) * length
        return products + 2.0 * length * length * self.width * self.depth


AnySpec = ArchSpec | TransformersSpec
MOST, MOST_LAYERS = 1 << 31, 1 << 16  # channels or words; layers, since costs are told for each


def transformers_spec(config: Mapping[str, Any]) -> TransformersSpec:
    """The sizes in a raw config.json, or in its `text_config`. Raises ModelError where one is missing or none."""
    family = config.get("model_type")
    inner = config.get("text_config")
    text = {**config, **(inner if isinstance(inner, Mapping) else {})}
    wanted = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    most = {"num_hidden_layers": MOST_LAYERS}
    wrong = [name for name in wanted if not _counts(text.get(name), most.get(name, MOST))]
    if not isinstance(family, str) or wrong:
        told = [f"no {name}" if text.get(name) is None else f"{name} {text[name]!r:.40}" for name in wrong]
        lacks = f"its config has {', '.join(told)}" if wrong else "that is no name"
        raise ModelError(
            f"config.json: model_type is {quoted(family)}; the transformers engine runs causal language models, alone or "
            f"inside a vision-language model, but {lacks}"
        )
    heads: int = text["num_attention_heads"]
    kv_heads, ffn_width = text.get("num_key_value_heads"), text.get("intermediate_size")
    return TransformersSpec(
        family=family,
        vocab_size=text["vocab_size"],
        width=text["hidden_size"],
        depth=text["num_hidden_layers"],
        ffn_width=ffn_width if _counts(ffn_width) else 4 * text["hidden_size"],  # some families have one for each layer
        attention=TransformersHeads(num_heads=heads, num_kv_heads=kv_heads if _counts(kv_heads) else heads),
        tie_embeddings=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
    )


def _counts(value: Any, most: int = MOST) -> TypeGuard[int]:
    """Whether it is a number of things, at least one, that memory could hold."""
    return type(value) is int and 1 <= value <= most
