"""What a model is, as a frozen value: everything that the decoder needs to know about a dense family. No torch here."""

from dataclasses import dataclass
from typing import Literal

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding. `kind` is the field's name for the scaling; the rest are its parameters."""

    kind: str = "default"  # one of ROPE_KINDS
    theta: float = 10000.0
    rotary_dim: int  # rotated channels of every head, its first ones: head_dim, or less for partial rotary
    factor: float = 1.0
    max_positions: int  # positions that the unscaled table was trained for
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # multiplies cos and sin


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention. `windows[l]`: layer l sees only that many latest tokens; None: all of them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class ArchSpec:
    """A dense decoder: pre-norm blocks of attention and an MLP (SiLU-gated, or plain with xIELU), RMSNorm, rotary positions."""

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
    norm_names: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")  # before attention, before the MLP
    tie_embeddings: bool = False

    @property
    def layer_params(self) -> int:
        """Weights of one layer's products."""
        a = self.attention
        ffn = (3 if self.activation == "swiglu" else 2) * self.ffn_width
        return self.width * (a.head_dim * (2 * a.num_heads + 2 * a.num_kv_heads) + ffn)

    @property
    def head_params(self) -> int:
        """Weights of the product that gives logits."""
        return self.width * self.vocab_size

    @property
    def linear_params(self) -> int:
        """Weights of the products that every token goes through, head included, table not."""
        return self.depth * self.layer_params + self.head_params

    def flops(self, length: int) -> float:
        """Floating-point operations of one forward pass over a sequence: 2 a weight and token, and causal attention."""
        a = self.attention
        seen = sum(min(length, window or length) for window in a.windows)  # keys of the last query, over the layers
        return 2.0 * self.linear_params * length + 2.0 * length * seen * a.num_heads * a.head_dim
