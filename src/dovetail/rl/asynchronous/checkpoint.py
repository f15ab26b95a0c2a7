"""The rollout checkpoint: finished groups of an asynchronous run, a safetensors file each.

A group is saved before it may train, and removed when all checkpoints are later than its step.
"""

import json
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from dovetail.sampler.params import Finish
from dovetail.sampler.turn import RolloutId, Turn
from dovetail.weights.atomic import make_directory, replace_file
from dovetail.weights.safe_paths import LEFTOVERS

NAME = re.compile(r"group_(\d{9,})\.safetensors")


def versions_of(turns: Sequence[Turn]) -> tuple[int, int]:
    """Returns the oldest and the newest version of turns."""
    versions = [version for turn in turns for version, _, _ in turn.versions]
    return min(versions), max(versions)


class RolloutCheckpoint:
    """Saves finished groups.

    key: of first weights, data and sampling; groups of another key are not loaded.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self.key = key
        make_directory(path)

    def save(self, group: int, turns: Sequence[Turn]) -> None:
        """Saves the turns of a group, which are on disk when it returns."""
        spans = [span for turn in turns for span in turn.versions]
        log_probs = [value for turn in turns for value in turn.log_probs]
        arrays = {
            "rollout": np.array([turn.id for turn in turns], np.int64),
            "length": np.array([len(turn.ids) for turn in turns], np.int64),
            "ids": np.array([token for turn in turns for token in turn.ids], np.int64),
            "log_probs": np.array(log_probs, np.float64),
            "spans": np.array([len(turn.versions) for turn in turns], np.int64),
            "versions": np.array(spans, np.int64).reshape(-1, 3),
        }
        facts = json.dumps({"finish": [turn.finish for turn in turns]})
        metadata = {"key": self.key, "facts": facts, "crc32": str(_checksum(arrays, facts))}
        replace_file(self._file(group), save(arrays, metadata))

    def load(self, first: int) -> tuple[dict[int, list[Turn]], list[str]]:
        """Returns groups from `first` on, and the problems of unusable files."""
        for debris in (path for pattern in LEFTOVERS for path in self.path.glob(pattern)):
            debris.unlink()
        groups = dict[int, list[Turn]]()
        problems = list[str]()
        for number, file in self._files():
            if number >= first:
                try:
                    groups[number] = self._read(file)
                except (SafetensorError, ValueError, LookupError, TypeError, OSError) as error:
                    problems.append(f"{file}: {error}")
        return groups, problems

    def forget(self, first: int) -> None:
        """Removes groups below `first`."""
        for number, file in self._files():
            if number < first:
                file.unlink()

    def drop(self, first: int, kept: Collection[int]) -> None:
        """Removes groups from `first` on, but those that are kept."""
        for number, file in self._files():
            if number >= first and number not in kept:
                file.unlink()

    def _file(self, group: int) -> Path:
        return self.path / f"group_{group:09}.safetensors"

    def _files(self) -> list[tuple[int, Path]]:
        found = ((NAME.fullmatch(file.name), file) for file in self.path.iterdir())
        return sorted((int(name[1]), file) for name, file in found if name)

    def _read(self, path: Path) -> list[Turn]:
        with safe_open(path, framework="numpy") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        if metadata["key"] != self.key:
            raise ValueError("it is of another model, of other data, or of other sampling")
        if int(metadata["crc32"]) != _checksum(arrays, metadata["facts"]):
            raise ValueError("its checksum does not fit: it has changed since it was written")
        finishes: list[Finish] = json.loads(metadata["facts"])["finish"]
        ends = arrays["length"].cumsum()[:-1]
        span_ends = arrays["spans"].cumsum()[:-1]
        columns = zip(
            arrays["rollout"].tolist(),
            np.split(arrays["ids"], ends),
            np.split(arrays["log_probs"], ends),
            np.split(arrays["versions"], span_ends),
            finishes,
            strict=True,
        )
        return [
            Turn(
                RolloutId(*rollout),
                tuple(ids.tolist()),
                tuple(log_probs.tolist()),
                finish,
                versions=tuple((version, start, end) for version, start, end in spans.tolist()),
            )
            for rollout, ids, log_probs, spans, finish in columns
        ]


def _checksum(arrays: Mapping[str, NDArray[Any]], facts: str) -> int:
    """Returns the CRC-32 of all that a file holds."""
    crc = zlib.crc32(facts.encode())
    for name in sorted(arrays):
        crc = zlib.crc32(arrays[name].tobytes(), crc)
    return crc
