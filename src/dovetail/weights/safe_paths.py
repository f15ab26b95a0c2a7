"""Which files of a model directory may be read (none outside, no pickles), and which paths written. Imports no torch.

Only links of the hub's cache may lead out, from `snapshots/REVISION` into `blobs`.
"""

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from dovetail.errors import CheckpointError, ConfigError, quoted

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MANIFEST = "MANIFEST.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
WEIGHTS = (".safetensors", *PICKLED, ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".tflite")
LEFTOVERS = (".tmp-*", ".trash-*")  # of interrupted saves
SIDE_FOLDER = "additional_chat_templates"

SideFiles = Mapping[str, Path | bytes]  # name -> path or content


def contained(directory: Path, name: str) -> Path:
    parts = PurePosixPath(name)
    if (
        not name
        or re.search("[\0\ud800-\udfff]", name)
        or "\\" in name
        or parts.is_absolute()
        or ".." in parts.parts
    ):
        outside = f"{directory} names the file {quoted(name)}, which is not inside the directory"
        raise CheckpointError(f"{outside}; correct its index")
    root = Path(os.path.realpath(directory))
    target = Path(os.path.realpath(root / name))
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(base) for base in allowed):
        raise CheckpointError(
            f"{directory / name} is a link to {target}, outside the directory; copy the file into it"
        )
    try:
        is_file = target.is_file()
        exists = target.exists()
    except OSError as error:  # a name that is too long
        raise CheckpointError(
            f"{directory} names the file {name[:80]!r}: {error.strerror}"
        ) from error
    if not is_file:
        kind = "is not a regular file" if exists else "does not exist"
        raise CheckpointError(f"{directory / name} {kind}; fetch the checkpoint again")
    return target


def side_files(directory: Path | str) -> dict[str, Path]:
    directory = Path(directory)
    files = {}
    for path in sorted([*directory.iterdir(), *directory.glob(f"{SIDE_FOLDER}/*")]):
        name = path.relative_to(directory).as_posix()
        weights = name.endswith((*WEIGHTS, ".index.json")) or name == MANIFEST
        if path.is_file() and not weights and not path.name.startswith("."):
            files[name] = contained(directory, name)
    return files


def refuse_without_safetensors(directory: Path) -> None:
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is not a directory; expected one with config.json and {SINGLE} or {INDEX}"
        )
    pickled = sorted(path.name for path in directory.iterdir() if path.name.endswith(PICKLED))
    if pickled:
        raise CheckpointError(
            f"{directory} has only pickled weights ({', '.join(pickled[:3])}), and unpickling can run code. If "
            f"you trust them, convert them once with transformers: "
            f"AutoModelForCausalLM.from_pretrained({str(directory)!r}).save_pretrained(NEW) writes safetensors"
        )
    raise CheckpointError(
        f"{directory} has no weights: expected {SINGLE} or {INDEX} with the files it names"
    )


def refuse_occupied(target: Path) -> None:
    """Raise unless a directory can replace `target` without loss."""
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        taken = f"{target} is there already and is not an empty directory"
        raise CheckpointError(f"{taken}; remove it or choose another path")
    if target.is_dir() and (target.is_mount() or target.samefile(os.curdir)):
        raise CheckpointError(
            f"{target} is a mount point or the working directory, which cannot be replaced; give a path inside it"
        )


def refuse_unwritable(path: Path, what: str) -> None:
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    refusal = f"{what} {path} cannot be written: {folder} is no directory that you may write to"
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError(refusal)
    try:  # /proc looks writable to root
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{refusal} ({error.strerror})") from error
