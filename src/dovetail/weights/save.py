"""Writes a Hugging Face directory: each file by one rank."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Unpack

from torch import Tensor, nn

from dovetail.parallel.mesh import Mesh
from dovetail.weights.atomic import AtomicDirectory, staged, write_file, write_sides
from dovetail.weights.safe_paths import INDEX, SINGLE, SideFiles
from dovetail.weights.safetensors import TensorFileWriter, TensorSpec, dump_json
from dovetail.weights.shards import ExportRules
from dovetail.weights.stream import BUCKET_BYTES, export, gather_whole

SHARD_BYTES = 5 * 10**9
METADATA = (("format", "pt"),)  # transformers needs it

# (order of tensors, names this rank writes) -> at least the latter
Produce = Callable[[Sequence[str], Collection[str]], Iterable[tuple[str, Tensor]]]


def save(
    model: nn.Module,
    path: Path | str,
    mesh: Mesh,
    *,
    sides: SideFiles,
    shard_bytes: int = SHARD_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
    **rules: Unpack[ExportRules],
) -> None:
    """An HF directory, atomically. Collective."""
    exported = export(model, mesh, **rules)
    specs = list(exported.specs.values())

    def produce(order: Sequence[str], _: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        return gather_whole(exported, mesh, order, bucket_bytes)

    write_hf(Path(path), mesh, specs, produce, sides=sides, shard_bytes=shard_bytes)


def write_hf(
    path: Path,
    mesh: Mesh,
    specs: list[TensorSpec],
    produce: Produce,
    sides: SideFiles,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    files = split_files(specs, shard_bytes)
    world = mesh["world"]
    # consecutive files have different writers: all stay busy
    rounds = [list(files)[start : start + world.size] for start in range(0, len(files), world.size)]
    rows = (row for names in rounds for row in zip_longest(*(files[name] for name in names)))
    order = [spec.name for row in rows for spec in row if spec]
    with staged(path, mesh) as stage:
        local = {
            name: files[name] for names in rounds for name in names[world.rank : world.rank + 1]
        }
        _write_files(stage, local, order, produce)
        with stage.verdict.catch():
            if stage.lead:
                write_sides(sides, stage.path)
                if len(files) > 1:
                    total = sum(spec.num_bytes for spec in specs)
                    weight_map = {
                        spec.name: file for file, group in files.items() for spec in group
                    }
                    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
                    write_file(stage.path / INDEX, dump_json(index))


def split_files(specs: Sequence[TensorSpec], shard_bytes: int) -> dict[str, list[TensorSpec]]:
    """File name -> tensors within `shard_bytes`, unless one is larger."""
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
    return {
        f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)
    }


def _write_files(
    stage: AtomicDirectory,
    local: dict[str, list[TensorSpec]],
    order: Sequence[str],
    produce: Produce,
) -> None:
    """After an error the rest is consumed: collectives must match."""
    file_of = {spec.name: file for file, specs in local.items() for spec in specs}
    remaining = {file: len(specs) for file, specs in local.items()}
    writers: dict[str, TensorFileWriter] = {}
    verdict = stage.verdict
    with verdict.catch():
        for name, tensor in produce(order, file_of.keys()):
            file = file_of.get(name)
            if file is None or verdict.problem:
                continue
            with verdict.catch():
                if file not in writers:
                    writers[file] = TensorFileWriter(stage.path / file, local[file], dict(METADATA))
                writers[file].write(name, tensor)
                remaining[file] -= 1
                if not remaining[file]:
                    writers.pop(file).close()
