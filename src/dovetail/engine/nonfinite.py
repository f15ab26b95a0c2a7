"""What was not finite in a step, and its micro-batches."""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dovetail.batch.micro import MicroBatch
from dovetail.engine.stage import Accumulated, inputs_of
from dovetail.errors import shortened
from dovetail.launch.progress import Progress
from dovetail.parallel.consensus import of_all
from dovetail.parallel.mesh import Mesh
from dovetail.weights.atomic import write_file
from dovetail.weights.safetensors import TensorFileWriter, TensorSpec, dump_json

GRADIENT = "gradient"  # faults that follow from others


@dataclass(frozen=True)
class StepWatch:
    """folder: for micro-batches of skipped steps."""

    progress: Progress | None = None
    folder: Path | None = None

    @property
    def step(self) -> int:
        return (self.progress and self.progress.state.step) or 0

    def record(
        self, own: Sequence[str], micros: Sequence[MicroBatch], mesh: Mesh
    ) -> dict[int, list[str]]:
        """All ranks' faults; ranks with a cause (a gradient only if there is no other) write micro-batches. Collective."""
        by_rank = of_all(list(own), mesh)
        causes = [[fault for fault in names if not fault.startswith(GRADIENT)] for names in by_rank]
        told = causes if any(causes) else by_rank
        faults = {rank: names for rank, names in enumerate(told) if names}
        rank = mesh["world"].rank
        if self.folder is not None and rank in faults:
            name = f"step_{self.step:06}.rank_{rank}"
            before = [*self.folder.glob(name), *self.folder.glob(f"{name}.*")]
            if before:  # a step may have several updates
                name = f"{name}.{len(before) + 1}"
            place = self.folder / name
            try:
                self._write(place, faults, micros, mesh)
            except OSError as error:  # the run goes on
                shutil.rmtree(place, ignore_errors=True)
                sys.stderr.write(
                    f"dovetail: {place}, what rank {rank} computed on, is not kept: {error}\n"
                )
        return faults

    def _write(
        self, place: Path, faults: dict[int, list[str]], micros: Sequence[MicroBatch], mesh: Mesh
    ) -> None:
        place.mkdir(parents=True)
        tensors = {}
        specs = []
        for i, micro in enumerate(micros):
            for column, x in _tensors(micro).items():
                key = f"{i}.{column}"
                tensors[key] = x
                specs.append(TensorSpec(key, x.dtype, tuple(x.shape)))
        writer = TensorFileWriter(place / "micro_batches.safetensors", specs)
        for key, x in tensors.items():
            writer.write(key, x)
        writer.close()
        description = {
            "step": self.step,
            "rank": mesh["world"].rank,
            "layout": str(mesh.layout),
            "coords": mesh.coords,
            "faults": {str(rank): names for rank, names in faults.items()},
            "lengths": [list(micro.batch.lengths) for micro in micros],
        }
        write_file(place / "fault.json", dump_json(description))


def record_faults(
    batches: Sequence[Accumulated], own: Sequence[str], watch: StepWatch, mesh: Mesh
) -> dict[int, list[str]]:
    """Collective."""
    found = []
    micros = []
    for i, each in enumerate(batches):
        where = f" of batch {i}" if len(batches) > 1 else ""
        found += [name + where for name in _nonfinite_parts(each)]
        micros += [micro for _, micro in each.pairs]
    return watch.record([*found, *own], micros, mesh)


def _nonfinite_parts(done: Accumulated) -> list[str]:
    inputs = inputs_of([micro for _, micro in done.pairs])
    bad = [name for name, x in inputs.items() if not _is_finite(x)]
    is_known = False
    for i, loss in enumerate(done.losses):
        if _is_finite(loss):
            continue
        is_known = True
        batch = done.batch
        index, _ = done.pairs[i]
        tokens = index.to(batch.tokens.device)
        members = batch.sequence_ids[tokens].unique_consecutive()
        listed = shortened(", ".join(map(str, members.tolist())))
        bad.append(f"loss of micro-batch {i} (sequences {listed})")
    named = zip(("loss", "count of the loss"), done.own, strict=False)
    for name, x in named:
        is_told = name == "loss" and is_known
        if not is_told and not _is_finite(x):
            bad.append(name)
    return bad


def _is_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def _tensors(micro: MicroBatch) -> dict[str, Tensor]:
    batch = micro.batch
    columns = {
        "tokens": batch.tokens,
        "positions": batch.positions,
        "cu_seqlens": batch.cu_seqlens,
        "targets": batch.targets,
        "mask": batch.mask,
    }
    return {**columns, **batch.fields, "order": micro.order}
