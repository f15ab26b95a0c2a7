"""Training state in a checkpoint's manifest, and fingerprints of inputs. Data order depends on seed and step only."""

import base64
import hashlib
import json
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NotRequired

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from dovetail.errors import CheckpointError
from dovetail.parallel.consensus import agreed, of_all, refuse_different
from dovetail.parallel.mesh import Mesh
from dovetail.weights.hf_directory import Pretrained
from dovetail.weights.safe_paths import AuxiliaryFiles

CHUNK = 1 << 24
READERS = 4  # bytes of a checksum, and threads of a rank
SAMPLED = 64
BLOCK = 1 << 12  # blocks of a weight file, and their bytes
VOLATILE = (
    "transformers_version",
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "use_cache",
)  # not part of the model
TEXT_FILES = (
    "tokenizer",
    "vocab",
    "merges",
    "chat_template",
    "special_tokens",
    "added_tokens",
    "spiece",
)
Count = Annotated[int, Field(ge=0, lt=1 << 48)]  # of steps, rows, updates


class RandomState(TypedDict):
    python: str
    numpy: str
    torch: str
    device: NotRequired[str]  # of an accelerator


class RunState(BaseModel):
    """order: of saves. score: higher is better. cursor: rows used. updates: by role. before: first evaluation. rng: by rank."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    run_id: str
    order: Count
    step: Count
    score: float | None
    recipe: Mapping[str, Any]
    model: str
    data: str
    cursor: Count
    updates: Mapping[str, Count]
    before: Mapping[str, float]
    rng: list[RandomState]

    @classmethod
    def parse(cls, state: Mapping[str, Any] | None, path: Path) -> "RunState":
        """CheckpointError names every bad field."""
        if state is None:
            raise CheckpointError(
                f"{path} has weights without training state; start a new run with model.path={path}"
            )
        try:
            return cls.model_validate(state)
        except ValidationError as error:
            details = [
                (".".join(map(str, d["loc"])), d["input"], d["msg"])
                for d in error.errors(include_url=False)
            ]
            problems = "; ".join(
                f"{name} is {given!r:.40}: {message}" for name, given, message in details
            )
            raise CheckpointError(f"{path}: its training state is not whole: {problems}") from None


def model_fingerprint(
    config: Mapping[str, Any], auxiliary: AuxiliaryFiles, directory: Path, mesh: Mesh
) -> str:
    """Collective. Config, tokenizer and every byte of the weights, for any number of ranks."""
    digest = _text_digest(config, auxiliary)
    world = mesh["world"]
    own = list[str]()
    chunks = list[tuple[Path, int]]()
    with agreed(mesh, directory):
        for path, size in _weight_files(directory, digest):
            chunks += [(path, start) for start in range(0, size, CHUNK)]
        with ThreadPoolExecutor(READERS) as readers:
            own = list(readers.map(_checksum, chunks[world.rank :: world.size]))
    shares = of_all(own, mesh)
    for i in range(len(chunks)):
        digest.update(shares[i % world.size][i // world.size].encode())
    return digest.hexdigest()


def _checksum(chunk: tuple[Path, int]) -> str:
    path, start = chunk
    with open(path, "rb") as file:
        file.seek(start)
        return f"{zlib.crc32(file.read(CHUNK)):08x}"


def refuse_other_models(key: str, source: Pretrained, mesh: Mesh) -> None:
    """Collective."""
    sample = ""
    with agreed(mesh, source.path):
        sample = sampled_fingerprint(source)
    refuse_different({f"{key} (config, tokenizer and weights)": sample}, mesh)


def sampled_fingerprint(source: Pretrained) -> str:
    """Config, tokenizer and a sample of the weights."""
    digest = _text_digest(source.config, source.auxiliary)
    for path, size in _weight_files(source.path, digest):
        with open(path, "rb") as file:
            for part in range(SAMPLED + 1):
                file.seek(part * max(size - BLOCK, 0) // SAMPLED)
                digest.update(file.read(BLOCK))
    return str(digest.hexdigest())


def _weight_files(directory: Path, digest: Any) -> Iterator[tuple[Path, int]]:
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        yield path, size


def _text_digest(config: Mapping[str, Any], auxiliary: AuxiliaryFiles) -> Any:
    digest = hashlib.sha256(
        _stable({key: value for key, value in config.items() if key not in VOLATILE})
    )
    for name in sorted(auxiliary):
        if name.startswith(TEXT_FILES):
            content = auxiliary[name]
            digest.update(
                name.encode() + (content if isinstance(content, bytes) else content.read_bytes())
            )
    return digest


def rows_fingerprint(rows: Iterable[object]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(_stable(asdict(row) if hasattr(row, "__dataclass_fields__") else row))  # type: ignore[call-overload]  # it is one
    return digest.hexdigest()


def random_state(device: torch.device) -> RandomState:
    version, words, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    states: RandomState = {
        "python": json.dumps([version, list(words), gauss]),
        "numpy": json.dumps(
            {**numpy, "state": {**numpy["state"], "key": _packed(numpy["state"]["key"])}}
        ),
        "torch": _packed(torch.get_rng_state().numpy()),
    }
    if device.type != "cpu":
        states["device"] = _packed(torch.get_device_module(device).get_rng_state(device).numpy())
    return states


def restore_random_state(states: RandomState, device: torch.device) -> None:
    version, words, gauss = json.loads(states["python"])
    random.setstate((version, tuple(words), gauss))
    numpy = json.loads(states["numpy"])
    numpy["state"]["key"] = np.frombuffer(base64.b64decode(numpy["state"]["key"]), dtype=np.uint32)
    np.random.set_state(numpy)
    torch.set_rng_state(_unpacked(states["torch"]))
    if device.type != "cpu" and "device" in states:
        torch.get_device_module(device).set_rng_state(_unpacked(states["device"]), device)


def _packed(data: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(data.tobytes()).decode()


def _unpacked(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _stable(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, default=repr).encode()
