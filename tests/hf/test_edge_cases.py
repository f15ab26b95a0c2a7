"""Cases that comparable systems got wrong, by their numbers in our list; each is compared with plain transformers."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen3_5Config,
)

from bench.models import one_rank
from dovetail.arch.transformers_spec import transformers_spec
from dovetail.batch.loss import TokenStats
from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.errors import CheckpointError, DataError, ModelError
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.hf.head import logit_scale
from dovetail.hf.transformers_model import TransformersModel, make_model
from dovetail.kernels.registry import KernelSet
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from tests.helpers.families import IMAGE, TEXT, WORDS, _make
from tests.helpers.harness import run
from tests.helpers.hf_parity import check, figures
from tests.helpers.parity_configs import VOCAB, tiny_model
from tests.helpers.parity_reference import objective, write_outputs
from tests.helpers.probe import PROBE, gradients
from tests.helpers.sights import (
    CLIP,
    SMALL,
    STILL,
    TALL,
    WIDE,
    Rows,
    alone,
    logits_of,
    save_sighted,
    sights,
    tiny_sighted,
)
from tests.helpers.tolerances import MODEL_FP32, OP_FP32, max_abs, worst_error


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints without references."""
    folders = {}
    for name in ("qwen2_5_vl", "qwen3_vl", "kimi_k25"):
        folders[name] = tmp_path_factory.mktemp(name)
        save_sighted(name, folders[name])
    folders["qwen3"] = tmp_path_factory.mktemp("qwen3")
    tiny_model(TEXT["qwen3"]()).save_pretrained(folders["qwen3"])
    return folders


def scores(path: Path, layout: Layout, batch: PackedBatch, budget: int | None = None) -> TokenStats:
    options = EngineOptions(engine="transformers", tokens_per_batch=budget)
    return from_pretrained(path, layout=layout, device="cpu", options=options).score(batch)


def expected(batch: PackedBatch, logits: Tensor) -> Tensor:
    """Log-probs of the batch's targets from the logits [T, V] of its sequences alone."""
    if "temperature" in batch.fields:
        logits = logits / batch.fields["temperature"][:, None]
    return logits.log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0] * batch.mask


def same(path: Path, family: str, rows: Rows, layout: str) -> None:
    """Every rank's log-probs of vision rows are those of transformers, sequence by sequence."""
    batch = sights(family, rows)
    model = tiny_sighted(family)
    with torch.no_grad():
        wanted = expected(
            batch, torch.cat([logits_of(model, inputs) for inputs in alone(family, rows)])
        )
    parsed = Layout.parse(layout)
    for found in run(parsed.num_ranks, scores, path, parsed, batch):
        assert max_abs((found.logprob - wanted) / wanted.abs().clamp(min=1.0)) <= MODEL_FP32


def text(lengths: tuple[int, ...], seed: int = 5) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(WORDS, (n,), generator=draw).tolist() for n in lengths]


def test_edge_case_12_a_mask_with_holes_is_not_an_attention_mask(models: dict[str, Path]) -> None:
    """Tokens that do not count are attended to and keep their positions."""
    for name in ("qwen3", "qwen2_5_vl"):
        batch = (
            sights("qwen2_5_vl", ((3, SMALL, 9),))
            if name != "qwen3"
            else PackedBatch.pack(text((19,)))
        )
        holes = batch.mask.clone()
        holes[9:14] = False
        full, some = (
            run(2, scores, models[name], Layout(cp=2), b)[0]
            for b in (batch, batch.with_mask(holes))
        )
        assert float(some.logprob[9:14].abs().max()) == 0.0
        assert max_abs((full.logprob - some.logprob)[holes]) <= MODEL_FP32


def test_edge_case_13_padded_rows_equal_packed_ones(models: dict[str, Path]) -> None:
    """Left or right, in transformers, against our packing."""
    rows = text((5, 11))
    model = tiny_model(TEXT["qwen3"]())
    batch = PackedBatch.pack(rows)
    (found, _) = run(2, scores, models["qwen3"], Layout(cp=2), batch)
    for left in (True, False):
        fill = [0] * 6
        ids = torch.tensor([fill + rows[0] if left else rows[0] + fill, rows[1]])
        seen = torch.tensor([[0] * 6 + [1] * 5 if left else [1] * 5 + [0] * 6, [1] * 11])
        positions = (seen.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(ids, attention_mask=seen, position_ids=positions).logits
        wanted = expected(batch, logits[seen.bool()])
        assert max_abs((found.logprob - wanted) / wanted.abs().clamp(min=1.0)) <= MODEL_FP32


def test_edge_case_14_equal_lengths_and_single_rows(models: dict[str, Path]) -> None:
    """Shapes that could be taken for each other: three rows of three, one row of three or four, positions [3, T]."""
    for rows in (((3,), (3,), (3,)), ((4,),), ((1, SMALL, 2), (1, SMALL, 2), (1, SMALL, 2))):
        same(models["qwen2_5_vl"], "qwen2_5_vl", rows, "cp=2")


def test_edge_case_15_a_sequence_above_the_budget_is_refused_whole(models: dict[str, Path]) -> None:
    batch = sights("qwen2_5_vl", ((2,), (3, TALL, 9)))
    with pytest.raises(
        AssertionError, match=r"sequence 1 has 22 tokens .* more than tokens_per_batch=20"
    ):
        run(1, scores, models["qwen2_5_vl"], Layout(), batch, 20)


def test_edge_case_16_tokens_that_cp_does_not_divide(models: dict[str, Path]) -> None:
    """21 tokens over 4 ranks: the padding is a sequence of its own, added and removed once."""
    assert len(sights("qwen3_vl", ((2, SMALL, 3), (10,)))) == 21
    same(models["qwen3_vl"], "qwen3_vl", ((2, SMALL, 3), (10,)), "cp=4")


@pytest.mark.parametrize("kv_heads", [1, pytest.param(4, marks=pytest.mark.soak)])
def test_edge_case_17_key_value_heads_are_copied_where_they_are_few(
    kv_heads: int, tmp_path: Path
) -> None:
    model = tiny_model(_make(LlamaConfig, num_key_value_heads=kv_heads)())
    model.save_pretrained(tmp_path / "model")
    write_outputs(model, tmp_path)
    for found in run(4, figures, str(tmp_path), Layout(cp=4, cp_mode="ulysses")):
        check(found)


def test_edge_case_17_heads_that_cp_does_not_divide(tmp_path: Path) -> None:
    config = TEXT["llama"]().to_dict() | {
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "hidden_size": 48,
    }
    AutoModelForCausalLM.from_config(LlamaConfig(**config)).save_pretrained(tmp_path)
    with pytest.raises(AssertionError, match="heads can be exchanged over 1, 2 of cp=4 ranks"):
        run(4, scores, tmp_path, Layout(cp=4, cp_mode="ulysses"), PackedBatch.pack(text((5,))))


def test_edge_case_22_placeholders_beyond_the_vocabulary(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Kimi-K2.5's video token is one past its table: never looked up, and not predicted where the mask says so."""
    batch = sights("kimi_k25", ((2, SMALL, 3), (10,)))
    batch = batch.with_mask(batch.mask & (batch.targets != IMAGE))
    path = tmp_path / "model"
    shutil.copytree(models["kimi_k25"], path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"image_token_id": VOCAB + 3}))
    tokens, targets = (x.masked_fill(x == IMAGE, VOCAB + 3) for x in (batch.tokens, batch.targets))
    (wanted,) = run(1, scores, models["kimi_k25"], Layout(), batch)
    for found in run(2, scores, path, Layout(cp=2), replace(batch, tokens=tokens, targets=targets)):
        assert max_abs(found.logprob - wanted.logprob) <= MODEL_FP32


def trained(path: Path, layout: Layout, batch: PackedBatch, budget: int) -> dict[str, Tensor]:
    options = EngineOptions(optim=PROBE, tokens_per_batch=budget)
    engine = from_pretrained(path, layout=layout, device="cpu", options=options)
    engine.train_step(batch, objective)
    return gradients(engine)[0]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3_vl", "cp=2,dp=2"),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in (("qwen2_5_vl", "cp=2,dp=2"), ("qwen2_5_vl", "dp=4"), ("qwen3_vl", "dp=4"))
        ),
    ],
)
def test_edge_case_41_images_on_some_ranks_only(
    models: dict[str, Path], name: str, layout: str
) -> None:
    """Text, an image and a video in micro-batches of their own: nobody waits, and gradients are those of one rank."""
    rows: Rows = ((9,), (1, SMALL, 4), (10,), (11,), (8,), (1, STILL, 3))
    batch = sights(name, rows)
    (wanted,) = run(1, trained, models[name], Layout(), batch, 1000)
    for found in run(4, trained, models[name], Layout.parse(layout), batch, 16):
        assert worst_error(found, wanted)[0] <= MODEL_FP32


def refused(path: Path, batch: PackedBatch) -> str:
    """The message of the DataError that every rank raises."""
    engine = from_pretrained(path, device="cpu", options=EngineOptions())
    try:
        engine.score(batch)
    except DataError as error:
        return str(error)
    return ""


def test_edge_case_42_image_token_count_differs_from_feature_rows(models: dict[str, Path]) -> None:
    media = {"pixel_values": torch.zeros(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    cases = {
        "sequence 1 has 3 image tokens, in runs of [3], but its images have 4 rows of features, [4]": Sequence(
            [5, *[IMAGE] * 3], media=media
        ),
        "sequence 1 has 2 image tokens, in runs of [2], but its images have 0 rows of features": Sequence(
            [5, IMAGE, IMAGE]
        ),
        "in runs of [3, 1], but its images have 4 rows of features, [4]": Sequence(
            [*[IMAGE] * 3, 5, IMAGE], media=media
        ),
        "pixel_values of shape (15, 96), but image_grid_thw [(1, 4, 4)], in multiples of 2, stands for (16, 96)": Sequence(
            [5, *[IMAGE] * 4], media={**media, "pixel_values": torch.zeros(15, 96)}
        ),
    }
    for words, row in cases.items():
        assert all(
            words in found
            for found in run(2, refused, models["qwen3_vl"], PackedBatch.pack([[1, 2], row]))
        )
    (found,) = run(1, refused, models["qwen3"], PackedBatch.pack([Sequence([5], media=media)]))
    assert "the batch has images or videos, but qwen3 reads text only" in found


def test_edge_case_42_images_over_the_boundaries_of_ranks(models: dict[str, Path]) -> None:
    """Deep features too, in several sequences: the eight tokens of an image lie on two of four ranks."""
    rows: Rows = ((6, TALL, 1), (4, WIDE, 3), (1, CLIP, 2))
    batch = sights("qwen3_vl", rows)
    places = (batch.tokens == IMAGE).nonzero()[:, 0]
    each = -(-len(batch) // 8) * 2
    assert {int(at) // each for at in places[:8]} == {0, 1}
    same(models["qwen3_vl"], "qwen3_vl", rows, "cp=4")


def test_edge_case_43_images_and_videos_in_either_order(models: dict[str, Path]) -> None:
    """Seconds a frame (Qwen2.5-VL) and a timestamp a frame (Qwen3-VL)."""
    rows: Rows = ((1, CLIP, 2, SMALL, 1, STILL, 2), (1, SMALL, 1, CLIP, TALL, 2))
    for name in ("qwen2_5_vl", "qwen3_vl"):
        same(models[name], name, rows, "cp=2")
    batch = sights("qwen2_5_vl", rows)
    (slow,) = run(1, scores, models["qwen2_5_vl"], Layout(), batch)
    assert batch.media[0] is not None
    batch.media[0]["second_per_grid_ts"].mul_(3)
    (fast,) = run(1, scores, models["qwen2_5_vl"], Layout(), batch)
    assert max_abs(slow.logprob - fast.logprob) > 100 * MODEL_FP32, "the mutation: seconds count"


@pytest.mark.parametrize("layout", [pytest.param("cp=2", marks=pytest.mark.soak), "cp=4"])
def test_edge_case_44_a_latent_attention_whose_values_are_narrower(
    models: dict[str, Path], layout: str
) -> None:
    """Queries of 24, values of 16, one rotary key for all heads, and YaRN's factor in the scale."""
    attention = tiny_sighted("kimi_k25").get_submodule("model.language_model.layers.0.self_attn")
    assert (attention.qk_head_dim, attention.v_head_dim) == (24, 16)
    assert attention.scaling != attention.qk_head_dim**-0.5
    same(models["kimi_k25"], "kimi_k25", ((2, SMALL, 3), (10,)), layout)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (_make(PhiConfig), "a head with a bias"),
        (
            _make(Gemma2Config, head_dim=8, attn_logit_softcapping=None),
            "final_logit_softcapping=30.0 changes the logits by more than a constant factor",
        ),
        (
            _make(Gemma3TextConfig, head_dim=8, final_logit_softcapping=1000.0),
            "final_logit_softcapping=1000.0 changes",
        ),
    ],
)
def test_edge_case_46_heads_that_are_not_fused_are_refused(
    config: partial[PreTrainedConfig], words: str
) -> None:
    options = config().to_dict()
    with pytest.raises(ModelError, match=words):
        TransformersModel(transformers_spec(options), options, Mesh.solo(), KernelSet())


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        (_make(CohereConfig, logit_scale=0.3), 0.3),
        (
            _make(
                GraniteConfig,
                logits_scaling=7.0,
                embedding_multiplier=3.0,
                attention_multiplier=0.2,
            ),
            1 / 7,
        ),
    ],
)
def test_edge_case_46_a_factor_of_the_logits_is_honored(
    config: partial[PreTrainedConfig], scale: float, tmp_path: Path
) -> None:
    model = tiny_model(config())
    assert abs(logit_scale(model, model.config.hidden_size) - scale) <= OP_FP32
    model.save_pretrained(tmp_path / "model")
    write_outputs(model, tmp_path)
    for found in run(2, figures, str(tmp_path), Layout(cp=2)):
        check(found)


def test_edge_case_46_adapters_are_refused(tmp_path: Path) -> None:
    """By the file that peft writes, in a directory that transformers would load with its adapter; and by their tensors."""
    tiny_model(TEXT["llama"]()).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    adapted = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    save_file({**weights, adapted: torch.zeros(2, 64)}, tmp_path / "model.safetensors")
    for engine in ("native", "transformers"):
        with (
            one_rank(),
            pytest.raises(
                CheckpointError, match=rf"holds an adapter \({adapted}\).*merge_and_unload"
            ),
        ):
            from_pretrained(tmp_path, device="cpu", options=EngineOptions(engine=engine))
    (tmp_path / "adapter_config.json").write_text("{}")
    with (
        one_rank(),
        pytest.raises(
            CheckpointError, match=r"holds an adapter \(adapter_config.json\).*merge_and_unload"
        ),
    ):
        from_pretrained(tmp_path, device="cpu")


@pytest.mark.parametrize("config", [Gemma3Config, Qwen3_5Config])
def test_other_ways_of_seeing_are_refused(config: type[PreTrainedConfig]) -> None:
    with pytest.raises(
        ModelError, match=r"is not among the vision-language families|carry state over sequence"
    ):
        make_model(config().to_dict())
