"""Sampling by a model's own `generate`: the same tokens as the embedded sampler draws, whatever the number of ranks."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import OlmoeConfig

from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.errors import CheckpointError, ModelError
from dovetail.factory.engine import EngineOptions, from_pretrained, make_mesh
from dovetail.factory.layouts import Backend
from dovetail.factory.sampler import backend_layout, make_sampler
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.sampler.base import SamplingParams, TokenPrompt
from dovetail.sampler.transformers import TransformersSampler
from dovetail.sampler.turn import Turn
from dovetail.weights.hf_directory import Pretrained
from tests.helpers.families import TEXT, WORDS
from tests.helpers.harness import run
from tests.helpers.parity_configs import MAX_POSITIONS, VOCAB, tiny, tiny_configs, tiny_model
from tests.helpers.sights import (
    CLIP,
    FILM,
    SMALL,
    Rows,
    save_sighted,
    sights,
    stored_name,
    tiny_sighted,
)
from tests.helpers.small_models import small
from tests.helpers.tolerances import MODEL_FP32

PROMPTS = [
    TokenPrompt(0, (3, 4, 5, 6)),
    TokenPrompt(1, (9,)),
    TokenPrompt(5, (7, 8, 9, 10, 11, 12, 13)),
]
PARAMS = SamplingParams(
    samples=3, max_new_tokens=9, seed=7, step=2, stop_ids=(1, 2, 11, 30, 50, 90)
)
BESIDE: Rows = ((2, CLIP, 3, SMALL, 2), (3, SMALL, 5), (2, FILM, 4), (7,))


def sampled(path: Path, backend: Backend) -> tuple[list[Turn], float]:
    """Completions after a refill from an engine, and how far their log-probs are from the engine's own."""
    source = Pretrained.open(path)
    engine = from_pretrained(path, device="cpu", options=EngineOptions(engine="transformers"))
    layout = backend_layout(source, engine.mesh.layout, backend)
    sampler = make_sampler(source, make_mesh(layout, torch.device("cpu")), torch.float32, backend)
    sampler.refill(engine.weights(sampler.dtype))
    found = sampler.sample(PROMPTS, PARAMS)
    prompts = {prompt.row: prompt.ids for prompt in PROMPTS}
    stats = engine.score(PackedBatch.pack([(*prompts[c.row], *c.ids) for c in found]))
    worst = 0.0
    rows = zip(
        found, stats.logprob.split([len(prompts[c.row]) + len(c.ids) for c in found]), strict=True
    )
    for c, scored in rows:
        first = len(prompts[c.row]) - 1
        mine = torch.tensor(c.log_probs)
        worst = max(worst, float((scored[first : first + len(mine)] - mine).abs().max()))
    return found, worst


@pytest.mark.parametrize("name", ["llama", "apertus"])
def test_equals_the_embedded_sampler(name: str, tmp_path: Path) -> None:
    tiny_model(TEXT[name]()).save_pretrained(tmp_path)
    ((expected, near),) = run(1, sampled, tmp_path, "native")
    ((alone, close),) = run(1, sampled, tmp_path, "transformers")
    assert [c.ids for c in alone] == [c.ids for c in expected]
    assert {c.finish for c in expected} == {"stop", "length"}
    assert max(near, close) <= MODEL_FP32
    for found, distance in run(2, sampled, tmp_path, "transformers"):
        assert [c.ids for c in found] == [c.ids for c in expected]
        assert distance <= MODEL_FP32


ODD = {
    "intermediate_size": 21,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}  # no width for torch's grouped products


def test_experts_of_any_width(tmp_path: Path) -> None:
    tiny_model(tiny(OlmoeConfig, **ODD)).save_pretrained(tmp_path)
    ((found, distance),) = run(1, sampled, tmp_path, "transformers")
    assert len(found) == 9
    assert distance <= MODEL_FP32


@pytest.mark.parametrize("family", ["gemma3_text", "phimoe"])
def test_a_family_that_only_transformers_knows(family: str, tmp_path: Path) -> None:
    """One of them lists its tensors under other names."""
    tiny_model(TEXT["gemma3"]() if family == "gemma3_text" else small(family)).save_pretrained(
        tmp_path
    )
    ((found, distance),) = run(1, sampled, tmp_path, "transformers")
    assert len(found) == 9
    assert distance <= MODEL_FP32
    source = Pretrained.open(tmp_path)
    with pytest.raises(ModelError, match=rf"not {family}; set rollout\.backend=transformers"):
        backend_layout(source, Layout(), "native")


def test_rope_by_length_is_refused_beyond_its_trained_positions() -> None:
    """A wave's tables would follow its longest row."""
    sampler = TransformersSampler(
        tiny_configs()["llama_longrope"].to_dict(), Mesh.solo(), torch.float32
    )
    sampler.refill(sampler.model.state_dict().items())
    prompts = [TokenPrompt(0, (3,) * 50)]
    assert len(sampler.sample(prompts, SamplingParams(max_new_tokens=MAX_POSITIONS - 50))) == 1
    with pytest.raises(
        ModelError, match=f"beyond {MAX_POSITIONS} positions rope_type 'longrope' changes the keys"
    ):
        sampler.sample(prompts, SamplingParams(max_new_tokens=MAX_POSITIONS - 49))


def chosen_by(path: Path, backend: Backend, layout: Layout) -> dict[str, torch.Tensor]:
    """The biases of a bfloat16 sampler's routers after a refill from a bfloat16 engine."""
    source = Pretrained.open(path, "native" if backend == "native" else "transformers")
    options = EngineOptions(engine="native" if backend == "native" else "transformers")
    engine = from_pretrained(
        path, layout=layout, device="cpu", dtype=torch.bfloat16, options=options
    )
    within = backend_layout(source, engine.mesh.layout, backend)
    sampler = make_sampler(source, make_mesh(within, torch.device("cpu")), torch.bfloat16, backend)
    sampler.refill(engine.weights(sampler.dtype))
    return {
        name: x
        for name, x in sampler.model.named_buffers()
        if name.endswith("e_score_correction_bias")
    }


@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        ("native", Layout()),
        ("native", Layout(pp=2)),
        ("transformers", Layout()),
        ("transformers", None),
    ],
)
def test_what_routers_choose_by_is_not_rounded(
    backend: Backend, layout: Layout | None, tmp_path: Path
) -> None:
    """Biases far from 0 differ by less than bfloat16 tells apart."""
    config = small("deepseek_v3" if layout else "dots1")
    config.attention_dropout = 0.0
    model = tiny_model(config)
    listed = {
        name: x for name, x in model.named_buffers() if name.endswith("e_score_correction_bias")
    }
    assert listed
    for number, bias in enumerate(listed.values()):
        bias.copy_(5.0 + 0.01 * torch.arange(len(bias)) + 0.001 * number)
    model.save_pretrained(tmp_path)
    for found in run(
        1 if layout is None else layout.pp, chosen_by, tmp_path, backend, layout or Layout()
    ):
        assert found.keys() == listed.keys()
        assert all(torch.equal(found[name], bias) for name, bias in listed.items())


def test_the_config_has_no_say_in_what_is_drawn() -> None:
    """Its end ends nothing that the call does not end, and its options of `generate` do nothing."""
    plain, ended = (tiny_model(TEXT["gemma3"]()) for _ in range(2))
    vars(ended.config).update(
        eos_token_id=list(range(40, 90)), guidance_scale=2.0, min_new_tokens=9
    )
    found = []
    for model in (plain, ended):
        sampler = TransformersSampler(model.config.to_dict(), Mesh.solo(), torch.float32)
        sampler.refill(model.state_dict().items())
        found.append(
            [
                sampler.sample(PROMPTS, replace(PARAMS, stop_ids=stops))
                for stops in ((), PARAMS.stop_ids)
            ]
        )
    assert found[0] == found[1]


def sighted(family: str, folder: Path) -> tuple[list[TokenPrompt], list[Turn], float]:
    """Completions of `BESIDE`, and how far their log-probs are from those of the engine, which takes each row as it is."""
    save_sighted(family, folder)
    source, batch = Pretrained.open(folder), sights(family, BESIDE)
    engine = from_pretrained(folder, device="cpu", options=EngineOptions(engine="transformers"))
    sampler = make_sampler(source, Mesh.solo(), torch.float32, "transformers")
    sampler.refill(engine.weights(sampler.dtype))
    rows = enumerate(zip(batch.tokens.split(batch.lengths), batch.media, strict=True))
    prompts = [TokenPrompt(row, ids.tolist(), media) for row, (ids, media) in rows]
    found = sampler.sample(
        prompts, replace(PARAMS, samples=2, max_new_tokens=5, banned_ids=tuple(range(WORDS, VOCAB)))
    )
    whole = [Sequence((*prompts[c.row].ids, *c.ids), media=prompts[c.row].media) for c in found]
    stats = engine.score(PackedBatch.pack(whole))
    worst = 0.0
    for c, scored in zip(found, stats.logprob.split([len(row.ids) for row in whole]), strict=True):
        mine = torch.tensor(c.log_probs)
        worst = max(worst, float((scored[-len(mine) - 1 : -1] - mine).abs().max()))
    return prompts, found, worst


@pytest.mark.parametrize("family", ["glm4v", pytest.param("glm4v_moe", marks=pytest.mark.soak)])
def test_images_beside_videos_whose_tokens_are_images(family: str, tmp_path: Path) -> None:
    """Also in one row; transformers itself takes images or videos, not both."""
    ((prompts, found, distance),) = run(1, sighted, family, tmp_path)
    kinds = [
        set(prompt.media or ()) & {"pixel_values", "pixel_values_videos"} for prompt in prompts
    ]
    assert sorted(map(len, kinds)) == [0, 1, 1, 1, 2]
    assert len(found) == 2 * len(prompts)
    assert distance <= MODEL_FP32


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    TEXT["llama"]().save_pretrained(tmp_path)
    sampler = make_sampler(Pretrained.open(tmp_path), Mesh.solo(), torch.float32, "transformers")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: missing") as told:
        sampler.refill([("model.norm.weight", torch.zeros(3)), ("other", torch.zeros(1))])
    assert "model.norm.weight: shape [3], expected [64]" in str(told.value)
    assert "other: not a tensor of LlamaForCausalLM" in str(told.value)
    with pytest.raises(CheckpointError, match="holds no weights"):
        sampler.sample(PROMPTS, PARAMS)


@pytest.mark.parametrize("form", ["fused", "turned", "apart", "old"])
def test_weights_come_under_any_names_of_a_checkpoint(form: str) -> None:
    """Experts fused, turned or apart, and the older names of vision-language models; nothing may be missing."""
    model = tiny_sighted("qwen2_5_vl" if form == "old" else "qwen3_vl_moe")
    listed = dict(as_listed(model.state_dict(), form))
    sampler = TransformersSampler(model.config.to_dict(), Mesh.solo(), torch.float32)
    sampler.refill(listed.items())
    for name, tensor in sampler.model.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    gone = next(name for name in listed if form in ("old", "fused") or "experts" in name)
    with pytest.raises(CheckpointError, match="missing"):
        sampler.refill((name, tensor) for name, tensor in listed.items() if name != gone)


def as_listed(tensors: dict[str, torch.Tensor], form: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if form == "turned" and stem.endswith("experts"):
            yield name, tensor.transpose(1, 2)
        elif form == "apart" and stem.endswith("experts"):
            for expert, matrix in enumerate(tensor):
                parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
                for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                    yield f"{stem}.{expert}.{part}.weight", rows
        else:
            yield (stored_name("qwen2_5_vl", name) if form == "old" else name), tensor
