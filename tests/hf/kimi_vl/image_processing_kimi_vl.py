"""The image processor: smaller where there are too many patches, padded to whole rows of features."""

import math

import numpy as np
import torch
from PIL import Image
from torch import Tensor


class KimiVLImageProcessor:
    def __init__(self, patch_size: int = 4, in_token_limit: int = 64, merge: int = 2) -> None:
        self.patch_size, self.in_token_limit, self.merge = patch_size, in_token_limit, merge

    def __call__(self, images: list[Image.Image]) -> dict[str, Tensor]:
        found = [self.patches(image) for image in images]
        return {
            "pixel_values": torch.cat([patches for patches, _ in found]),
            "image_grid_hws": torch.tensor([grid for _, grid in found]),
        }

    def patches(self, image: Image.Image) -> tuple[Tensor, tuple[int, int]]:
        p = self.patch_size
        count = (image.width // p) * (image.height // p)
        if count > self.in_token_limit:
            scale = math.sqrt(self.in_token_limit / count)
            size = int(image.width * scale), int(image.height * scale)
            image = image.resize(size, Image.Resampling.BICUBIC)
        height, width = (
            -(-n // (p * self.merge)) * self.merge for n in (image.height, image.width)
        )
        room = Image.new("RGB", (width * p, height * p))
        room.paste(image)
        x = torch.from_numpy(np.asarray(room).astype(np.float32)).permute(2, 0, 1) / 127.5 - 1.0
        return x.reshape(3, height, p, width, p).permute(1, 3, 0, 2, 4).reshape(-1, 3, p, p), (
            height,
            width,
        )
