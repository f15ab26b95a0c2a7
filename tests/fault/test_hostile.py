"""Hostile checkpoint directories: no code in the package that could run theirs, no way out of them, no header that hangs."""

import ast
import json
import os
import random
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import dovetail
from dovetail.checkpoint.manifest import Manifest
from dovetail.checkpoint.manifest_body import checksum
from dovetail.checkpoint.reader import ShardedReader
from dovetail.errors import CheckpointError
from dovetail.weights.hf_reader import HFReader
from dovetail.weights.safe_paths import INDEX, MANIFEST, auxiliary_files
from dovetail.weights.safetensors import TensorFile
from tests.helpers.harness import Apart
from tests.helpers.saves import Run

SECONDS = 5.0  # of processor time for one mutant; none takes a hundredth of it
MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
ATTRIBUTES = {
    "torch.load",
    "os.system",
    "os.popen",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "np.load",
    "numpy.load",
}
PICKLING = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
}


def dangers(source: str) -> Iterator[str]:
    """Everything in a module that could run what a file says."""
    tree = ast.parse(source)
    loaders = {"yaml.SafeLoader"} | {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "yaml.SafeLoader" in map(ast.unparse, node.bases)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    safe = [call.func for call in calls if loaders & {ast.unparse(arg) for arg in call.args[1:]}]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                {alias.name.split(".")[0] for alias in node.names}
                if isinstance(node, ast.Import)
                else set()
            )
            names |= (
                {(node.module or "").split(".")[0]} if isinstance(node, ast.ImportFrom) else set()
            )
            yield from sorted(names & MODULES)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in CALLS:
            yield node.id
        if isinstance(node, ast.Attribute):
            if (ast.unparse(node) in ATTRIBUTES or node.attr in PICKLING) and node not in safe:
                yield ast.unparse(node)
        if isinstance(node, ast.keyword) and node.arg == "shell":
            yield "shell="
        if isinstance(node, ast.keyword) and node.arg == "weights_only":
            yield "weights_only="


def test_no_code_of_ours_runs_what_a_file_says() -> None:
    files = sorted(Path(dovetail.__file__).parent.rglob("*.py"))
    assert len(files) > 80
    by_file = {file.name: found for file in files if (found := list(dangers(file.read_text())))}
    assert by_file == {"program.py": ["exec", "compile"]}, (
        "which runs a completion's program, in a sandbox"
    )


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from pickle import loads", "import dill as d", "import marshal", "import shelve", "eval('1')",
        "exec(x)", "torch.load(p)", "yaml.load(x)", "os.system('x')", "subprocess.run(x, shell=True)", "compile(a, b, 'exec')",
        "dist.all_gather_object(a, b)", "f = eval", "__import__('x')", "torch.load(p, weights_only=True)",
    ],
)  # fmt: skip
def test_each_danger_would_be_seen(line: str) -> None:
    assert list(dangers(line))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one save, and a secret beside it that no checkpoint may reach."""
    base = tmp_path_factory.mktemp("hostile")
    Run(base / "steps").save(1, 1)
    (step,) = (path for path in (base / "steps").glob("step_000001.*"))
    step.rename(base / "step")
    save_file({"a.weight": torch.zeros(2)}, base / "secret.safetensors")
    return base


NAMES = (
    "../secret.safetensors", "/etc/hostname", "sub/../../secret.safetensors", "./../secret.safetensors", "..", ".", "", "/",
    "..\\secret.safetensors", "a\0.safetensors", "../step/../secret.safetensors", "link.safetensors", "folder/secret.safetensors",
    "twice.safetensors", "\ud800.safetensors", "x" * 5000 + ".safetensors", "~/secret.safetensors", "file:///etc/hostname",
    "\uff0e\uff0e/secret.safetensors", "pipe.safetensors", "device.safetensors", "directory.safetensors", "loop.safetensors",
    "//etc/hostname", "sub//../..//secret.safetensors",
)  # fmt: skip
PLACES = ("index", "piece", "side")


def lay_traps(root: Path, base: Path) -> None:
    (root / "link.safetensors").symlink_to(base / "secret.safetensors")
    (root / "folder").symlink_to(base)
    (root / "first.safetensors").symlink_to("link.safetensors")
    (root / "twice.safetensors").symlink_to("first.safetensors")
    (root / "loop.safetensors").symlink_to("loop.safetensors")
    (root / "device.safetensors").symlink_to("/dev/zero")
    (root / "directory.safetensors").mkdir()
    (root / "sub").mkdir()
    os.mkfifo(root / "pipe.safetensors")


def write_index(root: Path, name: str) -> None:
    lay_traps(root, root.parent)
    save_file({"b.weight": torch.zeros(2)}, root / "b.safetensors")
    (root / INDEX).write_text(
        json.dumps({"weight_map": {"a.weight": name, "b.weight": "b.safetensors"}})
    )


def write_manifest(root: Path, name: str, place: str, whole: dict[str, Any]) -> None:
    lay_traps(root, root.parent)
    body = json.loads(json.dumps(whole))
    if place == "side":
        body["files"][name] = {"size": 1, "crc32": 1}
    else:
        (old,) = body["pieces"]
        body["pieces"] = {name: body["pieces"][old]}
        for tensor in body["tensors"].values():
            tensor["regions"][0]["file"] = name
    (root / MANIFEST).write_text(json.dumps({**body, "crc32": checksum(body)}))


def escapes(base: Path) -> list[tuple[str, str, str, list[str]]]:
    """(place, name, error, files opened outside) of every way out of a directory; in a process of its own."""
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    whole = json.loads((base / "step" / MANIFEST).read_text())
    del whole["crc32"]
    found = []
    for number, (place, name) in enumerate((place, name) for place in PLACES for name in NAMES):
        root = base / f"hostile-{number}"
        root.mkdir()
        write_index(root, name) if place == "index" else write_manifest(root, name, place, whole)
        opened.clear()
        told = ""
        try:
            if place == "index":
                HFReader(root)
            else:
                ShardedReader(root).verify()
        except CheckpointError as error:
            told = f"refused: {error}"
        except (OSError, ValueError) as error:
            told = f"{type(error).__name__}: {error}"
        allowed = os.path.realpath(root) + os.sep
        outside = [path for path in opened if not os.path.realpath(path).startswith(allowed)]
        found.append((place, name, told, outside))
    return found


def test_no_name_leads_out_of_a_directory(sound: Path) -> None:
    apart = Apart()
    found = apart(escapes, sound)
    apart.end()
    assert len(found) == len(PLACES) * len(NAMES) >= 40
    for place, name, told, outside in found:
        assert told.startswith("refused: "), (place, name[:40], told)
        assert not [path for path in outside if not path.endswith((".py", ".pyc"))], (
            place,
            name[:40],
            outside,
        )


def test_side_files_of_a_model_stay_inside(tmp_path: Path) -> None:
    for number, target in enumerate(("/etc/hostname", "../secret", "/dev/zero")):
        root = tmp_path / f"m{number}"
        root.mkdir()
        (root / "tokenizer.json").symlink_to(target)
        (tmp_path / "secret").write_text("x")
        if not (root / "tokenizer.json").is_file():
            assert "tokenizer.json" not in auxiliary_files(root), "devices are not read"
            continue
        with pytest.raises(CheckpointError, match="outside the directory"):
            auxiliary_files(root)


ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 1.5, 2**31, 2**63, 2**64, 10**30, 1e308, "", "x", "F32", "BF16", "\ud800", [], [0], [0, 0], [[]],
    [-1], [2**62, 2**62], {}, {"x": 1}, "a.weight", "../x", [[0, 8], [0, 6]], [[0, 4], [0, 6]],
)  # fmt: skip


def mutated(value: Any, rng: random.Random) -> Any:
    """The same JSON with one thing in it changed, added, renamed or left out."""
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.15:
        return rng.choice(ODD)
    copy = dict(value) if isinstance(value, dict) else list(value)
    key: Any = rng.choice([*copy]) if isinstance(copy, dict) else rng.randrange(len(copy))
    what = rng.random()
    if what < 0.1:
        copy.pop(key)
    elif what < 0.2 and isinstance(copy, dict):
        copy[rng.choice(["", "x", "__metadata__", "a.weight", "\ud800", "data_offsets"])] = (
            copy.pop(key)
        )
    elif what < 0.3 and isinstance(copy, list):
        copy.insert(key, rng.choice(ODD))
    else:
        copy[key] = mutated(copy[key], rng)
    return copy


def mutant_header(whole: bytes, rng: random.Random) -> bytes:
    length = struct.unpack("<Q", whole[:8])[0]
    text, data = whole[8 : 8 + length], whole[8 + length :]
    kind = rng.randrange(6)
    if kind == 0:
        return (
            struct.pack(
                "<Q",
                rng.choice([0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1, len(whole)]),
            )
            + text
            + data
        )
    if kind == 1:
        at = rng.randrange(len(text))
        text = text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :]
    elif kind == 2:
        text = rng.choice(
            [
                b"[" * 5000,
                b'{"a":' * 3000,
                b"",
                b"{}",
                b"null",
                b"9" * 6000,
                text + text,
                b"\xff\xfe" + text,
            ]
        )
    elif kind == 3:
        text = text.replace(b'"a.weight"', b'"b.weight"')  # twice the same key
    else:
        text = json.dumps(mutated(json.loads(text), rng)).encode()
    return struct.pack("<Q", len(text)) + text + data


MUTANTS = pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.soak)])


@MUTANTS
def test_mutants_of_a_header_are_refused_or_read(count: int, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(
        {
            "a.weight": torch.ones(8, 6),
            "b.weight": torch.zeros(3, dtype=torch.bfloat16),
            "c": torch.tensor(1),
        },
        path,
    )
    whole, rng, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(count):
        path.write_bytes(mutant_header(whole, rng))
        begun = time.process_time()
        try:
            file = TensorFile(path)
            for name in file.entries:
                file.read(name)
        except CheckpointError:
            refused += 1
        assert time.process_time() - begun < SECONDS
    assert 0.8 * count < refused < count


@MUTANTS
def test_mutants_of_a_manifest_are_refused_or_read(count: int, sound: Path) -> None:
    """With a checksum that is right, as an attacker would write it; and bytes changed by chance."""
    step = sound / "step"
    whole, rng, refused = (step / MANIFEST).read_bytes(), random.Random(1), 0
    body = json.loads(whole)
    del body["crc32"]
    del body["state"]["rng"]
    for _ in range(count // 2):
        changed = mutated(body, rng)
        for _ in range(rng.randrange(2)):
            changed = mutated(changed, rng)
        if isinstance(changed, dict):
            changed["crc32"] = checksum(changed)
        (step / MANIFEST).write_text(json.dumps(changed))
        begun = time.process_time()
        try:
            reader = ShardedReader(step)
            reader.verify()
            for name in reader.manifest.tensors:
                reader.read(name)
        except CheckpointError:
            refused += 1
        assert time.process_time() - begun < SECONDS
    (step / MANIFEST).write_bytes(whole)
    assert 0.3 * count // 2 < refused < count // 2


@pytest.mark.parametrize("deep", [200, 400, 600, 800, 900, 950, 1000, 3000, 100_000])
def test_deep_manifests_are_refused(deep: int) -> None:
    with pytest.raises(CheckpointError):
        Manifest.parse(
            b'{"format": "dovetail-sharded", "version": 2, "x": '
            + b"[" * deep
            + b"]" * deep
            + b"}",
            "it",
        )


def test_a_manifest_of_many_regions_is_refused_in_time() -> None:
    """Regions that nearly all share their rows: comparing each with each would take hours."""
    count = 30_000
    regions = [
        {"file": "p", "key": "k", "slice": [[0, 1], [i, i + 1]], "crc32": 0} for i in range(count)
    ]
    body = {
        "format": "dovetail-sharded", "version": 2, "layout": {}, "step": 1, "state": None, "files": {},
        "tensors": {"a": {"dtype": "F32", "shape": [1, count], "regions": regions}},
        "pieces": {"p": {"size": 1, "header_crc32": 1}},
    }  # fmt: skip
    begun = time.process_time()
    with pytest.raises(CheckpointError, match="more than 16 regions"):
        Manifest.parse(json.dumps({**body, "crc32": checksum(body)}).encode(), "it")
    assert time.process_time() - begun < SECONDS
