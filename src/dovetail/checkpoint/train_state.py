"""What of an engine goes into a training checkpoint, under which names, and how any layout finds it again.

NAME                              the policy's weights as they are saved for others, in their saved dtype
training/ROLE/param/NAME          weights as they are trained, where NAME is not there or has another dtype
training/ROLE/exp_avg/NAME        a moment of AdamW (exp_avg_sq is the other), as its parameter lies
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dovetail.checkpoint.manifest import TRAINING
from dovetail.checkpoint.reader import ShardedReader
from dovetail.nn.model import StagedModel
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import Slices, checkpoint_shapes
from dovetail.weights.experts import as_stored, stored
from dovetail.weights.load import load_into
from dovetail.weights.parallel_read import Job
from dovetail.weights.shards import LocalParam, local_params
from dovetail.weights.stream import Export, export_held

PARAM, MOMENT = "param", "exp_avg"
MODEL_ROLE = "policy"  # whose weights are the model of the checkpoint
ANYTHING = ("*",)  # the checkpoint holds other tensors, too
Moments = Mapping[str, Mapping[str, Tensor]]  # kind -> our name of a parameter -> its moment, shaped like its shard


def export_training(
    model: StagedModel, mesh: Mesh, role: str, moments: Moments, saved: Export | None = None
) -> list[Export]:
    """The weights that `saved` does not hold exactly, and the moments, of the engine that plays `role`. Collective."""
    exact = {} if saved is None else {name: spec.dtype for name, spec in saved.specs.items()}
    weights = [
        h
        for h in stored(model, mesh)
        if any(exact.get(name) != h.local.dtype for name in checkpoint_shapes(h.name, h.placement, h.shape))
    ]
    found = [export_held(weights, mesh, prefix=prefix(role, PARAM))]
    for kind, tensors in moments.items():
        found.append(export_held(_alike(model, mesh, tensors), mesh, prefix=prefix(role, kind)))
    return found


def load_training(model: StagedModel, mesh: Mesh, role: str, moments: Moments, reader: ShardedReader) -> None:
    """Fill weights and moments from a training checkpoint of any layout. Collective.

    The caller lets `reader` settle before it uses them.
    """
    load_weights(model, mesh, role, reader)
    for kind, tensors in moments.items():
        source = StateSource(reader, prefix(role, kind))
        load_into(_alone(_alike(model, mesh, tensors)), source, mesh, ignore=ANYTHING)


def load_weights(model: StagedModel, mesh: Mesh, role: str, reader: ShardedReader) -> None:
    """Fill the weights alone, as they were trained. Collective.

    A saved weight that is rounded is none that was trained: its moments tell in which dtype that one was held.
    """
    exact: list[str] = []
    for name in reader.names if role == MODEL_ROLE else ():
        moment = reader.manifest.tensors.get(prefix(role, MOMENT) + name)
        if moment is None or moment.dtype == reader.dtype(name):
            exact.append(name)
    load_into(_alone(stored(model, mesh)), StateSource(reader, prefix(role, PARAM), exact), mesh, ignore=ANYTHING)


def prefix(role: str, kind: str) -> str:
    """How the names of one kind of tensors of one role begin."""
    return f"{TRAINING}{role}/{kind}/"


class StateSource:
    """The tensors of a training checkpoint whose names begin with `start`, as a `TensorSource` without that beginning.

    Of those in `others` it has the ones that are not there under `start`.
    """

    def __init__(self, reader: ShardedReader, start: str, others: Collection[str] = ()) -> None:
        self.path: Path = reader.path / start  # as errors name it
        self._reader = reader
        self._stored = {name: name for name in others}
        self._stored |= {n.removeprefix(start): n for n in reader.manifest.tensors if n.startswith(start)}

    @property
    def names(self) -> Collection[str]:
        return self._stored.keys()

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read

    def shape(self, name: str) -> tuple[int, ...]:
        return self._reader.shape(self._stored[name])

    def dtype(self, name: str) -> torch.dtype:
        return self._reader.dtype(self._stored[name])

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        return self._reader.read(self._stored[name], slices)

    def jobs(self, name: str, slices: Slices, out: Tensor) -> Iterator[Job]:
        """What brings a rectangle of the tensor into `out`."""
        return self._reader.jobs(self._stored[name], slices, out)

    def settle(self, mesh: Mesh) -> None:
        """Compare the checksums of the whole checkpoint. Collective."""
        self._reader.settle(mesh, training=True)


def _alike(model: StagedModel, mesh: Mesh, tensors: Mapping[str, Tensor]) -> list[LocalParam]:
    """Tensors that lie as the parameters of these names do, in the checkpoint's form."""
    return as_stored(
        model, [replace(h, local=tensors[h.name]) for h in local_params(model, mesh) if h.parameter is not None]
    )


def _alone(params: Sequence[LocalParam]) -> list[LocalParam]:
    """Tied parameters under their first name only, as a training checkpoint has them."""
    return [replace(param, tied=()) for param in params]
