"""A decoder's architecture. No torch here."""

from dataclasses import dataclass
from typing import Literal

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
BY_LENGTH = ("dynamic", "longrope")  # frequencies change beyond `max_positions`


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    kind: str = "default"
    theta: float = 10000.0
    rotary_dim: int  # of a head, its first channels
    factor: float = 1.0
    max_positions: int
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()  # longrope, up to max_positions and beyond
    long_factor: tuple[float, ...] = ()
    attention_factor: float = 1.0  # of cos and sin


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention (arXiv 2405.04434). head_dim: the larger of key_dim and v_dim."""

    q_rank: int | None  # None: no latent
    kv_rank: int
    nope_dim: int  # channels without positions
    rope_dim: int
    v_dim: int
    stretch: float = 1.0  # of the scores: yarn's mscale squared
    interleaved: bool = True  # neighbors, not halves
    bias: bool = False  # of down projections

    @property
    def key_dim(self) -> int:
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    layers: tuple[bool, ...]
    num_experts: int
    top_k: int
    ffn_width: int  # of one expert
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = False  # weights sum to 1
    scale: float = 1.0
    bias: bool = False  # for the choice, not the weights
    groups: int = 1  # a token's experts come from the best `kept_groups`
    kept_groups: int = 1
    group_score: Literal["max", "top2"] = "max"  # its best expert's, or the sum of two
    shared_width: int = 0  # of all together
    shared_name: str = "shared_experts"
    shared_gate: bool = False

    @property
    def numbers(self) -> tuple[int, ...]:
        """Layers with experts."""
        return tuple(layer for layer, routes in enumerate(self.layers) if routes)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """windows: by layer; None: full."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...]
    latent: LatentSpec | None = None

    def params(self, width: int) -> int:
        heads = self.num_heads
        latent = self.latent
        if latent is None:
            return width * self.head_dim * (2 * heads + 2 * self.num_kv_heads)
        q = heads * latent.key_dim * (latent.q_rank or width) + width * (latent.q_rank or 0)
        kv = (
            width * (latent.kv_rank + latent.rope_dim)
            + heads * (latent.nope_dim + latent.v_dim) * latent.kv_rank
        )
        return q + kv + width * heads * latent.v_dim


@dataclass(frozen=True, kw_only=True)
class ArchSpec:
    """Pre-norm, with RMSNorm, rotary positions, and SwiGLU, xIELU or experts."""

    family: str
    vocab_size: int
    width: int
    depth: int
    ffn_width: int
    norm_eps: float
    attention: AttentionSpec
    rope: RopeSpec
    mlp_bias: bool = False
    activation: Literal["swiglu", "xielu"] = "swiglu"
    norm_names: tuple[str, str] = (
        "input_layernorm",
        "post_attention_layernorm",
    )  # before attention, before the MLP
    tie_embeddings: bool = False
    pad_id: int | None = None  # this row has no gradient
    moe: MoeSpec | None = None
    ignored: tuple[str, ...] = ()  # patterns of tensors

    def is_moe(self, layer: int) -> bool:
        return self.moe is not None and self.moe.layers[layer]

    @property
    def layer_params(self) -> tuple[int, ...]:
        """Weights of products per token (active experts)."""
        attention = self.attention.params(self.width)
        dense = self.width * (3 if self.activation == "swiglu" else 2) * self.ffn_width
        moe = self.moe
        routed = 0
        if moe is not None:
            routed = self.width * (
                3 * (moe.top_k * moe.ffn_width + moe.shared_width) + moe.num_experts
            )
        return tuple(
            attention + (routed if self.is_moe(layer) else dense) for layer in range(self.depth)
        )

    @property
    def head_params(self) -> int:
        return self.width * self.vocab_size

    @property
    def linear_params(self) -> int:
        return sum(self.layer_params) + self.head_params

    def flops(self, length: int) -> float:
        """A forward pass: 2 per weight and token, and causal attention."""
        a = self.attention
        seen = sum(
            min(length, window or length) for window in a.windows
        )  # keys of the last query, over the layers
        channels = (
            a.latent.key_dim + a.latent.v_dim if a.latent else 2 * a.head_dim
        )  # scores, and the mean of values
        return 2.0 * self.linear_params * length + 1.0 * length * seen * a.num_heads * channels
