"""Loading of a model from a checkpoint: each rank reads its slices.

The mismatches of all ranks are one error, before any change.
"""

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TypedDict, Unpack

import torch
from torch import nn

from dovetail.errors import CheckpointError, listing
from dovetail.parallel.consensus import agreed, of_all
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import as_index, checkpoint_shapes, whole
from dovetail.weights.hf_reader import TensorSource
from dovetail.weights.parallel_read import ReadJob, blocks, run_jobs
from dovetail.weights.shards import LocalParam, checkpoint_params

TOLERATED = ("*rotary_emb.inv_freq",)  # in old checkpoints
FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
COMPARED = 1 << 24  # elements at a time


class NameRules(TypedDict, total=False):
    """How names of a model and a source differ.

    aliases: our names -> the source's. fresh: names that are not read.
    ignore: patterns of tensors that are not used.
    """

    aliases: Mapping[str, str]
    fresh: Collection[str]
    ignore: Collection[str]


def load(model: nn.Module, source: TensorSource, mesh: Mesh, **rules: Unpack[NameRules]) -> None:
    """Fill the model. CheckpointError. Collective."""
    load_into(checkpoint_params(model, mesh), source, mesh, **rules)
    source.verify_checksums(mesh)


def load_into(
    params: list[LocalParam], source: TensorSource, mesh: Mesh, **rules: Unpack[NameRules]
) -> None:
    """Fill the parameters; the caller calls `verify_checksums`. CheckpointError. Collective."""
    present = compare(params, source, mesh, **rules)
    with agreed(mesh):
        _check_ties(present, source)
    with agreed(mesh), torch.no_grad():
        jobs: list[ReadJob] = []
        for param in sorted(params, key=lambda param: -param.local.numel()):  # no thread ends late
            filled = sum(region.num_elements for region in param.regions)
            if filled < param.local.numel():
                param.local.zero_()  # padding
            for region in param.regions:
                names = present.get(region.checkpoint_name)
                if names is not None:
                    out = param.local[as_index(region.local_slice)]
                    jobs += source.jobs(names[0], region.checkpoint_slice, out)
        run_jobs(jobs, mesh.device)


def compare(
    params: list[LocalParam], source: TensorSource, mesh: Mesh, **rules: Unpack[NameRules]
) -> dict[str, list[str]]:
    """Return our names -> the source's, several if tied. CheckpointError. Collective."""
    present = {}
    problems = []
    aliases = rules.get("aliases", {})
    for param in params:
        shapes = checkpoint_shapes(param.name, param.placement, param.shape)
        for name, shape in shapes.items():
            if name in rules.get("fresh", ()):
                continue
            names = [aliases.get(n, n) for n in (name, *param.tied)]
            present[name] = [n for n in names if n in source.names]
            if not present[name]:
                problems.append(f"missing: {' or '.join(names)} {list(shape)}")
            for stored in present[name]:
                problems += _mismatches(stored, shape, param.local.dtype, source)
    _raise_together(problems, present, source, mesh, rules.get("ignore", ()))
    return present


def tolerated(name: str, ignore: Collection[str] = ()) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in (*TOLERATED, *ignore))


def _check_ties(present: Mapping[str, list[str]], source: TensorSource) -> None:
    for first, *others in present.values():
        for other in others:
            if not _equal(source, first, other):
                raise CheckpointError(
                    f"{source.path}: the config ties {first} and {other}, but the checkpoint has "
                    "both "
                    "and they differ; set tie_word_embeddings to false in config.json, "
                    "or remove the one that is wrong"
                )


def _equal(source: TensorSource, first: str, other: str) -> bool:
    shape = source.shape(first)
    if shape != source.shape(other):
        return False
    for part, _ in blocks(whole(shape), torch.empty(shape, device="meta"), COMPARED):
        if not torch.equal(source.read(first, part), source.read(other, part)):
            return False
    return True


def _mismatches(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, source: TensorSource
) -> Iterator[str]:
    found = source.shape(name)
    stored = source.dtype(name)
    if found != shape:
        yield f"mis-shaped: {name} is {list(found)}, expected {list(shape)}"
    elif (stored in FLOATS) != (dtype in FLOATS):
        yield f"wrong dtype: {name} is {stored}, expected one that converts to {dtype}"


def _raise_together(
    problems: list[str],
    present: Mapping[str, list[str]],
    source: TensorSource,
    mesh: Mesh,
    ignore: Collection[str],
) -> None:
    """Raise CheckpointError with the problems of all ranks; together they know extra tensors."""
    merged: dict[str, None] = {}
    asked: set[str] = set()
    for their_problems, their_names in of_all([problems, [*present.values()]], mesh):
        merged |= dict.fromkeys(their_problems)
        asked.update(*their_names)
    for name in source.names:
        if name not in asked and not tolerated(name, ignore):
            merged[f"extra: {name} {list(source.shape(name))}"] = None
    if merged:
        question = "does its config.json belong to its weights?"
        raise CheckpointError(
            f"{source.path} does not fit the model; {question}\n{listing([*merged])}"
        )
