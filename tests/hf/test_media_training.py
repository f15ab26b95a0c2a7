"""Training on rows with images: GRPO, PPO and SFT by recipe, the same on every layout; and what the result loads in."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from tests.helpers.eyes import (
    IMAGE_ID,
    SEEN,
    TOKENS,
    VIDEO_ID,
    base64_of,
    encoded,
    picture,
    save_seeing,
    user,
)
from tests.helpers.program import here, on_ranks, read_rows, refusal, write_recipe, write_rows
from tests.helpers.tolerances import CURVE_FP32, RL_LOSS_FP32

REWARD = """
def of_characters(prompts, completions, **columns):
    assert "images" not in columns
    return [len(set(text[0]["content"] if isinstance(text, list) else text)) / 8 for text in completions]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


def rl_rows(folder: Path) -> Path:
    """Prompts with an image, with two, and with none."""
    (folder / "a.png").write_bytes(encoded(picture(17, 9, 1)))
    small = base64_of(encoded(picture(8, 8, 2)))
    rows: list[dict[str, Any]] = [
        {"prompt": user({"type": "image", "image": "a.png"}, "a"), "answer": "a"},
        {
            "prompt": user({"type": "image", "base64": small}, {"type": "image"}),
            "images": ["a.png"],
            "answer": "b",
        },
        {"prompt": f"{SEEN}c", "images": ["a.png"], "answer": "c"},
        {"prompt": "d", "answer": "d"},
    ]
    return write_rows(folder / "rl.jsonl", rows)


def trained(
    folder: Path, model: Path, data: Path, layout: str, **sections: Any
) -> list[dict[str, Any]]:
    """The metrics of two steps on a layout."""
    folder.mkdir()
    (folder / "variety.py").write_text(REWARD)
    sections = {
        "rollout": {"backend": "transformers", "temperature": 1.5},
        "trainer": {"steps": 2},
        **sections,
    }
    recipe = write_recipe(
        folder / "r.yaml", model, data, reward={"import": "variety:of_characters"}, **sections
    )
    world = {"dp=1": 1, "cp=2,dp=2": 4, "cp=2": 2, "dp=2": 2}[layout]
    ended = on_ranks(world, "train", recipe, "--layout", layout)
    assert {each.code for each in ended} == {0}, ended
    return read_rows(folder / "run/metrics.jsonl")


@pytest.mark.parametrize("layout", ["cp=2", pytest.param("cp=2,dp=2", marks=pytest.mark.soak)])
def test_grpo_on_image_prompts_is_the_same_on_every_layout(
    model: Path, tmp_path: Path, layout: str
) -> None:
    """With a reference, images in some rows only; identical ids: CONTRACT's rule for RL curves."""
    data = rl_rows(tmp_path)
    algorithm = {"name": "grpo", "kl_coef": 0.1, "num_mini_batches": 2}
    one = trained(tmp_path / "one", model, data, "dp=1", algorithm=algorithm)
    cut = trained(tmp_path / "cut", model, data, layout, algorithm=algorithm)
    assert one[0]["grad_norm"] > 0
    for ours, theirs in zip(cut, one, strict=True):
        assert ours["response_length_mean"] == theirs["response_length_mean"]
        assert ours["reward_mean"] == theirs["reward_mean"]
        assert abs(ours["grad_norm"] - theirs["grad_norm"]) <= CURVE_FP32 * theirs["grad_norm"]
        assert abs(ours["loss"] - theirs["loss"]) <= RL_LOSS_FP32 * (1 + abs(theirs["loss"]))
        assert (
            abs(ours["entropy_mean"] - theirs["entropy_mean"])
            <= CURVE_FP32 * theirs["entropy_mean"]
        )
    drawn = [
        row for file in sorted((tmp_path / "one/run/rollouts").iterdir()) for row in read_rows(file)
    ]
    assert not {IMAGE_ID, VIDEO_ID, *range(TOKENS, TOKENS + 2)} & {
        i for row in drawn for i in row["token_ids"]
    }
    assert any(
        {"type": "image"} in row["prompt"][0]["content"]
        for row in drawn
        if isinstance(row["prompt"], list)
    )


def test_the_result_has_its_processor(model: Path, tmp_path: Path) -> None:
    """SFT on an answer about an image, and on a conversation; hf/ loads as it is, and sees."""
    (tmp_path / "a.png").write_bytes(encoded(picture(17, 9, 1)))
    question = user({"type": "image", "path": "a.png"}, "what?")
    rows = [
        {"prompt": question, "completion": "a cat"},
        {"messages": [*question, {"role": "assistant", "content": "a dog"}]},
    ]
    data = write_rows(tmp_path / "sft.jsonl", rows)
    found = trained(tmp_path / "sft", model, data, "dp=2", algorithm={"name": "sft"})
    (alone,) = {
        row["loss"] for row in trained(tmp_path / "one", model, data, "dp=1", trainer={"steps": 1})
    }
    assert abs(found[0]["loss"] - alone) <= CURVE_FP32 * alone
    assert found[-1]["loss"] < found[0]["loss"]
    saved = tmp_path / "sft/run/hf"
    for name in ("preprocessor_config.json", "chat_template.jinja", "tokenizer.json"):
        assert (saved / name).read_bytes() == (model / name).read_bytes()
    processor, tokenizer = (
        AutoImageProcessor.from_pretrained(saved),
        AutoTokenizer.from_pretrained(saved),
    )
    seen = processor([picture(17, 9, 1)], return_tensors="pt")
    ids = torch.tensor(
        [[*tokenizer.encode("x"), *[IMAGE_ID] * (int(seen["image_grid_thw"].prod()) // 4)]]
    )
    loaded = AutoModelForImageTextToText.from_pretrained(saved, dtype=torch.float32)
    before = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        after, start = (
            m(ids, mm_token_type_ids=(ids == IMAGE_ID).long(), **seen).logits
            for m in (loaded, before)
        )
    assert bool((after != start).any())


def test_a_critic_sees_too(model: Path, tmp_path: Path) -> None:
    data = rl_rows(tmp_path)
    rows = trained(tmp_path / "ppo", model, data, "dp=1", algorithm={"name": "ppo", "kl_coef": 0.1})
    assert all(row["critic_grad_norm"] > 0 for row in rows)


def test_the_embedded_sampler_does_not_see(model: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "r.yaml", model, rl_rows(tmp_path), algorithm={"name": "grpo"})
    assert "set rollout.backend=transformers" in refusal(here("train", recipe))
