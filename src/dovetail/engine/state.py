"""What an engine saves, loads and moves: weights and optimizer."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dovetail.checkpoint.reader import ShardedReader
from dovetail.checkpoint.train_state import (
    MODEL_ROLE,
    export_training,
    load_training,
    open_state,
    save_state,
)
from dovetail.checkpoint.writer import save_sharded
from dovetail.memory import OffloadedState
from dovetail.nn.model import StagedModel
from dovetail.optim.groups import ParamGroup
from dovetail.optim.optimizer import Optimizer, OptimSettings
from dovetail.optim.replicas import check_replicas
from dovetail.parallel.consensus import agreed
from dovetail.parallel.mesh import Mesh
from dovetail.weights.adapters import merged_weights
from dovetail.weights.hf_directory import CheckpointSource
from dovetail.weights.peft import save_adapter
from dovetail.weights.save import save
from dovetail.weights.shards import adapter_params, local_tensor, parameters_in, reshard
from dovetail.weights.stream import Export, export, export_params, stream


class EngineState:
    model: StagedModel
    mesh: Mesh
    origin: CheckpointSource
    _settings: OptimSettings
    _optimizer: Optimizer | None
    _offloaded: OffloadedState | None

    @property
    def optimizer(self) -> Optimizer:
        raise NotImplementedError

    @property
    def resident_model(self) -> StagedModel:
        raise NotImplementedError

    def zero_grad(self) -> None:
        raise NotImplementedError

    @property
    def param_groups(self) -> list[ParamGroup]:
        """Set lr and weight_decay between steps, alike on every rank. The first has what matches no pattern."""
        return self.optimizer.groups

    def check_replicas(self) -> None:
        """MachineError on every rank where replicas differ."""
        check_replicas(self.resident_model, self.mesh, self._optimizer)

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """(HF name, whole tensor), in bounded buckets, with adapters added to their base.

        dtype: default: the saved ones.
        """
        dtype_of = (
            self.origin.dtype_of if dtype is None else parameters_in(dtype, self.resident_model)
        )
        model = self.resident_model
        produce = stream if model.adapter is None else merged_weights
        return produce(
            model, self.mesh, dtype_of=dtype_of, checkpoint_names=self.origin.checkpoint_names
        )

    def save_pretrained(self, path: Path | str) -> None:
        """Write an HF directory, atomically; of a model with adapters these alone, as PEFT does."""
        model = self.resident_model
        if model.adapter is None:
            save(model, path, self.mesh, **self._saved())
        else:
            save_adapter(model, Path(path), self.mesh, self.origin.name, self.origin.auxiliary)

    def save_sharded(self, path: Path | str) -> Path:
        """Shards and their manifest, atomically -> their directory."""
        return save_sharded(self.resident_model, Path(path), self.mesh, **self._saved())

    def _saved(self) -> dict[str, Any]:
        return {
            "auxiliary": self.origin.auxiliary,
            "dtype_of": self.origin.dtype_of,
            "checkpoint_names": self.origin.checkpoint_names,
        }

    def export_training(self, role: str, *, with_model: bool = False) -> list[Export]:
        """Named by `role`. with_model: also the weights as saved."""
        model = self.resident_model
        origin = self.origin
        saved = None
        if with_model and model.adapter is not None:
            saved = export_params(adapter_params(model, self.mesh), self.mesh)
        elif with_model:
            saved = export(
                model, self.mesh, dtype_of=origin.dtype_of, checkpoint_names=origin.checkpoint_names
            )
        states = self.optimizer.state_tensors()
        others = self.optimizer.rule.others()
        state = export_training(model, self.mesh, role, states, others, saved)
        return state if saved is None else [saved, *state]

    def load_training(self, role: str, reader: ShardedReader, updates: int) -> None:
        """Continue as after `updates` optimizer steps, from any layout."""
        model = self.resident_model
        self.optimizer.resume(updates)
        states = self.optimizer.state_tensors()
        others = self.optimizer.rule.others()
        found = load_training(model, self.mesh, role, states, others, reader)
        with agreed(self.mesh):
            self.optimizer.restore(states, found)

    def save_state(self, path: Path | str, extra: Mapping[str, Any] | None = None) -> Path:
        """Weights, optimizer, schedule and `extra` (JSON) to a new or empty directory, atomically; no accumulated gradients."""
        exports = self.export_training(MODEL_ROLE, with_model=True)
        groups = [asdict(group) for group in self.param_groups]
        state = {
            "updates": {MODEL_ROLE: self.updates},
            "param_groups": groups,
            "extra": dict(extra or {}),
        }
        return save_state(Path(path), self.mesh, exports, self.origin.auxiliary, state)

    def load_state(self, path: Path | str) -> Mapping[str, Any]:
        """Continue from `save_state` or a run's checkpoint, of any layout -> its `extra`."""
        reader = open_state(path, self.mesh)
        self.zero_grad()
        state: Any = reader.manifest.state
        self.load_training(MODEL_ROLE, reader, state["updates"][MODEL_ROLE])
        reader.verify_checksums(self.mesh, training=True)
        saved = state.get("param_groups", ())
        if [group["pattern"] for group in saved] == [group.pattern for group in self.param_groups]:
            for group, before in zip(self.param_groups, saved, strict=True):
                group.lr = before["lr"]
                group.weight_decay = before["weight_decay"]
        extra: Mapping[str, Any] = state.get("extra", {})
        return extra

    @property
    def updates(self) -> int:
        return 0 if self._optimizer is None else self._optimizer.steps

    def offload(self) -> None:
        """All state to the host until `onload`."""
        assert self._offloaded is None, "offload() twice without onload()"
        self._offloaded = OffloadedState(self._device_state())

    def onload(self) -> None:
        assert self._offloaded is not None, "onload() without offload()"
        self._offloaded.restore()
        self._offloaded = None

    def _device_state(self) -> list[Tensor]:
        reshard(self.model)
        state = [local_tensor(param) for param in self.model.parameters()]
        state += [
            local_tensor(param.grad) for param in self.model.parameters() if param.grad is not None
        ]
        state += list(self.model.buffers())
        if self._optimizer is not None and not self._settings.on_host:
            state += self._optimizer.rule.resident()
        return state
