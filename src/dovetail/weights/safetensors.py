"""Safetensors files: positioned reads, and writes tensor by tensor.

docs/adr/007-own-safetensors-reader.md says why.
"""

import ctypes
import json
import os
import stat
import struct
import threading
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dovetail.errors import CheckpointError, quoted
from dovetail.jsonl import parse_json
from dovetail.memory import view_at
from dovetail.parallel.placement import Slices, shape_of, whole
from dovetail.system import raise_open_files_limit
from dovetail.weights.parallel_read import (
    MAX_RANGES,
    blocks,
    byte_ranges,
    copy_out,
    range_elements,
    scatter_reads,
)

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}
MAX_LENGTH = 2**62
CHUNK = 1 << 26  # bytes at a time


@dataclass(frozen=True)
class TensorSpec:
    """The name, dtype and shape of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorEntry(TensorSpec):
    """A tensor of a file, from byte `start` on."""

    start: int


def dump_json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


class TensorFile:
    """A file to read from. CheckpointError where it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        self._fd = -1
        self._counting = threading.Lock()
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block
            raise CheckpointError(f"{path} is not a regular file")
        raise_open_files_limit()
        self._fd = os.open(path, os.O_RDONLY)
        try:
            with safe_open(path, framework="numpy"):  # header and size fit
                pass
        except SafetensorError as error:
            damage = f"{path} is cut, corrupt or no safetensors file: {error}"
            raise CheckpointError(f"{damage}; fetch or write it again") from error
        (length,) = struct.unpack("<Q", self._bytes(8))
        self.header = self._bytes(8 + length)
        self.entries = _parse_header(self.header, str(path))

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """Return a tensor, or a rectangle of it."""
        entry = self.entries[name]
        if slices is None:
            slices = whole(entry.shape)
        for (start, stop), length in zip(slices, entry.shape, strict=True):
            assert 0 <= start <= stop <= length, f"{name}: {slices} of {entry.shape}"
        out = torch.empty(shape_of(slices), dtype=entry.dtype)
        self.fill(name, slices, out, torch.empty(0, dtype=torch.uint8))
        return out

    def fill(
        self, name: str, slices: Slices, out: Tensor, buffer: Tensor, *, checksum: bool = False
    ) -> int:
        """Read a rectangle through `buffer` [bytes]. Return its CRC-32 with `checksum`, else 0."""
        entry = self.entries[name]
        crc = 0
        itemsize = entry.dtype.itemsize
        in_place = out.device.type == "cpu" and out.dtype == entry.dtype and out.is_contiguous()
        max_bytes = CHUNK if in_place else len(buffer)
        max_elements = MAX_RANGES * range_elements(entry.shape, slices)
        for block, part in blocks(slices, out, min(max_bytes // itemsize, max_elements)):
            target = part if in_place else view_at(buffer, 0, entry.dtype, part.shape)
            view = memory_of(target)
            offsets, length = byte_ranges(entry.shape, block, itemsize)
            for offset, buffers in scatter_reads(offsets, length, view):
                self._fill(buffers, entry.start + offset)
            self._count(len(view))
            if checksum:
                crc = zlib.crc32(view, crc)
            if not in_place:
                copy_out(target, part)
        return crc

    def checksum(self, name: str, buffer: Tensor) -> int:
        """Return the CRC-32 of a tensor, read through `buffer` [bytes]."""
        crc = 0
        view = memory_of(buffer)
        entry = self.entries[name]
        for at in range(0, entry.num_bytes, len(buffer)):
            block = view[: entry.num_bytes - at]
            self._fill([block], entry.start + at)
            crc = zlib.crc32(block, crc)
        self._count(entry.num_bytes)
        return crc

    def _count(self, num_bytes: int) -> None:
        with self._counting:
            self.bytes_read += num_bytes

    def _bytes(self, length: int) -> bytearray:
        out = bytearray(length)
        self._fill([memoryview(out)], 0)
        return out

    def _fill(self, buffers: list[memoryview], offset: int) -> None:
        while buffers:
            got = os.preadv(self._fd, buffers, offset)
            if not got:
                end = offset + sum(map(len, buffers))
                raise CheckpointError(
                    f"{self.path} ends before byte {end}: it was cut while being read"
                )
            offset = offset + got
            full = 0
            while full < len(buffers) and got >= len(buffers[full]):
                got -= len(buffers[full])
                full += 1
            buffers = buffers[full:]
            if got:
                buffers[0] = buffers[0][got:]


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, which the caller keeps alive.

    They do not go through numpy, with which `OffloadedState` could not resize the tensor.
    """
    is_plain = tensor.is_contiguous() and tensor.device.type == "cpu"
    assert is_plain, "only plain memory has an address to read from"
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        return memoryview(b"")
    array = ctypes.c_ubyte * num_bytes
    return memoryview(array.from_address(tensor.data_ptr())).cast("B")


def _parse_header(data: bytearray, what: str) -> dict[str, TensorEntry]:
    entries = {}
    for name, value in parse_json(bytes(data[8:]), f"the header of {what}").items():
        if name == "__metadata__":
            continue
        code = value["dtype"]
        shape = value["shape"]
        if code not in DTYPES or max(shape, default=0) > MAX_LENGTH:
            raise CheckpointError(
                f"{what}: {name} is {code} {quoted(shape)}; known dtypes are {', '.join(DTYPES)}"
            )
        start = len(data) + value["data_offsets"][0]
        entries[name] = TensorEntry(name, DTYPES[code], tuple(shape), start)
    return entries


class TensorFileWriter:
    """A new file, which gets its tensors in the order of `specs`."""

    def __init__(
        self, path: Path, specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        self._waiting = list(specs)[::-1]
        self.crc32: dict[str, int] = {}
        described: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        end = 0
        for spec in reversed(self._waiting):
            start = end
            end += spec.num_bytes
            described[spec.name] = {
                "dtype": CODES[spec.dtype],
                "shape": spec.shape,
                "data_offsets": [start, end],
            }
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # aligned data
        self.header = struct.pack("<Q", len(text)) + text
        self.size = len(self.header) + end
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115  # closed by `close`
        self._write(memoryview(self.header))

    def write(self, name: str, tensor: Tensor) -> None:
        spec = self._waiting.pop()
        given = TensorSpec(name, tensor.dtype, tuple(tensor.shape))
        assert given == spec, f"{given} is not {spec}"
        # no operators in a background save: they wait for the interpreter's lock
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            tensor = tensor.detach().cpu().contiguous()
        view = memory_of(tensor)
        self.crc32[name] = zlib.crc32(view)
        self._write(view)

    def close(self) -> None:
        assert not self._waiting, f"{self.path}: {self._waiting[-1].name} was never written"
        os.fsync(self._file.fileno())
        self._file.close()

    def _write(self, view: memoryview) -> None:
        while view:
            written = self._file.write(view[:CHUNK])
            view = view[written:]
