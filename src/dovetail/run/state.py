"""The state of a run beside its tensors: written whole into a checkpoint's manifest, and read whole or refused.

Data order and sampling noise are functions of the seed and the step, so they need no state but a cursor. The random
generators are kept all the same: a reward, or a model's own code, may draw from them.
"""

import base64
import hashlib
import json
import random
import zlib
from collections.abc import Iterable, Mapping, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from dovetail.errors import CheckpointError
from dovetail.parallel.collectives import gather_text
from dovetail.parallel.consensus import agreed, refuse_different
from dovetail.parallel.mesh import Mesh
from dovetail.weights.hf_directory import Pretrained
from dovetail.weights.safe_paths import SideFiles

Value = TypeVar("Value")
GENERATORS = ("python", "numpy", "torch")  # of every rank; and "device" where it has one
CPU = torch.device("cpu")
COUNTS = range(1 << 48)  # steps, rows, updates: what is beyond was never counted
STRETCH, READERS = 1 << 24, 4  # bytes of weights that a fingerprint sums at once, and threads of a rank that do
SAMPLED, BLOCK = 64, 1 << 12  # places of a file of weights that hosts compare, and bytes of each
VOLATILE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")  # of a config; not the model
TEXT_FILES = ("tokenizer", "vocab", "merges", "chat_template", "special_tokens", "added_tokens", "spiece")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where a run stands after `step` steps. Every field is needed; none is guessed where it is missing.

    order: the how-manieth save of the run this is. score: how good the model is, higher is better.
    model, data: fingerprints of config, tokenizer and weights, and of the rows as they are fed.
    cursor: data rows taken so far. updates: optimizer steps by role. before: the evaluation before training.
    rng: one entry a rank.
    """

    run_id: str
    order: int
    step: int
    score: float | None
    recipe: Mapping[str, Any]
    model: str
    data: str
    cursor: int
    updates: Mapping[str, int]
    before: Mapping[str, float]
    rng: Seq[Mapping[str, str]]

    def dump(self) -> dict[str, Any]:
        """The state as plain JSON values."""
        return asdict(self)

    @classmethod
    def parse(cls, found: Mapping[str, Any] | None, what: Path) -> "RunState":
        """The state that a manifest holds; anything missing, extra or of a wrong kind is refused by name."""
        if found is None:
            raise CheckpointError(
                f"{what} holds weights without training state; start a new run with model.path={what}"
            )
        expected = {field.name: field.type for field in fields(cls)}
        problems = [f"missing: {name}" for name in expected if name not in found]
        problems += [f"unknown: {name}" for name in found if name not in expected]
        kinds: dict[str, tuple[type, ...]] = {
            "run_id": (str,), "order": (int,), "step": (int,), "score": (float, int, type(None)), "recipe": (Mapping,),
            "model": (str,), "data": (str,), "cursor": (int,), "updates": (Mapping,), "before": (Mapping,), "rng": (list,),
        }  # fmt: skip
        problems += [
            f"{name} is {found[name]!r:.40}, not a {kind[0].__name__}"
            for name, kind in kinds.items()
            if name in found and (not isinstance(found[name], kind) or isinstance(found[name], bool))
        ]
        for rank, generators in enumerate(found["rng"] if isinstance(found.get("rng"), list) else []):
            told = generators if isinstance(generators, Mapping) else {}
            missing = [f"missing: rng[{rank}].{kind}" for kind in GENERATORS if not isinstance(told.get(kind), str)]
            problems += missing or ([] if _is_sound(told) else [f"rng[{rank}] is of no random generators"])
        counts = {name: found[name] for name in ("order", "step", "cursor") if type(found.get(name)) is int}
        counts |= {f"updates.{role}": n for role, n in found["updates"].items()} if _maps(found, "updates") else {}
        problems += [
            f"{name} is {n!r:.40}, not a count" for name, n in counts.items() if type(n) is not int or n not in COUNTS
        ]
        values = found["before"] if _maps(found, "before") else {}
        problems += [f"before.{k} is {v!r:.40}, not a number" for k, v in values.items() if type(v) not in (int, float)]
        if problems:
            raise CheckpointError(f"{what}: its training state is not whole: {'; '.join(problems)}")
        return cls(**found)


def model_fingerprint(config: Mapping[str, Any], sides: SideFiles, directory: Path, mesh: Mesh) -> str:
    """One value for a model's architecture, its tokenizer and every byte of its weights, of which each rank reads a share.

    The same whatever the number of ranks. Collective.
    """
    digest = _text_digest(config, sides)
    world, mine, stretches = mesh["world"], "", list[tuple[Path, int]]()
    with agreed(mesh, directory):
        for path in sorted(directory.glob("*.safetensors")):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            stretches += [(path, start) for start in range(0, size, STRETCH)]
        with ThreadPoolExecutor(READERS) as readers:
            mine = " ".join(readers.map(_checksum, stretches[world.rank :: world.size]))
    shares = [share.split() for share in gather_text(mine, world, mesh.device)]
    for i in range(len(stretches)):
        digest.update(shares[i % world.size][i // world.size].encode())
    return digest.hexdigest()


def _checksum(stretch: tuple[Path, int]) -> str:
    path, start = stretch
    with open(path, "rb") as file:
        file.seek(start)
        return f"{zlib.crc32(file.read(STRETCH)):08x}"


def refuse_other_models(key: str, source: Pretrained, mesh: Mesh) -> None:
    """ConfigError where samples of the config, tokenizer and weights behind `key` are not the same on all ranks. Collective."""
    sample = ""
    with agreed(mesh, source.path):
        digest = _text_digest(source.config, source.sides)
        for path in sorted(source.path.glob("*.safetensors")):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with open(path, "rb") as file:
                for part in range(SAMPLED + 1):
                    file.seek(part * max(size - BLOCK, 0) // SAMPLED)
                    digest.update(file.read(BLOCK))
        sample = digest.hexdigest()
    refuse_different({f"{key} (config, tokenizer and weights)": sample}, mesh)


def _text_digest(config: Mapping[str, Any], sides: SideFiles) -> Any:
    """A hash of a config without what does not change the model, and of the tokenizer's files."""
    digest = hashlib.sha256(_stable({key: value for key, value in config.items() if key not in VOLATILE}))
    for name in sorted(sides):
        if name.startswith(TEXT_FILES):
            content = sides[name]
            digest.update(name.encode() + (content if isinstance(content, bytes) else content.read_bytes()))
    return digest


def rows_fingerprint(rows: Iterable[object]) -> str:
    """One value for the rows of a data file as they are fed, in their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(_stable(asdict(row) if hasattr(row, "__dataclass_fields__") else row))  # type: ignore[call-overload]  # it is one
    return digest.hexdigest()


def random_state(device: torch.device) -> dict[str, str]:
    """The state of every random generator of this process, as text."""
    version, words, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    found = {
        "python": json.dumps([version, list(words), gauss]),
        "numpy": json.dumps({**numpy, "state": {**numpy["state"], "key": _packed(numpy["state"]["key"].tobytes())}}),
        "torch": _packed(torch.get_rng_state().numpy().tobytes()),
    }
    if device.type != "cpu":
        state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
        found["device"] = _packed(state.numpy().tobytes())
    return found


def restore_random_state(found: Mapping[str, str], device: torch.device) -> None:
    """Have every random generator go on from what `random_state` said."""
    version, words, gauss = json.loads(found["python"])
    random.setstate((version, tuple(words), gauss))
    numpy = json.loads(found["numpy"])
    numpy["state"]["key"] = np.frombuffer(_unpacked(numpy["state"]["key"]), dtype=np.uint32)
    np.random.set_state(numpy)
    torch.set_rng_state(_bytes(found["torch"]))
    if device.type != "cpu" and "device" in found:
        torch.get_device_module(device).set_rng_state(_bytes(found["device"]), device)


def _maps(found: Mapping[str, Any], name: str) -> bool:
    return isinstance(found.get(name), Mapping)


def _is_sound(found: Mapping[str, str]) -> bool:
    """Whether the generators of this process would go on from that. They stay as they are."""
    kept = random_state(CPU)
    try:
        restore_random_state(found, CPU)
    except (ValueError, TypeError, KeyError, RuntimeError, OverflowError):
        return False
    finally:
        restore_random_state(kept, CPU)
    return True


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(_unpacked(text)), dtype=torch.uint8)


def _packed(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _unpacked(text: str) -> bytes:
    return base64.b64decode(text)


def _stable(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, default=repr).encode()
