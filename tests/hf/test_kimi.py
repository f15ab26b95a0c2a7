"""Kimi-K2, Kimi-VL and Kimi-K2.5 as the hub has them: the numbers of their published math, and none of their code runs."""

import json
import runpy
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config

from dovetail.arch.registry import spec_from_config
from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.errors import ModelError
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.hf.kimi import KimiImages, published
from dovetail.hf.transformers_model import known_config, make_model
from dovetail.parallel.layout import Layout
from tests.helpers.checkpoints import digests
from tests.helpers.eyes import IMAGE_ID, SEEN, VOCAB, encoded, picture, said, seeing_tokenizer, user
from tests.helpers.families import MLA, VISION
from tests.helpers.harness import run
from tests.helpers.hf_parity import check, figures
from tests.helpers.media_training import rl_rows, trained
from tests.helpers.parity_bodies import compare
from tests.helpers.parity_configs import moe_configs, tiny
from tests.helpers.parity_reference import GRAD, objective, outputs_of, write_reference
from tests.helpers.probe import PROBE, gradients
from tests.helpers.program import here, on_ranks, read_rows, refusal, write_rows
from tests.helpers.sights import MIXED, sights, write_sights
from tests.helpers.tolerances import MODEL_FP32, max_abs, worst_error
from tests.hf.kimi_vl.configuration_kimi_vl import KimiVLConfig
from tests.hf.kimi_vl.image_processing_kimi_vl import KimiVLImageProcessor
from tests.hf.kimi_vl.modeling_kimi_vl import KimiVLForConditionalGeneration

# What transformers 5 lacks of the names that the published file imports, behind a line that says whether it ran.
CODE = """
import pathlib
pathlib.Path({ran!r}).write_text("ran")
from transformers.activations import ACT2FN, GELUActivation, PytorchGELUTanh
from transformers.cache_utils import Cache
from transformers.modeling_attn_mask_utils import _prepare_4d_causal_attention_mask
from transformers.modeling_utils import PreTrainedModel
from transformers.models.llava.modeling_llava import LlavaCausalLMOutputWithPast
from transformers.pytorch_utils import ALL_LAYERNORM_LAYERS, is_torch_greater_or_equal_than_1_13
from transformers.utils.import_utils import is_torch_fx_available
"""
AUTO = {
    "AutoConfig": "configuration_kimi_vl.KimiVLConfig",
    "AutoModelForCausalLM": "modeling_kimi_vl.KimiVLForConditionalGeneration",
}
SETTINGS = {
    "patch_size": 4,
    "merge_kernel_size": [2, 2],
    "in_token_limit": 64,
    "num_pooled_tokens": 1024,
    "pad_input": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "auto_map": {"AutoImageProcessor": "image_processing_kimi_vl.KimiVLImageProcessor"},
}
STILLS = tuple(
    tuple(part for part in row if isinstance(part, int) or part[0] == "image") for row in MIXED
)
TALL, LARGE, SMALL = picture(19, 14, 1), picture(50, 61, 2), picture(8, 8, 3)


def hub_text(**changes: Any) -> dict[str, Any]:
    """A text config by the keys of transformers 4."""
    mla: dict[str, Any] = dict(MLA)
    rope = dict(mla["rope_parameters"])
    plain = tiny(
        DeepseekV3Config,
        **{**mla, "vocab_size": VOCAB, "eos_token_id": 3, "tie_word_embeddings": False},
    )
    text = {
        name: x for name, x in plain.to_dict().items() if name not in ("rope_parameters", "dtype")
    }
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    keys = {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "aux_loss_alpha": 0.001,
    }
    return {**text, **keys, "rope_theta": theta, "rope_scaling": {"type": kind, **rope}, **changes}


def reference() -> KimiVLForConditionalGeneration:
    """A random float32 model, no parameter at its initial zeros or ones."""
    config = KimiVLConfig(text_config=hub_text(), media_placeholder_token_id=IMAGE_ID)
    config.text_config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = KimiVLForConditionalGeneration(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each expert's matrices by themselves, as they are published."""
    found = {}
    for name, x in tensors.items():
        stem, fused, kind = name.partition(".experts.")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(
            kind, ()
        )
        if not parts:
            found[name] = x
        for expert, matrix in enumerate(x if parts else ()):
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                found[f"{stem}{fused}{expert}.{part}.weight"] = rows.clone()
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the published code writes where it runs."""
    return tmp_path_factory.mktemp("ran") / "ran"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, ran: Path) -> Path:
    """A Kimi-VL as the hub has it: weights, settings and code."""
    path = tmp_path_factory.mktemp("kimi_vl")
    model = reference()
    save_file(apart(model.state_dict()), path / "model.safetensors", metadata={"format": "pt"})
    seeing_tokenizer().save_pretrained(path)
    for name in ("configuration_kimi_vl", "modeling_kimi_vl", "image_processing_kimi_vl"):
        (path / f"{name}.py").write_text(CODE.format(ran=str(ran)))
    with pytest.raises(ImportError):  # the trap works
        runpy.run_path(str(path / "modeling_kimi_vl.py"))
    ran.unlink()
    tower = model.config.vision_config.to_dict()
    config: dict[str, Any] = {
        "model_type": "kimi_vl",
        "auto_map": AUTO,
        "architectures": ["KimiVLForConditionalGeneration"],
    }
    config |= {
        "media_placeholder_token_id": IMAGE_ID,
        "ignore_index": -100,
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(
        json.dumps({**config, "text_config": hub_text(), "vision_config": tower})
    )
    (path / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return path


def log_probs(
    text: str, images: list[Image.Image], more: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """ids [n] and log-probs [n, V] of a text, with as many tokens for each image as it has rows of features."""
    seen = KimiVLImageProcessor()(images) if images else {}
    for height, width in seen["image_grid_hws"].tolist() if images else []:
        text = text.replace("<|image_pad|>", "\0" * (height * width // 4), 1)
    ids = seeing_tokenizer().encode(text.replace("\0", "<|image_pad|>"), add_special_tokens=False)
    row = torch.tensor([[*ids, *more]])
    with torch.no_grad():
        return row[0], reference()(row, **seen).logits[0].log_softmax(-1)


def same(found: list[float], wanted: Tensor) -> bool:
    return max_abs((torch.tensor(found) - wanted) / wanted.abs().clamp(min=1.0)) <= MODEL_FP32


def test_scores_are_those_of_the_published_math(folder: Path, ran: Path, tmp_path: Path) -> None:
    for name, image in (("tall", TALL), ("large", LARGE), ("small", SMALL)):
        (tmp_path / f"{name}.png").write_bytes(encoded(image))
    see, two = (
        {"type": "image", "image": "tall.png"},
        [{"type": "image", "image": f"{x}.png"} for x in ("small", "large")],
    )
    rows = [
        {"prompt": user(see, "What?"), "completion": "a cat"},
        {"prompt": "two", "completion": " words"},
        {"prompt": user("A ", *two), "completion": "!"},
    ]
    data, out = write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "out.jsonl"
    command = ["score", "--model", folder, "--data", data, "--out", out, "--layout", "cp=2"]
    assert {each.well for each in on_ranks(2, *command)} == {True}
    texts = [
        (said(SEEN, "What?") + "a cat", [TALL]),
        ("two words", []),
        (said("A ", SEEN, SEEN) + "!", [SMALL, LARGE]),
    ]
    for row, (text, images) in zip(read_rows(out), texts, strict=True):
        ids, logp = log_probs(text, images)
        assert same(row["log_probs"], logp[:-1].gather(1, ids[1:, None])[:, 0])
        assert same(row["entropy"], -(logp.exp() * logp).sum(-1)[:-1])
    assert not ran.exists()


def vl_gradients(path: Path, batch: PackedBatch) -> dict[str, Tensor]:
    engine = from_pretrained(
        path, layout=Layout(), device="cpu", options=EngineOptions(optim=PROBE)
    )
    engine.train_step(batch, objective)
    return gradients(engine)[0]


def test_gradients_are_those_of_the_published_math(folder: Path) -> None:
    """Two images in one sequence, none in another; as a library."""
    draw = torch.Generator().manual_seed(5)
    grids = torch.tensor([[1, 2, 6], [1, 4, 2]])
    media = {"pixel_values": torch.randn(20, 3, 4, 4, generator=draw), "image_grid_thw": grids}
    ids = [5, *[IMAGE_ID] * 3, 6, 7, *[IMAGE_ID] * 2, 8]
    batch = PackedBatch.pack([Sequence(ids, media=media), Sequence([9, 10, 11])])
    w0, w1 = torch.randn(2, len(batch), generator=draw)
    batch = batch.with_fields(w0=w0, w1=w1, temperature=torch.ones(len(batch)))
    model = reference()
    seen = {"pixel_values": media["pixel_values"], "image_grid_hws": grids[:, 1:]}
    first, second = batch.tokens.split(list(batch.lengths))
    logits = torch.cat([model(first[None], **seen).logits[0], model(second[None]).logits[0]])
    outputs = outputs_of(model, logits, batch)
    wanted = {name.removeprefix(GRAD): x for name, x in outputs.items() if name.startswith(GRAD)}
    (found,) = run(1, vl_gradients, folder, batch)
    assert worst_error(found, wanted)[0] <= MODEL_FP32


def test_completions_have_the_log_probs_of_the_published_math(
    folder: Path, ran: Path, tmp_path: Path
) -> None:
    (tmp_path / "tall.png").write_bytes(encoded(TALL))
    rows = [
        {"prompt": user({"type": "image", "image": "tall.png"}, "What?")},
        {"prompt": "no picture"},
    ]
    data, out = write_rows(tmp_path / "prompts.jsonl", rows), tmp_path / "out.jsonl"
    command = ["generate", "--model", folder, "--data", data, "--out", out, "--max-new-tokens", "5"]
    assert here(*command).well
    for row, (text, images) in zip(
        read_rows(out), ((said(SEEN, "What?"), [TALL]), ("no picture", [])), strict=True
    ):
        ids, logp = log_probs(text, images, tuple(row["token_ids"]))
        count = len(row["token_ids"])
        assert same(row["log_probs"], logp[-count - 1 : -1].gather(1, ids[-count:, None])[:, 0])
    assert not ran.exists()


def test_grpo_trains_the_tower(folder: Path, ran: Path, tmp_path: Path) -> None:
    """hf/ has what the source has, under its names."""
    trained(
        tmp_path / "run",
        folder,
        rl_rows(tmp_path),
        "dp=1",
        trainer={"steps": 1},
        algorithm={"name": "grpo"},
    )
    saved = tmp_path / "run/run/hf"
    after, before = (load_file(path / "model.safetensors") for path in (saved, folder))
    assert {name: x.shape for name, x in after.items()} == {
        name: x.shape for name, x in before.items()
    }
    for name in (
        "vision_tower.encoder.blocks.0.wqkv.weight",
        "multi_modal_projector.linear_1.weight",
    ):
        assert not torch.equal(after[name], before[name])
    for name in ("config.json", "modeling_kimi_vl.py", "preprocessor_config.json"):
        assert (saved / name).read_bytes() == (folder / name).read_bytes()
    assert not ran.exists()


def test_it_is_cut_and_comes_back(folder: Path, tmp_path: Path) -> None:
    assert here("convert", folder, tmp_path / "cut", "--to", "sharded").well
    assert here("convert", tmp_path / "cut", tmp_path / "back", "--to", "hf").well
    assert digests(tmp_path / "back") == digests(folder)


@pytest.fixture(scope="module")
def k25(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Kimi-K2.5 as the hub has it, and what transformers makes of it."""
    path = write_sights("kimi_k25", tmp_path_factory.mktemp("kimi_k25"), STILLS)
    names = (
        ("language_model.model.blocks.", "language_model.model.layers."),
        ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed."),
        ("model.mm_projector.", "mm_projector."),
    )
    for file, stem in (
        (path / "model/model.safetensors", ""),
        (path / "expected.safetensors", GRAD),
    ):
        tensors = load_file(file)
        for old, new in names:
            tensors = {name.replace(stem + old, stem + new): x for name, x in tensors.items()}
        save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((path / "model/config.json").read_text())
    tower, text = config["vision_config"], config["text_config"]
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    vision = {f"vt_{name}": tower[name] for name in sizes}
    vision |= {
        f"init_{name}": tower[name] for name in ("pos_emb_height", "pos_emb_width", "pos_emb_time")
    }
    vision |= {
        "patch_size": 4,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "pos_emb_type": "divided_fixed",
    }
    vision |= {
        "mm_projector_type": "patchmerger",
        "mm_hidden_size": 32,
        "projector_ln_eps": 1e-5,
        "text_hidden_size": 64,
    }
    hub = {
        "model_type": "kimi_k25",
        "tie_word_embeddings": False,
        "vision_config": vision,
        "auto_map": AUTO,
    }
    hub |= {"media_placeholder_token_id": config["image_token_id"]}
    hub["text_config"] = hub_text(
        model_type="kimi_k2",
        q_lora_rank=24,
        **{n: text[n] for n in ("vocab_size", "eos_token_id", "rms_norm_eps")},
    )
    (path / "model/config.json").write_text(json.dumps(hub))
    return path


@pytest.mark.parametrize("layout", [pytest.param("dp=1", marks=pytest.mark.soak), "cp=2"])
def test_kimi_k25_in_the_form_of_the_hub(k25: Path, layout: str) -> None:
    """Its numbers are transformers' of the same weights as `save_pretrained` writes them; and it leaves as it came."""
    assert (
        known_config(json.loads((k25 / "model/config.json").read_text())).text_config.q_lora_rank
        == 24
    )
    degrees = Layout.parse(layout)
    for found in run(
        degrees.num_ranks, figures, str(k25), degrees, "none", partial(sights, "kimi_k25", STILLS)
    ):
        check(found)


def values(path: Path) -> Tensor:
    options = EngineOptions(fresh_head_seed=0)
    return from_pretrained(
        path, layout=Layout(), head="value", device="cpu", options=options
    ).values(sights("kimi_k25", STILLS))


def test_a_critic_begins_from_kimi_k25(k25: Path) -> None:
    """Its language head, which has a name of its own, is left out."""
    assert run(1, values, k25 / "model")[0].unique().numel() > 1


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_kimi_k2_is_a_deepseek_v3(tmp_path: Path, engine: str) -> None:
    path = write_reference("deepseek_v3", tmp_path)
    config = json.loads((path / "model/config.json").read_text())
    (path / "model/config.json").write_text(
        json.dumps({**config, "model_type": "kimi_k2", "auto_map": AUTO})
    )
    if engine == "transformers":
        check(run(1, figures, str(path), Layout())[0])
        return
    (found,) = run(1, compare, {"kimi_k2": path}, Layout(), ("kimi_k2",))
    assert (
        max(found["kimi_k2"].output, found["kimi_k2"].grad, found["kimi_k2"].streamed) <= MODEL_FP32
    )
    given = moe_configs()["deepseek_v3"].to_dict()
    assert vars(spec_from_config(given | {"model_type": "kimi_k2"})) == vars(
        spec_from_config(given)
    ) | {"family": "kimi_k2"}


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        (
            "text_config",
            {"scoring_func": "softmax"},
            "scoring_func is 'softmax'; supported: 'sigmoid'",
        ),
        ("vision_config", {"merge_type": "mean"}, "merge_type is 'mean'; supported: 'sd2_tpool'"),
        ("vision_config", {"mm_hidden_size": 7}, "mm_hidden_size is 7; supported: 32"),
    ],
)
def test_what_is_not_computed_is_refused(part: str, change: dict[str, Any], words: str) -> None:
    config = VISION["kimi_k25"]().to_dict()
    with pytest.raises(ModelError, match=words):
        make_model(config | {part: config[part] | change})


def test_other_code_that_comes_with_a_model_is_not_run(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps({**config, "model_type": "unheard_of"}))
    data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [1, 2, 3]}])
    told = refusal(
        here(
            "score", "--model", tmp_path / "model", "--data", data, "--out", tmp_path / "out.jsonl"
        )
    )
    assert "model_type 'unheard_of' is code that comes with the model, which is not run" in told


@pytest.mark.parametrize("size", [(8, 8), (3, 30), (19, 14), (50, 61), (200, 9)])
def test_images_of_kimi_vl(size: tuple[int, int]) -> None:
    image, ours = picture(*size), KimiImages(SETTINGS)
    found, wanted = ours([image], return_tensors="pt"), KimiVLImageProcessor()([image])
    assert found["image_grid_thw"][:, 1:].tolist() == wanted["image_grid_hws"].tolist()
    assert max_abs(found["pixel_values"] - wanted["pixel_values"]) <= MODEL_FP32
    assert ours.get_number_of_image_patches(*size) == len(found["pixel_values"])


@pytest.mark.parametrize(
    ("height", "width", "grid"),
    [
        (10, 20, (4, 6)),  # padded: 3 and 5 patches
        (400, 400, (16, 16)),  # 100 x 100 patches, of which 256 are allowed: a scale of 0.16
        (16, 1600, (2, 20)),  # 400 patches of a side, of which 20 are allowed
    ],
)
def test_images_of_kimi_k25(height: int, width: int, grid: tuple[int, int]) -> None:
    limits = {
        "in_patch_limit": 256,
        "patch_limit_on_one_side": 20,
        "merge_kernel_size": 2,
        "patch_size": 4,
    }
    colors = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    settings = published({"media_proc_cfg": {**limits, **colors, "fixed_output_tokens": None}})
    assert settings is not None
    assert KimiImages(settings)([picture(height, width)])["image_grid_thw"].tolist() == [[1, *grid]]


def test_images_that_fit_no_tower() -> None:
    with pytest.raises(ValueError, match="is 2 x 512 patches; at most 511 fit"):
        KimiImages(SETTINGS | {"in_token_limit": 1 << 20}).get_number_of_image_patches(2048, 8)
    assert (
        KimiImages(SETTINGS | {"in_token_limit": 1 << 20}).get_number_of_image_patches(2040, 8)
        == 2 * 510
    )
    for broken in (
        {"pad_input": False},
        {"image_mean": None},
        {"merge_kernel_size": [2, 3]},
        {"patch_size": 0},
    ):
        with pytest.raises(ModelError, match=r"preprocessor_config\.json: "):
            KimiImages(SETTINGS | broken)
    assert published({"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4}) is None
