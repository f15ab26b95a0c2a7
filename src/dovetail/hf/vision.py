"""Vision features of packed sequences in the places of placeholder tokens.

cp ranks share the images. Each calls the tower once a micro-batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from dovetail.batch.micro import MicroBatch
from dovetail.batch.packed import LazyMedia, Media, PackedBatch, cumulative, start_reading
from dovetail.errors import DataError, ModelError, quoted
from dovetail.kernels.reference import sum_deterministic
from dovetail.parallel.collectives import gather_in_order
from dovetail.parallel.mesh import Axis


class VisionKind(NamedTuple):
    """code: token type."""

    name: str
    code: int
    pixels: str
    grid: str


KINDS = (
    VisionKind("image", 1, "pixel_values", "image_grid_thw"),
    VisionKind("video", 2, "pixel_values_videos", "video_grid_thw"),
)
GRIDS = (*(kind.grid for kind in KINDS), "second_per_grid_ts")


class Family(NamedTuple):
    """marks: around a video's image tokens. frames_apart: text between frames. clips: videos of several frames."""

    marks: bool = False
    frames_apart: bool = False
    clips: bool = True


# features replace placeholders' embeddings, one for one, under a causal mask
FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), Family()),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), Family(frames_apart=True)),
    **dict.fromkeys(("glm4v", "glm4v_moe"), Family(marks=True, frames_apart=True)),
    **dict.fromkeys(("kimi_k25", "kimi_vl"), Family(clips=False)),
}


class VisionInputs(NamedTuple):
    pixels: Tensor
    grid: tuple[int, ...]
    rows: int


class Vision:
    def __init__(self, model: "transformers.PreTrainedModel", axis: Axis) -> None:
        self.model = model
        self.axis = axis
        self.config: transformers.PreTrainedConfig = model.config
        self.family = family_of(model.config)
        patches = next(m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Conv3d)))
        shape = patches.weight.shape[1:]
        self.patch = (shape.numel(),) if isinstance(patches, nn.Conv3d) else tuple(shape)
        tower = self.config.vision_config.to_dict()
        self.merge: int = tower.get("spatial_merge_size") or tower["merge_kernel_size"][0]

    def check(self, batch: PackedBatch) -> None:
        """DataError for media that do not fit; lazy ones are compared when read."""
        for number, (tokens, media) in enumerate(_sequences(batch)):
            if not isinstance(media, LazyMedia):
                self._compare(number, tokens, media)

    def _compare(self, number: int, tokens: Tensor, media: Media | None) -> None:
        runs = torch.stack(
            torch.unique_consecutive(kinds_of(tokens, self.config), return_counts=True), dim=1
        ).tolist()
        for kind in KINDS:
            lengths = [length for code, length in runs if code == kind.code]
            expected = []
            for x in self.inputs(media, number, kind):
                frames = x.grid[0] if kind.code == 2 and self.family.frames_apart else 1
                expected += [x.rows // frames] * frames
            if lengths != expected:
                raise DataError(
                    f"sequence {number} has {sum(lengths)} {kind.name} tokens, in runs of {lengths}, but its {kind.name}s "
                    f"have {sum(expected)} rows of features, {expected}; give it the tokens and the media that the "
                    "processor made together, uncut"
                )

    def inputs(self, media: Media | None, number: int, kind: VisionKind) -> list[VisionInputs]:
        if media is None or kind.grid not in media:
            return []
        grids = [tuple(grid) for grid in media[kind.grid].tolist()]
        patches = [t * h * w for t, h, w in grids]
        shape = tuple(media[kind.pixels].shape) if kind.pixels in media else ()
        expected = (sum(patches), *self.patch)
        if shape != expected or any(h % self.merge or w % self.merge for _, h, w in grids):
            raise DataError(
                f"sequence {number} has {kind.pixels} of shape {shape}, but {kind.grid} {grids}, in multiples of "
                f"{self.merge}, stands for {expected}; give it what this model's processor made"
            )
        if not self.family.clips and any(t > 1 for t, _, _ in grids):
            lacks = f"which transformers' {self.config.model_type} does not take"
            raise DataError(
                f"sequence {number} has a video of several frames, {lacks}; give each frame as an image"
            )
        rows = [n // self.merge**2 for n in patches]
        return [
            VisionInputs(*x)
            for x in zip(media[kind.pixels].split(patches), grids, rows, strict=True)
        ]

    def positions(self, batch: PackedBatch) -> Tensor:
        """[R, T], by the model's own rule."""
        if not hasattr(self.model, "get_rope_index"):
            return batch.positions[None]
        parts = []
        for tokens, media in _sequences(batch):
            if media is None:
                parts.append(torch.arange(len(tokens)).expand(3, -1))
                continue
            grids = {name: media[name] for name in GRIDS if name in media}
            kinds = kinds_of(tokens, self.config)[None]
            alone, _ = self.model.get_rope_index(tokens[None], mm_token_type_ids=kinds, **grids)
            parts.append(alone[:, 0])
        return torch.cat(parts, dim=1).to(batch.positions.device)

    def encode(self, micro: MicroBatch, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Places [n] here, ascending, and features [n, D], first and deep ones. Collective over cp."""
        device = micro.order.device
        rank = self.axis.rank
        inputs, places = self._collect(micro.batch)
        owned = [
            *zip(
                inputs, balance_images([len(x.pixels) for x in inputs], self.axis.size), strict=True
            )
        ]
        rows_of = [sum(x.rows for x, owner in owned if owner == r) for r in range(self.axis.size)]
        rows, widths = self._run([x for x, owner in owned if owner == rank], dtype, device)
        height = max(*rows_of, 1)  # gradients flow on every rank
        padded = F.pad(rows[: rows_of[rank]], (0, 0, 0, height - rows_of[rank]))
        gathered = gather_in_order(padded, self.axis, sum_deterministic)
        ends = [r * height for r in range(self.axis.size)]
        index: list[int] = []
        for x, owner in owned:
            index += range(ends[owner], ends[owner] + x.rows)
            ends[owner] += x.rows
        places, by_place = places.sort()
        order = micro.shard.order(len(micro.batch))
        at = torch.searchsorted(order, places).clamp(max=len(order) - 1)
        is_local = order[at] == places
        features = gathered.index_select(
            0, torch.tensor(index, dtype=torch.int64)[by_place][is_local].to(device)
        )
        return at[is_local].to(device), list(features.split(widths, dim=1))

    def _collect(self, batch: PackedBatch) -> tuple[list[VisionInputs], Tensor]:
        inputs = list[VisionInputs]()
        places = [torch.empty(0, dtype=torch.int64)]
        starts = cumulative(batch.lengths).tolist()
        start_reading(batch.media)
        for number, (tokens, media) in enumerate(_sequences(batch)):
            if media is not None:
                self._compare(number, tokens, media)
                kinds = kinds_of(tokens, self.config)
                for kind in KINDS:
                    inputs += self.inputs(media, number, kind)
                    places.append(starts[number] + (kinds == kind.code).nonzero()[:, 0])
        return inputs, torch.cat(places)

    def _run(
        self, inputs: list[VisionInputs], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, list[int]]:
        if not inputs:
            blank = torch.zeros((self.merge**2, *self.patch))
            inputs = [VisionInputs(blank, (1, self.merge, self.merge), 1)]
        pixels = torch.cat([x.pixels for x in inputs]).to(device, dtype)
        grids = torch.tensor([x.grid for x in inputs], device=device)
        out = self.model.get_video_features(pixels, grids, return_dict=True)
        layers = [out.pooler_output, *out.get("deepstack_features", ())]
        features = [
            (x if isinstance(x, Tensor) else torch.cat(x)).to(dtype) for x in layers
        ]  # some models give a tuple
        return torch.cat(features, dim=1), [layer.shape[1] for layer in features]


def balance_images(patches: Sequence[int], ranks: int) -> list[int]:
    """Ranks: the largest first, to the least loaded."""
    load = [0] * ranks
    owners = [0] * len(patches)
    for i in sorted(range(len(patches)), key=lambda i: (-patches[i], i)):
        owners[i] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[owners[i]] += patches[i]
    return owners


def family_of(config: "transformers.PreTrainedConfig") -> Family:
    """ModelError."""
    try:
        return FAMILIES[config.model_type]
    except KeyError:
        raise ModelError(
            f"model_type {quoted(config.model_type)} is not among the vision-language families that the transformers engine "
            f"runs: {', '.join(FAMILIES)}; another may mask, merge or place its images in a way of its own"
        ) from None


def kinds_of(tokens: Tensor, config: "transformers.PreTrainedConfig") -> Tensor:
    """0 text, 1 image, 2 video."""
    kinds = (tokens == config.image_token_id).long()
    if family_of(config).marks:
        opened = (tokens == config.video_start_token_id).cumsum(-1)
        return kinds * (1 + (opened > (tokens == config.video_end_token_id).cumsum(-1)).long())
    return kinds + 2 * (tokens == config.video_token_id).long()


def as_images(tokens: Tensor, media: Media, config: "transformers.PreTrainedConfig") -> Media:
    """Images and frames in the order of their tokens: transformers gives features to all or none."""
    codes = [code for code in kinds_of(tokens, config).unique_consecutive().tolist() if code]
    frames = {kind.code: _frames(media, kind) for kind in KINDS}
    for kind in KINDS:
        if codes.count(kind.code) != len(frames[kind.code]):
            raise DataError(
                f"a prompt has {codes.count(kind.code)} runs of {kind.name} tokens, but {len(frames[kind.code])} images or "
                "frames for them; give it the tokens and the media that the processor made together, uncut"
            )
    left = {code: iter(parts) for code, parts in frames.items()}
    pixels, grids = zip(*(next(left[code]) for code in codes), strict=True)
    image = KINDS[0]
    return {image.pixels: torch.cat(pixels), image.grid: torch.tensor(grids)}


def _frames(media: Media, kind: VisionKind) -> list[tuple[Tensor, tuple[int, int, int]]]:
    if kind.grid not in media:
        return []
    grids = [(1, h, w) for frames, h, w in media[kind.grid].tolist() for _ in range(frames)]
    return list(zip(media[kind.pixels].split([h * w for _, h, w in grids]), grids, strict=True))


def _sequences(batch: PackedBatch) -> Iterator[tuple[Tensor, Media | None]]:
    media = batch.media or (None,) * batch.num_sequences
    return zip(batch.tokens.cpu().split(batch.lengths), media, strict=True)
