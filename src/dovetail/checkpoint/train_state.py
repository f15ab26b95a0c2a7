"""Training state of an engine in a checkpoint, for any layout.

NAME                              the policy's weights as saved, in their saved dtype
training/ROLE/param/NAME          weights as trained, where NAME is absent or has another dtype
training/ROLE/KIND/NAME           optimizer state of the parameter's shape
training/ROLE/optimizer/NAME      other optimizer state
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dovetail.checkpoint.manifest import TRAINING
from dovetail.checkpoint.reader import ShardedReader
from dovetail.checkpoint.writer import merged, write_sharded
from dovetail.errors import CheckpointError, listing
from dovetail.nn.model import StagedModel
from dovetail.parallel.consensus import agreed
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import REPLICATED, Region, checkpoint_shapes, whole
from dovetail.weights.load import load_into
from dovetail.weights.safe_paths import MANIFEST, AuxiliaryFiles
from dovetail.weights.shards import LocalParam, in_checkpoint_form, local_params, trained_params
from dovetail.weights.stream import Export, export_params

PARAM = "param"
OTHERS = "optimizer"
MODEL_ROLE = "policy"
ANYTHING = ("*",)
States = Mapping[str, Mapping[str, Tensor]]  # kind -> name -> a shard's
Others = Mapping[str, Tensor] | None  # None, on every rank: never any


def export_training(
    model: StagedModel,
    mesh: Mesh,
    role: str,
    states: States,
    others: Others = None,
    saved: Export | None = None,
) -> list[Export]:
    """Return the export of weights that `saved` does not hold exactly, and of optimizer state.

    Collective.
    """
    exact = {} if saved is None else {name: spec.dtype for name, spec in saved.specs.items()}
    weights = []
    for param in trained_params(model, mesh):
        dtype = param.local.dtype
        if any(exact.get(name) != dtype for name in _names(param)):
            weights.append(param)
    parts = {PARAM: weights}
    for kind, tensors in states.items():
        parts[kind] = _state_params(model, mesh, tensors)
    if others is not None:
        parts[OTHERS] = _other_params(others)
    return [export_params(part, mesh, prefix=prefix(role, kind)) for kind, part in parts.items()]


def load_training(
    model: StagedModel, mesh: Mesh, role: str, states: States, others: Others, reader: ShardedReader
) -> Mapping[str, Tensor]:
    """Load the training state, and return those of `others` that were read.

    The caller calls `verify_checksums`. Collective.
    """
    exact = _saved_as_trained(reader, role) if role == MODEL_ROLE else ()
    source = reader.training_state(prefix(role, PARAM), exact)
    _load_untied(trained_params(model, mesh), source, mesh)
    for kind, tensors in states.items():
        params = _state_params(model, mesh, tensors)
        source = reader.training_state(prefix(role, kind))
        with agreed(mesh):
            absent: list[str] = []
            for param in params:
                absent += [f"missing: {name}" for name in _names(param) if name not in source.names]
            if absent:
                raise CheckpointError(
                    f"{reader.path} has no {prefix(role, kind)} of what is trained here: "
                    f"{_cause(reader, role, kind)}, or start from the weights alone:\n"
                    f"{listing(absent)}"
                )
        _load_untied(params, source, mesh)
    if others is None:
        return {}
    source = reader.training_state(prefix(role, OTHERS))
    held = {name: tensor for name, tensor in others.items() if name in source.names}
    load_into(_other_params(held), source, mesh, ignore=ANYTHING)
    return held


def _names(param: LocalParam) -> Iterable[str]:
    return checkpoint_shapes(param.name, param.placement, param.shape)


def _state_names(reader: ShardedReader, role: str) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each tensor of training state, its kind, and the name of its parameter."""
    start = f"{TRAINING}{role}/"
    for name in reader.tensors:
        if name.startswith(start):
            kind, _, param = name.removeprefix(start).partition("/")
            yield name, kind, param


def _cause(reader: ShardedReader, role: str, kind: str) -> str:
    kinds = {found for _, found, _ in _state_names(reader, role)}
    if kind not in kinds:
        held = " and ".join(sorted(kinds - {PARAM, OTHERS})) or "no state"
        return (
            f"it has {held} of the optimizer that it was saved with; "
            "set that one (OptimSettings.name, in a recipe optim.name)"
        )
    return (
        "it was frozen there, or the checkpoint is not whole; "
        "freeze it (OptimSettings.frozen, in a recipe optim.frozen)"
    )


def _other_params(others: Mapping[str, Tensor]) -> list[LocalParam]:
    params = []
    for name, tensor in others.items():
        shape = tuple(tensor.shape)
        region = Region(name, shape, whole(shape), whole(shape), owned=True)
        params.append(LocalParam(name, REPLICATED, shape, tensor, (region,), (), None))
    return params


def save_state(
    path: Path,
    mesh: Mesh,
    exports: Sequence[Export],
    auxiliary: AuxiliaryFiles,
    state: Mapping[str, Any],
) -> Path:
    """Write a state that `open_state` opens. Collective."""
    json.dumps(state)  # raises on every rank
    specs, share = merged(exports)
    shares = {mesh["world"].rank: share}
    return write_sharded(path, mesh, specs, shares, mesh.layout, auxiliary=auxiliary, state=state)


def open_state(path: Path | str, mesh: Mesh) -> ShardedReader:
    """Open what `save_state` or a run wrote. Collective."""
    with agreed(mesh):
        if not (Path(path) / MANIFEST).exists():
            raise CheckpointError(
                f"{path} is not a saved state: it has no {MANIFEST}; give what save_state wrote"
            )
        reader = ShardedReader(path)
        state = reader.manifest.state or {}
        if MODEL_ROLE not in state.get("updates", {}):
            raise CheckpointError(
                f"{path} holds weights without training state; load it with from_pretrained"
            )
        return reader


def prefix(role: str, kind: str) -> str:
    return f"{TRAINING}{role}/{kind}/"


def _saved_as_trained(reader: ShardedReader, role: str) -> list[str]:
    """Return tensors that were not rounded: those of the dtype of their optimizer state."""
    dtypes: dict[str, set[torch.dtype]] = defaultdict(set)
    for name, kind, param in _state_names(reader, role):
        if kind != PARAM:
            dtypes[param].add(reader.dtype(name))
    names = reader.names
    return [name for name in names if name not in dtypes or reader.dtype(name) in dtypes[name]]


def _state_params(
    model: StagedModel, mesh: Mesh, tensors: Mapping[str, Tensor]
) -> list[LocalParam]:
    params = [param for param in local_params(model, mesh) if param.name in tensors]
    params = [replace(param, local=tensors[param.name]) for param in params]
    return in_checkpoint_form(model, params)


def _load_untied(params: list[LocalParam], source: ShardedReader, mesh: Mesh) -> None:
    """Load training state, which has tied parameters once."""
    untied = [replace(param, tied=()) for param in params]
    load_into(untied, source, mesh, ignore=ANYTHING)
