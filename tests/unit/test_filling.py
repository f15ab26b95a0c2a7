"""Bytes on their way from files to tensors: all of them, each in its place, summed right, whoever reads them."""

import os
import random
import shutil
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.checkpoint.conversion import convert_to_sharded
from dovetail.checkpoint.reader import ShardedReader
from dovetail.errors import CheckpointError, DamagedError
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import as_index
from dovetail.weights import parallel_read, safetensors
from dovetail.weights.parallel_read import blocks, run_jobs
from dovetail.weights.safetensors import TensorFile, TensorFileWriter, TensorSpec
from tests.helpers.checkpoints import decoder_on, write_tiny

CPU = torch.device("cpu")


def _placed(shape: list[int], dtype: torch.dtype, rng: random.Random) -> Tensor:
    """Room for a result: dense, turned, or every other column of something larger."""
    kind = rng.randrange(3) if shape else 0
    if kind == 1:
        return torch.zeros(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape))))
    if kind == 2:
        return torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]
    return torch.zeros(shape, dtype=dtype)


def _read_in_small_calls(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the smallest rectangles come as large ones do, in many calls, with gaps read or skipped."""
    monkeypatch.setattr(parallel_read, "MAX_BUFFERS", 5)
    monkeypatch.setattr(safetensors, "MAX_RANGES", 20)
    if way == "apart":
        monkeypatch.setattr(parallel_read, "MAX_GAP", 3)
    if way == "in parts":
        whole = os.preadv

        def some(fd: int, buffers: list[memoryview], at: int) -> int:
            first = buffers[0]
            return whole(fd, [first[: -(-len(first) // 2)]], at)

        monkeypatch.setattr(os, "preadv", some)


@pytest.mark.parametrize("way", ["near", "in parts", "apart"])
@pytest.mark.parametrize("room", [64, 1 << 12])  # rows longer than the buffer, and many rows in it
def test_any_rectangle_goes_anywhere(
    room: int, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _read_in_small_calls(way, monkeypatch)
    rng = random.Random(room)
    floats = [torch.float64, torch.float32, torch.bfloat16]
    for case in range(300 if way == "near" else 100):
        shape = [rng.randint(0 if case % 10 == 0 else 1, 9) for _ in range(rng.randint(0, 4))]
        dtype = rng.choice([*floats, torch.int64, torch.uint8, torch.bool])
        tensor = torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)
        path = tmp_path / f"{case}.safetensors"
        writer = TensorFileWriter(path, [TensorSpec("x", dtype, tuple(shape))])
        writer.write("x", tensor)
        writer.close()
        whole = case % 3 == 0
        bounds = [(0, n) if whole else sorted(rng.choices(range(n + 1), k=2)) for n in shape]
        slices = tuple((a, b) for a, b in bounds)
        wanted = tensor[as_index(slices)]
        out = _placed(list(wanted.shape), rng.choice(floats) if dtype in floats else dtype, rng)
        file, buffer = TensorFile(path), torch.empty(room, dtype=torch.uint8)
        crc = file.fill("x", slices, out, buffer, checksum=whole)
        assert torch.equal(out, wanted.to(out.dtype)), (
            shape,
            slices,
            dtype,
            out.dtype,
            out.stride(),
        )
        assert crc == (writer.crc32["x"] if whole else 0)
        raw = path.read_bytes()[file.entries["x"].start :]
        assert file.checksum("x", buffer) == zlib.crc32(raw) == writer.crc32["x"]


class Count:
    """A function that counts its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.function(*args)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """A file of one matrix of thousands of rows."""
    path = tmp_path_factory.mktemp("wide") / "wide"
    matrix = torch.arange(4096 * 6144, dtype=torch.int32).view(torch.bfloat16).view(4096, 2 * 6144)
    writer = TensorFileWriter(path, [TensorSpec("x", matrix.dtype, tuple(matrix.shape))])
    writer.write("x", matrix)
    writer.close()
    return path, matrix


@pytest.fixture
def wide(written: tuple[Path, Tensor]) -> tuple[TensorFile, Tensor]:
    """It, opened."""
    return TensorFile(written[0]), written[1]


@pytest.mark.parametrize(
    "columns", [16, 3072, 12200]
)  # 32 bytes, a quarter and nearly all of a row
def test_columns_are_read_and_copied_many_at_once(
    columns: int, wide: tuple[TensorFile, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not row by row: neither in calls of the kernel nor in copies to a device, and no strided memory to copy from."""
    file, matrix = wide
    copied: list[Tensor] = []

    def note(piece: Tensor, out: Tensor) -> None:
        copied.append(piece)
        parallel_read.copy_out(piece, out)

    reads = Count(os.preadv)
    monkeypatch.setattr(os, "preadv", reads)
    monkeypatch.setattr(safetensors, "copy_out", note)
    out, buffer = (
        torch.empty(len(matrix), columns),
        torch.empty(parallel_read.BUFFER_BYTES, dtype=torch.uint8),
    )
    bits = torch.empty(len(matrix), columns, dtype=matrix.dtype)
    file.fill("x", ((0, len(matrix)), (12288 - columns, 12288)), out, buffer)
    wanted = matrix[:, 12288 - columns :]
    assert torch.equal(out.view(torch.int32), wanted.float().view(torch.int32))
    assert len(copied) <= 1 + 1.1 * (2 * out.numel() / parallel_read.BUFFER_BYTES)
    assert all(piece.is_contiguous() for piece in copied)
    assert reads.calls <= len(matrix) // 32
    assert file.bytes_read == 2 * out.numel()
    file.fill("x", ((0, len(matrix)), (12288 - columns, 12288)), bits, buffer)
    assert torch.equal(bits.view(torch.int16), wanted.view(torch.int16))


def test_columns_of_a_file_that_is_cut_are_reported(
    written: tuple[Path, Tensor], tmp_path: Path
) -> None:
    file, matrix = TensorFile(Path(shutil.copy(written[0], tmp_path))), written[1]
    os.truncate(file.path, file.path.stat().st_size // 2)
    buffer = torch.empty(1 << 20, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="it was cut while being read"):
        file.fill("x", ((0, 4096), (0, 3072)), torch.empty(4096, 3072), buffer)
    half = torch.empty(2000, 3072)
    file.fill("x", ((0, 2000), (0, 3072)), half, buffer)
    assert torch.equal(half.view(torch.int32), matrix[:2000, :3072].float().view(torch.int32))


def test_blocks_tile_a_rectangle_in_its_order() -> None:
    numbers = torch.arange(3 * 4 * 5).view(3, 4, 5)
    for most in range(1, 70):
        found = list(blocks(((0, 3), (0, 4), (0, 5)), numbers, most))
        assert torch.cat([part.reshape(-1) for _, part in found]).tolist() == list(range(60))
        assert all(part.numel() <= most for _, part in found)
        assert all(
            torch.equal(numbers[as_index(slices)].reshape(-1), part.reshape(-1))
            for slices, part in found
        )


def test_every_job_is_done_once_and_an_error_is_told() -> None:
    done: list[int] = []
    threads: set[int] = set()
    together = threading.Barrier(4, timeout=60)

    def job(number: int) -> None:
        if number < 4:
            together.wait()  # several at once
        threads.add(threading.get_ident())
        done.append(number)

    run_jobs([lambda _, n=n: job(n) for n in range(500)], CPU)  # type: ignore[misc]  # a job takes a buffer
    assert sorted(done) == list(range(500))
    assert len(threads) >= 4
    run_jobs([], CPU)
    with pytest.raises(ZeroDivisionError):
        run_jobs([lambda _: 1 // 0], CPU)


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    source = write_tiny(tmp_path / "source", "llama")
    return convert_to_sharded(
        source, tmp_path / "cut", Layout(tp=2), lambda mesh: decoder_on(source, mesh), Mesh.solo()
    )


def _read(reader: ShardedReader, share: str) -> None:
    """Nothing, a slice of each tensor, or all of each."""
    for name in reader.names if share != "nothing" else ():
        shape = reader.shape(name)
        slices = tuple(
            (0, n // 2 if share == "slices" and i == 0 else n) for i, n in enumerate(shape)
        )
        out = torch.empty([b - a for a, b in slices], dtype=reader.dtype(name))
        run_jobs(list(reader.jobs(name, slices, out)), CPU)
        assert torch.equal(out, reader.read(name, slices))


@pytest.mark.parametrize("share", ["nothing", "slices", "all"])
def test_damage_is_told_however_much_was_read(share: str, cut: Path) -> None:
    size = sum(path.stat().st_size for path in cut.glob("pieces-*"))
    sound = ShardedReader(cut)
    _read(sound, share)
    before = sound.bytes_read
    sound.verify_checksums(Mesh.solo())
    summed = sound.bytes_read - before
    assert (
        summed == 0
        if share == "all"
        else summed > (0.9 * size if share == "nothing" else 0.3 * size)
    )
    sound.verify_checksums(Mesh.solo())
    assert sound.bytes_read == before + summed, "once is enough"
    for piece in sorted(cut.glob("pieces-*")):
        whole = piece.read_bytes()
        piece.write_bytes(whole[:-3] + bytes([whole[-3] ^ 16]) + whole[-2:])
        reader = ShardedReader(cut)
        _read(reader, share)
        with pytest.raises(DamagedError, match=piece.name) as caught:
            reader.verify_checksums(Mesh.solo())
        assert caught.value.path == cut
        last = list(reader._files[piece.name].entries)[-1]
        assert last in str(caught.value)
        piece.write_bytes(whole)


def test_a_file_that_is_cut_while_it_is_read_is_damage(cut: Path) -> None:
    reader = ShardedReader(cut)
    piece = sorted(cut.glob("pieces-*"))[0]
    with piece.open("r+b") as file:
        file.truncate(piece.stat().st_size - 1)
    for name in reader.names:
        run_jobs(
            list(
                reader.jobs(
                    name, tuple((0, n) for n in reader.shape(name)), torch.empty(reader.shape(name))
                )
            ),
            CPU,
        )
    with pytest.raises(DamagedError, match="it was cut while being read"):
        reader.verify_checksums(Mesh.solo())
