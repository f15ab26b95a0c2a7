"""Images of a prompt for vLLM's token endpoint: base64 of msgpack of `MultiModalKwargsItem` of vLLM 0.33.0."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.batch.packed import Media
from dovetail.errors import ConfigError, DataError
from dovetail.inference_servers.protocol import KEEPS_PIXELS, ServerInfo

QWEN_LIKE = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe"})
PIXELS = "pixel_values"
GRID = "image_grid_thw"
FIXED: Mapping[int, bytes] = {
    1: b"\xd4",
    2: b"\xd5",
    4: b"\xd6",
    8: b"\xd7",
    16: b"\xd8",
}  # by an extension's length


def check_media(server: ServerInfo, model: str, *, videos: bool) -> None:
    """Raises ConfigError for rows with images that a server cannot be given. model: its type."""
    if server.kind == "sglang":
        why = "SGLang turns the ids of a prompt with images into text and tokenizes that again"
    elif model not in QWEN_LIKE:
        why = f"vLLM takes pixels of {model} in another form; Dovetail writes that of {', '.join(sorted(QWEN_LIKE))}"
    elif videos:
        why = "places and times of a video's frames cannot be given with token ids, only images"
    elif not server.images:
        why = "this version of vLLM takes no images with token ids; 0.32 and newer do"
    elif server.normalizes:
        edit = f"start it with {KEEPS_PIXELS}, or add that to rollout.start.args"
        raise ConfigError(f"rows have images, which vLLM would normalize a second time; {edit}")
    else:
        return
    raise ConfigError(f"rows have images or videos, but {why}; set rollout.backend=transformers")


def image_features(
    ids: Sequence[int], media: Media, token: int, dtype: torch.dtype, salt: str
) -> dict[str, Any]:
    """Returns vLLM's `features` of a request.

    token: the placeholder, expanded. salt: that of the weights, since servers cache features.
    """
    if extra := sorted(set(media) - {PIXELS, GRID}):
        raise DataError(f"a prompt has {', '.join(extra)}; engines of their own take images alone")
    grids: Tensor = media[GRID].to(torch.int64)
    patches: list[int] = grids.prod(dim=1).tolist()
    places = [place for place, each in enumerate(ids) if each == token]
    merged, rest = divmod(sum(patches), max(1, len(places)))
    fits = not rest and merged > 0 and all(count % merged == 0 for count in patches)
    ranges = list[dict[str, int]]()
    items = list[str]()
    hashes = list[str]()
    for pixels, grid in zip(media[PIXELS].to(dtype).split(patches), grids, strict=True):
        run = places[: len(pixels) // merged] if fits else []
        if not run or run[-1] - run[0] != len(run) - 1:
            raise DataError(
                f"a prompt has {len(places)} image tokens that are not the places of images "
                f"{grids.tolist()}"
            )
        places = places[len(run) :]
        ranges.append({"offset": run[0], "length": len(run)})
        flat = ["flat", {"keep_on_cpu": False, "slices": [[[0, len(pixels), None]]], "dim": 0}]
        item = packed({
            PIXELS: {"data": pixels, "field": flat},
            GRID: {"data": grid, "field": ["batched", {"keep_on_cpu": True}]},
        })  # fmt: skip
        items.append(base64.b64encode(item).decode())
        hashes.append(hashlib.sha256(salt.encode() + item).hexdigest())
    return {
        "mm_hashes": {"image": hashes},
        "mm_placeholders": {"image": ranges},
        "kwargs_data": {"image": items},
    }


def packed(value: Any) -> bytes:
    """Returns msgpack; a tensor is its dtype, its shape, and its bytes as an extension of type 3."""
    if isinstance(value, Tensor):
        raw = value.contiguous().view(torch.uint8).numpy().tobytes()
        head = FIXED.get(len(raw)) or _sized(len(raw), {8: b"\xc7", 16: b"\xc8", 32: b"\xc9"})
        dtype = str(value.dtype).removeprefix("torch.")
        return b"\x93" + packed(dtype) + packed(list(value.shape)) + head + b"\x03" + raw
    if isinstance(value, dict):
        pairs = (packed(name) + packed(each) for name, each in value.items())
        return bytes([0x80 | len(value)]) + b"".join(pairs)
    if isinstance(value, list):
        return bytes([0x90 | len(value)]) + b"".join(map(packed, value))
    if isinstance(value, str):
        return bytes([0xA0 | len(value)]) + value.encode()
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    assert isinstance(value, int) and value >= 0
    return (
        bytes([value])
        if value < 128
        else _sized(value, {8: b"\xcc", 16: b"\xcd", 32: b"\xce", 64: b"\xcf"})
    )


def _sized(number: int, heads: Mapping[int, bytes]) -> bytes:
    """Returns the first head with room, and the number."""
    bits = next(bits for bits in heads if number < 1 << bits)
    return heads[bits] + number.to_bytes(bits // 8, "big")
