"""HF directories to sharded checkpoints and back, bit for bit."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn

from dovetail.checkpoint.reader import open_checkpoint
from dovetail.checkpoint.writer import write_sharded
from dovetail.jsonl import parse_json
from dovetail.parallel.consensus import agreed
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import Region
from dovetail.weights.config_file import CONFIG
from dovetail.weights.hf_directory import saved_config
from dovetail.weights.hf_reader import TensorSource
from dovetail.weights.load import FLOATS, NameRules, compare, tolerated
from dovetail.weights.safe_paths import SideFiles, side_files
from dovetail.weights.safetensors import TensorSpec, dump_json
from dovetail.weights.save import SHARD_BYTES, write_hf
from dovetail.weights.shards import LocalParam, ParamShard, checkpoint_params


def convert_to_sharded(
    source: Path | str,
    target: Path | str,
    layout: Layout,
    model_on: Callable[[Mesh], nn.Module],
    mesh: Mesh,
    *,
    dtype: torch.dtype | None = None,
    watch: Callable[[TensorSource], object] = id,
    **rules: Unpack[NameRules],
) -> Path:
    """Shard an HF directory or sharded checkpoint for `layout`, whose ranks the mesh divides. Collective.

    model_on: a rank's model, on meta.
    """
    reader = open_checkpoint(source, mesh)
    watch(reader)
    reader.verify_checksums(mesh)
    world = mesh["world"]
    by_rank: dict[int, list[LocalParam]] = {}
    for rank in range(world.rank, layout.num_ranks, world.size):
        imagined = Mesh.abstract(layout, rank)
        by_rank[rank] = checkpoint_params(model_on(imagined), imagined, as_wrapped=True)
    present = compare(
        [param for params in by_rank.values() for param in params], reader, mesh, **rules
    )
    specs = _specs(reader, dtype)
    shares = {rank: _share(params, present, reader, specs) for rank, params in by_rank.items()}
    asked = {name for names in present.values() for name in names}
    extra = [
        name
        for name in reader.names
        if name not in asked and tolerated(name, rules.get("ignore", ()))
    ]
    for name in extra if 0 in shares else ():
        whole = tuple((0, length) for length in reader.shape(name))
        shares[0][name] = [
            _piece(name, Region(name, reader.shape(name), whole, whole, True), reader, specs)
        ]
    sides = _sides(reader.path, mesh, dtype)
    return write_sharded(Path(target), mesh, list(specs.values()), shares, layout, sides=sides)


def convert_to_hf(
    source: Path | str,
    target: Path | str,
    mesh: Mesh,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    watch: Callable[[TensorSource], object] = id,
) -> None:
    """Collective."""
    reader = open_checkpoint(source, mesh)
    watch(reader)
    reader.verify_checksums(mesh)
    specs = _specs(reader, dtype)

    def produce(order: Sequence[str], wanted: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        return ((name, reader.read(name).to(specs[name].dtype)) for name in order if name in wanted)

    sides = _sides(reader.path, mesh, dtype)
    write_hf(
        Path(target), mesh, list(specs.values()), produce, sides=sides, shard_bytes=shard_bytes
    )


def _share(
    params: list[LocalParam],
    present: Mapping[str, list[str]],
    reader: TensorSource,
    specs: Mapping[str, TensorSpec],
) -> dict[str, list[ParamShard]]:
    share: dict[str, list[ParamShard]] = {}
    for param in params:
        for region in param.regions:
            for name in present[region.checkpoint_name] if region.owned else ():
                share.setdefault(name, []).append(_piece(name, region, reader, specs))
    return share


def _piece(
    name: str, region: Region, reader: TensorSource, specs: Mapping[str, TensorSpec]
) -> ParamShard:
    final = specs[name].dtype
    return ParamShard(region, final, lambda: reader.read(name, region.checkpoint_slice).to(final))


def _specs(reader: TensorSource, dtype: torch.dtype | None) -> dict[str, TensorSpec]:
    cast = {
        name: dtype for name in reader.names if dtype is not None and reader.dtype(name) in FLOATS
    }
    return {
        name: TensorSpec(name, cast.get(name, reader.dtype(name)), reader.shape(name))
        for name in reader.names
    }


def _sides(directory: Path, mesh: Mesh, dtype: torch.dtype | None) -> SideFiles:
    """A cast is in the config, or transformers would undo it."""
    sides: dict[str, Path | bytes] = {}
    with agreed(mesh):
        sides |= side_files(directory)
        if dtype is not None and CONFIG in sides:
            config = parse_json((directory / CONFIG).read_bytes(), str(directory / CONFIG))
            sides[CONFIG] = dump_json(saved_config(config, "lm", dtype))
    return sides
