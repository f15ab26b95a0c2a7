"""The sharded format in one process: damage is found, a crash leaves the old or the new, casts reach the config."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dovetail.checkpoint.conversion import convert_to_hf, convert_to_sharded
from dovetail.checkpoint.reader import ShardedReader
from dovetail.checkpoint.writer import save_sharded
from dovetail.errors import CheckpointError
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.weights.hf_reader import HFReader
from dovetail.weights.load import load
from dovetail.weights.safe_paths import auxiliary_files
from dovetail.weights.save import save
from dovetail.weights.stream import stream
from tests.helpers.checkpoints import (
    assert_same_tensors,
    decoder_on,
    digests,
    tensors_of,
    write_tiny,
)
from tests.helpers.forged import forge

LAYOUT = Layout(tp=2, dp=2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("hf") / "source", "qwen2", dtype=torch.bfloat16)


@pytest.fixture
def cut(source: Path, tmp_path: Path) -> Path:
    return _cut(source, tmp_path / "cut")


def _cut(source: Path, target: Path, **options: Any) -> Path:
    return convert_to_sharded(
        source, target, LAYOUT, lambda mesh: decoder_on(source, mesh), Mesh.solo(), **options
    )


def _loaded(source: Path) -> tuple[nn.Module, Mesh]:
    mesh = Mesh.solo()
    model = decoder_on(source, mesh, torch.bfloat16)
    load(model, HFReader(source), mesh)
    return model, mesh


def test_one_process_cuts_for_all_ranks(source: Path, cut: Path, tmp_path: Path) -> None:
    manifest = ShardedReader(cut).manifest
    assert dict(manifest.layout) == {"tp": 2, "pp": 1, "cp": 1, "dp": 2, "ep": 1}
    assert sorted(manifest.pieces) == [
        f"pieces-{rank:05}-of-00004.safetensors" for rank in range(4)
    ]
    assert list(manifest.tensors) == list(HFReader(source).names)
    convert_to_hf(cut, tmp_path / "hf", Mesh.solo())
    assert_same_tensors(tensors_of(tmp_path / "hf"), tensors_of(source))
    assert digests(tmp_path / "hf", weights=False) == digests(source, weights=False)


def test_odd_tensors_go_along_as_they_are(tmp_path: Path) -> None:
    """Of any dtype, of no elements, of no dims, and of names that look like that of a second piece."""
    source = write_tiny(tmp_path / "source", "llama")
    odd = {
        "a": torch.zeros(0, 3),
        "a#1": torch.tensor(7),
        "model.norm.weight#1": torch.tensor([True, False]),
        "b": torch.arange(4.0).to(torch.float8_e4m3fn),
    }
    save_file({**tensors_of(source), **odd}, source / "model.safetensors", {"format": "pt"})
    convert_to_hf(_cut(source, tmp_path / "cut", ignore=[*odd]), tmp_path / "hf", Mesh.solo())
    assert_same_tensors(tensors_of(tmp_path / "hf"), tensors_of(source))


def test_every_flipped_bit_is_found_and_named(cut: Path) -> None:
    rng = random.Random(0)
    files = [path for path in sorted(cut.rglob("*")) if path.is_file()]
    for _ in range(100):
        path = rng.choice(files)
        whole = path.read_bytes()
        at = rng.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
        with pytest.raises(CheckpointError) as caught:
            ShardedReader(cut).verify()
        assert path.name in str(caught.value)
        path.write_bytes(whole)
    ShardedReader(cut).verify()


def test_truncated_swapped_and_missing_files_are_refused(cut: Path) -> None:
    first, second = sorted(cut.glob("pieces-*"))[:2]
    whole = first.read_bytes()
    first.write_bytes(whole[:-1])
    with pytest.raises(
        CheckpointError,
        match=f"{first.name} has {len(whole) - 1} bytes, but the manifest says {len(whole)}",
    ):
        ShardedReader(cut)
    first.unlink()
    with pytest.raises(CheckpointError, match=f"{first.name} does not exist"):
        ShardedReader(cut)
    first.write_bytes(second.read_bytes())
    second.write_bytes(whole)
    with pytest.raises(CheckpointError, match="pieces-"):
        ShardedReader(cut).verify()


def test_even_the_blanks_of_a_header_are_covered(cut: Path) -> None:
    file = next(file for file in sorted(cut.glob("pieces-*")) if b"}} " in file.read_bytes())
    file.write_bytes(file.read_bytes().replace(b"}} ", b"}}\t", 1))
    with pytest.raises(
        CheckpointError, match=f"{file.name}: its header does not match its checksum"
    ):
        ShardedReader(cut)


NORM = "model.norm.weight"


def _move_region(body: dict[str, Any]) -> None:
    body["tensors"][NORM]["regions"][0]["slice"] = [[12, 24]]


def _drop_region(body: dict[str, Any]) -> None:
    body["tensors"][NORM]["regions"].pop()


def _leave(body: dict[str, Any]) -> None:
    body["pieces"]["../x.safetensors"] = {"size": 1, "header_crc32": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda body: body.update(version=3),
            "this dovetail reads 2; use the release that wrote it",
        ),
        (lambda body: body.update(format="other"), "expected 'dovetail-sharded'"),
        (lambda body: body.pop("tensors"), "not a manifest of version 2"),
        (lambda body: body.update(tensors=[]), "not a manifest of version 2"),
        (lambda body: body["tensors"][NORM].update(dtype="F4"), "not a manifest of version 2"),
        (
            lambda body: body["tensors"][NORM].update(dtype="F32"),
            "does not hold model.norm.weight as",
        ),
        (
            lambda body: body["tensors"][NORM]["regions"][0].update(file="nowhere"),
            "not among its pieces",
        ),
        (
            lambda body: body["tensors"][NORM]["regions"][0].update(slice=[[20, 32]]),
            "outside of it",
        ),
        (
            lambda body: body["tensors"][NORM]["regions"][0].update(slice=[[0, -1]]),
            "not a manifest of version 2",
        ),
        (_move_region, "two regions of model.norm.weight overlap"),
        (_drop_region, "hold 12 of its 24 elements"),
        (_leave, "not inside the directory"),
    ],
)
def test_a_forged_manifest_is_refused(
    cut: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    forge(cut, change)
    with pytest.raises(CheckpointError, match=message):
        ShardedReader(cut)


def test_a_cast_is_told_to_the_config(source: Path, tmp_path: Path) -> None:
    cut = _cut(source, tmp_path / "cut", dtype=torch.float32)
    convert_to_hf(cut, tmp_path / "hf", Mesh.solo())
    expected = {name: tensor.to(torch.float32) for name, tensor in tensors_of(source).items()}
    assert_same_tensors(tensors_of(tmp_path / "hf"), expected)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "float32"
    convert_to_hf(cut, tmp_path / "back", Mesh.solo(), dtype=torch.bfloat16)
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(source))


def test_targets_that_are_occupied_are_refused(source: Path, cut: Path) -> None:
    before = digests(cut)
    with pytest.raises(
        CheckpointError, match="is not an empty directory; remove it or choose another"
    ):
        _cut(source, cut)
    with pytest.raises(CheckpointError, match="is not an empty directory"):
        convert_to_hf(cut, source, Mesh.solo())
    assert digests(cut) == before


def _crash_at(count: int, action: Callable[[], object]) -> bool:
    """Run `action` in a child that dies just before its `count`-th change of the disk; whether it died."""
    child = os.fork()
    if child == 0:
        left = [count]
        for name in ("mkdir", "fsync", "rename", "replace", "symlink"):
            original = vars(os)[name]

            def dying(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)
                return _original(*args, **kwargs)

            setattr(os, name, dying)
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.soak)])
def test_every_crash_leaves_the_old_checkpoint_or_the_new(
    stride: int, source: Path, tmp_path: Path
) -> None:
    model, mesh = _loaded(source)
    auxiliary = auxiliary_files(source)
    old = tensors_of(source)
    first = save_sharded(model, tmp_path / "run", mesh, auxiliary=auxiliary, step=5)
    assert first.resolve() == (tmp_path / "run" / "step_000005").resolve()
    nn.init.constant_(model.get_parameter(NORM), 3.0)
    new = dict(stream(model, mesh))
    outcomes = set()
    for count in range(0, 100, stride):
        died = _crash_at(
            count, lambda: save_sharded(model, tmp_path / "run", mesh, auxiliary=auxiliary, step=5)
        )
        reader = ShardedReader(tmp_path / "run" / "step_000005")
        reader.verify()
        found = reader.read(NORM)
        is_new = bool((found == 3).all())
        assert_same_tensors(
            {name: reader.read(name) for name in reader.names}, new if is_new else old
        )
        outcomes.add((died, is_new))
        if not died:
            break
    assert outcomes | {(True, True)} == {(True, False), (True, True), (False, True)}
    assert stride > 1 or (True, True) in outcomes, "none died before the link was on the disk"
    out = tmp_path / "hf"
    for count in range(0, 100, stride):
        died = _crash_at(
            count, lambda: save(model, out, mesh, auxiliary=auxiliary, shard_bytes=5000)
        )
        if out.exists():
            assert_same_tensors(tensors_of(out), new)
            shutil.rmtree(out)
        else:
            assert died
        if not died:
            break
    assert count > 10
