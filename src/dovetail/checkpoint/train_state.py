"""An engine's training state in a checkpoint, for any layout.

NAME                              the policy's weights as saved, in their saved dtype
training/ROLE/param/NAME          weights as trained, where NAME is absent or has another dtype
training/ROLE/KIND/NAME           optimizer state of the parameter's shape
training/ROLE/optimizer/NAME      other optimizer state
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dovetail.checkpoint.manifest import TRAINING
from dovetail.checkpoint.reader import ShardedReader
from dovetail.checkpoint.writer import write_sharded
from dovetail.errors import CheckpointError, listing
from dovetail.nn.model import StagedModel
from dovetail.parallel.consensus import agreed
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import REPLICATED, Region, checkpoint_shapes
from dovetail.weights.load import load_into
from dovetail.weights.safe_paths import MANIFEST, SideFiles
from dovetail.weights.shards import LocalParam, checkpoint_params, in_checkpoint_form, local_params
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
    """Weights that `saved` does not hold exactly, and optimizer state. Collective."""
    exact = {} if saved is None else {name: spec.dtype for name, spec in saved.specs.items()}
    weights = [
        p
        for p in checkpoint_params(model, mesh)
        if any(
            exact.get(name) != p.local.dtype
            for name in checkpoint_shapes(p.name, p.placement, p.shape)
        )
    ]
    exports = [export_params(weights, mesh, prefix=prefix(role, PARAM))]
    for kind, tensors in states.items():
        exports.append(
            export_params(_state_params(model, mesh, tensors), mesh, prefix=prefix(role, kind))
        )
    if others is not None:
        exports.append(export_params(_other_params(others), mesh, prefix=prefix(role, OTHERS)))
    return exports


def load_training(
    model: StagedModel, mesh: Mesh, role: str, states: States, others: Others, reader: ShardedReader
) -> Mapping[str, Tensor]:
    """Returns those of `others` that were read. The caller calls `verify_checksums`. Collective."""
    exact = _saved_as_trained(reader, role) if role == MODEL_ROLE else ()
    _load_untied(
        checkpoint_params(model, mesh), reader.training_state(prefix(role, PARAM), exact), mesh
    )
    for kind, tensors in states.items():
        params = _state_params(model, mesh, tensors)
        source = reader.training_state(prefix(role, kind))
        with agreed(mesh):
            names = (
                name for p in params for name in checkpoint_shapes(p.name, p.placement, p.shape)
            )
            if absent := [f"missing: {name}" for name in names if name not in source.names]:
                raise CheckpointError(
                    f"{reader.path} has no {prefix(role, kind)} of what is trained here: {_cause(reader, role, kind)}, or start "
                    f"from the weights alone:\n{listing(absent)}"
                )
        _load_untied(params, source, mesh)
    if others is None:
        return {}
    source = reader.training_state(prefix(role, OTHERS))
    held = {name: tensor for name, tensor in others.items() if name in source.names}
    load_into(_other_params(held), source, mesh, ignore=ANYTHING)
    return held


def _cause(reader: ShardedReader, role: str, kind: str) -> str:
    start = f"{TRAINING}{role}/"
    kinds = {
        name.removeprefix(start).partition("/")[0]
        for name in reader.tensors
        if name.startswith(start)
    }
    if kind not in kinds:
        held = " and ".join(sorted(kinds - {PARAM, OTHERS})) or "no state"
        return f"it has {held} of the optimizer that it was saved with; set that one (OptimSettings.name, in a recipe optim.name)"
    return "it was frozen there, or the checkpoint is not whole; freeze it (OptimSettings.frozen, in a recipe optim.frozen)"


def _other_params(others: Mapping[str, Tensor]) -> list[LocalParam]:
    params = []
    for name, tensor in others.items():
        shape = tuple(tensor.shape)
        whole = tuple((0, length) for length in shape)
        region = Region(name, shape, whole, whole, owned=True)
        params.append(LocalParam(name, REPLICATED, shape, tensor, (region,), (), None))
    return params


def save_state(
    path: Path, mesh: Mesh, exports: Sequence[Export], sides: SideFiles, state: Mapping[str, Any]
) -> Path:
    """Collective."""
    json.dumps(state)  # raises on every rank
    specs = [spec for each in exports for spec in each.specs.values()]
    pieces = {name: piece for each in exports for name, piece in each.local.items()}
    return write_sharded(
        path, mesh, specs, {mesh["world"].rank: pieces}, mesh.layout, sides=sides, state=state
    )


def open_state(path: Path | str, mesh: Mesh) -> ShardedReader:
    """Opens what `save_state` or a run wrote. Collective."""
    with agreed(mesh):
        if not (Path(path) / MANIFEST).exists():
            raise CheckpointError(
                f"{path} is not a saved state: it has no {MANIFEST}; give what save_state wrote"
            )
        reader = ShardedReader(path)
        if MODEL_ROLE not in (reader.manifest.state or {}).get("updates", {}):
            raise CheckpointError(
                f"{path} holds weights without training state; load it with from_pretrained"
            )
        return reader


def prefix(role: str, kind: str) -> str:
    return f"{TRAINING}{role}/{kind}/"


def _saved_as_trained(reader: ShardedReader, role: str) -> list[str]:
    """Tensors that were not rounded: optimizer state has the dtype of training, if of no fixed one."""
    trained: dict[str, set[torch.dtype]] = defaultdict(set)
    for name, tensor in reader.manifest.tensors.items():
        kind, _, param = name.removeprefix(f"{TRAINING}{role}/").partition("/")
        if name.startswith(f"{TRAINING}{role}/") and kind != PARAM:
            trained[param].add(tensor.dtype)
    return [
        name for name in reader.names if name not in trained or reader.dtype(name) in trained[name]
    ]


def _state_params(
    model: StagedModel, mesh: Mesh, tensors: Mapping[str, Tensor]
) -> list[LocalParam]:
    params = [p for p in local_params(model, mesh) if p.name in tensors]
    return in_checkpoint_form(model, [replace(p, local=tensors[p.name]) for p in params])


def _load_untied(params: list[LocalParam], source: ShardedReader, mesh: Mesh) -> None:
    """Training state has tied parameters once."""
    load_into([replace(param, tied=()) for param in params], source, mesh, ignore=ANYTHING)
