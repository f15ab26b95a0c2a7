"""Which file holds which region of which tensor."""

import json
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from dovetail.errors import CheckpointError, quoted
from dovetail.jsonl import parse_json
from dovetail.parallel.placement import overlap
from dovetail.weights.hf_reader import StoredRegion, StoredTensor
from dovetail.weights.safetensors import CODES, DTYPES

FORMAT = "dovetail-sharded"
VERSION = 2
MOST_IN_A_FILE = 16  # of one tensor: the search is quadratic
READABLE = (1, VERSION)  # the first had no training state
TRAINING = "training/"


@dataclass(frozen=True)
class StoredFile:
    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """sides: config, tokenizer, ... state: other than tensors."""

    layout: Mapping[str, int]
    step: int | None
    tensors: Mapping[str, StoredTensor]
    pieces: Mapping[str, StoredFile]
    sides: Mapping[str, StoredFile]
    state: Mapping[str, Any] | None = None

    def dump(self) -> bytes:
        body = {
            "format": FORMAT,
            "version": VERSION,
            "layout": dict(self.layout),
            "step": self.step,
            "state": self.state,
            "tensors": {
                name: {
                    "dtype": CODES[tensor.dtype],
                    "shape": tensor.shape,
                    "regions": [
                        {"file": r.file, "key": r.key, "slice": r.slices, "crc32": r.crc32}
                        for r in tensor.regions
                    ],
                }
                for name, tensor in self.tensors.items()
            },
            "pieces": {
                name: {"size": file.size, "header_crc32": file.crc32}
                for name, file in self.pieces.items()
            },
            "files": {
                name: {"size": file.size, "crc32": file.crc32} for name, file in self.sides.items()
            },
        }
        return (json.dumps({**body, "crc32": _checksum(body)}) + "\n").encode()

    @classmethod
    def parse(cls, data: bytes, what: str) -> "Manifest":
        body = parse_json(data, what)
        if body.get("format") != FORMAT:
            raise CheckpointError(
                f"{what}: format {quoted(body.get('format'))}, expected {FORMAT!r}"
            )
        if body.get("version") not in READABLE:
            version = quoted(body.get("version"))
            known = f"{READABLE[0]} to {VERSION}"
            raise CheckpointError(
                f"{what}: format version {version}, this dovetail reads {known}; update dovetail"
            )
        crc = body.pop("crc32", None)
        if crc != _checksum(body):
            raise CheckpointError(
                f"{what} does not match its own checksum; it was changed after it was written"
            )
        try:
            manifest = cls(
                layout={name: _whole(degree) for name, degree in body["layout"].items()},
                step=None if body["step"] is None else _whole(body["step"]),
                tensors={name: _tensor(value) for name, value in body["tensors"].items()},
                pieces={
                    n: StoredFile(_whole(f["size"]), _whole(f["header_crc32"]))
                    for n, f in body["pieces"].items()
                },
                sides={
                    n: StoredFile(_whole(f["size"]), _whole(f["crc32"]))
                    for n, f in body["files"].items()
                },
                state=None
                if body["version"] == 1 or body["state"] is None
                else dict(body["state"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(
                f"{what} is not a manifest of version {body['version']}: {quoted(error)}"
            ) from error
        for name, tensor in manifest.tensors.items():
            _check_tiling(name, tensor, manifest.pieces, what)
        return manifest


def _checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{quoted(value)} is not a whole number")
    return value


def _tensor(value: Any) -> StoredTensor:
    regions = []
    for region in value["regions"]:
        slices = tuple((_whole(start), _whole(stop)) for start, stop in region["slice"])
        regions.append(
            StoredRegion(str(region["file"]), str(region["key"]), slices, _whole(region["crc32"]))
        )
    return StoredTensor(
        DTYPES[value["dtype"]], tuple(_whole(n) for n in value["shape"]), tuple(regions)
    )


def _check_tiling(
    name: str, tensor: StoredTensor, pieces: Mapping[str, StoredFile], what: str
) -> None:
    covered = 0
    if max(Counter(region.file for region in tensor.regions).values(), default=0) > MOST_IN_A_FILE:
        raise CheckpointError(f"{what}: {name} has more than {MOST_IN_A_FILE} regions in a file")
    for region in tensor.regions:
        if region.file not in pieces:
            raise CheckpointError(
                f"{what}: {name} lies in {quoted(region.file)}, which is not among its pieces"
            )
        if len(region.slices) != len(tensor.shape) or any(
            not start <= stop <= length
            for (start, stop), length in zip(region.slices, tensor.shape, strict=True)
        ):
            raise CheckpointError(
                f"{what}: {name} {list(tensor.shape)} has a region {region.slices} outside of it"
            )
        covered += prod(region.shape)
    if covered != prod(tensor.shape):
        raise CheckpointError(
            f"{what}: the regions of {name} hold {covered} of its {prod(tensor.shape)} elements"
        )
    by_row = sorted(tensor.regions, key=lambda region: region.slices)
    for i, first in enumerate(by_row):
        for other in by_row[i + 1 :]:
            if first.slices and other.slices[0][0] >= first.slices[0][1]:
                break
            if overlap(first.slices, other.slices) is not None:
                raise CheckpointError(
                    f"{what}: two regions of {name} overlap: {first.slices} and {other.slices}"
                )
