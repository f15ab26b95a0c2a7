"""Saving of a Hugging Face directory: each file is written by one rank."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor, nn

from dovetail.parallel.mesh import Mesh
from dovetail.weights.atomic import AtomicDirectory, staged, write_auxiliary, write_file
from dovetail.weights.safe_paths import INDEX, SINGLE, AuxiliaryFiles
from dovetail.weights.safetensors import TensorFileWriter, TensorSpec, dump_json
from dovetail.weights.shards import ExportRules
from dovetail.weights.stream import BUCKET_BYTES, export, gather_whole

SHARD_BYTES = 5 * 10**9
METADATA = (("format", "pt"),)  # transformers needs it

# (order of tensors, names that this rank writes) -> at least the latter
Produce = Callable[[Sequence[str], Collection[str]], Iterable[tuple[str, Tensor]]]


def save(
    model: nn.Module,
    path: Path | str,
    mesh: Mesh,
    *,
    auxiliary: AuxiliaryFiles,
    shard_bytes: int = SHARD_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
    **rules: Unpack[ExportRules],
) -> None:
    """Write an HF directory, atomically. Collective."""
    exported = export(model, mesh, **rules)
    specs = list(exported.specs.values())

    def produce(order: Sequence[str], _: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        return gather_whole(exported, mesh, order, bucket_bytes)

    write_hf(Path(path), mesh, specs, produce, auxiliary, shard_bytes)


def write_hf(
    path: Path,
    mesh: Mesh,
    specs: list[TensorSpec],
    produce: Produce,
    auxiliary: AuxiliaryFiles,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write an HF directory of the tensors that `produce` gives, atomically. Collective."""
    files = split_files(specs, shard_bytes)
    names = [*files]
    world = mesh["world"]
    order = []
    for start in range(0, len(names), world.size):
        # the files of a round have different writers: all stay busy
        groups = [files[name] for name in names[start : start + world.size]]
        for row in zip_longest(*groups):
            order += [spec.name for spec in row if spec]
    with staged(path, mesh) as stage:
        local = {name: files[name] for name in names[world.rank :: world.size]}
        _write_files(stage, local, order, produce)
        with stage.verdict.catch():
            if stage.lead:
                write_auxiliary(auxiliary, stage.path)
                if len(files) > 1:
                    write_file(stage.path / INDEX, dump_json(_index(files)))


def _index(files: Mapping[str, list[TensorSpec]]) -> dict[str, Any]:
    total = 0
    weight_map = {}
    for file, specs in files.items():
        for spec in specs:
            total += spec.num_bytes
            weight_map[spec.name] = file
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def split_files(specs: Sequence[TensorSpec], shard_bytes: int) -> dict[str, list[TensorSpec]]:
    """Return file name -> tensors within `shard_bytes`, unless one is larger."""
    groups: list[list[TensorSpec]] = [[]]
    free = shard_bytes
    for spec in specs:
        if groups[-1] and spec.num_bytes > free:
            groups.append([])
            free = shard_bytes
        groups[-1].append(spec)
        free -= spec.num_bytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    count = len(groups)
    numbered = enumerate(groups, 1)
    return {f"model-{i:05}-of-{count:05}.safetensors": group for i, group in numbered}


def _write_files(
    stage: AtomicDirectory,
    local: dict[str, list[TensorSpec]],
    order: Sequence[str],
    produce: Produce,
) -> None:
    """Write the files of this rank. After an error the rest is consumed: collectives must match."""
    file_of: dict[str, str] = {}
    remaining = {}
    for file, specs in local.items():
        remaining[file] = len(specs)
        file_of |= {spec.name: file for spec in specs}
    writers = {}
    verdict = stage.verdict
    with verdict.catch():
        for name, tensor in produce(order, file_of.keys()):
            if name not in file_of or verdict.problem:
                continue
            file = file_of[name]
            with verdict.catch():
                if file not in writers:
                    writers[file] = TensorFileWriter(stage.path / file, local[file], dict(METADATA))
                writers[file].write(name, tensor)
                remaining[file] -= 1
                if not remaining[file]:
                    writers.pop(file).close()
