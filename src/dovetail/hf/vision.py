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
from dovetail.parallel.axes import Axis
from dovetail.parallel.collectives import gather_in_order


class VisionKind(NamedTuple):
    """Images or videos. code: their token type; pixels and grid: names of the processor."""

    name: str
    code: int
    pixels: str
    grid: str


KINDS = (
    VisionKind("image", 1, "pixel_values", "image_grid_thw"),
    VisionKind("video", 2, "pixel_values_videos", "video_grid_thw"),
)
TOGETHER = "give it the tokens and the media that the processor made together, uncut"
GRIDS = (*(kind.grid for kind in KINDS), "second_per_grid_ts")


class Family(NamedTuple):
    """How a family writes videos.

    marks: tokens around a video's image tokens. frames_apart: text between frames.
    clips: videos of several frames.
    """

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
    """One image or video. rows: of its features."""

    pixels: Tensor
    grid: tuple[int, ...]
    rows: int


class Vision:
    """The vision part of a model."""

    def __init__(self, model: "transformers.PreTrainedModel", axis: Axis) -> None:
        self.model = model
        self.axis = axis
        self.config: transformers.PreTrainedConfig = model.config
        self.family = family_of(model.config)
        patches = next(m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Conv3d)))
        shape = patches.weight.shape[1:]
        self.patch = tuple(shape)
        if isinstance(patches, nn.Conv3d):
            self.patch = (shape.numel(),)
        tower = self.config.vision_config.to_dict()
        self.merge: int = tower.get("spatial_merge_size") or tower["merge_kernel_size"][0]

    def check(self, batch: PackedBatch) -> None:
        """Raise DataError for media that do not fit; lazy ones are compared when read."""
        for number, (tokens, media) in enumerate(_sequences(batch)):
            if not isinstance(media, LazyMedia):
                self._compare(number, tokens, media)

    def _compare(self, number: int, tokens: Tensor, media: Media | None) -> None:
        codes, counts = kinds_of(tokens, self.config).unique_consecutive(return_counts=True)
        runs = [*zip(codes.tolist(), counts.tolist(), strict=True)]
        for kind in KINDS:
            lengths = [length for code, length in runs if code == kind.code]
            expected = []
            for x in self.inputs(media, number, kind):
                frames = x.grid[0] if kind.code == 2 and self.family.frames_apart else 1
                expected += [x.rows // frames] * frames
            if lengths != expected:
                raise DataError(
                    f"sequence {number} has {sum(lengths)} {kind.name} tokens, in runs of "
                    f"{lengths}, "
                    f"but its {kind.name}s have {sum(expected)} rows of features, {expected}; "
                    f"{TOGETHER}"
                )

    def inputs(self, media: Media | None, number: int, kind: VisionKind) -> list[VisionInputs]:
        """Return the images or videos of a sequence. DataError."""
        if media is None or kind.grid not in media:
            return []
        grids = [tuple(grid) for grid in media[kind.grid].tolist()]
        patches = [t * h * w for t, h, w in grids]
        shape = tuple(media[kind.pixels].shape) if kind.pixels in media else ()
        expected = (sum(patches), *self.patch)
        is_odd = any(h % self.merge or w % self.merge for _, h, w in grids)
        if is_odd or shape != expected:
            raise DataError(
                f"sequence {number} has {kind.pixels} of shape {shape}, but {kind.grid} {grids}, "
                f"in multiples of {self.merge}, stands for {expected}; "
                "give it what this model's processor made"
            )
        if not self.family.clips and any(t > 1 for t, _, _ in grids):
            lacks = f"which transformers' {self.config.model_type} does not take"
            raise DataError(
                f"sequence {number} has a video of several frames, {lacks}; give each frame as "
                "an image"
            )
        rows = [n // self.merge**2 for n in patches]
        pixels = media[kind.pixels].split(patches)
        return [VisionInputs(*x) for x in zip(pixels, grids, rows, strict=True)]

    def positions(self, batch: PackedBatch) -> Tensor:
        """Return positions [R, T], by the model's own rule."""
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
        positions = torch.cat(parts, dim=1)
        return positions.to(batch.positions.device)

    def encode(self, micro: MicroBatch, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Return the places [n] of features in the tokens of this rank, and features [n, D].

        Places ascend; the features are the first and the deep ones. Collective over cp.
        """
        device = micro.order.device
        inputs, places = self._collect(micro.batch)
        gathered, index, widths = self._gather(inputs, dtype, device)
        places, by_place = places.sort()
        order = micro.shard.order(len(micro.batch))
        last = len(order) - 1
        local_places = torch.searchsorted(order, places).clamp(max=last)
        is_local = order[local_places] == places
        rows = torch.tensor(index, dtype=torch.int64)
        rows = rows[by_place][is_local]
        features = gathered.index_select(0, rows.to(device))
        layers = features.split(widths, dim=1)
        return local_places[is_local].to(device), [*layers]

    def _gather(
        self, inputs: list[VisionInputs], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, list[int], list[int]]:
        """Run a share of the inputs.

        Return features of all ranks, the row of each feature, and widths.
        """
        ranks = range(self.axis.size)
        owners = balance_images([len(x.pixels) for x in inputs], self.axis.size)
        rank = self.axis.rank
        own = []
        num_rows = [0 for _ in ranks]
        for x, owner in zip(inputs, owners, strict=True):
            num_rows[owner] += x.rows
            if owner == rank:
                own.append(x)
        features, widths = self._run(own, dtype, device)
        height = max(*num_rows, 1)  # gradients flow on every rank
        padding = height - num_rows[rank]
        padded = F.pad(features[: num_rows[rank]], (0, 0, 0, padding))
        gathered = gather_in_order(padded, self.axis, sum_deterministic)
        ends = [rank * height for rank in ranks]
        index: list[int] = []
        for x, owner in zip(inputs, owners, strict=True):
            index += range(ends[owner], ends[owner] + x.rows)
            ends[owner] += x.rows
        return gathered, index, widths

    def _collect(self, batch: PackedBatch) -> tuple[list[VisionInputs], Tensor]:
        inputs = []
        places = [torch.empty(0, dtype=torch.int64)]
        starts = cumulative(batch.lengths).tolist()
        start_reading(batch.media)
        for number, (tokens, media) in enumerate(_sequences(batch)):
            if media is not None:
                self._compare(number, tokens, media)
                kinds = kinds_of(tokens, self.config)
                for kind in KINDS:
                    inputs += self.inputs(media, number, kind)
                    found = (kinds == kind.code).nonzero()[:, 0]
                    places.append(starts[number] + found)
        return inputs, torch.cat(places)

    def _run(
        self, inputs: list[VisionInputs], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, list[int]]:
        """Return features side by side, and their widths. Without inputs, of a blank image."""
        if not inputs:
            blank = torch.zeros((self.merge**2, *self.patch))
            inputs = [VisionInputs(blank, (1, self.merge, self.merge), 1)]
        pixels = torch.cat([x.pixels for x in inputs]).to(device, dtype)
        grids = torch.tensor([x.grid for x in inputs], device=device)
        out = self.model.get_video_features(pixels, grids, return_dict=True)
        layers = [out.pooler_output, *out.get("deepstack_features", ())]
        features = []
        for x in layers:
            whole = x if isinstance(x, Tensor) else torch.cat(x)  # some models give a tuple
            features.append(whole.to(dtype))
        return torch.cat(features, dim=1), [x.shape[1] for x in features]


def balance_images(patches: Sequence[int], ranks: int) -> list[int]:
    """Return the rank of each image: the largest first, to the least loaded."""
    load = [0] * ranks
    owners = [0] * len(patches)
    largest_first = sorted(range(len(patches)), key=lambda i: -patches[i])
    for i in largest_first:
        owners[i] = min(range(ranks), key=lambda rank: load[rank])
        load[owners[i]] += patches[i]
    return owners


def family_of(config: "transformers.PreTrainedConfig") -> Family:
    """Return how the family of `config` writes videos. ModelError."""
    try:
        return FAMILIES[config.model_type]
    except KeyError:
        raise ModelError(
            f"model_type {quoted(config.model_type)} is not among the vision-language families "
            "that "
            f"the transformers engine runs: {', '.join(FAMILIES)}; another may mask, merge or "
            "place "
            "its images in a way of its own"
        ) from None


def kinds_of(tokens: Tensor, config: "transformers.PreTrainedConfig") -> Tensor:
    """Return the kind of each token: 0 text, 1 image, 2 video."""
    kinds = (tokens == config.image_token_id).long()
    if family_of(config).marks:
        opened = (tokens == config.video_start_token_id).cumsum(-1)
        closed = (tokens == config.video_end_token_id).cumsum(-1)
        return kinds * (1 + (opened > closed).long())
    return kinds + 2 * (tokens == config.video_token_id).long()


def as_images(tokens: Tensor, media: Media, config: "transformers.PreTrainedConfig") -> Media:
    """Return images and frames in the order of their tokens.

    transformers gives features to all or none.
    """
    runs_of_tokens = kinds_of(tokens, config).unique_consecutive()
    codes = [code for code in runs_of_tokens.tolist() if code]
    frames_left = {}
    for kind in KINDS:
        frames = _frames(media, kind)
        frames_left[kind.code] = iter(frames)
        runs = codes.count(kind.code)
        if runs != len(frames):
            raise DataError(
                f"a prompt has {runs} runs of {kind.name} tokens, but {len(frames)} images or "
                "frames "
                f"for them; {TOGETHER}"
            )
    chosen = [next(frames_left[code]) for code in codes]
    pixels, grids = zip(*chosen, strict=True)
    image = KINDS[0]
    return {image.pixels: torch.cat(pixels), image.grid: torch.tensor(grids)}


def _frames(media: Media, kind: VisionKind) -> list[tuple[Tensor, tuple[int, int, int]]]:
    if kind.grid not in media:
        return []
    grids = []
    for frames, height, width in media[kind.grid].tolist():
        grids += [(1, height, width)] * frames
    patches = [height * width for _, height, width in grids]
    pixels = media[kind.pixels].split(patches)
    return [*zip(pixels, grids, strict=True)]


def _sequences(batch: PackedBatch) -> Iterator[tuple[Tensor, Media | None]]:
    media = batch.media or (None,) * batch.num_sequences
    return zip(batch.tokens.cpu().split(batch.lengths), media, strict=True)
