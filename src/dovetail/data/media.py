"""What a row shows: its images and videos, found where the row names them, measured by their headers, and decoded.

A video is a list of images, its frames, or a file that transformers decodes. Nothing is fetched, and what is decoded is
bounded beforehand: a few formats that run no code, and a number of pixels.
"""

import base64
import binascii
import importlib
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.errors import DataError

KINDS = ("image", "video")  # each has a column of its own: images, videos

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 1 << 26  # of an image, or of all frames of a video
MAX_BYTES = 1 << 28  # of a file
TURNED = (5, 6, 7, 8)  # EXIF orientations that exchange height and width
ORIENTATION = 0x0112
FRAMES_PER_SECOND = 2.0  # of a list of frames whose row does not say
SOURCES = ("path", "url", "base64", "bytes")  # where a part of a message may have its source, beside its own kind


@dataclass(frozen=True)
class Picture:
    """An encoded image. `name` says which in messages; height and width are those of the upright image."""

    source: Path | bytes
    name: str
    height: int
    width: int


@dataclass(frozen=True)
class Clip:
    """A video: its frames, or the file that holds them."""

    name: str
    frames: tuple[Picture, ...] = ()
    file: Path | None = None
    fps: float = FRAMES_PER_SECOND


@dataclass(frozen=True)
class MediaRef:
    """What a row shows, each kind in the order of its places in the text."""

    images: tuple[Picture, ...] = ()
    videos: tuple[Clip, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.images or self.videos)


class MediaLocator:
    """Finds what a row shows: in the parts of its messages and in its columns `images` and `videos`.

    Paths are relative to `folder`. Everything here raises DataError without the row's place, which the caller adds.
    """

    def __init__(self, values: Mapping[str, Any], folder: Path) -> None:
        self.folder = folder
        self.left = {kind: _column(values, f"{kind}s") for kind in KINDS}
        self.images: list[Picture] = []
        self.videos: list[Clip] = []

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages for a chat template: their images and videos are found, and only say where they stand."""
        return [{**message, "content": self._content(message["content"])} for message in messages]

    def rest(self) -> MediaRef:
        """What was found, and what is left in the columns: those of a row without parts of messages."""
        for kind in KINDS:
            for entry in self.left[kind]:
                self._add(kind, entry, {})
        return MediaRef(tuple(self.images), tuple(self.videos))

    def all(self) -> MediaRef:
        """What was found in messages, which must be all that the row has."""
        for name, entries in self.left.items():
            if entries:
                raise DataError(
                    f"{len(entries)} of its {name}s have no place in the messages; give each a content part "
                    f'{{"type": "{name}"}}'
                )
        return MediaRef(tuple(self.images), tuple(self.videos))

    def _content(self, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        parts: list[dict[str, Any]] = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" and isinstance(part.get("text"), str):
                parts.append({"type": "text", "text": part["text"]})
            elif kind in self.left:
                self._part(kind, part)
                parts.append({"type": kind})
            else:
                raise DataError(
                    f'a content part is {_brief(part)}; expected {{"type": "text", "text": ...}}, {{"type": "image", '
                    '...} or {"type": "video", ...}'
                )
        return parts

    def _part(self, kind: str, part: Mapping[str, Any]) -> None:
        given = [(key, part[key]) for key in (kind, *SOURCES) if part.get(key) is not None]  # parquet fills in None
        if len(given) > 1:
            raise DataError(f"a content part of type {kind} has {' and '.join(key for key, _ in given)}; give one")
        if not given:
            if not self.left[kind]:
                raise DataError(
                    f"a content part of type {kind} has no source (one of {', '.join((kind, *SOURCES))}) and the row's "
                    f"column {kind}s has no entry left for it"
                )
            given = [(kind, self.left[kind].pop(0))]
        key, value = given[0]
        self._add(kind, f"data:;base64,{value}" if key == "base64" and isinstance(value, str) else value, part)

    def _add(self, kind: str, value: Any, part: Mapping[str, Any]) -> None:
        if kind == "image":
            self.images.append(self._picture(value, f"image {len(self.images)}"))
        else:
            self.videos.append(self._clip(value, f"video {len(self.videos)}", part.get("fps")))

    def _picture(self, value: Any, name: str) -> Picture:
        source = self._source(value, name)
        name = f"{name} ({source})" if isinstance(source, Path) else name
        bomb = pillow("Image").DecompressionBombWarning  # pillow warns from where we refuse
        with warnings.catch_warnings(action="ignore", category=bomb), _Opened(source, name) as image:
            height, width = image.height, image.width
            if _has_exif(image) and image.getexif().get(ORIENTATION) in TURNED:
                height, width = width, height
        return Picture(source, name, height, width)

    def _clip(self, value: Any, name: str, fps: Any) -> Clip:
        rate = FRAMES_PER_SECOND if fps is None else fps
        if not isinstance(rate, (int, float)) or not 0 < rate < math.inf:
            raise DataError(f"{name}: fps is {_brief(fps)}; expected frames a second")
        if not isinstance(value, list):
            source = self._source(value, name)
            if isinstance(source, bytes):
                raise DataError(f"{name} is bytes; give the path of its file, or the list of its frames")
            return Clip(f"{name} ({source})", file=source)
        frames = tuple(self._picture(frame, f"{name}, frame {number}") for number, frame in enumerate(value))
        sizes = {(frame.height, frame.width) for frame in frames}
        if len(sizes) != 1:
            raise DataError(f"{name} has {len(frames)} frames of {len(sizes)} sizes; expected frames of one size")
        if sum(frame.height * frame.width for frame in frames) > MAX_PIXELS:
            raise DataError(
                f"{name} has {len(frames)} frames of {sizes.pop()}, more than {MAX_PIXELS} pixels; give fewer"
            )
        return Clip(name, frames, fps=float(rate))

    def _source(self, value: Any, name: str) -> Path | bytes:
        """Bytes as they are; a path checked to be a file. Nothing is ever fetched."""
        if isinstance(value, Mapping):  # as datasets have them: {"bytes", "path"}
            value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
        if isinstance(value, bytes):
            return value
        if not isinstance(value, str) or not value:
            raise DataError(f"{name} is {_brief(value)}; expected a path, bytes, or base64")
        if value.startswith("data:"):
            try:
                return base64.b64decode(value.partition(",")[2], validate=True)
            except binascii.Error as error:
                raise DataError(f"{name} is not base64: {error}") from error
        if "://" in value and not value.startswith("file://"):
            raise DataError(f"{name} is the address {value[:80]}; nothing is fetched: save the file and give its path")
        path = self.folder / value.removeprefix("file://")
        try:
            size = path.stat().st_size if path.is_file() else None
        except OSError as error:  # too long
            raise DataError(f"{name}: {value[:80]!r} is no path: {error.strerror}") from error
        if size is None:
            raise DataError(f"{name}: {str(path)!r} is no file; paths are relative to the folder of the data file")
        if size > MAX_BYTES:
            raise DataError(f"{name}: {path} has {size} bytes, more than {MAX_BYTES}; give a smaller file")
        return path


class _Opened:
    """The header of an encoded image, for a `with` block. Raises DataError."""

    def __init__(self, source: Path | bytes, name: str) -> None:
        self.source, self.name = source, name

    def __enter__(self) -> Any:
        image = pillow("Image")
        file = io.BytesIO(self.source) if isinstance(self.source, bytes) else self.source
        try:
            self.image = image.open(file, formats=FORMATS)
        except image.DecompressionBombError as error:
            raise DataError(f"{self.name}: {error}; give a smaller image") from error
        except (OSError, ValueError, SyntaxError) as error:  # pillow's own are kinds of these
            raise DataError(f"{self.name} is no image that can be read (one of {', '.join(FORMATS)})") from error
        if self.image.height * self.image.width > MAX_PIXELS:
            self.image.close()
            raise DataError(
                f"{self.name} has {self.image.height} x {self.image.width} pixels, more than {MAX_PIXELS}; give a "
                "smaller image"
            )
        return self.image

    def __exit__(self, *_: object) -> None:
        self.image.close()


def pillow(module: str) -> Any:
    """A module of pillow, which is an extra. Raises DataError without it."""
    try:
        return importlib.import_module(f"PIL.{module}")
    except ImportError as error:
        raise DataError("images need pillow: pip install 'dovetail[vision]'") from error


def upright(picture: Picture) -> Any:
    """A decoded image, turned as its file says, in RGB."""
    with _Opened(picture.source, picture.name) as image:
        try:
            turned = pillow("ImageOps").exif_transpose(image) if _has_exif(image) else image
            return turned.convert("RGB")
        except (OSError, ValueError, SyntaxError) as error:  # cut off, or corrupt behind its header
            raise DataError(f"{picture.name} cannot be decoded: {error}; save it again") from error


def _has_exif(image: Any) -> bool:
    """Whether its header has EXIF tags; to ask a PNG for those behind its pixels would decode it."""
    return "exif" in image.info


def _column(values: Mapping[str, Any], key: str) -> list[Any]:
    found = values.get(key)
    if found is None:
        return []
    if not isinstance(found, list):
        raise DataError(f"{key} is {_brief(found)}; expected a list")
    return list(found)


def _brief(value: Any) -> str:
    return f"{value!r:.80}"
