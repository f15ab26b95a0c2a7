"""A process group with programs outside of this run, such as inference servers."""

import time
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is public

GroupBackend = Literal["nccl", "gloo"]
POLL = 0.0005  # seconds
UNIQUE_ID = "0"  # of a communicator: torch's own detail, as vLLM's examples have it
GRACE = 60.0  # seconds until torch ends the process


class PrivateGroup:
    """A group of which rank 0 serves the store; the others join at `address` and `port`."""

    def __init__(
        self,
        backend: GroupBackend,
        address: str,
        size: int,
        timeout: float,
        *,
        rank: int = 0,
        port: int = 0,
    ) -> None:
        self.backend = backend
        self.address = address
        self.size = size
        self.timeout = timeout
        self.rank = rank
        self._store = self._open_store(port, is_master=rank == 0)
        self.port = self._store.port
        self._group: Any = None

    def _open_store(self, port: int, *, is_master: bool) -> TCPStore:
        wait = timedelta(seconds=self.timeout)
        return TCPStore(
            self.address, port, is_master=is_master, wait_for_workers=False, timeout=wait
        )

    def connect(self, device: torch.device) -> None:
        """Join the group, which waits for all ranks."""
        timeout = timedelta(seconds=self.timeout)
        if self.backend == "gloo":
            self._group = dist.ProcessGroupGloo(self._store, self.rank, self.size, timeout)
            return
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout + timedelta(seconds=GRACE)
        self._group = dist.ProcessGroupNCCL(self._store, self.rank, self.size, options)
        first = self._group.allreduce([torch.ones(1, device=device)])  # makes the communicator
        self._finish(first)

    def unique_id(self) -> bytes:
        """Return the id for those without the store.

        It waits for `connect` on another thread, over a connection of its own.
        """
        return self._open_store(self.port, is_master=False).get(UNIQUE_ID)

    def broadcast(self, data: Tensor) -> None:
        """Broadcast from rank 0. RuntimeError after `timeout`."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._finish(self._group.broadcast([data], options))

    def abort(self) -> None:
        group = self._group
        self._group = None
        if group is not None:
            group.abort()

    def _finish(self, work: Any) -> None:
        if self.backend == "gloo":
            work.wait(timedelta(seconds=self.timeout))
            return
        end = time.monotonic() + self.timeout
        while not work.is_completed():
            if time.monotonic() > end:
                raise RuntimeError(f"a broadcast by NCCL did not end within {self.timeout:g} s")
            time.sleep(POLL)
        work.wait()
