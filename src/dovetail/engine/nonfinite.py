"""What a training step leaves behind when a number was not finite: which rank saw what, and what it computed on."""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dovetail.batch.micro import MicroBatch
from dovetail.batch.packed import PackedBatch
from dovetail.engine.expert_routing import PlannedMicroBatches
from dovetail.errors import shortened
from dovetail.launch.progress import Progress
from dovetail.parallel.collectives import gather_text
from dovetail.parallel.mesh import Mesh
from dovetail.weights.atomic import write_file
from dovetail.weights.safetensors import TensorFileWriter, TensorSpec, dump_json

GRADIENT = "gradient"  # of faults, the one that follows from any other


@dataclass(frozen=True)
class StepWatch:
    """Whom a training step tells where it is, and the directory for what it had to skip; None: nothing is kept."""

    progress: Progress = field(default_factory=Progress)
    folder: Path | None = None

    def keep(self, mine: Sequence[str], micros: Sequence[MicroBatch], mesh: Mesh) -> dict[int, list[str]]:
        """Everybody's faults, by rank; the ranks where they began write what they computed on. Collective.

        Gradients are summed before they are looked at, so a rank that sees them alone may not be where they went wrong.
        """
        everyone = [json.loads(text) for text in gather_text(json.dumps(list(mine)), mesh["world"], mesh.device)]
        causes = [[fault for fault in found if not fault.startswith(GRADIENT)] for found in everyone]
        faults = {rank: found for rank, found in enumerate(causes if any(causes) else everyone) if found}
        if self.folder is not None and mesh["world"].rank in faults:
            step, rank = self.progress.state.step or 0, mesh["world"].rank
            name = f"step_{step:06}.rank_{rank}"
            number = len([*self.folder.glob(name), *self.folder.glob(f"{name}.*")])  # a step may have several updates
            place = self.folder / (f"{name}.{number + 1}" if number else name)
            try:
                self._write(place, faults, micros, mesh)
            except OSError as error:  # a full disk, perhaps: the other ranks go on, and so does the run
                shutil.rmtree(place, ignore_errors=True)
                sys.stderr.write(f"dovetail: {place}, what rank {rank} computed on, is not kept: {error}\n")
        return faults

    def _write(self, place: Path, faults: dict[int, list[str]], micros: Sequence[MicroBatch], mesh: Mesh) -> None:
        place.mkdir(parents=True)
        tensors = {f"{i}.{key}": x for i, micro in enumerate(micros) for key, x in _tensors(micro).items()}
        specs = [TensorSpec(key, x.dtype, tuple(x.shape)) for key, x in tensors.items()]
        writer = TensorFileWriter(place / "micro_batches.safetensors", specs)
        for key, x in tensors.items():
            writer.write(key, x)
        writer.close()
        step, rank = self.progress.state.step or 0, mesh["world"].rank
        told = {"step": step, "rank": rank, "layout": str(mesh.layout), "coords": mesh.coords}
        lengths = [list(micro.batch.lengths) for micro in micros]
        faults_by_rank = {str(other): found for other, found in faults.items()}
        write_file(place / "fault.json", dump_json({**told, "faults": faults_by_rank, "lengths": lengths}))


def inputs_of(micros: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """What the losses read of the batch, on this rank's counted tokens, by micro-batch and name."""
    return {
        f"{name} of micro-batch {i}": x
        for i, micro in enumerate(micros)
        for name, x in micro.counted.fields.items()
        if x.is_floating_point()
    }


def spoiled(
    batch: PackedBatch, pairs: PlannedMicroBatches, parts: Sequence[Tensor], sums: Sequence[Tensor]
) -> list[str]:
    """The names of what is not finite of a step: what its losses read, the losses of this rank's micro-batches (`parts`), and
    their sum and count (`sums`)."""
    bad = [name for name, x in inputs_of([micro for _, micro in pairs]).items() if not bool(torch.isfinite(x).all())]
    for i, part in enumerate(parts):
        if not bool(torch.isfinite(part)):
            members = batch.sequence_ids[pairs[i][0].to(batch.tokens.device)].unique_consecutive().tolist()
            bad.append(f"loss of micro-batch {i} (sequences {shortened(', '.join(map(str, members)))})")
    known = [name for name in bad if name.startswith("loss")]
    named = zip(("loss", "count of the loss"), sums, strict=False)
    return bad + [name for name, x in named if not bool(torch.isfinite(x).all()) and not (name == "loss" and known)]


def _tensors(micro: MicroBatch) -> dict[str, Tensor]:
    batch = micro.batch
    names = ("tokens", "positions", "cu_seqlens", "targets", "mask")
    return {**{name: getattr(batch, name) for name in names}, **batch.fields, "order": micro.order}
