"""Configs of mixtures of experts against transformers' own: defaults, which layers route, costs; and refusals by name."""

import json
from typing import Any

import pytest
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from dovetail.arch.registry import spec_from_config, validate_layout
from dovetail.arch.spec import ArchSpec
from dovetail.errors import LayoutError, ModelError
from dovetail.parallel.layout import Layout
from dovetail.pipeline.partition import partition
from tests.helpers.parity_configs import moe_configs

CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen3_moe": (Qwen3MoeConfig, {}),
    "qwen2_moe": (Qwen2MoeConfig, {}),
    "mixtral": (MixtralConfig, {}),
    "deepseek_v2": (DeepseekV2Config, {"num_experts_per_tok": 6}),  # transformers has no default
    "deepseek_v3": (DeepseekV3Config, {}),
}
HELD = {  # the name that transformers' modules ask for
    "qwen3_moe": "num_local_experts",
    "qwen2_moe": "num_experts",
    "mixtral": "num_local_experts",
    "deepseek_v2": "n_routed_experts",
    "deepseek_v3": "n_routed_experts",
}
every_family = pytest.mark.parametrize("family", sorted(CONFIGS))


def raw(config: PreTrainedConfig, only_differences: bool = False) -> dict[str, Any]:
    return dict(json.loads(config.to_json_string(use_diff=only_differences)))


def read(family: str, **options: Any) -> ArchSpec:
    return spec_from_config({"model_type": family, **CONFIGS[family][1], **options})


@every_family
def test_defaults_are_those_of_transformers(family: str) -> None:
    kind, needed = CONFIGS[family]
    config = kind(**needed)
    spec, c = read(family), config.to_dict()
    assert (
        spec
        == spec_from_config(raw(config))
        == spec_from_config(raw(config, only_differences=True))
    )
    assert (spec.width, spec.depth, spec.vocab_size) == (
        c["hidden_size"],
        c["num_hidden_layers"],
        c["vocab_size"],
    )
    assert (spec.norm_eps, spec.tie_embeddings) == (c["rms_norm_eps"], c["tie_word_embeddings"])
    assert spec.rope.theta == config.rope_parameters["rope_theta"]
    moe = spec.moe
    assert moe is not None
    assert moe.num_experts == next(
        c[k] for k in ("num_local_experts", "num_experts", "n_routed_experts") if k in c
    )
    assert (moe.top_k, moe.ffn_width) == (
        c["num_experts_per_tok"],
        c.get("moe_intermediate_size", c["intermediate_size"]),
    )
    assert (spec.attention.latent is not None) == family.startswith("deepseek")


@every_family
def test_both_names_of_the_number_of_experts_are_those_of_transformers(family: str) -> None:
    kind, needed = CONFIGS[family]
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        for options in (
            {name: 64},
            {"num_experts": 48, "num_local_experts": 48, "n_routed_experts": 48, name: 64},
        ):
            saved = raw(kind.from_dict({**needed, **options}))
            moe, normal = read(family, **options).moe, spec_from_config(saved).moe
            held = getattr(kind.from_dict({**needed, **options}), HELD[family])
            assert moe is not None and normal is not None, options
            assert moe.num_experts == normal.num_experts == held, options


def test_a_head_dim_that_says_what_is_known_is_read() -> None:
    """transformers writes the rotary table's, and gives V2's own to its modules whatever a file says."""
    for given in (None, 64):
        assert read("deepseek_v3", head_dim=given) == read("deepseek_v3")
    assert read("deepseek_v2", head_dim=2) == read("deepseek_v2")


def test_modules_that_predict_further_tokens_are_left_aside() -> None:
    """As many as the config says: transformers leaves whatever it does not know."""
    one, two = (f"model.layers.{61 + at}.*" for at in range(2))
    for options in (
        {},
        {"num_nextn_predict_layers": 1},
        {"num_nextn_predict_layers": 0},
        {"num_mtp_layers": None},
    ):
        assert read("deepseek_v3", **options).ignored == (one,)
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        assert read("deepseek_v3", **{name: 2}).ignored == (one, two)
        assert read("deepseek_v3", **raw(DeepseekV3Config(**{name: 2}))).ignored == (one, two)
    assert len(read("deepseek_v3", num_mtp_layers=1 << 61).ignored) < 100


def test_which_layers_route() -> None:
    assert read("deepseek_v3").is_moe(3) and not read("deepseek_v3").is_moe(2)
    spec = read("qwen2_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert spec.moe is not None and spec.moe.numbers == (1, 5)
    assert read("qwen3_moe", num_hidden_layers=2, mlp_only_layers=[0, 1]).moe is None


def test_windows_of_qwen2_moe_are_those_of_transformers() -> None:
    for options in (
        {"use_sliding_window": True, "max_window_layers": 3},
        {"use_sliding_window": False},
    ):
        config = Qwen2MoeConfig(num_hidden_layers=6, sliding_window=7, **options)
        expected = tuple(7 if kind == "sliding_attention" else None for kind in config.layer_types)
        spec = read("qwen2_moe", num_hidden_layers=6, sliding_window=7, **options)
        assert spec.windows == spec_from_config(raw(config)).windows == expected


def test_costs_count_the_chosen_experts() -> None:
    spec = spec_from_config(moe_configs()["deepseek_v3"].to_dict())
    attention = 24 * 64 + 8 * 20 * 24 + 64 * 28 + 8 * 28 * 20 + 64 * 8 * 16
    dense, routed = 3 * 64 * 96, 3 * 64 * (3 * 16 + 2 * 16) + 64 * 16
    assert spec.layer_params == (attention + dense, attention + routed, attention + routed)
    pairs = 10 * 10 * 3 / 2 * 8  # (query, key) of a sequence of ten, over layers and heads
    assert spec.flops(10) == 2 * 10 * (sum(spec.layer_params) + 64 * 131) + 2 * pairs * (20 + 16)


def test_the_cut_into_stages_knows_that_layers_differ() -> None:
    dense = {"mlp_only_layers": [0, 1], "intermediate_size": 49152, "vocab_size": 2}
    spec = read("qwen3_moe", num_hidden_layers=9, **dense)
    assert spec.layer_params[0] > 5 * spec.layer_params[-1]
    assert [len(stage) for stage in partition(spec, Layout(pp=2))] == [2, 7]


YARN = {"type": "yarn", "factor": 4.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (
            "qwen3_moe",
            {"num_experts_per_tok": 129},
            "num_experts_per_tok is 129; supported: at most 128",
        ),
        ("qwen3_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok is None"),
        (
            "deepseek_v3",
            {"n_group": 3},
            "n_group is 3; supported: a divisor of n_routed_experts=256",
        ),
        ("deepseek_v3", {"topk_group": 9}, "topk_group is 9; supported: at most n_group=8"),
        ("deepseek_v3", {"n_group": 256}, "groups of two experts or more"),
        ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 33}, "at most 32"),
        (
            "deepseek_v3",
            {"scoring_func": "softmax"},
            "scoring_func is 'softmax'; supported: sigmoid only",
        ),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        (
            "deepseek_v3",
            {"num_key_value_heads": 8},
            "num_key_value_heads is 8; supported: num_attention_heads=128",
        ),
        ("deepseek_v3", {"qk_rope_head_dim": 63}, "an even number of rotated channels"),
        ("deepseek_v3", {"head_dim": 2}, "head_dim is 2; supported: qk_rope_head_dim=64"),
        (
            "deepseek_v3",
            {"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5",
        ),
        (
            "deepseek_v2",
            {"rope_scaling": YARN, "partial_rotary_factor": 0.5},
            "partial_rotary_factor is 0.5; .* 1.0",
        ),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (
            "deepseek_v3",
            {"rope_scaling": "yarn"},
            "rope_scaling is 'yarn'; supported: one flat set for all layers",
        ),
        (
            "deepseek_v2",
            {"rope_parameters": [4.0]},
            r"rope_parameters is \[4.0\]; supported: one flat set",
        ),
        (
            "deepseek_v3",
            {"rope_scaling": {**YARN, "mscale_all_dim": "1"}},
            "mscale_all_dim is '1'; supported: a number",
        ),
        (
            "deepseek_v2",
            {"rope_scaling": {**YARN, "factor": [4]}},
            r"factor is \[4\]; supported: a number",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    family: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(family, **options)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            Layout(dp=3, ep=3),
            "ep=3 does not divide the 8 experts of this qwen3_moe model; use one of ep=1, 2, 4, 8",
        ),
        (Layout(tp=16), "attention heads are not a multiple of 16"),
    ],
)
def test_layouts_that_cannot_cut_experts(layout: Layout, message: str) -> None:
    spec = spec_from_config(moe_configs()["qwen3_moe"].to_dict())
    with pytest.raises(LayoutError, match=message):
        validate_layout(spec, layout)


def test_a_dense_model_has_no_experts_to_cut() -> None:
    with pytest.raises(LayoutError, match="ep=2 cuts experts, and this llama model has none"):
        validate_layout(spec_from_config({"model_type": "llama"}), Layout(dp=2, ep=2))
