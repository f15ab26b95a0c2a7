"""The back ends: a bucket of bytes comes by a file, a process group or shared memory; its tensors are checked, then loaded.

An update is start, any number of `update_weights`, each with one bucket, one with the manifest, finish. A refusal ends it.
"""

import base64
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from dovetail_vllm.ledger import Ledger, Refused, listed

POLL = 0.0005  # seconds
GRACE = 60.0  # seconds after our own deadline, for torch's, which would end the process


@dataclass
class Init(WeightTransferInitInfo):
    """timeout: seconds for one bucket. The rest is `dovetail_nccl`'s: a store of the trainer, and ranks in its group."""

    timeout: float = 300.0
    backend: str = "nccl"  # or gloo
    master_address: str = ""
    master_port: int = 0
    rank_offset: int = 1
    world_size: int = 0


@dataclass
class Update(WeightTransferUpdateInfo):
    """A bucket, the manifest, or (abort) the end of an update that its trainer left."""

    bucket: int = -1
    num_bytes: int = 0
    tensors: list = field(default_factory=list)  # name, dtype, shape, first byte, sum
    manifest: list | None = None  # name, dtype, shape, sum
    abort: bool = False
    file: str = ""
    memory: dict | None = None  # path, or device (its UUID) and handle


class VerifiedEngine(WeightTransferEngine[Init, Update]):
    init_info_cls, update_info_cls = Init, Update

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.ledger, self.begun = Ledger(), False
        self.parameters: set[str] = set()
        self.loaded: set[str] | None = set()
        self.timeout = Init.timeout

    def init_transfer_engine(self, init_info: Init) -> None:
        self.timeout = init_info.timeout

    def start_weight_update(self) -> None:
        if self.begun:  # the update before did not end: vLLM would count its tensors as this one's
            finalize_layerwise_reload(self.model, self.model_config)
        self.ledger, self.loaded, self.begun = Ledger(), set(), True
        self.parameters = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Update) -> None:
        if update_info.abort:
            raise Refused("the update is abandoned, as its trainer asks")
        if update_info.manifest is not None:
            self.ledger.close(update_info.manifest)
            self._check_loaded()
            return
        memory = self.receive(update_info)
        loaded = self.model.load_weights(
            self.ledger.take(update_info.bucket, update_info.num_bytes, update_info.tensors, memory)
        )
        if loaded is None or self.loaded is None:  # a model that does not say what it loaded
            self.loaded = None
        else:
            self.loaded |= loaded

    def _check_loaded(self) -> None:
        """As vLLM does when it loads a checkpoint."""
        quantized = getattr(self.model_config, "quantization", None) is not None
        if self.loaded is not None and not quantized and (left := self.parameters - self.loaded):
            self.ledger.whole = False
            raise Refused(
                f"{listed(left)}: parameters of the engine's model that no tensor of the update fills"
            )

    def finish_weight_update(self) -> None:
        if not self.ledger.whole:
            raise Refused(
                f"the update ends after {self.ledger.buckets} buckets without a manifest that they fulfil"
            )
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            self._repack_tied()
        self.begun = False

    def _repack_tied(self) -> None:
        """On a CPU a tied LM head keeps a packed copy, which vLLM makes anew only for the module that was loaded."""
        owners: dict[int, torch.nn.Module] = {}
        for module in self.model.modules():
            weight = module._parameters.get("weight")
            tied = (
                weight is not None
                and weight.numel()
                and owners.setdefault(id(weight), module) is not module
            )
            if tied and hasattr(module, "quant_method"):
                module.quant_method.process_weights_after_loading(module)

    def receive(self, update: Update) -> Tensor:
        """The bucket's bytes, uint8 on this worker's device, in memory that nobody else writes: vLLM keeps views of it."""
        raise NotImplementedError

    def shutdown(self) -> None:
        pass


class FileEngine(VerifiedEngine):
    def receive(self, update: Update) -> Tensor:
        data = bytearray(Path(update.file).read_bytes())
        return (
            torch.frombuffer(data, dtype=torch.uint8).to(self.device)
            if data
            else torch.empty(0, dtype=torch.uint8)
        )


class GroupEngine(VerifiedEngine):
    """The trainer is rank 0 and broadcasts each bucket. A bucket that does not come in time ends the group, not the engine."""

    group: Any = None

    def init_transfer_engine(self, init_info: Init) -> None:
        super().init_transfer_engine(init_info)
        self.shutdown()
        wait = timedelta(seconds=self.timeout)
        parallel = self.parallel_config
        rank = (
            init_info.rank_offset
            + parallel.data_parallel_index * parallel.world_size
            + parallel.rank
        )
        store = dist.TCPStore(
            init_info.master_address, init_info.master_port, is_master=False, timeout=wait
        )
        if init_info.backend == "nccl":
            from vllm.utils.nccl import unpinned_nccl_env

            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=self.timeout + GRACE)
            with (
                unpinned_nccl_env()
            ):  # the trainer has none of the variables that vLLM may set for its own groups
                self.group = dist.ProcessGroupNCCL(store, rank, init_info.world_size, options)
                self.group.allreduce([torch.ones(1, device=self.device)]).wait()  # connects
            torch.accelerator.synchronize()
        else:
            self.group = dist.ProcessGroupGloo(store, rank, init_info.world_size, wait)

    def receive(self, update: Update) -> Tensor:
        if self.group is None:
            raise Refused(
                "no group with the trainer: an earlier broadcast failed; initialize weight transfer again"
            )
        place = (
            self.device
            if isinstance(self.group, getattr(dist, "ProcessGroupNCCL", ()))
            else torch.device("cpu")
        )
        memory = torch.empty(update.num_bytes, dtype=torch.uint8, device=place)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            work = self.group.broadcast([memory], options)
            if place.type == "cpu":
                work.wait(timedelta(seconds=self.timeout))
            else:
                self._wait(work)
        except RuntimeError:
            self.shutdown()
            raise
        return memory.to(self.device)

    def _wait(self, work: Any) -> None:
        end = monotonic() + self.timeout
        while not work.is_completed():
            if monotonic() > end:
                raise RuntimeError(
                    f"the trainer's broadcast did not come within {self.timeout:g} s"
                )
            sleep(POLL)
        work.wait()

    def shutdown(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            group.abort()


class MemoryEngine(VerifiedEngine):
    def receive(self, update: Update) -> Tensor:
        memory = update.memory or {}
        if "path" in memory:
            shared = torch.from_file(
                memory["path"], shared=True, size=update.num_bytes, dtype=torch.uint8
            )
            return shared.to(self.device, copy=True)
        handle, counter, event = (
            base64.b64decode(memory[name]) for name in ("handle", "counter", "event")
        )
        place = self._device(memory["device"])
        size, offset, counted, waits = (
            memory[name] for name in ("size", "offset", "counter_offset", "event_waits")
        )
        storage = torch.UntypedStorage._new_shared_cuda(
            place, handle, size, offset, counter, counted, event, waits
        )
        shared = torch.empty(0, dtype=torch.uint8, device=f"cuda:{place}").set_(
            storage, 0, (update.num_bytes,), (1,)
        )
        mine = shared.to(self.device, copy=True)
        torch.accelerator.synchronize()  # before the trainer's memory is let go
        return mine

    @staticmethod
    def _device(uuid: str) -> int:
        """The number of the trainer's GPU here."""
        known = [
            str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())
        ]
        if uuid not in known:
            raise Refused(
                f"the trainer's GPU {uuid} is not visible here ({', '.join(known)}); use dovetail_nccl"
            )
        return known.index(uuid)
