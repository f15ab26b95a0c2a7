"""Finished groups of an asynchronous run, a safetensors file each.

A group is saved before it may train, and removed when all checkpoints are later than its step.
"""

import json
import re
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from dovetail.sampler.base import Completion
from dovetail.weights.atomic import make_directory, replace_file
from dovetail.weights.safe_paths import LEFTOVERS

NAME = re.compile(r"group_(\d{9,})\.safetensors")


@dataclass(frozen=True)
class FinishedGroup:
    id: int
    answers: tuple[Completion, ...]  # by sample

    @property
    def ages(self) -> tuple[int, int]:
        """Oldest and newest version."""
        versions = [version for answer in self.answers for version, _, _ in answer.versions]
        return min(versions), max(versions)


class Journal:
    """key: of first weights, data and sampling; groups of another key are not loaded."""

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self.key = key
        make_directory(path)

    def save(self, group: FinishedGroup) -> None:
        """On disk when it returns."""
        answers = group.answers
        arrays = {
            "row": np.array([answer.row for answer in answers], np.int64),
            "sample": np.array([answer.sample for answer in answers], np.int64),
            "length": np.array([len(answer.ids) for answer in answers], np.int64),
            "ids": np.array([token for answer in answers for token in answer.ids], np.int64),
            "log_probs": np.array(
                [value for answer in answers for value in answer.log_probs], np.float64
            ),
            "spans": np.array([len(answer.versions) for answer in answers], np.int64),
            "versions": np.array(
                [span for answer in answers for span in answer.versions], np.int64
            ).reshape(-1, 3),
        }
        facts = json.dumps({"finish": [answer.finish for answer in answers]})
        metadata = {"key": self.key, "facts": facts, "crc32": str(_checksum(arrays, facts))}
        replace_file(self._file(group.id), save(arrays, metadata))

    def load(self, first: int) -> tuple[dict[int, FinishedGroup], list[str]]:
        """Groups from `first` on, and problems of unusable files."""
        for debris in (path for pattern in LEFTOVERS for path in self.path.glob(pattern)):
            debris.unlink()
        groups = dict[int, FinishedGroup]()
        problems = list[str]()
        for number, file in self._files():
            if number >= first:
                try:
                    groups[number] = self._read(number, file)
                except (SafetensorError, ValueError, LookupError, TypeError, OSError) as error:
                    problems.append(f"{file}: {error}")
        return groups, problems

    def forget(self, first: int) -> None:
        """Groups below `first`."""
        for number, file in self._files():
            if number < first:
                file.unlink()

    def drop(self, first: int, kept: Collection[int]) -> None:
        """Groups from `first` on, but those that are kept."""
        for number, file in self._files():
            if number >= first and number not in kept:
                file.unlink()

    def _file(self, group: int) -> Path:
        return self.path / f"group_{group:09}.safetensors"

    def _files(self) -> list[tuple[int, Path]]:
        found = ((NAME.fullmatch(file.name), file) for file in self.path.iterdir())
        return sorted((int(name[1]), file) for name, file in found if name)

    def _read(self, number: int, path: Path) -> FinishedGroup:
        with safe_open(path, framework="numpy") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        if metadata["key"] != self.key:
            raise ValueError("it is of another model, of other data, or of other sampling")
        if int(metadata["crc32"]) != _checksum(arrays, metadata["facts"]):
            raise ValueError("its checksum does not fit: it has changed since it was written")
        facts: Mapping[str, Any] = json.loads(metadata["facts"])
        token = 0
        span = 0
        answers = list[Completion]()
        for i, sample in enumerate(arrays["sample"].tolist()):
            tokens = slice(token, token + int(arrays["length"][i]))
            spans = slice(span, span + int(arrays["spans"][i]))
            token = tokens.stop
            span = spans.stop
            ids, log_probs = (tuple(arrays[name][tokens].tolist()) for name in ("ids", "log_probs"))
            versions = tuple(
                (version, start, end) for version, start, end in arrays["versions"][spans].tolist()
            )
            row = int(arrays["row"][i])
            finish = facts["finish"][i]
            answers.append(Completion(row, sample, ids, log_probs, finish, versions=versions))
        return FinishedGroup(number, tuple(answers))


def _checksum(arrays: Mapping[str, NDArray[Any]], facts: str) -> int:
    crc = zlib.crc32(facts.encode())
    for name in sorted(arrays):
        crc = zlib.crc32(arrays[name].tobytes(), crc)
    return crc
