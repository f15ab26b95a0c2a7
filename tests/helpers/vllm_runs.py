"""Runs of a real vLLM."""

import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from dovetail.inference_servers.http import Client, ServerError
from dovetail.inference_servers.push import Pusher
from dovetail.parallel.process_group import temporary_process_group

PYTHON, MODEL = (
    os.environ.get("DOVETAIL_VLLM_PYTHON"),
    Path.home() / ".cache/dovetail/smollm2-135m-instruct",
)
CPU = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip


class VersionPusher(Pusher):
    """The servers have the weights already."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self.clients = clients

    def push(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> list[ServerError | None]:
        assert len(list(weights))
        for client in self.clients:
            client.post("/update_weight_version", {"new_version": str(version)})
        return [None] * len(self.clients)

    def close(self) -> None:
        pass


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def process_group() -> Iterator[None]:
    with temporary_process_group(torch.device("cpu"), timedelta(hours=1)):
        yield
