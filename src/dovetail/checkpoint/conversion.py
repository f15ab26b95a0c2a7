"""Conversion of HF directories to sharded checkpoints and back, bit for bit."""

from collections import defaultdict
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
from dovetail.parallel.placement import Region, whole
from dovetail.weights.config_file import CONFIG
from dovetail.weights.hf_directory import saved_config
from dovetail.weights.hf_reader import TensorSource
from dovetail.weights.load import FLOATS, NameRules, compare, tolerated
from dovetail.weights.merged import MergedSource
from dovetail.weights.safe_paths import AuxiliaryFiles, auxiliary_files
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
    """Write an HF directory or sharded checkpoint as a sharded checkpoint for `layout`.

    The mesh divides the ranks of `layout`. model_on: from a rank's mesh to its model, on meta.
    Collective.
    """
    reader = open_checkpoint(source, mesh)
    watch(reader)
    reader.verify_checksums(mesh)
    world = mesh["world"]
    by_rank = {}
    all_params: list[LocalParam] = []
    for rank in range(world.rank, layout.num_ranks, world.size):
        imagined = Mesh.abstract(layout, rank)
        by_rank[rank] = checkpoint_params(model_on(imagined), imagined, as_wrapped=True)
        all_params += by_rank[rank]
    present = compare(all_params, reader, mesh, **rules)
    specs = _specs(reader, dtype)
    shares = {rank: _share(params, present, reader, specs) for rank, params in by_rank.items()}
    if 0 in shares:
        asked = set[str]().union(*present.values())
        for name in reader.names:
            if name not in asked and tolerated(name, rules.get("ignore", ())):
                shape = reader.shape(name)
                region = Region(name, shape, whole(shape), whole(shape), owned=True)
                shares[0][name] = [_shard(name, region, reader, specs)]
    auxiliary = _auxiliary(reader.path, mesh, dtype)
    return write_sharded(
        Path(target), mesh, list(specs.values()), shares, layout, auxiliary=auxiliary
    )


def convert_to_hf(
    source: Path | str,
    target: Path | str,
    mesh: Mesh,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    adapter: Path | None = None,
    watch: Callable[[TensorSource], object] = id,
) -> None:
    """Write a sharded checkpoint or HF directory as an HF directory. Collective.

    adapter: PEFT's directory, whose products are added.
    """
    reader = open_checkpoint(source, mesh)
    watch(reader)
    if adapter is not None:
        with agreed(mesh):
            reader = MergedSource(reader, adapter)
    reader.verify_checksums(mesh)
    specs = _specs(reader, dtype)

    def produce(order: Sequence[str], wanted: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        for name in order:
            if name in wanted:
                yield name, reader.read(name).to(specs[name].dtype)

    auxiliary = _auxiliary(reader.path, mesh, dtype)
    write_hf(Path(target), mesh, list(specs.values()), produce, auxiliary, shard_bytes)


def _share(
    params: list[LocalParam],
    present: Mapping[str, list[str]],
    reader: TensorSource,
    specs: Mapping[str, TensorSpec],
) -> dict[str, list[ParamShard]]:
    share: dict[str, list[ParamShard]] = defaultdict(list)
    for param in params:
        for region in param.regions:
            if region.owned:
                for name in present[region.checkpoint_name]:
                    share[name].append(_shard(name, region, reader, specs))
    return share


def _shard(
    name: str, region: Region, reader: TensorSource, specs: Mapping[str, TensorSpec]
) -> ParamShard:
    dtype = specs[name].dtype

    def read() -> Tensor:
        return reader.read(name, region.checkpoint_slice).to(dtype)

    return ParamShard(region, dtype, read)


def _specs(reader: TensorSource, dtype: torch.dtype | None) -> dict[str, TensorSpec]:
    specs = {}
    for name in reader.names:
        stored = reader.dtype(name)
        cast = dtype if dtype is not None and stored in FLOATS else stored
        specs[name] = TensorSpec(name, cast, reader.shape(name))
    return specs


def _auxiliary(directory: Path, mesh: Mesh, dtype: torch.dtype | None) -> AuxiliaryFiles:
    """Return the auxiliary files, with a cast in the config, or transformers would undo it."""
    auxiliary: dict[str, Path | bytes] = {}
    with agreed(mesh):
        auxiliary |= auxiliary_files(directory)
        if dtype is not None and CONFIG in auxiliary:
            path = directory / CONFIG
            config = parse_json(path.read_bytes(), str(path))
            auxiliary[CONFIG] = dump_json(saved_config(config, "lm", dtype))
    return auxiliary
