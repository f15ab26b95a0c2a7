"""Rotary tables against transformers' own: every kind's frequencies, and what they do to queries."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from dovetail.arch.registry import spec_from_config
from dovetail.arch.spec import RopeSpec
from dovetail.errors import ModelError
from dovetail.kernels import reference
from dovetail.nn.attention import rope_tables
from dovetail.nn.rope import inverse_frequencies
from tests.helpers.tolerances import EXACT, OP_FP64, assert_close

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    {"rope_type": "linear", "factor": 3.7, "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    {"rope_type": "dynamic", "factor": 1.7, "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    {**LLAMA3, "factor": 8.0, "rope_theta": 5e5, "original_max_position_embeddings": 64},
    {
        **LLAMA3,
        "factor": 32.0,
        "rope_theta": 5e5,
        "original_max_position_embeddings": 100,
        "high_freq_factor": 9.0,
    },
    {
        **LLAMA3,
        "factor": 8.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 9,
        "partial_rotary_factor": 0.5,
    },
    {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 1e6,
        "original_max_position_embeddings": 64,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "factor": None,
        "rope_theta": 1e6,
        "original_max_position_embeddings": 64,
    },
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "rope_theta": 1e4,
        "beta_fast": 16.0,
        "beta_slow": 2,
        "truncate": None,
    },
    {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 1.3},
    {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e4, "mscale": 0.7},
    {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e4, "attention_factor": 1.25},
    {"rope_type": "yarn", "factor": 1.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5},
]
MAX_POSITIONS = 256
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
LONGROPES: list[dict[str, Any]] = [
    LONGROPE,
    {**LONGROPE, "factor": 2.0},
    {**LONGROPE, "factor": 1.0, "rope_theta": 5e5},
    {**LONGROPE, "attention_factor": 1.25},
    {**LONGROPE, "partial_rotary_factor": 0.5},
]


def with_factors(rope: dict[str, Any], head_dim: int = 32) -> dict[str, Any]:
    count = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    return {
        **rope,
        "short_factor": [1 + i / 7 for i in range(count)],
        "long_factor": [2.0 + i for i in range(count)],
    }


def hf_config(rope: dict[str, Any], head_dim: int = 32) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=MAX_POSITIONS,
        rope_parameters=dict(rope),
    )  # fmt: skip


def our_spec(rope: dict[str, Any], head_dim: int = 32) -> RopeSpec:
    shape = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": head_dim}
    limits = {"max_position_embeddings": MAX_POSITIONS}
    return spec_from_config(
        {"model_type": "llama", **shape, **limits, "rope_parameters": rope}
    ).rope


def name_of(rope: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in rope.items())


@pytest.mark.parametrize("rope", VARIANTS, ids=name_of)
@pytest.mark.parametrize("head_dim", [32, 128])
def test_frequencies_are_those_of_transformers(rope: dict[str, Any], head_dim: int) -> None:
    config, spec = hf_config(rope, head_dim), our_spec(rope, head_dim)
    module = LlamaRotaryEmbedding(config)
    assert_close(inverse_frequencies(spec, torch.float32, MAX_POSITIONS), module.inv_freq, EXACT)
    assert spec.attention_factor == module.attention_scaling
    if spec.kind != "default":
        expected, attention_factor = ROPE_INIT_FUNCTIONS[spec.kind](config)
        assert_close(inverse_frequencies(spec, torch.float32, MAX_POSITIONS), expected, EXACT)
        assert spec.attention_factor == attention_factor


@pytest.mark.parametrize("factor", [1.0, 2.0, 1.7])
@pytest.mark.parametrize(
    "length", [1, MAX_POSITIONS - 1, MAX_POSITIONS, MAX_POSITIONS + 1, 3 * MAX_POSITIONS]
)
def test_dynamic_frequencies_follow_the_length(factor: float, length: int) -> None:
    rope = {"rope_type": "dynamic", "factor": factor, "rope_theta": 10000.0}
    plain = our_spec({"rope_type": "default", "rope_theta": 10000.0})
    ours = inverse_frequencies(our_spec(rope), torch.float32, length)
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](hf_config(rope), seq_len=torch.tensor(length))
    assert_close(ours, expected, EXACT)
    scaled = length > MAX_POSITIONS
    assert torch.equal(ours, inverse_frequencies(plain, torch.float32)) != scaled


@pytest.mark.parametrize("length", [1, 63, 64, 65, 3 * MAX_POSITIONS])
@pytest.mark.parametrize("rope", LONGROPES, ids=name_of)
def test_longrope_tables_follow_the_length(rope: dict[str, Any], length: int) -> None:
    rope = with_factors(rope)
    config, spec, positions = hf_config(rope), our_spec(rope), torch.arange(length)
    expected, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=length)
    assert_close(inverse_frequencies(spec, torch.float32, length), expected, EXACT)
    assert spec.attention_factor == attention_factor
    x = torch.randn(length, 4, 32)
    half = spec.rotary_dim // 2
    for ours, theirs in zip(
        rope_tables(spec, positions, [length], torch.float32),
        LlamaRotaryEmbedding(config)(x, positions[None]),
        strict=True,
    ):
        assert_close(ours, theirs[0, :, :half], EXACT)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"short_factor": None}, "short_factor is None; supported: a list of 16 numbers above 0"),
        ({"long_factor": [1.0] * 15}, "long_factor is .*; supported: a list of 16 numbers above 0"),
        ({"long_factor": [0.0] * 16}, "long_factor is .*; supported: a list of 16 numbers above 0"),
        (
            {"original_max_position_embeddings": 1},
            "original_max_position_embeddings is 1; supported: .* 2 or more",
        ),
    ],
)
def test_longrope_that_makes_no_table_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        our_spec({**with_factors(LONGROPE), **given})


@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}, with_factors(LONGROPE)],
    ids=name_of,
)
def test_lengths_are_each_sequences_own(rope: dict[str, Any]) -> None:
    """A long sequence leaves the tables of a short one packed beside it bit for bit, and the other way round."""
    spec = our_spec(rope)

    def tables(lengths: list[int]) -> tuple[Tensor, Tensor]:
        positions = torch.cat([torch.arange(n) for n in lengths])
        return rope_tables(spec, positions, lengths, torch.float32)

    short, long = 40, 2 * MAX_POSITIONS
    for packed, alone_short, alone_long in zip(
        tables([short, long]), tables([short]), tables([long]), strict=True
    ):
        assert torch.equal(packed, torch.cat((alone_short, alone_long)))
        assert not torch.equal(alone_short, alone_long[:short])


@pytest.mark.parametrize(
    "rope", [v for v in VARIANTS if "partial_rotary_factor" not in v], ids=name_of
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotation_is_that_of_transformers(rope: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config, spec = hf_config(rope), our_spec(rope)
    num_tokens = 3 * MAX_POSITIONS if spec.kind == "dynamic" else 100
    x = torch.randn(num_tokens, 4, 32, dtype=dtype)
    positions = torch.arange(num_tokens)
    expected = hf_rotation(config, x, positions)
    cos, sin = rope_tables(spec, positions, [num_tokens], dtype)
    assert cos.dtype == sin.dtype == dtype
    ours = reference.rope(x, cos, sin)
    assert ours.dtype == dtype
    assert_close(ours, expected, EXACT)


def hf_rotation(config: LlamaConfig, x: Tensor, positions: Tensor) -> Tensor:
    """x [T, H, C] as the queries of one sequence in transformers."""
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    return apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)[0][
        0
    ].transpose(0, 1)


def test_partial_rotation_leaves_the_other_channels_alone() -> None:
    torch.manual_seed(0)
    x, positions = torch.randn(50, 4, 32), torch.arange(50)
    partial = our_spec(
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    )
    assert partial.rotary_dim == 16
    ours = reference.rope(x, *rope_tables(partial, positions, [50], torch.float32))
    assert torch.equal(ours[..., 16:], x[..., 16:])
    whole = hf_config({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, head_dim=16)
    assert_close(ours[..., :16], hf_rotation(whole, x[..., :16], positions), EXACT)


def test_float64_stays_float64() -> None:
    """Against complex multiplication in float64; a float32 step anywhere would show."""
    torch.manual_seed(0)
    spec = RopeSpec(theta=1e4, rotary_dim=8, max_positions=64)
    x, positions = torch.randn(60, 2, 8, dtype=torch.float64), torch.arange(60)
    turn = torch.outer(positions.double(), 1e4 ** (-torch.arange(4, dtype=torch.float64) / 4))
    turned = (
        torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(turn), turn)[:, None]
    )
    ours = reference.rope(x, *rope_tables(spec, positions, [60], torch.float64))
    assert ours.dtype == torch.float64
    assert_close(ours, torch.cat((turned.real, turned.imag), dim=-1), OP_FP64)


@pytest.mark.parametrize("kind", ["proportional", "su", "mrope"])
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    with pytest.raises(
        ModelError, match=f"'{kind}'; supported: default, linear, dynamic, llama3, yarn, longrope"
    ):
        our_spec({"rope_type": kind, "factor": 2.0})
    with pytest.raises(ModelError, match=kind):
        inverse_frequencies(RopeSpec(kind=kind, rotary_dim=8, max_positions=64), torch.float32)


def test_three_rows_of_positions_turn_the_channels_that_the_spec_says() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    module = Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(head_dim=16, rope_parameters=rope))
    positions = torch.randint(0, 90, (3, 7), generator=torch.Generator().manual_seed(0))
    expected = module(torch.zeros(1, dtype=torch.float32), positions[:, None])
    spec = RopeSpec(rotary_dim=16, max_positions=90, rows=(0, 1, 2, 0, 1, 2, 0, 0))
    chosen = torch.tensor([5, 0, 3])
    for at in (None, chosen):
        found = rope_tables(spec, positions, (7,), torch.float32, at)
        for ours, theirs in zip(found, expected, strict=True):
            rows = theirs[0, :, :8]
            assert_close(ours, rows if at is None else rows[at], EXACT)
