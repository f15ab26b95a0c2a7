"""Kimi-K2, Kimi-VL and Kimi-K2.5 as published.

`MoonViT` is here because transformers' tower orders queries and keys differently.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from dovetail.arch.common import Config
from dovetail.errors import ModelError
from dovetail.kernels.reference import wide, widened
from dovetail.nn.activation_checkpoint import Recompute, runner

TEXT = "deepseek_v3"
VISION = "kimi_k25"  # transformers' names
THETA = 10000.0
BICUBIC = 3  # pillow's number
MAX_SIDE = 512
LIMITS = ("in_token_limit", "in_patch_limit")  # of Kimi-VL, of Kimi-K2.5
MEDIA_PAD = 163605  # where config.json lacks it
# supported values of keys that transformers' configs lack
TOWER_ONLY: Mapping[str, Any] = {
    "merge_type": "sd2_tpool", "mm_projector_type": "patchmerger", "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu", "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
TEXT_ONLY: Mapping[str, Any] = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}


def translated(config: Config) -> Config:
    """Return config.json as transformers knows it. ModelError."""
    form = FORMS.get(str(config.get("model_type")))
    return config if form is None else form(config)


def _text(config: Config) -> Config:
    _check(config, TEXT_ONLY)
    return {**config, "model_type": TEXT}


def _vision(config: Config) -> Config:
    text = dict(config.get("text_config") or {})
    published = dict(config.get("vision_config") or {})
    _check(published, TOWER_ONLY)
    published.pop("model_type", None)
    tower = {}
    for name, value in published.items():
        tower[name.removeprefix("vt_").removeprefix("init_")] = value
    width = tower.get("hidden_size", 1152)
    _check(tower, {"mm_hidden_size": width})
    return {
        "image_token_id": config.get("media_placeholder_token_id", MEDIA_PAD),
        "video_token_id": -1,
        "projection_hidden_size": width,
        "projection_layer_norm_eps": tower.get("projector_ln_eps", 1e-5),
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        **config,
        "model_type": VISION,
        "text_config": _text(text),
        "vision_config": tower,
    }


FORMS: Mapping[str, Callable[[Config], Config]] = {
    "kimi_k2": _text,
    "kimi_vl": _vision,
    "kimi_k25": _vision,
}


def _check(config: Config, supported: Config) -> None:
    for name, value in supported.items():
        if config.get(name, value) != value:
            raise ModelError(f"config.json: {name} is {config[name]!r}; supported: {value!r}")


class PositionTable(nn.Module):
    """Learned embeddings of positions, scaled to each image."""

    def __init__(self, height: int, width: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(height, width, dim))

    def forward(self, sizes: Sequence[tuple[int, int]]) -> Tensor:
        """Return embeddings [sum of heights * widths, D], in float32 or wider."""
        table = widened(self.weight)
        out = []
        for height, width in sizes:
            rows = _bicubic(table, 0, height)
            columns = _bicubic(table, 1, width)
            tall = torch.einsum("yi,ijd->yjd", rows, table)
            scaled = torch.einsum("xj,yjd->yxd", columns, tall)
            out.append(scaled.flatten(0, 1))
        return torch.cat(out)


def _bicubic(table: Tensor, dim: int, size: int) -> Tensor:
    """Return the matrix [size, length] of a scaling: gradients of products are deterministic."""
    length = table.shape[dim]
    identity = torch.eye(length, dtype=table.dtype, device=table.device)
    image = identity[None, None]
    matrix = F.interpolate(image, size=(size, length), mode="bicubic")
    return matrix[0, 0]


class PatchEmbed(nn.Module):
    """A convolution of patches, plus the embeddings of their positions."""

    def __init__(self, config: "transformers.PreTrainedConfig") -> None:
        super().__init__()
        size = config.patch_size
        dim = config.hidden_size
        self.proj = nn.Conv2d(3, dim, kernel_size=size, stride=size)
        self.pos_emb = PositionTable(config.pos_emb_height, config.pos_emb_width, dim)

    def forward(self, pixels: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
        x = self.proj(pixels).flatten(1)
        return x + self.pos_emb(sizes).to(x.dtype)


class Block(nn.Module):
    """A layer of the tower: attention within each image, and an MLP."""

    def __init__(self, config: "transformers.PreTrainedConfig") -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.norm0 = nn.LayerNorm(width)
        self.norm1 = nn.LayerNorm(width)
        self.wqkv = nn.Linear(width, 3 * width)
        self.wo = nn.Linear(width, width)
        self.mlp = nn.Sequential()
        self.mlp.add_module("fc0", nn.Linear(width, config.intermediate_size))
        self.mlp.add_module("act", nn.GELU("tanh"))
        self.mlp.add_module("fc1", nn.Linear(config.intermediate_size, width))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, counts: list[int]) -> Tensor:
        """Return x [n, D] after the layer.

        cos and sin [n, 1, C / 2]; counts: patches of each image.
        """
        qkv = self.wqkv(self.norm0(x))
        q, k, v = qkv.unflatten(1, (3, self.num_heads, -1)).unbind(1)  # [n, H, C]
        q = _rope(q, cos, sin)
        k = _rope(k, cos, sin)
        by_head = [y.transpose(0, 1)[None] for y in (q, k, v)]  # [1, H, n, C]
        by_image = [y.split(counts, dim=2) for y in by_head]
        images = zip(*by_image, strict=True)
        attended = [F.scaled_dot_product_attention(*image) for image in images]
        heads = torch.cat(attended, dim=2)
        mixed = heads[0].transpose(0, 1)
        x = x + self.wo(mixed.flatten(1))
        return x + self.mlp(self.norm1(x))


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x_wide = x.to(cos.dtype)
    pairs = x_wide.unflatten(-1, (-1, 2))
    a, b = pairs.unbind(-1)
    first = a * cos - b * sin
    second = a * sin + b * cos
    rotated = torch.stack((first, second), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


class Encoder(nn.Module):
    """The layers of the tower."""

    def __init__(self, config: "transformers.PreTrainedConfig") -> None:
        super().__init__()
        self.channels: int = config.hidden_size // config.num_attention_heads
        rope = config.rope_parameters or {}
        self.theta = float(rope.get("rope_theta", THETA))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.final_layernorm = nn.LayerNorm(config.hidden_size)
        self.recompute: Recompute = "none"

    def forward(self, x: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
        angles = torch.cat([self.angles(height, width, x) for height, width in sizes])
        cos = angles[:, None].cos()
        sin = angles[:, None].sin()
        run = runner(self.recompute)
        counts = [height * width for height, width in sizes]
        for block in self.blocks:
            x = run(block, x, cos, sin, counts)
        return self.final_layernorm(x)

    def angles(self, height: int, width: int, like: Tensor) -> Tensor:
        """Return angles [height * width, C / 2], of column and row in turn."""
        arange = partial(torch.arange, dtype=wide(like.dtype), device=like.device)
        exponents = arange(0, self.channels, 4) / self.channels
        frequencies = self.theta**-exponents
        columns = arange(width).repeat(height)
        rows = arange(height).repeat_interleave(width)
        places = torch.stack((columns, rows), dim=-1)
        angles = frequencies[:, None] * places[:, None]
        return angles.flatten(1)


class MoonViT(nn.Module):
    """The vision tower of arXiv 2504.07491, section 2.1."""

    def __init__(self, config: "transformers.PreTrainedConfig") -> None:
        super().__init__()
        self.merge_kernel_size: tuple[int, int] = tuple(config.merge_kernel_size)
        if len(set(self.merge_kernel_size)) > 1:
            given = f"config.json: merge_kernel_size is {self.merge_kernel_size}"
            raise ModelError(f"{given}; supported: two equal sides")
        self.patch_embed = PatchEmbed(config)
        self.encoder = Encoder(config)

    def forward(self, pixel_values: Tensor, grid_thw: Tensor, **_: object) -> Any:
        """Return pooler_output [n / merged, merged, D].

        pixel_values: patches [n, 3, patch, patch]. grid_thw [images, 3].
        """
        sizes = [(height, width) for _, height, width in grid_thw.tolist()]
        x = self.encoder(self.patch_embed(pixel_values, sizes), sizes)
        side = self.merge_kernel_size[0]
        images = x.split([height * width for height, width in sizes])
        rows = []
        for image, (height, width) in zip(images, sizes, strict=True):
            squares = image.view(height // side, side, width // side, side, -1)
            merged = squares.transpose(1, 2).flatten(0, 1)
            rows.append(merged.flatten(1, 2))
        return transformers.modeling_outputs.BaseModelOutputWithPooling(x, torch.cat(rows))


TOWERS: Mapping[str, type[nn.Module]] = {VISION: MoonViT}


def replace_tower(model: "transformers.PreTrainedModel") -> None:
    """Put our tower in place of transformers' one, where we have one."""
    cls = TOWERS.get(model.config.model_type)
    if cls is not None:
        tower = cls(model.config.vision_config).to(model.dtype)
        model.get_submodule("model").add_module("vision_tower", tower)


def published(settings: Config) -> dict[str, Any] | None:
    """Return the settings of a processor as Kimi publishes them; None: it is another one."""
    merged = {**settings, **(settings.get("media_proc_cfg") or {})}
    return merged if any(name in merged for name in LIMITS) else None


class KimiImages:
    """A processor like transformers'.

    It scales images down and pads them to whole rows of features.
    """

    def __init__(self, settings: Config) -> None:
        for name, value in (("pad_input", True), ("fixed_output_tokens", None)):
            if settings.get(name, value) != value:
                raise ModelError(
                    f"preprocessor_config.json: {name} is {settings[name]!r}; supported: {value!r}"
                )
        kernel = settings.get("merge_kernel_size", 2)
        self.merge_size, *others = kernel if isinstance(kernel, list) else [kernel]
        self.patch_size: int = settings.get("patch_size", 14)
        self.limit: int = next(settings[name] for name in LIMITS if name in settings)
        self.is_k25 = LIMITS[1] in settings
        self.max_side: int = settings.get("patch_limit_on_one_side", MAX_SIDE)
        self.mean = settings.get("image_mean")
        self.std = settings.get("image_std")
        counts = (self.merge_size, self.patch_size, self.limit, self.max_side)
        are_counts = all(type(n) is int and n > 0 for n in counts)
        has_equal_sides = set(others) <= {self.merge_size}
        colors = (self.mean, self.std)
        have_colors = all(isinstance(each, list) and len(each) == 3 for each in colors)
        if not (are_counts and has_equal_sides and have_colors):
            raise ModelError(
                "preprocessor_config.json: expected patch_size, one merge_kernel_size for both "
                "sides, "
                "limits above 0, and image_mean and image_std of three colors; fetch it again"
            )

    def __call__(self, images: Sequence[Any], **_: object) -> dict[str, Tensor]:
        """Return pixels [n, 3, patch, patch] and grids (1, height, width)."""
        pixels = []
        grids = []
        p = self.patch_size
        for image in images:
            (scaled_height, scaled_width), (height, width) = self._sizes(image.height, image.width)
            x = np.asarray(image.resize((scaled_width, scaled_height), resample=BICUBIC))
            bottom = (0, height * p - scaled_height)
            right = (0, width * p - scaled_width)
            x = np.pad(x, (bottom, right, (0, 0))).astype(np.float32)
            x = x / np.float32(255) - np.float32(self.mean)
            x = x / np.float32(self.std)
            patches = torch.from_numpy(x).view(height, p, width, p, 3)
            pixels.append(patches.permute(0, 2, 4, 1, 3).flatten(0, 1))
            grids.append((1, height, width))
        return {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}

    def get_number_of_image_patches(self, height: int, width: int, _: object = None) -> int:
        """Return the number; ValueError for an image that is too long."""
        _, patches = self._sizes(height, width)
        return math.prod(patches)

    def _sizes(self, height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the pixels of the scaled image, and the patches of the padded one."""
        p = self.patch_size
        max_pixels = self.max_side * p
        patches = max(1, height // p) * max(1, width // p)
        scale = min(1.0, math.sqrt(self.limit / patches))
        if self.is_k25:
            scale = min(scale, max_pixels / height, max_pixels / width)
        scaled_height = max(1, int(height * scale))
        scaled_width = max(1, int(width * scale))
        cell = p * self.merge_size
        h = -(-scaled_height // cell) * self.merge_size
        w = -(-scaled_width // cell) * self.merge_size
        longest = self.max_side if self.is_k25 else self.max_side - 1
        if max(h, w) > longest:
            raise ValueError(
                f"an image of {width} x {height} pixels is {w} x {h} patches; at most {longest} fit"
            )
        return (scaled_height, scaled_width), (h, w)
