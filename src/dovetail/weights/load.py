"""Fills a model from a checkpoint: every rank reads its own slices, after the whole checkpoint has been found to fit.

Loading is total. Names, shapes and kinds of dtype are compared for all tensors on all ranks, and everything that is
wrong is raised in one error on every rank, before any parameter is touched. transformers' conventions are kept: a tied
checkpoint may list either of the tied names or both, and tables of rotary frequencies in old ones are tolerated.
"""

import json
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

import torch
from torch import nn

from dovetail.errors import CheckpointError, listing
from dovetail.parallel.collectives import gather_text
from dovetail.parallel.consensus import agreed
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import as_index, checkpoint_shapes
from dovetail.weights.experts import stored
from dovetail.weights.hf_reader import TensorSource
from dovetail.weights.parallel_read import Job, run_jobs
from dovetail.weights.shards import LocalParam

TOLERATED = ("*rotary_emb.inv_freq",)  # buffers that old checkpoints list; computed here
NO_ALIASES: Mapping[str, str] = MappingProxyType({})
FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})  # float8 needs scales: none here
COMPARED = 1 << 24  # elements of two tied tensors compared at a time


def load(
    model: nn.Module,
    source: TensorSource,
    mesh: Mesh,
    *,
    aliases: Mapping[str, str] = NO_ALIASES,
    fresh: Collection[str] = (),
    ignore: Collection[str] = (),
) -> None:
    """Fill every parameter of `model` from `source`, converted to the parameter's dtype. Collective.

    `aliases` maps our name of a tensor to the source's. Those named in `fresh` are not looked for: the caller fills
    them. `ignore` are patterns (`lm_head.*`) of source tensors that may be left over.
    """
    load_into(stored(model, mesh), source, mesh, aliases=aliases, fresh=fresh, ignore=ignore)
    source.settle(mesh)


def load_into(
    params: list[LocalParam],
    source: TensorSource,
    mesh: Mesh,
    *,
    aliases: Mapping[str, str] = NO_ALIASES,
    fresh: Collection[str] = (),
    ignore: Collection[str] = (),
) -> None:
    """The same for tensors that lie as a model's parameters do: its optimizer's moments. Collective.

    The caller lets `source` settle before it uses them.
    """
    present = compare(params, source, mesh, aliases=aliases, fresh=fresh, ignore=ignore)
    with agreed(mesh):
        _check_ties(present, source)
    with agreed(mesh), torch.no_grad():
        jobs: list[Job] = []
        for param in params:
            if sum(region.num_elements for region in param.regions) < param.local.numel():
                param.local.zero_()  # padding, which may be all that this rank has
            for region in param.regions:
                if region.checkpoint_name in present:
                    place = param.local[as_index(region.local_slice)]
                    jobs += source.jobs(present[region.checkpoint_name][0], region.checkpoint_slice, place)
        run_jobs(jobs, mesh.device)


def compare(
    params: list[LocalParam],
    source: TensorSource,
    mesh: Mesh,
    *,
    aliases: Mapping[str, str] = NO_ALIASES,
    fresh: Collection[str] = (),
    ignore: Collection[str] = (),
) -> dict[str, list[str]]:
    """By our name of a tensor, the source's names of it (several where tied); one error on all ranks. Collective."""
    present: dict[str, list[str]] = {}
    problems: list[str] = []
    for param in params:
        for name, shape in checkpoint_shapes(param.name, param.placement, param.shape).items():
            if name in fresh:
                continue
            names = [aliases.get(each, each) for each in (name, *param.tied)]
            present[name] = [each for each in names if each in source.names]
            if not present[name]:
                problems.append(f"missing: {' or '.join(names)} {list(shape)}")
            problems += filter(None, (mismatch(each, shape, param.local.dtype, source) for each in present[name]))
    _raise_together(problems, [each for names in present.values() for each in names], source, mesh, ignore)
    return present


def _check_ties(present: Mapping[str, list[str]], source: TensorSource) -> None:
    for first, *others in present.values():
        for other in others:
            if not same_tensor(source, first, other):
                raise CheckpointError(
                    f"{source.path}: the config ties {first} and {other}, but the checkpoint has both and they differ; "
                    "set tie_word_embeddings to false in config.json, or remove the one that is wrong"
                )


def mismatch(name: str, shape: tuple[int, ...], dtype: torch.dtype, source: TensorSource) -> str:
    """What is wrong with a source's tensor for a parameter of this shape and kind of dtype; empty if nothing."""
    if source.shape(name) != shape:
        return f"mis-shaped: {name} is {list(source.shape(name))}, expected {list(shape)}"
    if (source.dtype(name) in FLOATS) != (dtype in FLOATS):
        return f"wrong dtype: {name} is {source.dtype(name)}, expected one that converts to {dtype}"
    return ""


def tolerated(name: str, ignore: Collection[str] = ()) -> bool:
    """Whether a tensor that no parameter asks for may be there."""
    return any(fnmatchcase(name, pattern) for pattern in (*TOLERATED, *ignore))


def same_tensor(source: TensorSource, first: str, other: str) -> bool:
    """Whether two tensors of a checkpoint are equal, in bounded memory: only then may a config tie them."""
    shape = source.shape(first)
    if shape != source.shape(other):
        return False
    if not shape:
        return torch.equal(source.read(first), source.read(other))
    rows = max(1, COMPARED * shape[0] // max(1, torch.Size(shape).numel()))
    tail = tuple((0, length) for length in shape[1:])
    spans = [((start, min(start + rows, shape[0])), *tail) for start in range(0, shape[0], rows)]
    return all(torch.equal(source.read(first, span), source.read(other, span)) for span in spans)


def _raise_together(
    problems: list[str], seen: list[str], source: TensorSource, mesh: Mesh, ignore: Collection[str]
) -> None:
    """Merge what all ranks found: pipeline stages ask for some tensors each, and know the extra ones only together."""
    everyone = [json.loads(text) for text in gather_text(json.dumps([problems, seen]), mesh["world"], mesh.device)]
    merged = list(dict.fromkeys(problem for found, _ in everyone for problem in found))
    asked = {name for _, names in everyone for name in names}
    extra = [name for name in source.names if name not in asked and not tolerated(name, ignore)]
    merged += [f"extra: {name} {list(source.shape(name))}" for name in extra]
    if merged:
        raise CheckpointError(
            f"{source.path} does not fit the model; does its config.json belong to its weights?\n{listing(merged)}"
        )
