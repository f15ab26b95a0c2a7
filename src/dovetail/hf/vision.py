"""What a model sees: images and videos of packed sequences as rows of features, in the places that their tokens hold.

Whole images are dealt to the cp ranks by their patches. Each rank runs its own through the model's tower and gathers all
features; gradients go back the same way, so no image is computed twice. Every micro-batch is one call of the tower on
every rank, text or not: who has nothing to look at looks at a placeholder, and none of its features is used.

Images and videos go through that call together, as videos: to the families below an image is a video of one frame.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

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


@dataclass(frozen=True)
class VisionKind:
    """What can be seen: its number among types of tokens (0 is text), and its names in a processor's output."""

    name: str
    code: int
    pixels: str
    grid: str


KINDS = (
    VisionKind("image", 1, "pixel_values", "image_grid_thw"),
    VisionKind("video", 2, "pixel_values_videos", "video_grid_thw"),
)
GRIDS = (*(kind.grid for kind in KINDS), "second_per_grid_ts")  # what positions follow from


@dataclass(frozen=True)
class Family:
    """How a family's tokens stand for what it sees.

    marks: videos are image tokens between two marks of their own. frames_apart: a video's frames have text between them.
    clips: videos may have several frames; where not, their
    features are pooled over frames, which transformers does not count.
    """

    marks: bool = False
    frames_apart: bool = False
    clips: bool = True


# Families whose features replace the embeddings of placeholder tokens, one for one, under a causal mask.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen2_vl": Family(),
        "qwen2_5_vl": Family(),
        "qwen3_vl": Family(frames_apart=True),
        "qwen3_vl_moe": Family(frames_apart=True),
        "glm4v": Family(marks=True, frames_apart=True),
        "glm4v_moe": Family(marks=True, frames_apart=True),
        "kimi_k25": Family(clips=False),
        "kimi_vl": Family(clips=False),
    }
)


@dataclass(frozen=True)
class VisionInputs:
    """An image or a video: patches [frames * height * width, ...] on the host, and its grid."""

    pixels: Tensor
    grid: tuple[int, ...]
    rows: int  # of features


@dataclass(frozen=True)
class VisionOutputs:
    """The features of this rank's tokens: rows [n, D] for its tokens `places` [n], rising; one more set a deep layer."""

    places: Tensor
    features: tuple[Tensor, ...]


class Vision:
    """The tower of a vision-language model, and the tokens that stand for what it sees."""

    def __init__(self, model: "transformers.PreTrainedModel", axis: Axis) -> None:
        """`model` has the tower and the text backbone; `axis` is cp."""
        self.model, self.axis = model, axis
        self.config: transformers.PreTrainedConfig = model.config
        self.family = family_of(model.config)
        patches = next(m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Conv3d)))
        shape = patches.weight.shape[1:]
        self.patch = (shape.numel(),) if isinstance(patches, nn.Conv3d) else tuple(shape)  # as the tower takes one
        tower = self.config.vision_config.to_dict()
        self.side: int = tower["spatial_merge_size"] if "spatial_merge_size" in tower else tower["merge_kernel_size"][0]

    def kinds(self, tokens: Tensor) -> Tensor:
        """int64 [n]: which tokens of one sequence stand for a part of an image (1) or of a video (2)."""
        return kinds_of(tokens, self.config)

    def check(self, batch: PackedBatch) -> None:
        """Refuse media that do not fit their sequences. Raises DataError, which names the sequence.

        Those that are not read yet were measured when they were made, and are compared once they are: to look at them
        here would read the whole batch on every rank.
        """
        for number, (tokens, media) in enumerate(_sequences(batch)):
            if not isinstance(media, LazyMedia):
                self._compare(number, tokens, media)

    def _compare(self, number: int, tokens: Tensor, media: Media | None) -> None:
        kinds = self.kinds(tokens)
        runs = torch.stack(torch.unique_consecutive(kinds, return_counts=True), dim=1).tolist()
        for kind in KINDS:
            found = [length for code, length in runs if code == kind.code]
            expected = [n for sight in self.sights(media, number, kind) for n in self._runs(sight, kind)]
            if found != expected:
                raise DataError(
                    f"sequence {number} has {sum(found)} {kind.name} tokens, in runs of {found}, but its {kind.name}s "
                    f"have {sum(expected)} rows of features, {expected}; give it the tokens and the media that the "
                    "processor made together, uncut"
                )

    def _runs(self, sight: VisionInputs, kind: VisionKind) -> list[int]:
        """How many tokens of a sight lie together, and then apart from those."""
        frames = sight.grid[0] if kind.code == 2 and self.family.frames_apart else 1
        return [sight.rows // frames] * frames

    def sights(self, media: Media | None, number: int, kind: VisionKind) -> list[VisionInputs]:
        """The images, or the videos, of one sequence."""
        if media is None or kind.grid not in media:
            return []
        grids = [tuple(grid) for grid in media[kind.grid].tolist()]
        patches = [t * h * w for t, h, w in grids]
        shape, expected = tuple(media[kind.pixels].shape) if kind.pixels in media else (), (sum(patches), *self.patch)
        if shape != expected or any(h % self.side or w % self.side for _, h, w in grids):
            raise DataError(
                f"sequence {number} has {kind.pixels} of shape {shape}, but {kind.grid} {grids}, in multiples of "
                f"{self.side}, stands for {expected}; give it what this model's processor made"
            )
        if not self.family.clips and any(t > 1 for t, _, _ in grids):
            raise DataError(
                f"sequence {number} has a video of several frames, which transformers' {self.config.model_type} does not "
                "take; give each frame as an image"
            )
        area = self.side**2
        parts = media[kind.pixels].split(patches)
        return [VisionInputs(part, grid, n // area) for part, grid, n in zip(parts, grids, patches, strict=True)]

    def positions(self, batch: PackedBatch) -> Tensor:
        """[R, T]: each sequence's positions by the model's own rule, as if it were alone."""
        if not hasattr(self.model, "get_rope_index"):
            return batch.positions[None]
        found = []
        for tokens, media in _sequences(batch):
            if media is None:
                found.append(torch.arange(len(tokens)).expand(3, -1))
                continue
            grids = {name: media[name] for name in GRIDS if name in media}
            alone, _ = self.model.get_rope_index(tokens[None], mm_token_type_ids=self.kinds(tokens)[None], **grids)
            found.append(alone[:, 0])
        return torch.cat(found, dim=1).to(batch.positions.device)

    def look(self, micro: MicroBatch, dtype: torch.dtype) -> VisionOutputs:
        """The features of this rank's tokens of a micro-batch. Collective over cp."""
        device = micro.order.device
        sights, places = self._spread(micro.batch)
        owners = deal([len(sight.pixels) for sight in sights], self.axis.size)
        heights = [sum(s.rows for s, at in zip(sights, owners, strict=True) if at == r) for r in range(self.axis.size)]
        mine = [sight for sight, owner in zip(sights, owners, strict=True) if owner == self.axis.rank]
        rows, widths = self._run(mine, dtype, device)
        height = max(*heights, 1)  # at least one row, so that ranks exchange something and gradients find their way
        filled = F.pad(rows[: heights[self.axis.rank]], (0, 0, 0, height - heights[self.axis.rank]))
        everyone = gather_in_order(filled, self.axis, sum_deterministic)
        starts = [rank * height for rank in range(self.axis.size)]
        index = torch.tensor(_stretches([sight.rows for sight in sights], owners, starts), dtype=torch.int64)
        places, by_place = places.sort()  # within a sequence images came before videos
        order = micro.shard.order(len(micro.batch))
        local = torch.searchsorted(order, places).clamp(max=len(order) - 1)
        here = order[local] == places
        features = everyone.index_select(0, index[by_place][here].to(device))
        return VisionOutputs(local[here].to(device), tuple(features.split(widths, dim=1)))

    def _spread(self, batch: PackedBatch) -> tuple[list[VisionInputs], Tensor]:
        """All sights of a batch, and the place among its tokens of each row of their features."""
        sights: list[VisionInputs] = []
        places = [torch.empty(0, dtype=torch.int64)]
        starts = cumulative(batch.lengths).tolist()
        start_reading(batch.media)
        for number, (tokens, media) in enumerate(_sequences(batch)):
            if media is not None:
                self._compare(number, tokens, media)
                kinds = self.kinds(tokens)
                for kind in KINDS:
                    sights += self.sights(media, number, kind)
                    places.append(starts[number] + (kinds == kind.code).nonzero()[:, 0])
        return sights, torch.cat(places)

    def _run(self, sights: list[VisionInputs], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[int]]:
        """One call of the tower: features [n, D] of all layers that give some, side by side, and the width of each."""
        if not sights:
            grid = (1, self.side, self.side)
            sights = [VisionInputs(torch.zeros((self.side**2, *self.patch)), grid, 1)]
        pixels = torch.cat([sight.pixels for sight in sights]).to(device, dtype)
        grids = torch.tensor([sight.grid for sight in sights], device=device)
        found = self.model.get_video_features(pixels, grids, return_dict=True)
        layers = [found.pooler_output, *found.get("deepstack_features", ())]
        features = [(x if isinstance(x, Tensor) else torch.cat(x)).to(dtype) for x in layers]  # or a tuple, by image
        return torch.cat(features, dim=1), [layer.shape[1] for layer in features]


def deal(patches: Sequence[int], ranks: int) -> list[int]:
    """Which rank runs each image: the largest first, to the rank with the fewest patches."""
    load, owners = [0] * ranks, [0] * len(patches)
    for i in sorted(range(len(patches)), key=lambda i: (-patches[i], i)):
        owners[i] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[owners[i]] += patches[i]
    return owners


def family_of(config: "transformers.PreTrainedConfig") -> Family:
    """How a model sees, if that is proved. Raises ModelError."""
    try:
        return FAMILIES[config.model_type]
    except KeyError:
        raise ModelError(
            f"model_type {quoted(config.model_type)} is not among the vision-language families that the transformers engine "
            f"runs: {', '.join(FAMILIES)}; another may mask, merge or place its images in a way of its own"
        ) from None


def kinds_of(tokens: Tensor, config: "transformers.PreTrainedConfig") -> Tensor:
    """int64, as the tokens of one sequence or of rows of them: which stand for a part of an image (1) or of a video (2)."""
    kinds = (tokens == config.image_token_id).long()
    if family_of(config).marks:
        opened = (tokens == config.video_start_token_id).cumsum(-1)
        return kinds * (1 + (opened > (tokens == config.video_end_token_id).cumsum(-1)).long())
    return kinds + 2 * (tokens == config.video_token_id).long()


def as_images(tokens: Tensor, media: Media, config: "transformers.PreTrainedConfig") -> Media:
    """One sequence's images and its videos' frames, all as images in the order of their runs of tokens [n].

    For families whose videos are image tokens: transformers gives features to all of them or to none. Raises DataError.
    """
    codes = [code for code in kinds_of(tokens, config).unique_consecutive().tolist() if code]
    frames = {kind.code: _frames(media, kind) for kind in KINDS}
    for kind in KINDS:
        if codes.count(kind.code) != len(frames[kind.code]):
            raise DataError(
                f"a prompt has {codes.count(kind.code)} runs of {kind.name} tokens, but {len(frames[kind.code])} images or "
                "frames for them; give it the tokens and the media that the processor made together, uncut"
            )
    left = {code: iter(each) for code, each in frames.items()}
    pixels, grids = zip(*(next(left[code]) for code in codes), strict=True)
    image = KINDS[0]
    return {image.pixels: torch.cat(pixels), image.grid: torch.tensor(grids)}


def _frames(media: Media, kind: VisionKind) -> list[tuple[Tensor, tuple[int, int, int]]]:
    """The patches and the grid of each frame of all images, or of all videos."""
    if kind.grid not in media:
        return []
    grids = [(1, h, w) for frames, h, w in media[kind.grid].tolist() for _ in range(frames)]
    return list(zip(media[kind.pixels].split([h * w for _, h, w in grids]), grids, strict=True))


def _sequences(batch: PackedBatch) -> Iterator[tuple[Tensor, Media | None]]:
    """Tokens, on the host, and media of each sequence."""
    media = batch.media or (None,) * batch.num_sequences
    return zip(batch.tokens.cpu().split(batch.lengths), media, strict=True)


def _stretches(rows: Sequence[int], owners: Sequence[int], starts: list[int]) -> list[int]:
    """Where each row of each image lies when every rank's are in order from its own start."""
    ends = list(starts)
    found: list[int] = []
    for count, owner in zip(rows, owners, strict=True):
        found += range(ends[owner], ends[owner] + count)
        ends[owner] += count
    return found
