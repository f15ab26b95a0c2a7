"""Fills a model from a checkpoint; ranks read their slices. All ranks' mismatches are one error, before any change."""

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import TypedDict, Unpack

import torch
from torch import nn

from dovetail.errors import CheckpointError, listing
from dovetail.parallel.consensus import agreed, of_all
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import as_index, checkpoint_shapes
from dovetail.weights.hf_reader import TensorSource
from dovetail.weights.parallel_read import Job, blocks, run_jobs
from dovetail.weights.shards import LocalParam, checkpoint_params

TOLERATED = ("*rotary_emb.inv_freq",)  # in old checkpoints
FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
COMPARED = 1 << 24  # elements at a time


class NameRules(TypedDict, total=False):
    """Our names -> the source's; names not read; patterns of unused tensors."""

    aliases: Mapping[str, str]
    fresh: Collection[str]
    ignore: Collection[str]


def load(model: nn.Module, source: TensorSource, mesh: Mesh, **rules: Unpack[NameRules]) -> None:
    """Collective."""
    load_into(checkpoint_params(model, mesh), source, mesh, **rules)
    source.verify_checksums(mesh)


def load_into(
    params: list[LocalParam], source: TensorSource, mesh: Mesh, **rules: Unpack[NameRules]
) -> None:
    """The caller calls `verify_checksums`. Collective."""
    present = compare(params, source, mesh, **rules)
    with agreed(mesh):
        _check_ties(present, source)
    with agreed(mesh), torch.no_grad():
        jobs: list[Job] = []
        for param in sorted(params, key=lambda param: -param.local.numel()):  # no thread ends late
            if sum(region.num_elements for region in param.regions) < param.local.numel():
                param.local.zero_()  # padding
            for region in param.regions:
                if region.checkpoint_name in present:
                    out = param.local[as_index(region.local_slice)]
                    jobs += source.jobs(
                        present[region.checkpoint_name][0], region.checkpoint_slice, out
                    )
        run_jobs(jobs, mesh.device)


def compare(
    params: list[LocalParam], source: TensorSource, mesh: Mesh, **rules: Unpack[NameRules]
) -> dict[str, list[str]]:
    """Our names -> the source's, several if tied. Collective."""
    present: dict[str, list[str]] = {}
    problems: list[str] = []
    aliases = rules.get("aliases", {})
    for param in params:
        for name, shape in checkpoint_shapes(param.name, param.placement, param.shape).items():
            if name in rules.get("fresh", ()):
                continue
            names = [aliases.get(n, n) for n in (name, *param.tied)]
            present[name] = [n for n in names if n in source.names]
            if not present[name]:
                problems.append(f"missing: {' or '.join(names)} {list(shape)}")
            problems += filter(
                None, (_mismatch(n, shape, param.local.dtype, source) for n in present[name])
            )
    _raise_together(problems, present, source, mesh, rules.get("ignore", ()))
    return present


def tolerated(name: str, ignore: Collection[str] = ()) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in (*TOLERATED, *ignore))


def _check_ties(present: Mapping[str, list[str]], source: TensorSource) -> None:
    for first, *others in present.values():
        for other in others:
            if not _equal(source, first, other):
                raise CheckpointError(
                    f"{source.path}: the config ties {first} and {other}, but the checkpoint has both and they differ; "
                    "set tie_word_embeddings to false in config.json, or remove the one that is wrong"
                )


def _equal(source: TensorSource, first: str, other: str) -> bool:
    shape = source.shape(first)
    whole = tuple((0, length) for length in shape)
    parts = [part for part, _ in blocks(whole, torch.empty(shape, device="meta"), COMPARED)]
    same = (torch.equal(source.read(first, part), source.read(other, part)) for part in parts)
    return shape == source.shape(other) and all(same)


def _mismatch(name: str, shape: tuple[int, ...], dtype: torch.dtype, source: TensorSource) -> str:
    if source.shape(name) != shape:
        return f"mis-shaped: {name} is {list(source.shape(name))}, expected {list(shape)}"
    if (source.dtype(name) in FLOATS) != (dtype in FLOATS):
        return f"wrong dtype: {name} is {source.dtype(name)}, expected one that converts to {dtype}"
    return ""


def _raise_together(
    problems: list[str],
    present: Mapping[str, list[str]],
    source: TensorSource,
    mesh: Mesh,
    ignore: Collection[str],
) -> None:
    """Extra tensors are known to all pipeline ranks together."""
    everyone = of_all([problems, [name for names in present.values() for name in names]], mesh)
    merged = list(dict.fromkeys(problem for theirs, _ in everyone for problem in theirs))
    asked = {name for _, names in everyone for name in names}
    extra = [name for name in source.names if name not in asked and not tolerated(name, ignore)]
    merged += [f"extra: {name} {list(source.shape(name))}" for name in extra]
    if merged:
        question = "does its config.json belong to its weights?"
        raise CheckpointError(
            f"{source.path} does not fit the model; {question}\n{listing(merged)}"
        )
