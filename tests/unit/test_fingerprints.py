"""Fingerprints of a model's weights, by which a run notices other contents under the same names."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.run.state import CHUNK, model_fingerprint, sampled_fingerprint
from tests.helpers.harness import run


def flip(file: Path, where: int) -> None:
    content = bytearray(file.read_bytes())
    content[where] ^= 1
    file.write_bytes(content)


def test_a_bit_anywhere_in_the_weights_makes_another_fingerprint(tmp_path: Path) -> None:
    """Of files of several stretches, whatever the number of ranks."""
    for name, size in (("a.safetensors", CHUNK + 5), ("b.safetensors", 1 << 13)):
        (tmp_path / name).write_bytes(bytes(size))
    found = [model_fingerprint({}, {}, tmp_path, Mesh.solo())]
    for file, where in (("a", -1), ("a", CHUNK // 3), ("b", -(1 << 12) - 1)):
        flip(tmp_path / f"{file}.safetensors", where)
        found.append(model_fingerprint({}, {}, tmp_path, Mesh.solo()))
    assert len(set(found)) == 4
    assert run(2, fingerprint_of, tmp_path) == [found[-1]] * 2


def test_samples_of_weights_are_of_the_whole_file(tmp_path: Path) -> None:
    """All of a small one; of a larger one its ends and blocks between."""
    source: Any = SimpleNamespace(config={}, auxiliary={}, path=tmp_path)
    found, size = [], 64 * 5 << 12
    (tmp_path / "a.safetensors").write_bytes(bytes(5000))
    (tmp_path / "b.safetensors").write_bytes(bytes(size))
    for file, where in (("a", 0), ("a", 4200), ("b", -1), ("b", (size - 4096) // 2)):
        found.append(sampled_fingerprint(source))
        flip(tmp_path / f"{file}.safetensors", where)
    assert len({*found, sampled_fingerprint(source)}) == 5


def fingerprint_of(folder: Path) -> str:
    return model_fingerprint({}, {}, folder, Mesh.build(Layout(dp=2)))
