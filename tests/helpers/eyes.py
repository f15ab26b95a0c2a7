"""Tiny vision-language models as directories with all that a row of images needs, and rows for them.

The tokenizer and the image processor are made here, since no hub is reachable. Kimi-K2.5's own image processor needs
torchvision, so its directory has one in a file of code, which only runs behind the flag.
"""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    Glm4vImageProcessorPil,
    PreTrainedModel,
    Qwen2VLImageProcessorPil,
)

from tests.helpers.families import VISION
from tests.helpers.sights import GLM, logits_of
from tests.helpers.tokenizers import SEEING, make_tokenizer

MARKS = (
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
)
IMAGE_ID, VIDEO_ID = 260, 261
TOKENS = 260 + len(MARKS)
VOCAB = TOKENS + 2  # wider than the tokenizer, as tables often are
END = 3  # <|im_end|>
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "kimi_k25")
MIXTURES = ("qwen3_vl_moe", "glm4v_moe")
SEEN = "<|vision_start|><|image_pad|><|vision_end|>"
OWN_CODE = """
from transformers import Qwen2VLImageProcessorPil


class SquarePatches(Qwen2VLImageProcessorPil):
    def preprocess(self, images, **options):
        found = super().preprocess(images, **options)
        found["pixel_values"] = found["pixel_values"].reshape(-1, 3, 2, 4, 4)[:, :, 0]
        return found
"""


def seeing_tokenizer() -> Any:
    tokenizer = make_tokenizer(template=SEEING)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    assert tokenizer.convert_tokens_to_ids(list(MARKS)) == list(range(IMAGE_ID, TOKENS))
    return tokenizer


def seeing_model(family: str) -> PreTrainedModel:
    """A random float32 model, no parameter at its initial zeros or ones."""
    config = VISION[family]()
    vars(config.text_config).update(
        {"vocab_size": VOCAB, "eos_token_id": END, "bos_token_id": None}
    )
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    vars(config).update(dict(zip(names, range(IMAGE_ID, TOKENS), strict=False)))
    if family in GLM:
        vars(config).update(
            {"video_start_token_id": IMAGE_ID + 4, "video_end_token_id": IMAGE_ID + 5}
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(
            config, dtype=torch.float32
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def save_seeing(family: str, path: Path) -> Path:
    """Write `seeing_model(family)`, a tokenizer and an image processor as a directory."""
    model = seeing_model(family)
    model.save_pretrained(path)
    seeing_tokenizer().save_pretrained(path)
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    if family in GLM:
        Glm4vImageProcessorPil(
            **sizes, size={"shortest_edge": 128, "longest_edge": 1024}
        ).save_pretrained(path)
        return path
    Qwen2VLImageProcessorPil(
        **sizes, size={"shortest_edge": 64, "longest_edge": 512}
    ).save_pretrained(path)
    if family == "kimi_k25":
        (path / "squares.py").write_text(OWN_CODE)
        settings = json.loads((path / "preprocessor_config.json").read_text())
        del settings["image_processor_type"]
        settings["auto_map"] = {"AutoImageProcessor": "squares.SquarePatches"}
        (path / "preprocessor_config.json").write_text(json.dumps(settings))
    return path


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def user(*parts: Mapping[str, Any] | str) -> list[dict[str, Any]]:
    """One message of a user; strings are parts of text."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else dict(part) for part in parts
    ]
    return [{"role": "user", "content": content}]


def said(*parts: str) -> str:
    """What the template writes for `user(...)`, an image being `SEEN`."""
    return f"<|im_start|>user\n{''.join(parts)}<|im_end|>\n<|im_start|>assistant\n"


class Peer:
    """Plain transformers on one row: tokens are written out in the text, as its own processors do it."""

    def __init__(self, family: str, folder: Path) -> None:
        self.model = seeing_model(family)
        self.tokenizer = seeing_tokenizer()
        self.processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=True)

    def inputs(self, text: str, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if images:
            found = dict(
                self.processor([image.convert("RGB") for image in images], return_tensors="pt")
            )
            for grid in found["image_grid_thw"]:
                text = text.replace(MARKS[0], "\0" * (int(grid.prod()) // 4), 1)
        ids = torch.tensor(
            self.tokenizer.encode(text.replace("\0", MARKS[0]), add_special_tokens=False)
        )
        return {
            "input_ids": ids[None],
            "mm_token_type_ids": (ids == IMAGE_ID).long()[None],
            **found,
        }

    def log_probs(
        self, text: str, images: Sequence[Image.Image]
    ) -> tuple[list[float], list[float]]:
        """Log-prob of each token but the first, and the entropy that it was drawn at."""
        inputs = self.inputs(text, images)
        logp = self._distributions(inputs)[:-1]
        return self._picked(logp, inputs["input_ids"][0, 1:]), (
            -(logp.exp() * logp).sum(-1)
        ).tolist()

    def follow(self, text: str, images: Sequence[Image.Image], ids: Sequence[int]) -> list[float]:
        """Log-probs of ids after a prompt."""
        inputs = self.inputs(text, images)
        for name, more in (
            ("input_ids", torch.tensor(ids)),
            ("mm_token_type_ids", torch.zeros(len(ids)).long()),
        ):
            inputs[name] = torch.cat([inputs[name], more[None]], dim=1)
        return self._picked(self._distributions(inputs)[-len(ids) - 1 : -1], torch.tensor(ids))

    def _distributions(self, inputs: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return torch.log_softmax(logits_of(self.model, inputs), -1)

    def _picked(self, logp: Tensor, ids: Tensor) -> list[float]:
        found: list[float] = logp.gather(1, ids[:, None])[:, 0].tolist()
        return found
