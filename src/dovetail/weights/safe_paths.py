"""The files of a model directory that may be read, and paths that may be written.

No file outside of the directory is read, and no pickle.

Imports no torch. Only links of the hub's cache may lead out, from `snapshots/REVISION` into
`blobs`.
"""

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import NoReturn

from dovetail.errors import CheckpointError, ConfigError, ModelError, quoted, raise_disk_problem

ADAPTER_CONFIG = "adapter_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MANIFEST = "MANIFEST.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
WEIGHTS = (".safetensors", *PICKLED, ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".tflite")
LEFTOVERS = (".tmp-*", ".trash-*")  # of interrupted saves
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "tiktoken.model")
TEMPLATE_FOLDER = "additional_chat_templates"

AuxiliaryFiles = Mapping[str, Path | bytes]  # name -> path or content


def contained(directory: Path, name: str) -> Path:
    """Return the path of a file that is inside the directory. CheckpointError."""
    path = PurePosixPath(name)
    is_inside = name and not path.is_absolute() and ".." not in path.parts
    if not is_inside or re.search("[\\\\\0\ud800-\udfff]", name):
        outside = f"{directory} names the file {quoted(name)}, which is not inside the directory"
        raise CheckpointError(f"{outside}; correct its index")
    root = Path(os.path.realpath(directory))
    target = Path(os.path.realpath(root / name))
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(base) for base in allowed):
        raise CheckpointError(
            f"{directory / name} is a link to {target}, outside the directory; copy the file "
            "into it"
        )
    try:
        is_file = target.is_file()
        exists = target.exists()
    except OSError as error:  # a name that is too long
        problem = f"{directory} names the file {name[:80]!r}: {error.strerror}"
        raise CheckpointError(problem) from error
    if not is_file:
        kind = "is not a regular file" if exists else "does not exist"
        raise CheckpointError(f"{directory / name} {kind}; fetch the checkpoint again")
    return target


def auxiliary_files(directory: Path | str) -> dict[str, Path]:
    """Return the files beside the weights, such as the tokenizer's."""
    directory = Path(directory)
    files = {}
    paths = [*directory.iterdir(), *directory.glob(f"{TEMPLATE_FOLDER}/*")]
    for path in sorted(paths):
        name = path.relative_to(directory).as_posix()
        is_weights = name.endswith((*WEIGHTS, ".index.json")) or name == MANIFEST
        if path.is_file() and not is_weights and not path.name.startswith("."):
            files[name] = contained(directory, name)
    return files


def refuse_without_safetensors(directory: Path) -> NoReturn:
    """Raise CheckpointError for a directory without weights that may be read."""
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is not a directory; expected one with config.json and {SINGLE} or {INDEX}"
        )
    pickled = sorted(path.name for path in directory.iterdir() if path.name.endswith(PICKLED))
    if pickled:
        raise CheckpointError(
            f"{directory} has only pickled weights ({', '.join(pickled[:3])}), and unpickling "
            "can run "
            "code. If you trust them, convert them once with transformers: "
            f"AutoModelForCausalLM.from_pretrained({str(directory)!r}).save_pretrained(NEW) "
            "writes safetensors"
        )
    raise CheckpointError(
        f"{directory} has no weights: expected {SINGLE} or {INDEX} with the files it names"
    )


def refuse_without_adapter(directory: Path) -> None:
    if not (directory / ADAPTER_CONFIG).is_file():
        raise CheckpointError(
            f"{directory} has no {ADAPTER_CONFIG}; give the directory of an adapter, as PEFT "
            "saves it"
        )


def refuse_without_tokenizer(directory: Path, auxiliary: AuxiliaryFiles) -> None:
    if not auxiliary.keys() & set(TOKENIZER_FILES):
        lacks = f"{directory} has no tokenizer (tokenizer.json)"
        raise ModelError(f"{lacks}; give rows of input_ids, or copy it there")


def refuse_occupied(target: Path) -> None:
    """Raise CheckpointError unless a directory can replace `target` without loss."""
    is_directory = target.is_dir() and not target.is_symlink()
    is_free = not any(target.iterdir()) if is_directory else not os.path.lexists(target)
    if not is_free:
        taken = f"{target} is there already and is not an empty directory"
        raise CheckpointError(f"{taken}; remove it or choose another path")
    if is_directory and (target.is_mount() or target.samefile(os.curdir)):
        raise CheckpointError(
            f"{target} is a mount point or the working directory, which cannot be replaced; "
            "give a path inside it"
        )


def refuse_unwritable(path: Path, what: str) -> None:
    """Raise ConfigError unless the nearest folder of `path` that exists can be written to."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    refusal = f"{what} {path} cannot be written: {folder} is no directory that you may write to"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\n")
    except OSError as error:
        raise_disk_problem(error, path)
        raise ConfigError(f"{refusal} ({error.strerror})") from error
