"""The image processor of the stand-in: native resolution, padded to whole rows of features."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor


class KimiVLImageProcessor(BaseImageProcessor):  # type: ignore[misc]
    model_input_names = ("pixel_values", "image_grid_hws")

    def __init__(self, patch_size: int = 4, merge_kernel_size: tuple[int, int] = (2, 2), **options: Any) -> None:
        super().__init__(**options)
        self.patch_size, self.merge_kernel_size = patch_size, list(merge_kernel_size)

    def preprocess(self, images: list[Image.Image], return_tensors: str | None = None, **_: Any) -> BatchFeature:
        found = [self.patches(image) for image in images]
        data = {
            "pixel_values": torch.cat([patches for patches, _ in found]),
            "image_grid_hws": torch.tensor([grid for _, grid in found]),
        }
        return BatchFeature(data=data, tensor_type=return_tensors)

    def patches(self, image: Image.Image) -> tuple[torch.Tensor, tuple[int, int]]:
        p = self.patch_size
        height, width = (
            -(-n // (p * m)) * m for n, m in zip((image.height, image.width), self.merge_kernel_size, strict=True)
        )
        room = Image.new("RGB", (width * p, height * p))
        room.paste(image.convert("RGB"))
        x = torch.from_numpy(np.asarray(room).astype(np.float32)).permute(2, 0, 1) / 127.5 - 1.0
        return x.reshape(3, height, p, width, p).permute(1, 3, 0, 2, 4).reshape(-1, 3, p, p), (height, width)
