"""Pushes to servers around the plugin (a stand-in for vLLM): by each transport, and with a failure at every step."""

import contextlib
import importlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.inference_servers.background import in_background
from dovetail.inference_servers.http import Client
from dovetail.inference_servers.push import Pusher
from dovetail.inference_servers.transports import SLOTS
from dovetail.parallel.private_group import UNIQUE_ID, PrivateGroup
from dovetail.recipe.rollout import PushSection
from tests.helpers import vllm_stand_in as stand_in
from tests.helpers.forked import popen
from tests.helpers.harness import template
from tests.helpers.plugin_weights import WEIGHTS

SHAPES = {name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()}
STEPS = (
    "/weight_info", "/get_world_size", "/init_weight_transfer_engine", "/pause", "/start_weight_update", "/update_weights",
    "/finish_weight_update", "/resume",
)  # fmt: skip


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(stand_in.PLUGIN))
    stand_in.install(monkeypatch.setitem)
    for name in ("dovetail_vllm.engines", "dovetail_vllm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(stand_in.WeightTransferEngineFactory, "_registry", {})
    with contextlib.ExitStack() as stack:
        yield lambda backend: stack.enter_context(stand_in.serving(f"dovetail_{backend}", SHAPES))


def pusher(servers: list[Any], transport: Any, directory: Path, **options: Any) -> Pusher:
    section = PushSection(
        transport=transport,
        directory=str(directory),
        timeout=options.pop("timeout", 5.0),
        **options,
    )
    return Pusher([Client(server.url) for server in servers], section, kind="vllm")


def small(made: Pusher, monkeypatch: pytest.MonkeyPatch) -> Pusher:
    """Buckets of kilobytes."""
    original = importlib.import_module("dovetail.inference_servers.push").fill
    monkeypatch.setattr(
        "dovetail.inference_servers.push.fill",
        lambda weights, transport, _, **kw: original(weights, transport, 4096, **kw),
    )
    return made


def weights(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in WEIGHTS.items():
        yield name, (tensor if tensor.dtype is torch.float8_e4m3fn else tensor + version)


def serves(server: Any, version: int) -> bool:
    """Whether it serves, and then exactly these weights."""
    given = dict(weights(version))
    for whole, parts in server.worker.model.parts.items():
        got = server.worker.model.values[whole]
        if not torch.equal(
            got.view(torch.uint8), torch.cat([given[part] for part in parts]).view(torch.uint8)
        ):
            return False
    return server.worker.version == str(version) and not server.worker.paused


@pytest.mark.parametrize("transport", ["file", "ipc", "nccl"])
def test_pushes_by_each_transport(
    servers: Any, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = [servers(transport), servers(transport)]
    made = small(pusher(pair, transport, tmp_path), monkeypatch)
    for version in (3, 4):
        assert made.push(weights(version), version) == [None, None]
        assert all(serves(server, version) for server in pair)
    assert not list(tmp_path.iterdir())
    for server in pair:
        assert server.calls.count("/init_weight_transfer_engine") == 1
        assert server.calls.count("/update_weights") > 2 * SLOTS + 2
    made.close()


@pytest.mark.parametrize("step", STEPS)
def test_a_failure_at_each_step_stays_with_its_server(
    servers: Any, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = servers("file"), servers("file")
    made = small(pusher([good, bad], "file", tmp_path), monkeypatch)
    assert made.push(weights(1), 1) == [None, None]
    bad.calls.clear()

    def fail(_: Any) -> None:
        raise RuntimeError("planted")

    bad.worker.version = "another"  # as if it had been restarted: all is initialized again
    bad.faults = {(step, 3 if step == "/update_weights" else 1): fail}
    error, other = made.push(weights(2), 2)[::-1]
    assert other is None and serves(good, 2)
    assert error is not None and error.url == bad.url and "planted" in error.message
    early = step in STEPS[:4]
    assert early or bad.worker.paused, "it does not serve a half of anything"
    assert made.push(weights(3), 3) == [None, None], "all comes back"
    assert serves(good, 3) and serves(bad, 3)


def test_a_server_that_hangs_costs_its_own_time_alone(
    servers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = servers("nccl"), servers("nccl")
    monkeypatch.setattr("dovetail.inference_servers.push_vllm.SETTLE", 0.2)
    made, over = (
        small(pusher([good, bad], "nccl", tmp_path, timeout=1.5), monkeypatch),
        threading.Event(),
    )
    bad.faults = {("/update_weights", 3): lambda _: over.wait(60) and None}
    results = made.push(weights(1), 1)
    assert results[0] is None and serves(good, 1)
    assert results[1] is not None and not serves(bad, 1) and bad.worker.paused
    over.set()
    while bad.worker.active:  # its end of the broadcast is gone: it is refused
        time.sleep(0.01)
    assert made.push(weights(2), 2) == [None, None]
    made.close()


def test_all_ranks_gather_to_the_end_whatever_happens(servers: Any, tmp_path: Path) -> None:
    gone = servers("file")
    made = pusher([gone], "file", tmp_path)
    gone.faults = {("/weight_info", 1): lambda _: (_ for _ in ()).throw(OSError("away"))}
    seen: list[str] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights(1):
            seen.append(name)
            yield name, tensor

    assert made.push(stream(), 1)[0] is not None
    assert seen == list(WEIGHTS)
    assert Pusher([], PushSection(), kind="vllm").push(stream(), 1) == []
    assert len(seen) == 2 * len(WEIGHTS)


def test_a_trainer_that_dies_in_a_push_leaves_a_server_that_takes_the_next(
    servers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = servers("file")
    server.worker.paused = True
    server.worker.start()
    server.worker.model.load_weights([(name, tensor + 1) for name, tensor in list(weights(1))[:3]])
    made = small(pusher([server], "file", tmp_path), monkeypatch)
    assert made.push(weights(2), 2) == [None] and serves(server, 2)


def test_by_gloo_between_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.helpers.vllm_stand_in",
        "dovetail_nccl",
        json.dumps(SHAPES),
    ]
    process = popen(template, command, stderr=None, stdin=-1)
    assert process.stdout is not None and process.stdin is not None
    client = Client(process.stdout.readline().strip())
    made = small(Pusher([client], PushSection(timeout=30.0), kind="vllm"), monkeypatch)
    assert made.push(weights(5), 5) == [None] and made.push(weights(6), 6) == [None]
    expected = stand_in.Model(SHAPES)
    given = dict(weights(6))
    expected.values = {
        whole: torch.cat([given[part] for part in parts]) for whole, parts in expected.parts.items()
    }
    assert client.post("/weight_checker", {"action": "checksum"})["checksums"] == stand_in.digests(
        expected
    )
    assert client.get("/weight_info") == {"weight_version": "6"}
    made.close()
    process.stdin.close()
    process.wait()


def test_who_waits_for_the_id_of_a_communicator_keeps_nobody_from_making_it() -> None:
    group = PrivateGroup("nccl", "127.0.0.1", 2, timeout=20.0)
    waiting = in_background(group.unique_id)
    time.sleep(0.2)
    group._store.set(UNIQUE_ID, "id")
    assert waiting.result(5) == b"id"
