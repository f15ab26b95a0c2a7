"""Images and videos of rows: located, measured by their headers, decoded within bounds. Nothing is fetched."""

import base64
import binascii
import importlib
import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.errors import DataError

KINDS = ("image", "video")

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 1 << 26  # of an image, or of all frames of a video
MAX_BYTES = 1 << 28  # of a file
TURNED = (5, 6, 7, 8)  # EXIF orientations
ORIENTATION = 0x0112
FRAMES_PER_SECOND = 2.0
SOURCES = ("path", "url", "base64", "bytes")  # or the part's type
IMAGE_ERRORS = (OSError, ValueError, SyntaxError)  # bases of pillow's own


@dataclass(frozen=True)
class Picture:
    source: Path | bytes
    name: str
    height: int  # of the upright image
    width: int


@dataclass(frozen=True)
class Clip:
    name: str
    frames: tuple[Picture, ...] = ()
    file: Path | None = None  # without frames: transformers decodes it
    fps: float = FRAMES_PER_SECOND


@dataclass(frozen=True)
class MediaRef:
    """Media of a row, in the order of their places in the text."""

    images: tuple[Picture, ...] = ()
    videos: tuple[Clip, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.images or self.videos)


class MediaLocator:
    """Reads content parts and the columns `images` and `videos`. Paths are relative to `folder`."""

    def __init__(self, values: Mapping[str, Any], folder: Path) -> None:
        self.folder = folder
        self.unused = {kind: _column(values, f"{kind}s") for kind in KINDS}
        self.images: list[Picture] = []
        self.videos: list[Clip] = []

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Without sources, for a chat template."""
        return [{**message, "content": self._content(message["content"])} for message in messages]

    def with_columns(self) -> MediaRef:
        """Returns the media of messages, then of the columns."""
        for kind in KINDS:
            for entry in self.unused[kind]:
                self._add(kind, entry, {})
        return MediaRef(tuple(self.images), tuple(self.videos))

    def in_messages(self) -> MediaRef:
        """Returns the media of messages, which must use all of the columns."""
        for name, entries in self.unused.items():
            if entries:
                part = f'{{"type": "{name}"}}'
                raise DataError(
                    f"{len(entries)} of its {name}s have no place in the messages; give each a "
                    f"content part {part}"
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
            elif kind in self.unused:
                self._part(kind, part)
                parts.append({"type": kind})
            else:
                raise DataError(
                    f'a content part is {part!r:.80}; expected {{"type": "text", "text": ...}}, {{"type": "image", '
                    '...} or {"type": "video", ...}'
                )
        return parts

    def _part(self, kind: str, part: Mapping[str, Any]) -> None:
        sources = [
            (key, part[key]) for key in (kind, *SOURCES) if part.get(key) is not None
        ]  # parquet fills in None
        if len(sources) > 1:
            raise DataError(
                f"a content part of type {kind} has {' and '.join(key for key, _ in sources)}; "
                "give one"
            )
        if not sources:
            if not self.unused[kind]:
                raise DataError(
                    f"a content part of type {kind} has no source (one of "
                    f"{', '.join((kind, *SOURCES))}) and the row's "
                    f"column {kind}s has no entry left for it"
                )
            sources = [(kind, self.unused[kind].pop(0))]
        key, value = sources[0]
        self._add(
            kind,
            f"data:;base64,{value}" if key == "base64" and isinstance(value, str) else value,
            part,
        )

    def _add(self, kind: str, value: Any, part: Mapping[str, Any]) -> None:
        if kind == "image":
            self.images.append(self._picture(value, f"image {len(self.images)}"))
        else:
            self.videos.append(self._clip(value, f"video {len(self.videos)}", part.get("fps")))

    def _picture(self, value: Any, name: str) -> Picture:
        source = self._source(value, name)
        name = f"{name} ({source})" if isinstance(source, Path) else name
        bomb = pillow("Image").DecompressionBombWarning
        with (
            warnings.catch_warnings(action="ignore", category=bomb),
            _opened(source, name) as image,
        ):
            height = image.height
            width = image.width
            if _has_exif(image) and image.getexif().get(ORIENTATION) in TURNED:
                height, width = width, height
        return Picture(source, name, height, width)

    def _clip(self, value: Any, name: str, fps: Any) -> Clip:
        rate = FRAMES_PER_SECOND if fps is None else fps
        if not isinstance(rate, (int, float)) or not 0 < rate < math.inf:
            raise DataError(f"{name}: fps is {fps!r:.80}; expected frames a second")
        if not isinstance(value, list):
            source = self._source(value, name)
            if isinstance(source, bytes):
                raise DataError(
                    f"{name} is bytes; give the path of its file, or the list of its frames"
                )
            return Clip(f"{name} ({source})", file=source)
        frames = tuple(
            self._picture(frame, f"{name}, frame {number}") for number, frame in enumerate(value)
        )
        sizes = {(frame.height, frame.width) for frame in frames}
        if len(sizes) != 1:
            raise DataError(
                f"{name} has {len(frames)} frames of {len(sizes)} sizes; expected frames of one "
                "size"
            )
        if sum(frame.height * frame.width for frame in frames) > MAX_PIXELS:
            raise DataError(
                f"{name} has {len(frames)} frames of {sizes.pop()}, over {MAX_PIXELS} pixels; "
                "give fewer"
            )
        return Clip(name, frames, fps=float(rate))

    def _source(self, value: Any, name: str) -> Path | bytes:
        if isinstance(value, Mapping):  # as datasets have them: {"bytes", "path"}
            value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
        if isinstance(value, bytes):
            return value
        if not isinstance(value, str) or not value:
            raise DataError(f"{name} is {value!r:.80}; expected a path, bytes, or base64")
        if value.startswith("data:"):
            try:
                return base64.b64decode(value.partition(",")[2], validate=True)
            except binascii.Error as error:
                raise DataError(f"{name} is not base64: {error}") from error
        if "://" in value and not value.startswith("file://"):
            raise DataError(
                f"{name} is the address {value[:80]}; nothing is fetched: save the file and give "
                "its path"
            )
        path = self.folder / value.removeprefix("file://")
        try:
            size = path.stat().st_size if path.is_file() else None
        except OSError as error:  # too long
            raise DataError(f"{name}: {value[:80]!r} is no path: {error.strerror}") from error
        if size is None:
            raise DataError(
                f"{name}: {str(path)!r} is no file; paths are relative to the folder of the data "
                "file"
            )
        if size > MAX_BYTES:
            raise DataError(
                f"{name}: {path} has {size} bytes, more than {MAX_BYTES}; give a smaller file"
            )
        return path


@contextmanager
def _opened(source: Path | bytes, name: str) -> Iterator[Any]:
    """Opens an image and reads its header."""
    module = pillow("Image")
    try:
        image = module.open(
            io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS
        )
    except module.DecompressionBombError as error:
        raise DataError(f"{name}: {error}; give a smaller image") from error
    except IMAGE_ERRORS as error:
        raise DataError(
            f"{name} is no image that can be read (one of {', '.join(FORMATS)})"
        ) from error
    with closing(image):
        if image.height * image.width > MAX_PIXELS:
            size = f"{image.height} x {image.width} pixels"
            raise DataError(f"{name} has {size}, more than {MAX_PIXELS}; give a smaller image")
        yield image


def pillow(module: str) -> Any:
    try:
        return importlib.import_module(f"PIL.{module}")
    except ImportError as error:
        raise DataError("images need pillow: pip install 'dovetail-rl[vision]'") from error


def upright(picture: Picture) -> Any:
    """Decoded, turned by its EXIF tag, in RGB."""
    with _opened(picture.source, picture.name) as image:
        try:
            turned = pillow("ImageOps").exif_transpose(image) if _has_exif(image) else image
            return turned.convert("RGB")
        except IMAGE_ERRORS as error:
            raise DataError(f"{picture.name} cannot be decoded: {error}; save it again") from error


def _has_exif(image: Any) -> bool:
    """Whether the header has EXIF data: `getexif` would decode a PNG."""
    return "exif" in image.info


def _column(values: Mapping[str, Any], key: str) -> list[Any]:
    column = values.get(key)
    if column is not None and not isinstance(column, list):
        raise DataError(f"{key} is {column!r:.80}; expected a list")
    return list(column or ())
