"""transformers' processors of images and videos."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor

from dovetail.batch.packed import LazyMedia, Media
from dovetail.data.media import Clip, MediaRef, Picture, upright
from dovetail.errors import DataError
from dovetail.hf.vision import GRIDS, KINDS

READERS = 4  # threads
AHEAD = 32  # rows
CACHE_BYTES = 1 << 30
TENSORS = (*(kind.pixels for kind in KINDS), *GRIDS)


class FileMedia(LazyMedia):
    """rows: of features, of each image. where: file and line."""

    def __init__(
        self, shown: MediaRef, rows: tuple[int, ...], where: str, cache: "MediaCache"
    ) -> None:
        self.shown = shown
        self.rows = rows
        self.where = where
        self._cache = cache

    def start(self) -> None:
        self._cache.start(self)

    def __getitem__(self, name: str) -> Tensor:
        return self._cache.read(self)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._cache.read(self))

    def __len__(self) -> int:
        return len(self._cache.read(self))

    def __repr__(self) -> str:
        return f"FileMedia({self.shown!r})"  # compared when a run resumes

    def __deepcopy__(self, _: object) -> "FileMedia":
        return self

    __eq__ = object.__eq__
    __hash__ = object.__hash__


class MediaCache:
    """Keeps the most recent within `capacity` bytes."""

    def __init__(self, read: Callable[[FileMedia], Media], capacity: int = CACHE_BYTES) -> None:
        self._read = read
        self._capacity = capacity
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="media")
        self._lock = threading.Lock()
        self._futures: dict[FileMedia, Future[Media]] = {}  # most recent last
        self._ahead: set[FileMedia] = set()  # started, not read yet

    def start(self, media: FileMedia) -> None:
        if media not in self._futures and len(self._ahead) < AHEAD:
            self._ahead.add(media)
            self._future(media)

    def read(self, media: FileMedia) -> Media:
        self._ahead.discard(media)
        return self._future(media).result()

    def _future(self, media: FileMedia) -> Future[Media]:
        with self._lock:
            wanted = self._futures.pop(media, None) or self._pool.submit(self._read, media)
            self._futures[media] = wanted
            size = 0
            for other, future in reversed(list(self._futures.items())):
                if future.done() and future.exception() is None:
                    size += sum(tensor.nbytes for tensor in future.result().values())
                if size > self._capacity and other is not media and future.done():
                    del self._futures[other]
        return wanted


class Processor:
    def __init__(
        self,
        image_token: int,
        video_token: int,
        load_images: Callable[[], Any],
        load_videos: Callable[[], Any],
    ) -> None:
        self.image_token = image_token
        self.video_token = video_token
        self._load_images = load_images
        self._load_videos = load_videos
        self.cache = MediaCache(self.read)

    @property
    def placeholder_ids(self) -> frozenset[int]:
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
        """Returns ids with a placeholder for each row of features."""
        rows = tuple(self._feature_rows(picture) for picture in shown.images)
        kinds = (
            ("image", self.image_token, shown.images),
            ("video", self.video_token, shown.videos),
        )
        for kind, token, sources in kinds:
            count = list(ids).count(token)
            if count != len(sources):
                raise DataError(
                    f"the text has {count} {kind} tokens (id {token}), but the row has "
                    f"{len(sources)} {kind}s; in messages "
                    f'give each a content part {{"type": "{kind}"}}, in a string write the token where it stands'
                )
        images = iter([[self.image_token] * n for n in rows])
        videos = iter([self._video_ids(clip) for clip in shown.videos])
        longer: list[int] = []
        longer_mask: list[bool] = []
        places = {self.video_token: videos, self.image_token: images}
        for token, trained in zip(ids, mask or [False] * len(ids), strict=True):
            tokens = next(places[token]) if token in places else [token]
            longer += tokens
            longer_mask += [trained] * len(tokens)
        return longer, longer_mask, FileMedia(shown, rows, where, self.cache) if shown else None

    def match(self, ids: Sequence[int], shown: MediaRef, where: str) -> Media | None:
        """The media of expanded ids."""
        if shown.videos:
            raise DataError(
                "input_ids with videos: only the processor lays out a video's tokens; give messages"
            )
        rows = tuple(self._feature_rows(picture) for picture in shown.images)
        runs = [len(list(run)) for token, run in groupby(ids) if token == self.image_token]
        if tuple(runs) != rows or self.video_token in ids:
            raise DataError(
                f"input_ids have {sum(runs)} image tokens (id {self.image_token}), in runs of "
                f"{runs}, but the row's images "
                f"have {sum(rows)} rows of features, {list(rows)}; give the ids that this "
                "model's processor made for these "
                "images"
            )
        return FileMedia(shown, rows, where, self.cache) if shown else None

    def read(self, media: FileMedia) -> Media:
        """Reads media in a thread of the cache."""
        shown = media.shown
        tensors = dict[str, Tensor]()
        try:
            if shown.images:
                pictures = [upright(picture) for picture in shown.images]
                tensors |= _tensors(self.images(pictures, return_tensors="pt"))
                grids = tensors[KINDS[0].grid]
                rows = tuple((grids.prod(dim=1) // self.images.merge_size**2).tolist())
                if rows != media.rows:
                    raise DataError(
                        f"its images have {rows} rows of features, but {media.rows} when rows "
                        "were loaded"
                    )
            if shown.videos:
                clips = [_tensors(self._watch(clip)) for clip in shown.videos]
                tensors |= {name: torch.cat([clip[name] for clip in clips]) for name in clips[0]}
        except ValueError as error:  # ours, and of transformers
            raise DataError(f"{media.where}: {error}") from error
        return tensors

    def _feature_rows(self, picture: Picture) -> int:
        processor = self.images
        try:
            if hasattr(processor, "get_number_of_image_patches"):
                patches = processor.get_number_of_image_patches(picture.height, picture.width, {})
            else:
                patches = int(
                    _tensors(processor([upright(picture)], return_tensors="pt"))[
                        KINDS[0].grid
                    ].prod()
                )
            rows: int = patches // processor.merge_size**2
        except ValueError as error:
            raise DataError(f"{picture.name}: the model's processor refuses it: {error}") from error
        except (AttributeError, TypeError, LookupError) as error:
            raise DataError(
                f"preprocessor_config.json names {type(processor).__name__}, which makes no "
                "patches of native resolution "
                f"({error!r}); give the one that the model came with"
            ) from error
        return rows

    def _video_ids(self, clip: Clip) -> list[int]:
        token = self.videos.tokenizer.convert_ids_to_tokens(self.video_token)
        return cast(
            "list[int]",
            self._watch(clip, text=[token], add_special_tokens=False)["input_ids"][0].tolist(),
        )

    def _watch(self, clip: Clip, **options: Any) -> Mapping[str, Any]:
        if clip.file is not None:
            options["videos"] = [str(clip.file)]
        else:
            count = len(clip.frames)
            options |= {
                "videos": [[upright(frame) for frame in clip.frames]],
                "do_sample_frames": False,
                "video_metadata": [
                    {
                        "total_num_frames": count,
                        "fps": clip.fps,
                        "frames_indices": list(range(count)),
                    }
                ],
            }
        try:
            return cast("Mapping[str, Any]", self.videos(return_tensors="pt", **options))
        except (ValueError, ImportError, OSError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise DataError(
                f"{clip.name}: the model's video processor refuses it: {reason}"
            ) from error


def _tensors(out: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: torch.as_tensor(out[name]) for name in TENSORS if name in out}
