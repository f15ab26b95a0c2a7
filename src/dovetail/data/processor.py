"""How a model sees rows: transformers' processor of its images and videos, asked for lengths at once and for pixels late.

When rows are loaded an image's size says how many tokens stand for it, so rows that are too long, broken or missing are
refused before any step. A video's length only its processor can tell, so videos are read once for that. What a step looks
at, each rank reads for itself, and only for sequences that it runs: one rank that read for all would send some fifty times
the bytes of the files. Threads read: pillow and numpy let go of the interpreter while they work, and nothing has to be
copied between processes. They need no killing, since what they decode is bounded (`media`).
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dovetail.batch.packed import LazyMedia, Media
from dovetail.data.media import Clip, MediaRef, Picture, upright
from dovetail.errors import DataError
from dovetail.hf.vision import GRIDS, KINDS

READERS = 4  # threads of a rank
AHEAD = 32  # rows that are read before anybody asks for them
KEPT_BYTES = 1 << 30  # of what a rank has read last


class FileMedia(LazyMedia):
    """A row's images and videos as its model's processor makes them, read on the first look."""

    def __init__(self, shown: MediaRef, rows: tuple[int, ...], where: str, shelf: "MediaCache") -> None:
        """rows: of features, of each image. where: the row's place, for messages."""
        self.shown, self.rows, self.where, self._shelf = shown, rows, where, shelf

    def start(self) -> None:
        self._shelf.start(self)

    def __getitem__(self, name: str) -> Tensor:
        return self._shelf.read(self)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shelf.read(self))

    def __len__(self) -> int:
        return len(self._shelf.read(self))

    def __repr__(self) -> str:
        return f"FileMedia({self.shown!r})"  # the same in every run: rows are compared when one is resumed

    def __deepcopy__(self, _: object) -> "FileMedia":
        return self  # nothing of it changes

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


class MediaCache:
    """Reads in the background, and keeps what was asked for last within a budget of bytes."""

    def __init__(self, read: Callable[[FileMedia], Media], capacity: int = KEPT_BYTES) -> None:
        self._read, self._capacity = read, capacity
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="media")
        self._lock = threading.Lock()
        self._kept: dict[FileMedia, Future[Media]] = {}  # the last asked for at the end
        self._ahead: set[FileMedia] = set()  # begun, and not asked for yet

    def start(self, media: FileMedia) -> None:
        """Begin to read it, unless many have been begun that nobody has asked for yet."""
        if media not in self._kept and len(self._ahead) < AHEAD:
            self._ahead.add(media)
            self._future(media)

    def read(self, media: FileMedia) -> Media:
        self._ahead.discard(media)
        return self._future(media).result()

    def _future(self, media: FileMedia) -> Future[Media]:
        with self._lock:
            found = self._kept.pop(media, None) or self._pool.submit(self._read, media)
            self._kept[media] = found
            held = 0
            for other, future in reversed(list(self._kept.items())):
                held += _size(future)
                if held > self._capacity and other is not media and future.done():
                    del self._kept[other]
        return found


class Processor:
    """How a model sees a row: transformers' processor of its images, and of its videos where torchvision is installed.

    `image_token` and `video_token` are the ids that a chat template writes once for each; the model reads one for each
    row of features.
    """

    def __init__(
        self, image_token: int, video_token: int, load_images: Callable[[], Any], load_videos: Callable[[], Any]
    ) -> None:
        """The loaders are called when the first image or video comes, and raise UserErrors."""
        self.image_token, self.video_token = image_token, video_token
        self._load_images, self._load_videos = load_images, load_videos
        self.shelf = MediaCache(self.read)

    @property
    def stand_ins(self) -> frozenset[int]:
        """Ids that stand for what is seen; they may lie outside the vocabulary."""
        return frozenset(token for token in (self.image_token, self.video_token) if token >= 0)

    @cached_property
    def images(self) -> Any:
        return self._load_images()

    @cached_property
    def videos(self) -> Any:
        return self._load_videos()

    def expand(
        self, ids: Sequence[int], mask: Sequence[bool] | None, shown: MediaRef, where: str
    ) -> tuple[list[int], list[bool], Media | None]:
        """The ids with as many tokens in the place of each image and video as the model reads there; the mask likewise."""
        rows = [self._rows(picture) for picture in shown.images]
        self._compare(ids, shown)
        images = iter([[self.image_token] * n for n in rows])
        videos = iter([self._video_ids(clip) for clip in shown.videos])
        longer: list[int] = []
        longer_mask: list[bool] = []
        for token, trained in zip(ids, mask or [False] * len(ids), strict=True):
            found = [token]
            if token == self.image_token:
                found = next(images)
            elif token == self.video_token:
                found = next(videos)
            longer += found
            longer_mask += [trained] * len(found)
        return longer, longer_mask, self._media(shown, rows, where)

    def fit(self, ids: Sequence[int], shown: MediaRef, where: str) -> Media | None:
        """The media of ids that hold as many tokens for each image as it has rows of features already."""
        if shown.videos:
            raise DataError("input_ids with videos: how a video's tokens lie is its processor's affair; give messages")
        rows = [self._rows(picture) for picture in shown.images]
        runs: list[int] = []
        before = None
        for token in ids:
            if token == self.image_token:
                if token != before:
                    runs.append(0)
                runs[-1] += 1
            before = token
        if runs != rows or self.video_token in ids:
            raise DataError(
                f"input_ids have {sum(runs)} image tokens (id {self.image_token}), in runs of {runs}, but the row's images "
                f"have {sum(rows)} rows of features, {rows}; give the ids that this model's processor made for these images"
            )
        return self._media(shown, rows, where)

    def read(self, media: FileMedia) -> Media:
        """Pixels and grids. Raises DataError, which names the row; in one of the shelf's threads."""
        shown, found = media.shown, dict[str, Tensor]()
        try:
            if shown.images:
                found |= self._pixels(self.images([upright(picture) for picture in shown.images], return_tensors="pt"))
                grids = found[KINDS[0].grid]
                rows = tuple((grids.prod(dim=1) // self.images.merge_size**2).tolist())
                if rows != media.rows:
                    raise DataError(f"its images have {rows} rows of features, but {media.rows} when rows were loaded")
            if shown.videos:
                watched = [self._pixels(self._watch(clip)) for clip in shown.videos]
                found |= {name: torch.cat([each[name] for each in watched]) for name in watched[0]}
        except ValueError as error:  # ours, and what transformers' processors raise
            raise DataError(f"{media.where}: {error}") from error
        return found

    def _media(self, shown: MediaRef, rows: Sequence[int], where: str) -> Media | None:
        return FileMedia(shown, tuple(rows), where, self.shelf) if shown else None

    def _compare(self, ids: Sequence[int], shown: MediaRef) -> None:
        for kind, token, things in (
            ("image", self.image_token, shown.images),
            ("video", self.video_token, shown.videos),
        ):
            count = list(ids).count(token)
            if count != len(things):
                raise DataError(
                    f"the text has {count} {kind} tokens (id {token}), but the row has {len(things)} {kind}s; in messages "
                    f'give each a content part {{"type": "{kind}"}}, in a string write the token where it stands'
                )

    def _rows(self, picture: Picture) -> int:
        """How many rows of features an image becomes."""
        processor = self.images
        try:
            if hasattr(processor, "get_number_of_image_patches"):
                patches = processor.get_number_of_image_patches(picture.height, picture.width, {})
            else:  # code that comes with a model: seen once for that
                found = self._pixels(processor([upright(picture)], return_tensors="pt"))
                patches = int(found[KINDS[0].grid].prod())
            rows: int = patches // processor.merge_size**2
        except ValueError as error:
            raise DataError(f"{picture.name}: the model's processor refuses it: {error}") from error
        except (AttributeError, TypeError, LookupError) as error:
            raise DataError(
                f"preprocessor_config.json names {type(processor).__name__}, which makes no patches of native resolution "
                f"({error!r}); give the one that the model came with"
            ) from error
        return rows

    def _video_ids(self, clip: Clip) -> list[int]:
        """What the processor writes in the place of a video's token."""
        token = self.videos.tokenizer.convert_ids_to_tokens(self.video_token)
        ids: list[int] = self._watch(clip, text=[token], add_special_tokens=False)["input_ids"][0].tolist()
        return ids

    def _watch(self, clip: Clip, **options: Any) -> Mapping[str, Any]:
        """What the model's whole processor makes of a video."""
        processor = self.videos
        if clip.file is not None:
            options |= {"videos": [str(clip.file)]}
        else:
            count = len(clip.frames)
            options |= {
                "videos": [[upright(frame) for frame in clip.frames]],
                "do_sample_frames": False,
                "video_metadata": [{"total_num_frames": count, "fps": clip.fps, "frames_indices": list(range(count))}],
            }
        try:
            found: Mapping[str, Any] = processor(return_tensors="pt", **options)
        except (ValueError, ImportError, OSError, RuntimeError) as error:
            told = " ".join(str(error).split())[:300]
            raise DataError(f"{clip.name}: the model's video processor refuses it: {told}") from error
        return found

    @staticmethod
    def _pixels(found: Mapping[str, Any]) -> dict[str, Tensor]:
        wanted = (*(kind.pixels for kind in KINDS), *GRIDS)
        return {name: torch.as_tensor(found[name]) for name in wanted if name in found}


def _size(future: Future[Media]) -> int:
    """Bytes of what was read; none yet, or an error, takes nothing."""
    if not future.done() or future.exception() is not None:
        return 0
    return sum(tensor.nbytes for tensor in future.result().values())
