"""Training on rows with images: GRPO, PPO and SFT by recipe, the same on every layout; and what the result loads in."""

from pathlib import Path

import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from tests.helpers.eyes import (
    IMAGE_ID,
    TOKENS,
    VIDEO_ID,
    encoded,
    picture,
    user,
)
from tests.helpers.media_training import model as model, rl_rows, trained
from tests.helpers.program import here, read_rows, refusal, write_recipe, write_rows
from tests.helpers.tolerances import CURVE_FP32, RL_LOSS_FP32


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
