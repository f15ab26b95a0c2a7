"""Processors that need torchvision."""

from pathlib import Path
from typing import Any

import transformers

from tests.helpers.eyes import save_seeing
from tests.helpers.sights import GLM

SIZES: dict[str, Any] = {"patch_size": 4, "merge_size": 2}
# Each family's processor, video processor and bounds of a video's pixels.
KINDS = {
    "qwen2_vl": ("Qwen2VLProcessor", "Qwen2VLVideoProcessor", (64, 512)),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor", (64, 512)),
    "qwen3_vl": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor", (64, 2048)),
    "glm4v": ("Glm4vProcessor", "Glm4vVideoProcessor", (128, 2048)),
}


def torchvision_works() -> bool:
    try:
        __import__("torchvision")
    except (ImportError, RuntimeError):  # absent, or built for another torch
        return False
    return True


def save_watching(family: str, path: Path) -> Path:
    """The directory of a model with its whole processor."""
    save_seeing(family, path)
    if family in GLM:  # whose processor has names of its own for the tokens
        for file in (*path.glob("*.json"), *path.glob("*.jinja")):
            text = file.read_text().replace(
                "'<|video_pad|>'", "'<|begin_of_video|><|video|><|end_of_video|>'"
            )
            file.write_text(
                text.replace("<|image_pad|>", "<|image|>").replace("<|video_pad|>", "<|video|>")
            )
    processor, videos, (shortest, longest) = KINDS[family]
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|begin_of_image|>", "<|end_of_image|>"]}
    )
    size = {"shortest_edge": shortest, "longest_edge": longest}
    whole = vars_of(processor)(
        image_processor=transformers.AutoImageProcessor.from_pretrained(path),
        tokenizer=tokenizer,
        video_processor=vars_of(videos)(**SIZES, temporal_patch_size=2, size=size),
        chat_template=tokenizer.chat_template,
    )
    (path / "preprocessor_config.json").unlink()
    whole.save_pretrained(path)
    return path


def vars_of(name: str) -> Any:
    return getattr(transformers, name)
