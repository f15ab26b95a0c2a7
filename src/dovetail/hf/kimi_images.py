"""The image processor of Kimi-VL and Kimi-K2.5, from their published settings."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dovetail.errors import ModelError

BICUBIC = 3  # pillow's number
MAX_SIDE = 512  # patches
LIMITS = ("in_token_limit", "in_patch_limit")  # of Kimi-VL, of Kimi-K2.5


def published(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings in preprocessor_config.json, if they are Kimi's own."""
    merged = {**settings, **(settings.get("media_proc_cfg") or {})}
    return merged if any(name in merged for name in LIMITS) else None


class KimiImages:
    """Scales images down to the limit and pads them to whole rows of features; called as transformers' processors."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        for name, value in (("pad_input", True), ("fixed_output_tokens", None)):
            if settings.get(name, value) != value:
                raise ModelError(f"preprocessor_config.json: {name} is {settings[name]!r}; supported: {value!r}")
        kernel = settings.get("merge_kernel_size", 2)
        self.merge_size, *others = kernel if isinstance(kernel, list) else [kernel]
        self.patch_size: int = settings.get("patch_size", 14)
        self.limit: int = next(settings[name] for name in LIMITS if name in settings)
        self.is_k25 = LIMITS[1] in settings
        self.max_side: int = settings.get("patch_limit_on_one_side", MAX_SIDE)
        self.mean, self.std = settings.get("image_mean"), settings.get("image_std")
        counts = (self.merge_size, self.patch_size, self.limit, self.max_side)
        whole = all(type(n) is int and n > 0 for n in counts) and set(others) <= {self.merge_size}
        if not whole or not all(isinstance(colors, list) and len(colors) == 3 for colors in (self.mean, self.std)):
            raise ModelError(
                "preprocessor_config.json: expected patch_size, one merge_kernel_size for both sides, limits above 0, and "
                "image_mean and image_std of three colors; fetch it again"
            )

    def __call__(self, images: Sequence[Any], **_: object) -> dict[str, Tensor]:
        """Pixels [n, 3, patch, patch], and grids (1, height, width)."""
        pixels, grids, p = [], [], self.patch_size
        for image in images:
            size, (height, width) = self._sizes(image.height, image.width)
            x = np.asarray(image.resize((size[1], size[0]), resample=BICUBIC))
            x = np.pad(x, ((0, height * p - size[0]), (0, width * p - size[1]), (0, 0))).astype(np.float32)
            x = (x / np.float32(255) - np.float32(self.mean)) / np.float32(self.std)
            pixels.append(torch.from_numpy(x).view(height, p, width, p, 3).permute(0, 2, 4, 1, 3).flatten(0, 1))
            grids.append((1, height, width))
        return {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}

    def get_number_of_image_patches(self, height: int, width: int, _: object = None) -> int:
        """Raises ValueError."""
        return math.prod(self._sizes(height, width)[1])

    def _sizes(self, height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """In pixels after scaling, in patches after padding."""
        p, most = self.patch_size, self.max_side * self.patch_size
        patches = max(1, height // p) * max(1, width // p)
        scale = min(1.0, math.sqrt(self.limit / patches))
        if self.is_k25:
            scale = min(scale, most / height, most / width)
        scaled = max(1, int(height * scale)), max(1, int(width * scale))
        h, w = (-(-n // (p * self.merge_size)) * self.merge_size for n in scaled)
        longest = self.max_side if self.is_k25 else self.max_side - 1
        if max(h, w) > longest:
            raise ValueError(
                f"an image of {width} x {height} pixels becomes {w} x {h} patches; at most {longest} fit a side"
            )
        return scaled, (h, w)
