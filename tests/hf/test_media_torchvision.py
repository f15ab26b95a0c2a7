"""What needs torchvision, and so a build of it for this torch: videos, Kimi's images, and transformers' whole processors.

Ids, pixels and grids of rows are those of `AutoProcessor`, asked for the whole text at once; scores are transformers'.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from dovetail.data.examples import Limits, load_prompts
from dovetail.factory.tokenizer import load_processor, load_tokenizer
from dovetail.hf.vision import kinds_of
from dovetail.weights.hf_directory import Pretrained
from tests.helpers.eyes import SEEN, Peer, encoded, picture, save_seeing, user
from tests.helpers.program import on_ranks, read_rows, write_rows
from tests.helpers.sights import logits_of
from tests.helpers.tolerances import MODEL_FP32
from tests.helpers.torchvision_rows import KINDS, SIZES, save_watching, torchvision_works, vars_of

FRAMES = 4
RATE = 2.0


pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not torchvision_works(), reason="needs a torchvision for this torch"),
]


def watching_rows(folder: Path) -> list[dict[str, Any]]:
    for number in range(FRAMES):
        (folder / f"{number}.png").write_bytes(encoded(picture(24, 16, number)))
    frames = [f"{number}.png" for number in range(FRAMES)]
    film, still = (
        {"type": "video", "video": frames, "fps": RATE},
        {"type": "image", "path": "2.png"},
    )
    return [
        {"prompt": user(film, "what?"), "answer": 0},
        {
            "prompt": user("a", still, "b", {"type": "video"}, still),
            "videos": [frames[:2]],
            "answer": 0,
        },
    ]


@pytest.mark.parametrize("family", KINDS)
def test_rows_are_what_the_whole_processor_makes_of_them(family: str, tmp_path: Path) -> None:
    source = Pretrained.open(save_watching(family, tmp_path / "model"))
    whole = transformers.AutoProcessor.from_pretrained(source.path)
    rows = watching_rows(tmp_path)
    data = write_rows(tmp_path / "rows.jsonl", rows)
    found = load_prompts(
        data, load_tokenizer(source), Limits(1000), processor=load_processor(source)
    )
    still = [picture(24, 16, 2)] * 2
    for prompt, images, count in zip(found, (None, still), (FRAMES, 2), strict=True):
        text = whole.apply_chat_template(prompt.prompt, add_generation_prompt=True)
        frames = [picture(24, 16, number) for number in range(count)]
        metadata = {"total_num_frames": count, "fps": RATE, "frames_indices": list(range(count))}
        expected = whole(
            text=[text],
            images=images,
            videos=[frames],
            do_sample_frames=False,
            video_metadata=[metadata],
            return_tensors="pt",
        )
        assert list(prompt.ids) == expected["input_ids"][0].tolist()
        assert prompt.media is not None
        for name, tensor in prompt.media.items():
            assert torch.equal(tensor, torch.as_tensor(expected[name])), name
        kinds = kinds_of(torch.tensor([prompt.ids]), whole_config(source.path))
        assert torch.equal(kinds, expected["mm_token_type_ids"])


def whole_config(path: Path) -> Any:
    return transformers.AutoConfig.from_pretrained(path)


def read_by_transformers(whole: Any, model: Path, text: str) -> list[float]:
    """Log-probs of a text with one video, of all its frames."""
    metadata = {"total_num_frames": FRAMES, "fps": RATE, "frames_indices": list(range(FRAMES))}
    frames = [picture(24, 16, number) for number in range(FRAMES)]
    options = {"do_sample_frames": False, "video_metadata": [metadata], "return_tensors": "pt"}
    return log_probs_of(
        transformers.AutoModelForImageTextToText.from_pretrained(model),
        whole(text=[text], videos=[frames], **options),
    )


def log_probs_of(model: Any, inputs: dict[str, Tensor]) -> list[float]:
    found = {name: torch.as_tensor(x) for name, x in inputs.items()}
    with torch.no_grad():
        logp = torch.log_softmax(logits_of(model, found), -1)[:-1]
    picked: list[float] = logp.gather(1, found["input_ids"][0, 1:, None])[:, 0].tolist()
    return picked


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_scores_of_videos_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = save_watching(family, tmp_path / "model")
    whole = transformers.AutoProcessor.from_pretrained(model)
    row = watching_rows(tmp_path)[0]
    data = write_rows(
        tmp_path / "rows.jsonl", [{**row, "completion": "x"}, {"prompt": "a", "completion": "b"}]
    )
    out = tmp_path / "out.jsonl"
    flags = ["--layout", "cp=2", "--tokens-per-batch", "256"]
    assert {
        each.well
        for each in on_ranks(2, "score", "--model", model, "--data", data, "--out", out, *flags)
    } == {True}
    bare = user({"type": "video"}, "what?")
    expected = read_by_transformers(
        whole, model, whole.apply_chat_template(bare, add_generation_prompt=True) + "x"
    )
    for a, b in zip(read_rows(out)[0]["log_probs"], expected, strict=True):
        assert abs(a - b) <= MODEL_FP32 * max(1.0, abs(b))


def test_kimi_by_its_own_image_processor(tmp_path: Path) -> None:
    model = save_seeing("kimi_k25", tmp_path / "model")
    size = {"max_height": 32, "max_width": 32}
    vars_of("Kimi_K25ImageProcessor")(**SIZES, size=size).save_pretrained(model)
    (tmp_path / "a.png").write_bytes(encoded(picture(30, 18)))
    row = {"prompt": f"a{SEEN}b", "images": ["a.png"], "completion": "c"}
    data, out = write_rows(tmp_path / "rows.jsonl", [row, row]), tmp_path / "out.jsonl"
    assert {
        each.well
        for each in on_ranks(
            2, "score", "--model", model, "--data", data, "--out", out, "--layout", "cp=2"
        )
    } == {True}
    log_probs, _ = Peer("kimi_k25", model).log_probs(f"a{SEEN}bc", [picture(30, 18)])
    for found in read_rows(out):
        for a, b in zip(found["log_probs"], log_probs, strict=True):
            assert abs(a - b) <= MODEL_FP32 * max(1.0, abs(b))
