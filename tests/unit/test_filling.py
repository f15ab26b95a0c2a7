"""Bytes on their way from files to tensors: all of them, each in its place, summed right, whoever reads them."""

import random
import threading
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dovetail.checkpoint.convert import convert_to_sharded
from dovetail.checkpoint.reader import ShardedReader
from dovetail.errors import DamagedError
from dovetail.layout import Layout
from dovetail.mesh import Mesh
from dovetail.placement import as_index
from dovetail.weights.checksums import joined
from dovetail.weights.files import TensorFile, TensorFileWriter, TensorSpec
from dovetail.weights.filling import blocks, do_all
from tests.checkpoints import decoder_on, write_tiny

CPU = torch.device("cpu")


def test_sums_of_stretches_make_that_of_the_whole() -> None:
    rng = random.Random(0)
    for _ in range(300):
        data = rng.randbytes(rng.choice([0, 1, 7, 1000]))
        ends = [0, *sorted(rng.choices(range(len(data) + 1), k=rng.randrange(4))), len(data)]
        parts = [(zlib.crc32(data[a:b]), b - a) for a, b in pairwise(ends)]
        assert joined(parts) == zlib.crc32(data)
    assert joined([(zlib.crc32(b"a"), 1), (zlib.crc32(bytes(1 << 20)), 1 << 20)]) == zlib.crc32(b"a" + bytes(1 << 20))
    assert joined([(zlib.crc32(b"b"), 1), (zlib.crc32(b"a"), 1)]) != zlib.crc32(b"ab")


def _placed(shape: list[int], dtype: torch.dtype, rng: random.Random) -> Tensor:
    """Room for a result: dense, turned, or every other column of something larger."""
    kind = rng.randrange(3) if shape else 0
    if kind == 1:
        return torch.zeros(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape))))
    if kind == 2:
        return torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("room", [64, 1 << 12])  # rows longer than the buffer, and many rows in it
def test_any_rectangle_goes_anywhere(room: int, tmp_path: Path) -> None:
    rng = random.Random(room)
    floats = [torch.float64, torch.float32, torch.bfloat16]
    for case in range(300):
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
        crc = file.fill("x", slices, out, buffer, summed=whole)
        assert torch.equal(out, wanted.to(out.dtype)), (shape, slices, dtype, out.dtype, out.stride())
        assert crc == (writer.crc32["x"] if whole else 0)
        num_bytes = tensor.numel() * dtype.itemsize
        start, stop = sorted(rng.choices(range(num_bytes + 1), k=2))
        raw = path.read_bytes()[file.entries["x"].start :]
        assert file.sum("x", start, stop, buffer) == zlib.crc32(raw[start:stop])


def test_blocks_tile_a_rectangle_in_its_order() -> None:
    numbers = torch.arange(3 * 4 * 5).view(3, 4, 5)
    for most in range(1, 70):
        found = list(blocks(((0, 3), (0, 4), (0, 5)), numbers, most))
        assert torch.cat([part.reshape(-1) for _, part in found]).tolist() == list(range(60))
        assert all(part.numel() <= most for _, part in found)
        assert all(torch.equal(numbers[as_index(slices)].reshape(-1), part.reshape(-1)) for slices, part in found)


def test_every_job_is_done_once_and_an_error_is_told() -> None:
    done: list[int] = []
    threads: set[int] = set()
    together = threading.Barrier(4, timeout=60)

    def job(number: int) -> None:
        if number < 4:
            together.wait()  # several at once
        threads.add(threading.get_ident())
        done.append(number)

    do_all([lambda _, n=n: job(n) for n in range(500)], CPU)  # type: ignore[misc]  # a job takes a buffer
    assert sorted(done) == list(range(500))
    assert len(threads) >= 4
    do_all([], CPU)
    with pytest.raises(ZeroDivisionError):
        do_all([lambda _: 1 // 0], CPU)


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
        slices = tuple((0, n // 2 if share == "slices" and i == 0 else n) for i, n in enumerate(shape))
        out = torch.empty([b - a for a, b in slices], dtype=reader.dtype(name))
        do_all(list(reader.jobs(name, slices, out)), CPU)
        assert torch.equal(out, reader.read(name, slices))


@pytest.mark.parametrize("share", ["nothing", "slices", "all"])
def test_damage_is_told_however_much_was_read(share: str, cut: Path) -> None:
    size = sum(path.stat().st_size for path in cut.glob("pieces-*"))
    sound = ShardedReader(cut)
    _read(sound, share)
    before = sound.bytes_read
    sound.settle(Mesh.solo())
    summed = sound.bytes_read - before
    assert summed == 0 if share == "all" else summed > (0.9 * size if share == "nothing" else 0.3 * size)
    sound.settle(Mesh.solo())
    assert sound.bytes_read == before + summed, "once is enough"
    for piece in sorted(cut.glob("pieces-*")):
        whole = piece.read_bytes()
        piece.write_bytes(whole[:-3] + bytes([whole[-3] ^ 16]) + whole[-2:])
        reader = ShardedReader(cut)
        _read(reader, share)
        with pytest.raises(DamagedError, match=piece.name) as caught:
            reader.settle(Mesh.solo())
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
        do_all(list(reader.jobs(name, tuple((0, n) for n in reader.shape(name)), torch.empty(reader.shape(name)))), CPU)
    with pytest.raises(DamagedError, match="it was cut while being read"):
        reader.settle(Mesh.solo())
