"""The server of a tiny model, and clients of it."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dovetail.inference_servers import push, transports
from dovetail.inference_servers.fleet import Fleet, Replica
from dovetail.inference_servers.http import Client
from dovetail.inference_servers.protocol import ServerRequest
from dovetail.inference_servers.push import Pusher
from dovetail.inference_servers.vllm import Native
from dovetail.recipe.rollout import PushSection
from dovetail.sampler.base import SamplingParams
from dovetail.sampler.turn import RolloutId
from dovetail.serving.app import Settings
from dovetail.serving.http_server import HttpServer, listen
from dovetail.serving.sampler_server import SamplerServer
from dovetail.serving.text import Text
from tests.helpers.parity_configs import VOCAB, tiny_configs, tiny_model
from tests.helpers.schedulers import sampler_of

MODEL = "qwen2_window"
GREEDY = SamplingParams(max_new_tokens=1, temperature=0)


def weights(factor: float = 1.0) -> dict[str, Tensor]:
    return {name: factor * w for name, w in tiny_model(tiny_configs()[MODEL]).state_dict().items()}


@contextmanager
def serving(
    key: str | None = None,
    *,
    text: Text | None = None,
    **options: Any,
) -> Iterator[HttpServer]:
    sampler = sampler_of(MODEL, options.pop("max_tokens", 4096), lambda step: step, **options)
    sampler_server = SamplerServer(sampler, push_directory=Path("/"))
    settings = Settings(model="tiny", text=text, key=key)
    with running(HttpServer(sampler_server, listen("127.0.0.1", 0), settings)) as server:
        yield server


@contextmanager
def running(server: HttpServer) -> Iterator[HttpServer]:
    server.start()
    owner = threading.Thread(target=server.run)
    owner.start()
    try:
        yield server
    finally:
        server.stop()
        owner.join()


def fleet_of(*servers: HttpServer) -> Fleet:
    replicas = [
        Replica(client, Native().probe(client, VOCAB))
        for client in (Client(each.url) for each in servers)
    ]
    for replica in replicas:
        replica.problem = None
    return Fleet(replicas, Native(), timeout=20.0, on_server_lost=lambda _: None)


def pusher(
    server: HttpServer, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> Pusher:
    """By buckets of kilobytes."""
    fill = transports.fill
    monkeypatch.setattr(
        push, "fill", lambda pairs, transport, _, **given: fill(pairs, transport, 16384, **given)
    )
    section = PushSection(transport="file", directory=str(folder), timeout=10.0, **options)
    return Pusher([Client(server.url)], section, kind="vllm")


def request(ids: Sequence[int], params: SamplingParams, row: int = 0) -> ServerRequest:
    return ServerRequest(
        id=RolloutId(params.step, row, 0), prompt_ids=list(ids), params=params, salt="s"
    )


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)
