"""Fleets of stand-ins for inference servers."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from dovetail.inference_servers.fleet import Fleet, Replica, ServerClient
from dovetail.inference_servers.http import Client, ServerError
from dovetail.inference_servers.protocol import ServerRequest
from dovetail.inference_servers.sglang import Sglang
from dovetail.inference_servers.vllm import Vllm
from dovetail.sampler.base import SamplingParams
from dovetail.sampler.turn import RolloutId
from tests.helpers.fake_engine import VOCABULARY, FakeEngine

SERVER_CLIENTS: dict[str, ServerClient] = {"vllm": Vllm(), "sglang": Sglang()}
PROMPT = [3, 1, 4, 1, 5]
KINDS = pytest.mark.parametrize("kind", ["vllm", "sglang"])


def probe(fake: FakeEngine, vocab_size: int | None = VOCABULARY) -> Any:
    return SERVER_CLIENTS[fake.kind].probe(Client(fake.url, key=fake.key, timeout=5.0), vocab_size)


@contextmanager
def fleet(*fakes: FakeEngine, timeout: float = 5.0) -> Iterator[tuple[Fleet, list[ServerError]]]:
    """Of running stand-ins that have weights of version 7."""
    losses: list[ServerError] = []
    with ExitStack() as stack:
        for fake in fakes:
            stack.enter_context(fake)
        replicas = [
            Replica(Client(fake.url, key=fake.key, timeout=5.0), probe(fake)) for fake in fakes
        ]
        made = Fleet(
            replicas, SERVER_CLIENTS[fakes[0].kind], timeout=timeout, on_server_lost=losses.append
        )
        for fake, replica in zip(fakes, replicas, strict=True):
            fake.version = "7"
            fake.requests.clear()
            made.pushed(replica, 7, None)
        yield made, losses
        made.close()


def request(params: SamplingParams, row: int = 0, sample: int = 0) -> ServerRequest:
    return ServerRequest(
        id=RolloutId(params.step, row, sample), prompt_ids=PROMPT, params=params, salt="run-7"
    )
