"""Writes a Hugging Face directory with all ranks: each file by one rank, none with more than a bucket in memory."""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import zip_longest
from pathlib import Path

from torch import Tensor, nn

from dovetail.parallel.mesh import Mesh
from dovetail.weights.atomic import AtomicDirectory, staged, write_file, write_sides
from dovetail.weights.safe_paths import INDEX, SINGLE, SideFiles
from dovetail.weights.safetensors import TensorFileWriter, TensorSpec, dump_json
from dovetail.weights.shards import Dtypes, own_dtype
from dovetail.weights.stream import BUCKET_BYTES, export, gather_whole

SHARD_BYTES = 5 * 10**9
METADATA = (("format", "pt"),)  # transformers refuses files without it

# Called with the order in which tensors are wanted and the names that this rank writes; yields at least the latter.
Produce = Callable[[Sequence[str], Collection[str]], Iterable[tuple[str, Tensor]]]


def save(
    model: nn.Module,
    path: Path | str,
    mesh: Mesh,
    *,
    sides: SideFiles,
    dtype_of: Dtypes = own_dtype,
    listed: Collection[str] | None = None,
    shard_bytes: int = SHARD_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Write `model` and its side files as the HF directory `path`, complete or not at all. Collective.

    `dtype_of` and `listed` describe the source checkpoint (see `stream.export`), so that an untrained model comes out
    with the source's names, dtypes and bytes.
    """
    found = export(model, mesh, dtype_of=dtype_of, listed=listed)
    write_hf(
        Path(path),
        mesh,
        list(found.specs.values()),
        lambda order, _: gather_whole(found, mesh, order, bucket_bytes),
        sides=sides,
        shard_bytes=shard_bytes,
    )


def write_hf(
    target: Path,
    mesh: Mesh,
    specs: Sequence[TensorSpec],
    produce: Produce,
    *,
    sides: SideFiles,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write tensors that `produce` hands out as an HF directory: weight files dealt over ranks, the rest by rank 0."""
    files = split_files(specs, shard_bytes)
    world = mesh["world"]
    # Consecutive files have different writers; taking their tensors in turn keeps all writers busy.
    waves = [list(files)[start : start + world.size] for start in range(0, len(files), world.size)]
    order = [
        spec.name for wave in waves for row in zip_longest(*(files[name] for name in wave)) for spec in row if spec
    ]
    with staged(target, mesh) as stage:
        mine = {name: files[name] for wave in waves for name in wave[world.rank : world.rank + 1]}
        _write_files(stage, mine, order, produce)
        with stage.verdict.catch():
            if stage.lead:
                write_sides(sides, stage.path)
                if len(files) > 1:
                    write_file(stage.path / INDEX, _index(files))


def split_files(specs: Sequence[TensorSpec], shard_bytes: int) -> dict[str, list[TensorSpec]]:
    """File name -> its tensors, in order, each file within `shard_bytes` unless one tensor is larger."""
    groups: list[list[TensorSpec]] = [[]]
    room = shard_bytes
    for spec in specs:
        if groups[-1] and spec.num_bytes > room:
            groups.append([])
            room = shard_bytes
        groups[-1].append(spec)
        room -= spec.num_bytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def _write_files(
    stage: AtomicDirectory, mine: dict[str, list[TensorSpec]], order: Sequence[str], produce: Produce
) -> None:
    """Take every tensor that comes; write this rank's. An error is kept: the others' collectives must match."""
    where = {spec.name: file for file, specs in mine.items() for spec in specs}
    left = {file: len(specs) for file, specs in mine.items()}
    writers: dict[str, TensorFileWriter] = {}
    verdict = stage.verdict
    with verdict.catch():
        for name, tensor in produce(order, where.keys()):
            file = where.get(name)
            if file is None or verdict.problem:
                continue
            with verdict.catch():
                if file not in writers:
                    writers[file] = TensorFileWriter(stage.path / file, mine[file], dict(METADATA))
                writers[file].write(name, tensor)
                left[file] -= 1
                if not left[file]:
                    writers.pop(file).close()


def _index(files: dict[str, list[TensorSpec]]) -> bytes:
    total = sum(spec.num_bytes for specs in files.values() for spec in specs)
    names = {spec.name: file for file, specs in files.items() for spec in specs}
    return dump_json({"metadata": {"total_size": total}, "weight_map": names})
