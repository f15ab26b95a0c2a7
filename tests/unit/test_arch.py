"""Configs against transformers' own config classes: defaults, forms of RoPE, windows; and refusals by name."""

import json
from typing import Any

import pytest
import torch
from transformers import (
    ApertusConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.activations import ACT2FN

from dovetail.arch.registry import spec_from_config, validate_layout
from dovetail.arch.spec import ArchSpec
from dovetail.errors import LayoutError, ModelError
from dovetail.parallel.layout import Layout

CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
every_family = pytest.mark.parametrize("family", sorted(CONFIGS))
LINEAR, YARN = {"type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def raw(config: PreTrainedConfig, only_differences: bool = False) -> dict[str, Any]:
    """What save_pretrained writes into config.json."""
    return dict(json.loads(config.to_json_string(use_diff=only_differences)))


def read(family: str, **options: Any) -> ArchSpec:
    return spec_from_config({"model_type": family, **options})


def written(family: str, **options: Any) -> dict[str, Any]:
    """The same options after transformers has read and written them, every default spelled out."""
    return raw(CONFIGS[family].from_dict(json.loads(json.dumps(options))))


@every_family
def test_defaults_are_those_of_transformers(family: str) -> None:
    spec, config = read(family), CONFIGS[family]()
    spelled_out = raw(config)
    assert spec == spec_from_config(spelled_out)
    assert spec == spec_from_config(raw(config, only_differences=True))
    a = spec.attention
    assert spec.vocab_size == config.vocab_size
    assert (spec.width, spec.depth, spec.ffn_width) == (
        config.hidden_size,
        config.num_hidden_layers,
        config.intermediate_size,
    )
    assert (a.num_heads, a.num_kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    assert a.head_dim == spelled_out.get(
        "head_dim", config.hidden_size // config.num_attention_heads
    )
    assert spec.norm_eps == config.rms_norm_eps
    assert spec.tie_embeddings == config.tie_word_embeddings
    assert spec.rope.theta == config.rope_parameters["rope_theta"]
    assert spec.rope.max_positions == config.max_position_embeddings
    assert spec.windows == hf_windows(config)


@every_family
def test_absent_keys_take_their_defaults_one_by_one(family: str) -> None:
    """Every key but one set away from its default: the absent one reads as transformers' default."""
    away = {
        "vocab_size": 131, "hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 5,
        "num_attention_heads": 64, "num_key_value_heads": 16, "max_position_embeddings": 77,
        "rms_norm_eps": 1e-3, "tie_word_embeddings": True, "attention_bias": True,
        "mlp_bias": True, "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2, "head_dim": 6,
    }  # fmt: skip
    known = raw(CONFIGS[family]())
    away = {key: value for key, value in away.items() if key in known}
    for absent in away:
        options = {key: value for key, value in away.items() if key != absent}
        assert read(family, **options) == spec_from_config(written(family, **options)), absent
        assert read(family, **options) != read(family, **away), absent


def test_null_heads_and_head_dim_are_derived() -> None:
    for family in ("llama", "mistral"):
        config = {
            "hidden_size": 96,
            "num_attention_heads": 8,
            "num_key_value_heads": None,
            "head_dim": None,
        }
        a = read(family, **config).attention
        assert (a.num_kv_heads, a.head_dim) == (8, 12)
    shape = {"hidden_size": 96, "num_attention_heads": 8, "num_key_value_heads": 8}
    assert read("qwen2", **shape).attention.head_dim == 12
    assert read("qwen2", **shape, head_dim=32).attention.head_dim == 32
    assert read("qwen3", **shape).attention.head_dim == 128


@pytest.mark.parametrize(
    ("family", "options", "qkv", "o", "qk_norm", "mlp"),
    [
        ("llama", {}, False, False, False, False),
        ("llama", {"attention_bias": True}, True, True, False, False),
        ("llama", {"mlp_bias": True}, False, False, False, True),
        ("mistral", {}, False, False, False, False),
        ("qwen2", {}, True, False, False, False),
        ("qwen3", {}, False, False, True, False),
        ("qwen3", {"attention_bias": True}, True, True, True, False),
    ],
)
def test_biases_and_norms(
    family: str, options: dict[str, Any], qkv: bool, o: bool, qk_norm: bool, mlp: bool
) -> None:
    spec = read(family, **options)
    a = spec.attention
    assert (a.qkv_bias, a.o_bias, a.qk_norm, spec.mlp_bias) == (qkv, o, qk_norm, mlp)


ROPES: list[dict[str, Any]] = [
    {"rope_theta": 5e5},
    {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_theta": 7.0},
    {"rope_scaling": None, "rope_theta": 5e5},
    {"rope_scaling": {}, "rope_parameters": {"rope_theta": 5e5}},
    {"rope_scaling": LINEAR, "rope_theta": 5e5},
    {
        "rope_scaling": LINEAR,
        "rope_parameters": {"rope_type": "dynamic", "factor": 3.0},
        "rope_theta": 5e5,
    },
    {
        "rope_scaling": {
            "type": "linear",
            "rope_type": "dynamic",
            "factor": 2.0,
            "rope_theta": 9.0,
        },
        "rope_theta": 5.0,
    },
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64},
    {"rope_scaling": LLAMA3, "max_position_embeddings": 640},
    {
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64},
        "max_position_embeddings": 640,
    },
    {"rope_parameters": {**YARN, "rope_theta": 5e5, "original_max_position_embeddings": 64}},
    {
        "rope_scaling": {**YARN, "factor": None, "original_max_position_embeddings": 64},
        "max_position_embeddings": 640,
    },
    {
        "rope_scaling": {
            **YARN,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
            "truncate": False,
            "beta_fast": 20,
        }
    },
    {"rope_scaling": LINEAR, "partial_rotary_factor": 0.5},
    {"rope_scaling": {**LINEAR, "partial_rotary_factor": 0.25}, "partial_rotary_factor": 0.5},
]


@every_family
@pytest.mark.parametrize("rope", ROPES, ids=json.dumps)
def test_forms_of_rope_read_as_transformers_reads_them(family: str, rope: dict[str, Any]) -> None:
    """Our reading of the raw form equals our reading of transformers' normal form, and that one key by key."""
    ours, normal = read(family, **rope).rope, written(family, **rope)
    assert ours == spec_from_config(normal).rope
    r = normal["rope_parameters"]
    assert (ours.kind, ours.theta) == (r["rope_type"], r["rope_theta"])
    for key in r.keys() & {"low_freq_factor", "high_freq_factor", "beta_fast", "truncate"}:
        assert vars(ours)[key] == r[key]
    if r.get("factor"):
        assert ours.factor == r["factor"]
    limit = normal["max_position_embeddings"]
    assert ours.max_positions == r.get("original_max_position_embeddings", limit)


EMPTY = [{"rope_parameters": {}}, {"rope_parameters": {}, "rope_theta": 5.0}, {"rope_scaling": {}}]


@pytest.mark.parametrize("rope", [{}, *ROPES, *EMPTY, {"rope_scaling": LINEAR}], ids=json.dumps)
def test_families_with_a_theta_of_their_own(rope: dict[str, Any]) -> None:
    for kind in (ApertusConfig, MixtralConfig):
        normal = raw(kind.from_dict(json.loads(json.dumps(rope))))
        ours, r = read(kind.model_type, **rope).rope, normal["rope_parameters"]
        assert (ours.kind, ours.theta, ours.factor) == (
            r["rope_type"],
            r["rope_theta"],
            r.get("factor") or ours.factor,
        )


def test_the_row_that_is_not_trained() -> None:
    for given, row in ((None, None), (0, 0), (9, 9), (-1, 9), (-11, None), (10, None)):
        assert read("llama", vocab_size=10, pad_token_id=given).pad_id == row
    assert read("llama").pad_id is None
    assert read("apertus").pad_id == ApertusConfig().pad_token_id


def test_original_length_at_top_level_wins() -> None:
    """As in transformers, whose table functions let the top-level key override the one inside."""
    scaling = {**YARN, "original_max_position_embeddings": 88}
    assert read("llama", rope_scaling=scaling).rope.max_positions == 88
    assert (
        read("llama", rope_scaling=scaling, original_max_position_embeddings=77).rope.max_positions
        == 77
    )
    config = LlamaConfig.from_dict(
        {"rope_scaling": dict(scaling), "original_max_position_embeddings": 77}
    )
    config.standardize_rope_params()
    assert dict(config.rope_parameters or {})["original_max_position_embeddings"] == 77


def test_partial_rotation_spans_what_the_table_of_transformers_spans() -> None:
    assert (
        read("llama", head_dim=64, partial_rotary_factor=0.25, rope_scaling=LINEAR).rope.rotary_dim
        == 16
    )
    assert (
        read(
            "llama", head_dim=64, rope_parameters={**YARN, "partial_rotary_factor": 0.5}
        ).rope.rotary_dim
        == 32
    )
    assert read("llama", head_dim=64, partial_rotary_factor=0.25).rope.rotary_dim == 64


def hf_windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """The window of every layer, as transformers' modules take it from the config object."""
    depth = config.num_hidden_layers
    if isinstance(config, LlamaConfig):
        return (None,) * depth
    if isinstance(config, MistralConfig):
        return (config.sliding_window,) * depth
    kinds = {"sliding_attention": config.sliding_window, "full_attention": None}
    return tuple(kinds[kind] for kind in config.layer_types)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"layer_types": ["full_attention"] * 4, "sliding_window": None}),
        ("mistral", {}),
        ("mistral", {"sliding_window": 7}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 7, "layer_types": ["sliding_attention"] * 4}),
        *(
            (family, options)
            for family in ("qwen2", "qwen3")
            for options in (
                {"sliding_window": 7},
                {"sliding_window": 7, "use_sliding_window": True},
                {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0},
                {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 3},
                {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 1},
                {"use_sliding_window": True, "max_window_layers": 1},
                {
                    "sliding_window": 7,
                    "use_sliding_window": True,
                    "layer_types": ["full_attention"] * 4,
                },
                {
                    "sliding_window": 7,
                    "use_sliding_window": True,
                    "layer_types": [
                        "sliding_attention",
                        "full_attention",
                        "attention",
                        "sliding_attention",
                    ],
                },
                {"layer_types": ["full_attention"] * 4},
            )
        ),
    ],
    ids=str,
)
def test_windows_are_those_of_transformers(family: str, options: dict[str, Any]) -> None:
    options = {"num_hidden_layers": 4, **options}
    assert read(family, **options).windows == hf_windows(CONFIGS[family].from_dict(dict(options)))
    assert read(family, **options).windows == spec_from_config(written(family, **options)).windows


@every_family
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: silu"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1; supported: 0.0"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config .*gptq.*supported: none",
        ),
        ({"is_causal": False}, "is_causal is False; supported: true"),
        ({"per_layer_config": {"0": {}}}, "per_layer_config"),
        (
            {"rope_scaling": {"type": "proportional", "factor": 2.0}},
            "rope_type is 'proportional'; supported: default, ",
        ),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "short_factor is missing; supported: a list of 64",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
            "rope_parameters .*one flat set for all layers",
        ),
        (
            {"rope_scaling": {**LINEAR, "mrope_section": [1, 2]}},
            r"mrope_section is \[1, 2\]; supported: attention",
        ),
        (
            {"rope_scaling": {"type": "linear"}},
            "factor is missing; supported: a number of 1 or more",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 0.5}},
            "factor is 0.5; supported: a number of 1 or more",
        ),
        (
            {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}},
            "low_freq_factor is 4.0; supported: .*below",
        ),
        ({"rope_theta": None}, "rope_theta is None; supported: a number"),
        ({"rope_theta": 0}, "rope_theta is 0; supported: a number of 2 or more"),
        ({"head_dim": 9}, "rotated channels"),
        (
            {"rope_scaling": LINEAR, "partial_rotary_factor": 1.5},
            "partial_rotary_factor is 1.5; supported: an even",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types .*one entry for each of the 4 layers"),
        (
            {"layer_types": ["linear_attention"] * 4},
            "layer_types .*supported: full_attention and sliding_attention",
        ),
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads is 3; supported: a divisor of num_attention_heads=32",
        ),
        ({"hidden_size": "4096"}, "hidden_size is '4096'; supported: a whole number"),
        (
            {"num_attention_heads": 0},
            "num_attention_heads is 0; supported: a whole number of 1 or more",
        ),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"vocab_size": 1}, "vocab_size is 1; supported: a whole number of 2 or more"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; supported: a number above 0 and below 1"),
        (
            {"rms_norm_eps": 1e308},
            "rms_norm_eps is 1e.308; supported: a number above 0 and below 1",
        ),
        ({"eos_token_id": -1}, "eos_token_id is -1; supported: an id below vocab_size="),
        (
            {"eos_token_id": [2, 10**9]},
            "eos_token_id is .*1000000000.; supported: an id below vocab_size=",
        ),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'; supported: .* a list of them, or null"),
        ({"eos_token_id": {}}, "eos_token_id is {}; supported: .* a list of them, or null"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; supported: true or false"),
    ],
    ids=str,
)
def test_refusals_say_what_was_given_and_what_is_supported(
    family: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=f"{family} model.*{message}"):
        read(family, **{"num_hidden_layers": 4, **options})


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {"sliding_window": 4096}, "sliding_window is 4096; supported: null"),
        ("llama", {"layer_types": ["sliding_attention"] * 2}, "only full_attention in every layer"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        (
            "mistral",
            {"layer_types": ["full_attention"] * 2},
            "only sliding_attention in every layer",
        ),
        (
            "mistral",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "only sliding_attention in every layer",
        ),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "a sliding_window that is in use"),
        (
            "qwen3",
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4},
            "a sliding_window that is in use",
        ),
        ("qwen3", {"head_dim": None}, "head_dim is None"),
    ],
)
def test_refusals_of_one_family(family: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(family, **{"num_hidden_layers": 2, **options})


@every_family
def test_swish_is_another_name_of_silu(family: str) -> None:
    x = torch.linspace(-9, 9, 101)
    assert torch.equal(ACT2FN["swish"](x), ACT2FN["silu"](x))
    assert read(family, hidden_act="swish") == read(family)


@pytest.mark.parametrize("given", ["gpt2", None, ["llama"]])
def test_an_unknown_family_names_the_known_ones(given: object) -> None:
    with pytest.raises(
        ModelError,
        match=r"model_type is .*; known families: apertus, deepseek_v2, .* mixtral, .* qwen3_moe",
    ):
        spec_from_config({"model_type": given})


@pytest.mark.parametrize(
    "head", ["ForCausalLM", "ForTokenClassification", "ForSequenceClassification"]
)
def test_value_models_have_the_same_trunk(head: str) -> None:
    assert read("llama", architectures=[f"Llama{head}"], num_labels=1) == read("llama")


def small(**options: int) -> ArchSpec:
    heads = {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
    }
    return read("llama", vocab_size=131, **{**heads, **options})


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_degrees_that_divide(tp: int) -> None:
    validate_layout(small(), Layout(tp=tp, dp=3))


@pytest.mark.parametrize(
    ("options", "tp", "message"),
    [
        (
            {},
            3,
            "tp=3 does not fit .*8 attention heads .* multiple of 3; 2 key-value heads .* use one of tp=1, 2, 4, 8$",
        ),
        ({}, 16, "8 attention heads are not a multiple of 16; use one of tp=1, 2, 4, 8$"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 96},
            4,
            "6 key-value heads are neither a multiple nor a divisor of 4; use one of tp=1, 2, 3, 6, 12$",
        ),
        (
            {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
            2,
            "use one of tp=1, 3, 9$",
        ),
    ],
)
def test_degrees_that_cannot_divide(options: dict[str, int], tp: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        validate_layout(small(**options), Layout(tp=tp))


def test_gated_widths_are_padded_and_others_must_divide() -> None:
    validate_layout(small(intermediate_size=93), Layout(tp=8))
    with pytest.raises(
        LayoutError, match=r"intermediate_size 93 is not a multiple of 2; use one of tp=1$"
    ):
        validate_layout(read("apertus", intermediate_size=93), Layout(tp=2))


def test_a_config_with_senselessly_many_heads_is_answered_at_once() -> None:
    config = {"num_attention_heads": (1 << 40) + 1, "num_key_value_heads": 1, "head_dim": 2}
    with pytest.raises(
        LayoutError, match=r"attention heads are not a multiple of 2; use one of tp=1, 257$"
    ):
        validate_layout(read("llama", **config), Layout(tp=2))
