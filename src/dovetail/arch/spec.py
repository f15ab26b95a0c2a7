"""The architecture of a decoder. No torch here."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
BY_LENGTH = ("dynamic", "longrope")  # frequencies change beyond `max_positions`


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary positions."""

    kind: str = "default"
    theta: float = 10000.0
    rotary_dim: int  # of a head, its first channels
    rows: tuple[int, ...] = ()  # by frequency: its row of positions [3, T]; else these are [T]
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
    """Experts, and how tokens choose them. layers: those with experts are true."""

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
        """The numbers of the layers with experts."""
        return tuple(layer for layer, routes in enumerate(self.layers) if routes)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """A layer's attention. window: the keys that a token sees; None: all."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    latent: LatentSpec | None = None

    @property
    def kind(self) -> str:
        """The name of its class in `nn.decoder.MIXERS`."""
        return "attention" if self.latent is None else "latent_attention"

    def cached_heads(self, tp: int) -> tuple[int, int]:
        """Returns the key-value heads of a rank of tp, and their channels: what a sampler keeps."""
        return max(1, self.num_kv_heads // tp), self.head_dim

    def flops(self, length: int) -> float:
        """Returns the operations of the scores and of the mean of values, of one sequence."""
        keys = min(length, self.window or length)  # of the last query
        channels = 2 * self.head_dim
        if self.latent is not None:
            channels = self.latent.key_dim + self.latent.v_dim
        return 1.0 * length * keys * self.num_heads * channels

    def params(self, width: int) -> int:
        """Return the weights of the projections of a layer."""
        heads = self.num_heads
        latent = self.latent
        if latent is None:
            return width * self.head_dim * (2 * heads + 2 * self.num_kv_heads)
        q_up = heads * latent.key_dim * (latent.q_rank or width)
        q_down = width * (latent.q_rank or 0)
        kv_up = heads * (latent.nope_dim + latent.v_dim) * latent.kv_rank
        kv_down = width * (latent.kv_rank + latent.rope_dim)
        return q_up + q_down + kv_up + kv_down + width * heads * latent.v_dim


@dataclass(frozen=True, kw_only=True)
class ArchSpec:
    """A pre-norm decoder with RMSNorm, rotary positions, and SwiGLU, xIELU or experts.

    mixers: what moves information between tokens, by layer.
    norm_names: of the norm before attention, and of the one before the MLP.
    native, engine and missing_features: as in `TransformersSpec`.
    """

    native: ClassVar[Literal[True]] = True
    engine: ClassVar[Literal["native"]] = "native"
    missing_features: ClassVar[str] = ""

    family: str
    vocab_size: int
    width: int
    depth: int
    ffn_width: int
    norm_eps: float
    mixers: tuple[AttentionSpec, ...]
    rope: RopeSpec
    mlp_bias: bool = False
    activation: Literal["swiglu", "xielu"] = "swiglu"
    norm_names: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    tie_embeddings: bool = False
    pad_id: int | None = None  # this row has no gradient
    moe: MoeSpec | None = None
    ignored: tuple[str, ...] = ()  # patterns of tensors

    @property
    def attention(self) -> AttentionSpec:
        """The first layer's attention, whose heads tp and cp divide."""
        return self.mixers[0]

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(mixer.window for mixer in self.mixers)

    def is_moe(self, layer: int) -> bool:
        return self.moe is not None and self.moe.layers[layer]

    @property
    def layer_params(self) -> tuple[int, ...]:
        """The weights of each layer's products for a token (active experts)."""
        num_products = 3 if self.activation == "swiglu" else 2
        mlps = [num_products * self.ffn_width * self.width] * self.depth
        moe = self.moe
        if moe is not None:
            active_width = moe.top_k * moe.ffn_width + moe.shared_width
            for layer in moe.numbers:
                mlps[layer] = self.width * (3 * active_width + moe.num_experts)
        mixers = [mixer.params(self.width) for mixer in self.mixers]
        return tuple(mixer + mlp for mixer, mlp in zip(mixers, mlps, strict=True))

    @property
    def head_params(self) -> int:
        return self.width * self.vocab_size

    @cached_property
    def linear_params(self) -> int:
        return sum(self.layer_params) + self.head_params

    @cached_property
    def _layers_of_mixer(self) -> Counter[AttentionSpec]:
        return Counter(self.mixers)

    def flops(self, length: int) -> float:
        """Return the operations of a forward pass: 2 per weight and token, and causal attention."""
        total = 2.0 * self.linear_params * length
        for mixer, count in self._layers_of_mixer.items():
            total += count * mixer.flops(length)
        return total
