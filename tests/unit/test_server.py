"""The embedded sampler as a server, spoken to by our own client: its samples are the sampler's, and pushes come in between."""

import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.cli import serve
from dovetail.cli.main import run_command
from dovetail.errors import ConfigError, MachineError
from dovetail.factory import serving as serving_parts
from dovetail.inference_servers.http import Client, ServerError
from dovetail.inference_servers.push import Pusher
from dovetail.inference_servers.remote_sampler import RemoteSampler
from dovetail.inference_servers.sglang import Sglang
from dovetail.inference_servers.vllm import Native, Vllm, generate_body
from dovetail.parallel.mesh import Mesh
from dovetail.recipe.rollout import PushSection
from dovetail.sampler.base import SamplingParams, TokenPrompt
from dovetail.sampler.native import NativeSampler, cache_bytes
from dovetail.sampler.turn import Turn
from dovetail.serving.http_server import HttpServer
from dovetail.serving.sampler_server import SamplerServer
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.parity_configs import VOCAB
from tests.helpers.prompts import some_prompts
from tests.helpers.schedulers import PARAMS, sampler_of
from tests.helpers.served import (
    GREEDY,
    MODEL,
    fleet_of,
    pusher,
    request,
    serving,
    wait_for,
    weights,
)
from tests.helpers.tolerances import MODEL_FP32, SUM_ORDER, assert_close


def remote(folder: Path, transport: Any, *servers: HttpServer) -> RemoteSampler:
    fleet = fleet_of(*servers)
    clients = [replica.client for replica in fleet.replicas]
    section = PushSection(transport=transport, directory=str(folder), timeout=10.0)
    return RemoteSampler(
        Mesh.solo(), torch.float64, VOCAB, fleet, Pusher(clients, section, kind="vllm")
    )


def all_but_versions(done: list[Turn]) -> list[Turn]:
    return [replace(each, versions=()) for each in done]


@pytest.mark.parametrize("transport", ["file", "nccl", "ipc"])
def test_a_batch_has_the_bits_of_the_sampler(transport: str, tmp_path: Path) -> None:
    """Also after one of other lengths, and with fewer rows than samples; padded as with CUDA graphs."""
    options: dict[str, Any] = {"page_size": 4, "decode_steps": 3, "max_num_seqs": 20}
    local = sampler_of(MODEL, 4096, lambda step: step, **options)
    with serving(**options) as server:
        sampler = remote(tmp_path, transport, server)
        for step, (prompts, params) in enumerate(
            [
                (some_prompts(), replace(PARAMS, banned_ids=(2, 5))),
                (
                    some_prompts((3, 9, 5))[::-1],
                    replace(PARAMS, max_new_tokens=40, step=3, top_p=0.8),
                ),
            ],
            1,
        ):
            sampler.refill(weights(1 / step).items())
            local.refill(weights(1 / step).items())
            found, expected = sampler.sample(prompts, params), local.sample(prompts, params)
            assert all_but_versions(found) == expected
            assert all(each.versions == ((step, 0, len(each.ids)),) for each in found)
            assert not any(loop.runner.joining for loop in server.sampler_server._loops.values())
        sampler.close()


def test_two_servers_share_a_batch_and_repeat_it(tmp_path: Path) -> None:
    local = sampler_of(MODEL)
    with serving() as one, serving() as other:
        sampler = remote(tmp_path, "file", one, other)
        sampler.refill(weights().items())
        found = sampler.sample(some_prompts(), PARAMS)
        assert found == sampler.sample(some_prompts(), PARAMS)
        assert all(next(server.sampler_server._slots) == 1 + 2 * 12 for server in (one, other)), (
            "one is the probe's"
        )
        for each, expected in zip(found, local.sample(some_prompts(), PARAMS), strict=True):
            assert each.ids == expected.ids
            assert_close(torch.tensor(each.log_probs), torch.tensor(expected.log_probs), SUM_ORDER)
        sampler.close()


def test_requests_join_what_runs_and_draw_the_same() -> None:
    """One after another, of several lengths, kinds and page counts, more than fit at once."""
    prompts, long = (
        some_prompts((5, 17, 1)),
        replace(PARAMS, samples=1, max_new_tokens=14, stop_ids=()),
    )
    kinds = [
        long,
        replace(long, max_new_tokens=9, top_k=7),
        replace(long, max_new_tokens=18, temperature=0.5),
    ]
    local = sampler_of(MODEL)
    with serving(page_size=4, max_tokens=120) as server:
        fleet = fleet_of(server)
        asked = [(prompt, params) for prompt in prompts for params in kinds]
        futures = [
            fleet.threads.submit(fleet.generate, request(prompt.ids, params, prompt.row))
            for prompt, params in asked
        ]
        alone = zip(*(local.sample(prompts, params) for params in kinds), strict=True)
        for expected, future in zip(chain(*alone), futures, strict=True):
            reply = future.result()
            assert tuple(reply.ids) == expected.ids and reply.finish == expected.finish
            assert_close(torch.tensor(reply.log_probs), torch.tensor(expected.log_probs), SUM_ORDER)
        assert all(loop.runner.joining for loop in server.sampler_server._loops.values())
        wait_for(
            lambda: (
                server.sampler_server.pool.num_free == 120 // 4
                and not server.sampler_server._living
            )
        )
        continued = fleet._protocol.generate(
            Client(server.url), fleet.replicas[0].server, request(prompts[0].ids, long, prompts[0].row),
            futures[0].result().ids[:6], lambda: time.monotonic() + 9,
        )  # fmt: skip
        assert (
            tuple(token for part in continued for token in part.ids) == futures[0].result().ids[6:]
        )
        fleet.close()


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_push_through_running_requests(
    kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, prompts = replace(GREEDY, max_new_tokens=24), some_prompts((9, 4))
    with serving(page_size=4) as server:
        made, fleet, sampler_server = (
            pusher(server, tmp_path, monkeypatch, kv=kv),
            fleet_of(server),
            server.sampler_server,
        )
        assert made.push(weights().items(), 3) == [None]
        sampler_server.call(partial(sampler_server.pause, clear_cache=False))
        futures = [
            fleet.threads.submit(fleet.generate, request(prompt.ids, params, prompt.row))
            for prompt in prompts
        ]
        wait_for(lambda: len(sampler_server._living) == 2)
        while not all(len(sample.new) > 2 for sample in sampler_server._living.values()):
            sampler_server.call(sampler_server.resume)
            time.sleep(0.001)
            sampler_server.call(partial(sampler_server.pause, clear_cache=False))
        assert made.push(weights(0.5).items(), 4) == [None]
        for prompt, reply in zip(prompts, [future.result() for future in futures], strict=True):
            check_parts(prompt, reply, params, kv)
        assert Client(server.url).get("/weight_info") == {"weight_version": "4"}
        fleet.close()


def check_parts(prompt: TokenPrompt, reply: Turn, params: SamplingParams, kv: str) -> None:
    """Tokens of version 3 are as without the push; those of version 4, with `recompute`, as if its weights had drawn on."""
    (_, _, cut), second = reply.versions
    assert (
        [version for version, _, _ in reply.versions] == [3, 4]
        and second[1:] == (cut, 24)
        and 2 < cut < 24
    )
    old, new = sampler_of(MODEL), sampler_of(MODEL)
    new.refill(weights(0.5).items())
    (before,) = old.sample([prompt], params)
    (after,) = new.sample(
        [TokenPrompt(0, [*prompt.ids, *reply.ids[:cut]])], replace(params, max_new_tokens=24 - cut)
    )
    assert reply.ids[:cut] == before.ids[:cut] and reply.ids != before.ids
    assert_close(
        torch.tensor(reply.log_probs[:cut]), torch.tensor(before.log_probs[:cut]), SUM_ORDER
    )
    if kv == "recompute":
        assert reply.ids[cut:] == after.ids
        assert_close(torch.tensor(reply.log_probs[cut:]), torch.tensor(after.log_probs), SUM_ORDER)
    else:
        assert abs(reply.log_probs[cut] - after.log_probs[0]) > MODEL_FP32, (
            "keys and values are the old weights'"
        )


def test_a_push_that_is_not_whole_leaves_the_server_alive_and_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as server:
        made, client, given = pusher(server, tmp_path, monkeypatch), Client(server.url), weights()
        name = "model.layers.1.mlp.up_proj.weight"
        monkeypatch.setattr("dovetail.inference_servers.transports.FileTransport.publish", flipped)
        (error,) = made.push(given.items(), 1)
        assert (
            error is not None and "its bytes have the sum" in error.message and error.status == 400
        )
        monkeypatch.undo()
        made = pusher(server, tmp_path, monkeypatch)
        for wrong, says in (
            ({n: w for n, w in given.items() if n != name}, f"{name}: missing"),
            (
                given | {"model.extra": torch.zeros(3)},
                "model.extra: not a tensor of this qwen2 model",
            ),
            (given | {name: torch.zeros(3)}, rf"{name}: shape [3], expected"),
        ):
            (error,) = made.push(wrong.items(), 1)
            assert error is not None and says in error.message
            assert client.get("/is_paused") == {"is_paused": True} and client.get("/health") == {}
            with pytest.raises(ServerError, match="HTTP 400: the weights are not whole"):
                client.post("/resume")
        assert made.push(given.items(), 2) == [None] and client.get("/is_paused") == {
            "is_paused": False
        }
        fleet = fleet_of(server)
        assert fleet.threads.submit(fleet.generate, request([1, 2], GREEDY)).result().versions == (
            (2, 0, 1),
        )
        fleet.close()
        with pytest.raises(ServerError, match="call /pause"):
            client.post("/start_weight_update")
        with pytest.raises(ServerError, match="no update is under way"):
            client.post("/update_weights", {"update_info": {"manifest": []}})


def flipped(transport: Any, bucket: Any) -> None:
    bucket.data[5] ^= 4
    transport._own.mkdir(parents=True, exist_ok=True)
    transport._path(bucket).write_bytes(bytes(bucket.data.tolist()))


def test_a_push_whose_files_cannot_be_written_is_an_error_of_all_ranks() -> None:
    with serving() as server:
        made = remote(Path("/proc/none"), "file", server)
        with pytest.raises(MachineError, match=r"rollout.push.directory: .*/proc/none"):
            made.refill(weights().items())
        made.close()


def test_a_client_that_resets_its_connection_is_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        connections = server._uvicorn.server_state.connections
        peer = socket.create_connection(("127.0.0.1", server.port))
        wait_for(lambda: len(connections) == 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        wait_for(lambda: not connections)
    assert capfd.readouterr().err == ""


def test_a_pause_keeps_requests_and_clients_that_leave_free_their_pages() -> None:
    with serving(page_size=4) as server:
        client, fleet, sampler_server = Client(server.url), fleet_of(server), server.sampler_server
        client.post("/pause?mode=keep&clear_cache=false")
        future = fleet.threads.submit(
            fleet.generate, request([3, 4], replace(GREEDY, max_new_tokens=7))
        )
        wait_for(lambda: len(sampler_server._living) == 1)
        assert not future.done() and sampler_server.pool.num_free == 1024
        client.post("/resume")
        assert len(future.result().ids) == 7
        body = generate_body(
            fleet.replicas[0].server, request([1], replace(GREEDY, max_new_tokens=4000)), []
        )
        events = client.stream("/inference/v1/generate", body, lambda: time.monotonic() + 20)
        next(events)
        (leaves,) = sampler_server._living.values()
        stays = fleet.threads.submit(
            fleet.generate, request([3, 4], replace(GREEDY, max_new_tokens=600))
        )
        wait_for(lambda: len(sampler_server._living) == 2)
        events.close()  # type: ignore[attr-defined]  # it is a generator
        assert len(stays.result().ids) == 600 and stays.result().ids[:7] == future.result().ids
        wait_for(lambda: sampler_server.pool.num_free == 1024 and not sampler_server._living)
        assert len(leaves.new) < 4000
        fleet.close()


def test_a_batch_that_does_not_get_whole_begins_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dovetail.serving.sampler_server.HOLD_SECONDS", 0.1)
    with serving() as server:
        fleet = fleet_of(server)
        lone = replace(request([1], GREEDY), batch=("b", 2, 0))
        assert len(fleet.threads.submit(fleet.generate, lone).result().ids) == 1
        pair = [replace(request([n], GREEDY), batch=("c", 2, n)) for n in (0, 1)]
        assert all(
            len(future.result().ids) == 1
            for future in [fleet.threads.submit(fleet.generate, one) for one in pair]
        )
        assert len(fleet.threads.submit(fleet.generate, pair[0]).result().ids) == 1, (
            "a request that is sent again begins at once"
        )
        fleet.close()


def test_its_share_of_a_gpus_memory_arrives_and_is_enough(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[float, bool]] = []

    def entries(_: NativeSampler, share: float = 0.5, *, of_all: bool = False) -> int:
        asked.append((share, of_all))
        return 127  # one page and a part of another

    def make(*_: object, utilization: float, **__: object) -> None:
        SamplerServer(sampler_of(MODEL, page_size=64), utilization=utilization)

    monkeypatch.setattr(NativeSampler, "max_entries", entries)
    monkeypatch.setattr(serving_parts, "make_server", make)
    monkeypatch.setattr(serve, "read_model", lambda _: None)
    assert (
        run_command(
            ["serve", "model", "--port", "0", "--device", "cpu", "--gpu-memory-utilization", "0.35"]
        )
        == 2
    )
    assert asked == [(0.35, True)]
    said = "has 1 pages of 64 tokens, expected 2 or more; raise --gpu-memory-utilization"
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_cache_gets_what_the_process_and_the_gpu_leave() -> None:
    """Of 100 bytes: 10 in tensors, 20 more kept by the allocator, and `free` of the rest."""
    of = partial(cache_bytes, total=100, held=10, reserved=30)
    assert of(0.5, free=60, of_all=False) == 0.5 * 80
    assert of(0.8, free=70, of_all=True) == 0.8 * 100 - 10
    assert of(0.8, free=30, of_all=True) == 0.9 * 50, "others have 40"


def test_what_the_server_refuses() -> None:
    with serving(key="sk-quite-secret", max_tokens=256) as server:
        client = Client(server.url, key="sk-quite-secret")

        def refused(
            status: int, path: str, body: Mapping[str, Any] | None = None, mine: Client = client
        ) -> str:
            with pytest.raises(ServerError) as error:
                mine.post(path, body)
            assert error.value.status == status, error.value
            return error.value.message

        def generate(ids: Any = (1,), **sampling: Any) -> str:
            return refused(
                400, "/inference/v1/generate", {"token_ids": ids, "sampling_params": sampling}
            )

        assert refused(401, "/resume", mine=Client(server.url)).startswith("Unauthorized")
        assert Client(server.url).get("/health") == {}
        assert "this server has POST /inference/v1/generate, " in refused(404, "/v1/embeddings")
        assert "repetition_penalty=1.1: this server has none" in generate(repetition_penalty=1.1)
        assert "stop=['END']: this server has none" in generate(stop=["END"])
        assert "bad_words=['x']: this server has none" in generate(bad_words=["x"])
        assert "logprobs=5" in generate(logprobs=5)
        assert "logit_bias {'3': 1.0}" in generate(logit_bias={"3": 1.0})
        assert "0 to 130" in generate([VOCAB]) and "at least 1 item" in generate([])
        assert "200 new ones are more than the 192 of this server" in generate(max_tokens=200)
        assert "temperature=-1" in generate(temperature=-1)
        assert "token_ids: Field required" in refused(400, "/inference/v1/generate", {})
        assert "mode=abort: this server has mode=keep" in refused(400, "/pause")
        assert Vllm().probe(client, VOCAB).transfer == "dovetail_nccl"
        for wire in (Sglang(), Vllm()):
            with pytest.raises(ConfigError, match=r"SGLang|fewer than"):
                wire.probe(client, VOCAB + 1)
        with (
            FakeEngine() as other,
            pytest.raises(ConfigError, match="not started by `dovetail serve`"),
        ):
            Native().probe(Client(other.url), None)
