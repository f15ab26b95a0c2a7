"""The manifest of a sharded checkpoint: which file holds which region of which tensor."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from dovetail.checkpoint.manifest_body import FORMAT, VERSION, checksum, read_body
from dovetail.errors import CheckpointError, quoted
from dovetail.parallel.placement import Slices, overlap
from dovetail.weights.hf_reader import StoredRegion, StoredTensor
from dovetail.weights.safetensors import CODES, DTYPES

MAX_IN_A_FILE = 16  # of one tensor: the search is quadratic
TRAINING = "training/"


@dataclass(frozen=True)
class StoredFile:
    """A file's size, and the CRC-32 of it or of its header."""

    size: int
    crc32: int

    @classmethod
    def parse(cls, value: Any, crc32: str) -> "StoredFile":
        return cls(_whole(value["size"]), _whole(value[crc32]))


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    auxiliary: config, tokenizer, ... state: other than tensors.
    """

    layout: Mapping[str, int]
    step: int | None
    tensors: Mapping[str, StoredTensor]
    pieces: Mapping[str, StoredFile]
    auxiliary: Mapping[str, StoredFile]
    state: Mapping[str, Any] | None = None

    def dump(self) -> bytes:
        """Return the manifest's file."""
        body: dict[str, Any] = {"format": FORMAT, "version": VERSION, "layout": dict(self.layout)}
        body["step"] = self.step
        body["state"] = self.state
        body["tensors"] = {name: _dump_tensor(tensor) for name, tensor in self.tensors.items()}
        body["pieces"] = {}
        for name, file in self.pieces.items():
            body["pieces"][name] = {"size": file.size, "header_crc32": file.crc32}
        body["files"] = {name: vars(file) for name, file in self.auxiliary.items()}
        body["crc32"] = checksum(body)
        return (json.dumps(body) + "\n").encode()

    @classmethod
    def parse(cls, data: bytes, what: str) -> "Manifest":
        """Return the manifest of a file. CheckpointError."""
        body = read_body(data, what)
        try:
            step = body["step"]
            state = body["state"]
            pieces = body["pieces"].items()
            auxiliary = body["files"].items()
            manifest = cls(
                layout={name: _whole(degree) for name, degree in body["layout"].items()},
                step=None if step is None else _whole(step),
                tensors={name: _parse_tensor(value) for name, value in body["tensors"].items()},
                pieces={name: StoredFile.parse(value, "header_crc32") for name, value in pieces},
                auxiliary={name: StoredFile.parse(value, "crc32") for name, value in auxiliary},
                state=None if state is None else dict(state),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(
                f"{what} is not a manifest of version {body['version']}: {quoted(error)}"
            ) from error
        for name, tensor in manifest.tensors.items():
            _check_tiling(name, tensor, manifest.pieces, what)
        return manifest


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{quoted(value)} is not a whole number")
    return value


def _dump_tensor(tensor: StoredTensor) -> dict[str, Any]:
    regions = []
    for region in tensor.regions:
        place = {"file": region.file, "key": region.key, "slice": region.slices}
        regions.append({**place, "crc32": region.crc32})
    return {"dtype": CODES[tensor.dtype], "shape": tensor.shape, "regions": regions}


def _parse_tensor(value: Any) -> StoredTensor:
    regions = []
    for region in value["regions"]:
        file = str(region["file"])
        key = str(region["key"])
        slices = tuple((_whole(start), _whole(stop)) for start, stop in region["slice"])
        regions.append(StoredRegion(file, key, slices, _whole(region["crc32"])))
    shape = tuple(_whole(length) for length in value["shape"])
    return StoredTensor(DTYPES[value["dtype"]], shape, tuple(regions))


def _is_inside(slices: Slices, shape: tuple[int, ...]) -> bool:
    if len(slices) != len(shape):
        return False
    dims = zip(slices, shape, strict=True)
    return all(start <= stop <= length for (start, stop), length in dims)


def _check_tiling(
    name: str, tensor: StoredTensor, pieces: Mapping[str, StoredFile], what: str
) -> None:
    """Raise CheckpointError unless the regions of a tensor have each element once."""
    covered = 0
    counts = Counter(region.file for region in tensor.regions)
    if max(counts.values(), default=0) > MAX_IN_A_FILE:
        raise CheckpointError(f"{what}: {name} has more than {MAX_IN_A_FILE} regions in a file")
    for region in tensor.regions:
        if region.file not in pieces:
            raise CheckpointError(
                f"{what}: {name} lies in {quoted(region.file)}, which is not among its pieces"
            )
        if not _is_inside(region.slices, tensor.shape):
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
