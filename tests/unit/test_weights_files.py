"""The safetensors reader and writer against the library, and against files that are damaged or hostile."""

import json
import os
import random
import resource
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.errors import CheckpointError
from dovetail.parallel.placement import as_index
from dovetail.weights.hf_reader import HFReader
from dovetail.weights.safe_paths import INDEX, SINGLE, auxiliary_files
from dovetail.weights.safetensors import CODES, TensorFile, TensorFileWriter, TensorSpec


def _file(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def _entry(begin: int, end: int, *, shape: Any = None, dtype: Any = "U8") -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [end - begin] if shape is None else shape,
        "data_offsets": [begin, end],
    }


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{]", b"", "is cut, corrupt or no safetensors"),
        (b'{"a":' * 5000, b"", "is cut, corrupt or no safetensors"),
        (
            b'{"a":'
            + json.dumps(_entry(0, 1)).encode()
            + b',"a":'
            + json.dumps(_entry(0, 1)).encode()
            + b"}",
            b"x",
            "'a' appears twice",
        ),
        ({"a": _entry(0, 4)}, b"xx", "is cut, corrupt or no safetensors"),
        ({"a": _entry(0, 2)}, b"xxxx", "is cut, corrupt or no safetensors"),
        ({"a": _entry(0, 4), "b": _entry(2, 6)}, b"x" * 6, "is cut, corrupt or no safetensors"),
        ({"a": _entry(0, 2), "b": _entry(4, 6)}, b"x" * 6, "is cut, corrupt or no safetensors"),
        ({"a": _entry(0, 4, shape=[5])}, b"xxxx", "is cut, corrupt or no safetensors"),
        ({"a": _entry(-4, 0, shape=[4])}, b"xxxx", "is cut, corrupt or no safetensors"),
        ({"a": _entry(0, 0, shape=[0, 10**19])}, b"", r"a is U8 \[0, 10000000000000000000\]"),
        ({"a": _entry(0, 4, shape=[4.0])}, b"xxxx", "is cut, corrupt or no safetensors"),
        (
            {"a": _entry(0, 4, shape=[4], dtype="F8_E8M0")},
            b"xxxx",
            "a is F8_E8M0 .*known dtypes are",
        ),
        ({"a": None}, b"", "is cut, corrupt or no safetensors"),
    ],
)
def test_a_bad_header_is_refused(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        TensorFile(_file(tmp_path / "a.safetensors", header, data))


@pytest.mark.parametrize(
    "content", [b"", b"1234567", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 1) + b"{}"]
)
def test_a_bad_length_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="is cut, corrupt or no safetensors"):
        TensorFile(tmp_path / "a.safetensors")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}, path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            TensorFile(path)


def test_data_begins_at_a_multiple_of_eight(tmp_path: Path) -> None:
    """The format asks for it: who maps a file into memory would read numbers across their alignment."""
    for length in range(1, 9):
        writer = TensorFileWriter(
            tmp_path / str(length), [TensorSpec("x" * length, torch.float64, (1,))]
        )
        writer.write("x" * length, torch.ones(1, dtype=torch.float64))
        writer.close()
        assert [
            entry.start % 8 for entry in TensorFile(tmp_path / str(length)).entries.values()
        ] == [0]


def test_reads_fetch_exactly_the_slice(tmp_path: Path) -> None:
    rng = random.Random(0)
    dtypes = list(CODES)
    for case in range(200):
        shape = [rng.randint(0 if case % 10 == 0 else 1, 6) for _ in range(rng.randint(0, 4))]
        tensor = torch.randint(0, 2, shape).to(rng.choice(dtypes))
        path = tmp_path / f"{case}.safetensors"
        writer = TensorFileWriter(path, [TensorSpec("x", tensor.dtype, tuple(shape))])
        writer.write("x", tensor)
        writer.close()
        assert torch.equal(
            load_file(path)["x"].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)
        )
        bounds = [sorted(rng.choices(range(n + 1), k=2)) for n in shape]
        slices = tuple((a, b) for a, b in bounds)
        file = TensorFile(path)
        found, expected = file.read("x", slices), tensor[as_index(slices)]
        assert found.dtype == expected.dtype
        assert torch.equal(
            found.view(torch.uint8) if shape else found.view(-1),
            expected.contiguous().view(torch.uint8) if shape else expected.view(-1),
        )
        assert file.bytes_read == expected.numel() * tensor.element_size()


def _indexed(path: Path, weight_map: dict[str, str]) -> Path:
    path.mkdir(exist_ok=True)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/../../x.safetensors",
        "..\\x.safetensors",
        "x\0.safetensors",
    ],
)
def test_an_index_that_leaves_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="not inside the directory"):
        HFReader(_indexed(tmp_path / "model", {"a": name}))


def test_links_out_of_the_directory_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    model = tmp_path / "model"
    model.mkdir()
    os.symlink("../x.safetensors", model / SINGLE)
    with pytest.raises(CheckpointError, match="outside the directory"):
        HFReader(model)
    os.symlink("/etc/hostname", model / "tokenizer.json")
    with pytest.raises(CheckpointError, match="outside the directory"):
        auxiliary_files(model)


def test_the_hub_cache_may_link_to_its_own_blobs(tmp_path: Path) -> None:
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    save_file({"a": torch.ones(1)}, repository / "blobs" / "beef")
    os.symlink("../../blobs/beef", snapshot / SINGLE)
    assert list(HFReader(snapshot).names) == ["a"]
    (snapshot / SINGLE).unlink()
    save_file({"a": torch.ones(1)}, tmp_path / "elsewhere")
    os.symlink("../../../elsewhere", snapshot / SINGLE)
    with pytest.raises(CheckpointError, match="outside the directory"):
        HFReader(snapshot)


def test_what_is_no_checkpoint_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        HFReader(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="has no weights"):
        HFReader(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(CheckpointError, match=r"only pickled weights.*save_pretrained"):
        HFReader(tmp_path)
    os.mkfifo(tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match="not a regular file"):
        HFReader(tmp_path)


def test_an_index_must_match_its_files(tmp_path: Path) -> None:
    model = _indexed(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    save_file({"a": torch.ones(1), "c": torch.ones(1)}, model / "1.safetensors")
    save_file({"a": torch.zeros(1), "c": torch.ones(1)}, model / "2.safetensors")
    with pytest.raises(CheckpointError) as caught:
        HFReader(model)
    assert "b: 2.safetensors does not hold it" in str(caught.value)
    assert "c: both 2.safetensors and 1.safetensors hold it" in str(caught.value)
    save_file({"b": torch.zeros(1), "a": torch.zeros(1)}, model / "2.safetensors")
    reader = HFReader(model)
    assert set(reader.names) == {
        "a",
        "b",
        "c",
    }  # c is not in the index; loading reports it as extra
    assert reader.read("a") == 1
    _indexed(model, {"a": "pytorch_model.bin"})
    with pytest.raises(CheckpointError, match="not safetensors"):
        HFReader(model)


def test_more_files_than_a_process_may_open_at_first(tmp_path: Path) -> None:
    """Of a checkpoint that a thousand ranks wrote, under the limit of 1024 that many systems begin with."""
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(2)}, path)
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        files = [TensorFile(path) for _ in range(2 * few)]
        assert all(torch.equal(file.read("a"), torch.ones(2)) for file in files)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > few
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
