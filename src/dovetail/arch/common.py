"""Readers of config.json, as transformers 5 reads it; unsupported options are refused."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dovetail.arch.spec import ROPE_KINDS, ArchSpec, AttentionSpec, MoeSpec, RopeSpec
from dovetail.errors import ModelError, OptionError, quoted

Config = Mapping[str, Any]  # config.json
SILU = ("silu", "swish")  # one function
SCALED_FROM_ORIGINAL = ("llama3", "yarn", "longrope")
FULL = "full_attention"
SLIDING = "sliding_attention"
FULL_NAMES = (FULL, "attention")  # older configs have the second
DEFAULT_THETA = 10000.0
MAX_INTEGER = 1 << 62  # of torch's sizes
# transformers' defaults
BASE: Mapping[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
ROPE_KEYS = frozenset((
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor",
    "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor", "short_factor",
    "long_factor", "finetuned",  # the last has no effect
))  # fmt: skip


@dataclass(frozen=True)
class Fields:
    """A config with defaults. Its readers raise ModelError that names the key."""

    where: str
    config: Config
    defaults: Config

    def __contains__(self, key: str) -> bool:
        return key in self.config or key in self.defaults

    def get(self, key: str) -> Any:
        return self.config.get(key, self.defaults.get(key))

    def integer(self, key: str, least: int = 1) -> int:
        value = self.get(key)
        expected = f"a whole number of {least} or more"
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.refusal(key, expected)
        if value >= MAX_INTEGER:
            raise self.refusal(key, f"{expected}, below 2^62")
        return value

    def number(self, key: str, least: float = 0.0) -> float:
        value = self.get(key)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not least <= value < math.inf:
            raise self.refusal(key, f"a number of {least:g} or more")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def refusal(self, key: str, expected: str) -> ModelError:
        state = "is missing" if key not in self else f"is {quoted(self.get(key))}"
        return ModelError(f"{self.where}: {key} {state}; supported: {expected}")

    def lack(self, key: str, expected: str) -> OptionError:
        return OptionError(str(self.refusal(key, expected)))


def family_fields(family: str, config: Config, base: Config, **defaults: Any) -> Fields:
    return Fields(f"config.json of a {family} model", config, {**base, **defaults})


def renamed(config: Config, name: str, to: str) -> Config:
    """Return the config with `name` as an alias that overrides `to`."""
    if name not in config:
        return config
    return {**config, to: config[name]}


def dense_spec(
    c: Fields,
    *,
    windows: tuple[int | None, ...],
    mlp_bias: bool = False,
    activations: tuple[str, ...] = SILU,
    **attention: Any,
) -> ArchSpec:
    """Return the spec of a dense decoder. windows: by layer. attention: more of AttentionSpec.

    ModelError: no model; OptionError: an unsupported option.
    """
    _refuse_unsupported(c, activations)
    width = c.integer("hidden_size")
    heads = c.integer("num_attention_heads")
    kv_heads = heads if c.get("num_key_value_heads") is None else c.integer("num_key_value_heads")
    if heads % kv_heads:
        raise c.refusal("num_key_value_heads", f"a divisor of num_attention_heads={heads}")
    derived = c.get("head_dim") is None and c.defaults.get("head_dim") is None
    head_dim = width // heads if derived else c.integer("head_dim")
    attention |= {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    return ArchSpec(
        family=str(c.get("model_type")),
        vocab_size=_vocab_size(c),
        width=width,
        depth=c.integer("num_hidden_layers"),
        ffn_width=c.integer("intermediate_size"),
        norm_eps=_norm_eps(c),
        mixers=tuple(AttentionSpec(window=window, **attention) for window in windows),
        rope=rope_spec(c, head_dim),
        mlp_bias=mlp_bias,
        tie_embeddings=c.flag("tie_word_embeddings"),
        pad_id=_pad_id(c),
    )


def _vocab_size(c: Fields) -> int:
    """Returns the number of ids. ModelError for an eos_token_id that is none of them."""
    size = c.integer("vocab_size", least=2)
    ends = c.get("eos_token_id")
    for end in ends if isinstance(ends, list) else [ends]:
        if end is not None and not is_id(end, size):
            raise c.refusal(
                "eos_token_id", f"an id below vocab_size={size}, a list of them, or null"
            )
    return size


def is_id(value: object, vocab_size: int) -> bool:
    return type(value) is int and 0 <= value < vocab_size


def _norm_eps(c: Fields) -> float:
    """Returns what is added to mean squares; with 0 the norm of a zero vector is not finite."""
    eps = c.number("rms_norm_eps")
    if not 0 < eps < 1:
        raise c.refusal("rms_norm_eps", "a number above 0 and below 1")
    return eps


def _pad_id(c: Fields) -> int | None:
    """Return the row that transformers does not train."""
    pad = c.get("pad_token_id")
    rows = c.integer("vocab_size")
    if pad is None:
        return None
    if not isinstance(pad, int) or isinstance(pad, bool):
        raise c.refusal("pad_token_id", "a token id or null")
    return pad % rows if -rows <= pad < rows else None


def with_experts(spec: ArchSpec, c: Fields, moe: MoeSpec) -> ArchSpec:
    choice = moe.num_experts // moe.groups * moe.kept_groups
    if moe.top_k > choice:
        expected = f"at most {choice}, the experts that a token may choose from"
        raise c.refusal("num_experts_per_tok", expected)
    return replace(spec, moe=moe if any(moe.layers) else None)


def layer_windows(
    c: Fields, *, used: bool = True, first: int = 0, per_layer: bool = True
) -> tuple[int | None, ...]:
    """Return windows from layer `first` on, or by `layer_types`. Without `per_layer` they agree."""
    window = None
    if used and c.get("sliding_window") is not None:
        window = c.integer("sliding_window")
    depth = c.integer("num_hidden_layers")
    implied = [SLIDING if window is not None and layer >= first else FULL for layer in range(depth)]
    types = c.get("layer_types")
    if types is None:
        types = implied
    if not isinstance(types, list) or not all(isinstance(name, str) for name in types):
        raise c.refusal("layer_types", f"a list of {FULL} and {SLIDING}")
    types = [FULL if name in FULL_NAMES else name for name in types]
    if len(types) != depth:
        raise c.refusal("layer_types", f"one entry for each of the {depth} layers")
    if not set(types) <= {FULL, SLIDING}:
        raise c.refusal("layer_types", f"{FULL} and {SLIDING}")
    if not per_layer and types != implied:
        supported = f"only {implied[0]} in every layer, which is all that this family runs"
        raise c.lack("layer_types", supported)
    if SLIDING in types and window is None:
        supported = f"{SLIDING} only together with a sliding_window that is in use"
        raise c.refusal("layer_types", supported)
    return tuple(window if name == SLIDING else None for name in types)


def rope_fields(c: Fields, **defaults: Any) -> Fields:
    """Return the rotary parameters; the older `rope_scaling` wins."""
    key = "rope_scaling" if c.get("rope_scaling") else "rope_parameters"
    rope = c.get(key) or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise c.refusal(key, "one flat set for all layers")
    defaults["rope_type"] = rope.get("type", "default")
    return Fields(f"the rotary embedding in {c.where}", rope, defaults)


def rope_spec(c: Fields, head_dim: int) -> RopeSpec:
    """Return the rotary embedding. Rotary parameters win over top-level keys."""
    longest = c.integer("max_position_embeddings")
    max_positions = longest
    r = rope_fields(
        c,
        rope_theta=c.config.get("rope_theta", DEFAULT_THETA),
        partial_rotary_factor=c.get("partial_rotary_factor"),
        original_max_position_embeddings=longest,
        truncate=True,
    )
    kind = r.get("rope_type")
    if kind not in ROPE_KINDS:
        raise r.refusal("rope_type", ", ".join(ROPE_KINDS))
    for key in r.config.keys() - ROPE_KEYS:
        raise r.refusal(key, ", ".join(sorted(ROPE_KEYS)))
    if kind in SCALED_FROM_ORIGINAL:
        top_level = c.get("original_max_position_embeddings") is not None
        max_positions = (c if top_level else r).integer("original_max_position_embeddings")
    scaling = {}
    if kind != "default":
        scaling = _scaling(kind, r, longest / max_positions)
    rotary_dim = _rotary_dim(r, kind, head_dim)
    if kind == "longrope":
        scaling |= _longrope(r, rotary_dim // 2, scaling["factor"], max_positions)
    return RopeSpec(
        kind=kind,
        theta=r.number("rope_theta", least=2.0),  # yarn takes its logarithm
        rotary_dim=rotary_dim,
        max_positions=max_positions,
        **scaling,
    )


def _rotary_dim(r: Fields, kind: str, head_dim: int) -> int:
    """Return the rotated channels.

    An unscaled table ignores `partial_rotary_factor`, as in transformers.
    """
    dim = head_dim
    partial = kind != "default" and r.get("partial_rotary_factor") is not None
    if partial:
        dim = int(head_dim * r.number("partial_rotary_factor"))
    least = 4 if kind == "dynamic" else 2  # dim / (dim - 2)
    if dim % 2 or not least <= dim <= head_dim:
        bounds = f"at least {least} and at most head_dim={head_dim}"
        expected = f"an even number of rotated channels, {bounds}, not {dim}"
        if partial:
            raise r.refusal("partial_rotary_factor", expected)
        raise ModelError(f"{r.where}: supported: {expected}")
    return dim


def _scaling(kind: str, r: Fields, stretch: float) -> dict[str, Any]:
    """Return the fields of a scaled table.

    stretch: longest over original length, the default factor.
    """
    implied = kind in ("yarn", "longrope") and r.get("factor") is None
    factor = stretch if implied else r.number("factor", least=1.0)
    if kind == "llama3":
        low = r.number("low_freq_factor")
        high = r.number("high_freq_factor")
        if not 0 < low < high:
            expected = f"a number above 0 and below high_freq_factor={high:g}"
            raise r.refusal("low_freq_factor", expected)
        return {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    if kind == "yarn":
        return {
            "factor": factor,
            "beta_fast": r.number("beta_fast") if r.get("beta_fast") else 32.0,
            "beta_slow": r.number("beta_slow") if r.get("beta_slow") else 1.0,
            "truncate": bool(r.get("truncate")),
            "attention_factor": _yarn_attention_factor(r, factor),
        }
    return {"factor": factor}


def _longrope(r: Fields, count: int, factor: float, original: int) -> dict[str, Any]:
    """Return factors by frequency, and sqrt(1 + ln(factor) / ln(original)) (arXiv 2402.13753)."""
    factors: dict[str, Any] = {}
    for key in ("short_factor", "long_factor"):
        values = r.get(key)
        is_list = isinstance(values, list) and len(values) == count
        if not is_list or not all(type(x) in (int, float) and x > 0 for x in values):
            expected = f"a list of {count} numbers above 0, one for each pair of rotated channels"
            raise r.refusal(key, expected)
        factors[key] = tuple(map(float, values))
    if r.get("attention_factor") is not None:
        factors["attention_factor"] = r.number("attention_factor")
    elif factor > 1.0:
        if original < 2:
            raise r.refusal("original_max_position_embeddings", "a whole number of 2 or more")
        factors["attention_factor"] = math.sqrt(1 + math.log(factor) / math.log(original))
    return factors


def _yarn_attention_factor(r: Fields, factor: float) -> float:
    """Return 0.1 ln(factor) + 1 (YaRN, arXiv 2309.00071), or the ratio of mscales."""
    if r.get("attention_factor") is not None:
        return r.number("attention_factor")
    if r.get("mscale") and r.get("mscale_all_dim"):
        scale = yarn_mscale(r.number("mscale"), factor)
        return scale / yarn_mscale(r.number("mscale_all_dim"), factor)
    return yarn_mscale(1.0, factor)


def yarn_mscale(scale: float, factor: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _refuse_unsupported(c: Fields, activations: tuple[str, ...]) -> None:
    if c.get("hidden_act") not in activations:
        raise c.lack("hidden_act", activations[0])
    if c.get("attention_dropout"):
        raise c.lack("attention_dropout", "0.0; set it to 0.0, there is no dropout in RL training")
    if c.get("is_causal") is False:
        raise c.refusal("is_causal", "true")
    for key in ("quantization_config", "compression_config"):
        if c.get(key):
            remedy = "convert the checkpoint to float32 or bfloat16 weights first"
            raise c.refusal(key, f"none; {remedy}")
    if c.get("per_layer_config"):
        raise c.refusal("per_layer_config", "none: all layers alike, up to layer_types")
