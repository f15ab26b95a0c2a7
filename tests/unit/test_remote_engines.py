"""Requests to vLLM and SGLang, checked against the servers' own descriptions, and what becomes of a lost replica."""

import re
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from dovetail.errors import ConfigError
from dovetail.factory.inference_servers import connect
from dovetail.inference_servers.http import Client, ServerError
from dovetail.inference_servers.protocol import check_log_probs
from dovetail.inference_servers.remote_sampler import RemoteSampler
from dovetail.parallel.mesh import Mesh
from dovetail.recipe.schema import make_recipe
from dovetail.sampler.base import SamplingParams, TokenPrompt
from dovetail.sampler.turn import Turn
from tests.helpers.fake_engine import VOCABULARY, FakeEngine, hashed_logits, log_softmax
from tests.helpers.fleets import KINDS, PROMPT, SERVER_CLIENTS, fleet, probe, request
from tests.helpers.tolerances import OP_FP64


def expected_log_probs(reply: Turn, temperature: float = 1.0) -> list[float]:
    scores = []
    for i, token in enumerate(reply.ids):
        z = hashed_logits([*PROMPT, *reply.ids[:i]])
        scores.append(log_softmax([each / temperature for each in z])[token])
    return scores


@KINDS
def test_a_sample_has_the_ids_and_log_probs_of_the_server_and_stops_where_asked(kind: Any) -> None:
    params = SamplingParams(max_new_tokens=80, temperature=0.7, seed=5, step=2, banned_ids=(2, 9))
    with fleet(FakeEngine(kind, stream_interval=7)) as (engines, _):
        whole, other, again = (
            engines.threads.submit(engines.generate, request(params, sample=i)).result()
            for i in (0, 1, 0)
        )
        stop = whole.ids[20]
        ended = engines.threads.submit(
            engines.generate, request(replace(params, stop_ids=(stop,)))
        ).result()
    assert len(whole.ids) == 80 and whole.finish == "length" and whole.versions == ((7, 0, 80),)
    assert whole.ids == again.ids != other.ids and not {2, 9} & {*whole.ids, *other.ids}
    if (
        kind == "sglang"
    ):  # vLLM's are of the tokens that were not banned, which the policy hardly draws
        assert whole.log_probs == pytest.approx(expected_log_probs(whole, 0.7), abs=OP_FP64)
    first = whole.ids.index(stop)
    assert ended.ids == whole.ids[: first + 1] and ended.finish == "stop"


@KINDS
def test_every_sampling_field_is_sent_and_known_to_the_server(kind: Any) -> None:
    """The stand-in refuses fields that the server's description does not have."""
    params = SamplingParams(
        max_new_tokens=4, temperature=0.0, top_p=0.9, top_k=3, min_p=0.1, stop_ids=(1,), stop=("x",)
    )
    fake = FakeEngine(kind)
    with fleet(fake) as (engines, _):
        engines.threads.submit(engines.generate, request(params)).result()
    sent = fake.requests[0]["sampling_params"]
    names = {
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "stop": ["x"],
        "stop_token_ids": [1],
        "n": 1,
    }
    names |= {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": True,
    }
    assert names.items() <= sent.items()
    assert fake.requests[0].get("cache_salt", fake.requests[0].get("extra_key")) == "run-7"
    if kind == "vllm":
        assert sent["detokenize"] is True and sent["logprobs"] == 0 and sent["max_tokens"] == 4


@KINDS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_dead_replica_s_samples_go_on_elsewhere_with_their_tokens(
    kind: Any, temperature: float
) -> None:
    params = SamplingParams(max_new_tokens=60, temperature=temperature)
    dying, other = (
        FakeEngine(kind, stream_interval=4, dies_after=22),
        FakeEngine(kind, stream_interval=4),
    )
    with fleet(dying, other) as (engines, losses):
        futures = [
            engines.threads.submit(engines.generate, request(params, row=i)) for i in range(6)
        ]
        replies = [future.result(20) for future in futures]
    assert len(losses) == 1 and losses[0].url == dying.url
    for reply in replies:
        assert len(reply.ids) == 60 and reply.versions == ((7, 0, 60),) and reply.finish == "length"
        assert reply.log_probs == pytest.approx(expected_log_probs(reply), abs=OP_FP64)
    asked = [each.get("token_ids") or each["input_ids"] for each in other.requests]
    continued = [ids for ids in asked if len(ids) > len(PROMPT)]
    assert continued and all(
        tuple(ids[len(PROMPT) :]) in [reply.ids[: len(ids) - len(PROMPT)] for reply in replies]
        for ids in continued
    )
    if temperature == 0:
        assert len({tuple(reply.ids) for reply in replies}) == 1


def test_a_stop_string_may_span_replicas_so_its_sample_begins_anew() -> None:
    params = SamplingParams(max_new_tokens=30, temperature=0.0, stop=("end",))
    dying, other = FakeEngine(stream_interval=4, dies_after=10), FakeEngine()
    with fleet(dying, other) as (engines, _):
        replies = [
            engines.threads.submit(engines.generate, request(params, row=i)).result(20)
            for i in range(2)
        ]
    assert [len(reply.ids) for reply in replies] == [30, 30]
    assert all(each["token_ids"] == PROMPT for each in other.requests)


def test_silence_loses_a_replica_and_nothing_is_lost_with_it() -> None:
    params = SamplingParams(max_new_tokens=20, temperature=0.0)
    with fleet(FakeEngine(stream_interval=2, stalls_after=6), FakeEngine(), timeout=0.4) as (
        engines,
        losses,
    ):
        replies = [
            engines.threads.submit(engines.generate, request(params, row=i)).result(20)
            for i in range(2)
        ]
        assert not engines.replicas[0].serves and engines.replicas[1].serves
    assert (
        "no whole answer" in str(losses[0])
        and replies[0].ids == replies[1].ids
        and len(replies[0].ids) == 20
    )


def test_a_push_is_no_silence_and_a_replica_that_does_not_take_it_is_left_at_once() -> None:
    """Both stand still for longer than the silence; then one has new weights, and the other one's sample goes on there."""
    over = threading.Event(), threading.Event()

    def standing(which: int, ids: Sequence[int]) -> list[float]:
        if len(ids) == len(PROMPT) + 3:
            over[which].wait(20)
        return hashed_logits(ids)

    good, bad = (
        FakeEngine(stream_interval=1, logits=partial(standing, which)) for which in range(2)
    )
    with fleet(good, bad, timeout=0.3) as (engines, losses):
        futures = [
            engines.threads.submit(
                engines.generate, request(SamplingParams(max_new_tokens=9), row=i)
            )
            for i in range(2)
        ]
        with engines.pushing():
            threading.Event().wait(0.8)
            good.version = "8"
            engines.pushed(engines.replicas[0], 8, None)
            engines.pushed(
                engines.replicas[1],
                8,
                ServerError(bad.url, "/resume", None, "it did not take them"),
            )
        over[0].set()
        replies = [future.result(10) for future in futures]
        over[1].set()
    assert [loss.message for loss in losses] == ["it did not take them"] and not engines.replicas[
        1
    ].serves
    assert [reply.versions for reply in replies] == [((7, 0, 4), (8, 4, 9)), ((7, 0, 3), (8, 3, 9))]


def test_requests_under_way_end_when_the_run_does() -> None:
    with fleet(FakeEngine(stream_interval=2, stalls_after=4), timeout=1e6) as (engines, _):
        future = engines.threads.submit(engines.generate, request(SamplingParams(max_new_tokens=9)))
        time.sleep(0.1)
        engines.close()
        with pytest.raises(ServerError):
            future.result(60)


def test_a_busy_replica_is_asked_again_and_a_wrong_request_is_not() -> None:
    fake = FakeEngine()
    with fleet(fake) as (engines, losses):
        fake.failures = 2
        assert (
            len(
                engines.threads.submit(engines.generate, request(SamplingParams(max_new_tokens=5)))
                .result(20)
                .ids
            )
            == 5
        )
        with pytest.raises(ServerError, match="HTTP 400: 500 tokens behind 5"):
            engines.threads.submit(
                engines.generate, request(SamplingParams(max_new_tokens=500))
            ).result(20)
        assert not losses and engines.replicas[0].serves


def test_a_replica_serves_only_after_a_push_that_it_took() -> None:
    fakes = FakeEngine(), FakeEngine()
    with fleet(*fakes) as (engines, losses):
        first = engines.replicas[0]
        engines.pushed(
            first, 8, ServerError(first.client.url, "/update_weights", 500, "sum of lm_head.weight")
        )
        replies = [
            engines.threads.submit(
                engines.generate, request(SamplingParams(max_new_tokens=3), row=i)
            ).result()
            for i in range(4)
        ]
        assert not fakes[0].requests and len(fakes[1].requests) == 4 and len(replies) == 4
        engines.pushed(engines.replicas[1], 8, ServerError("u", "/pause", None, "gone"))
        with pytest.raises(ServerError, match=r"no engine is left.*sum of lm_head.*gone"):
            engines.threads.submit(engines.generate, request(SamplingParams())).result()
        engines.pushed(first, 9, None)
        engines.threads.submit(engines.generate, request(SamplingParams(max_new_tokens=3))).result()
    assert len(losses) == 2 and len(fakes[0].requests) == 1


def test_requests_go_to_the_replica_with_the_fewest_and_a_prompt_s_to_its_own() -> None:
    held = threading.Event()

    def logits(ids: Sequence[int]) -> list[float]:
        held.wait(10)
        return hashed_logits(ids)

    fakes = FakeEngine(), FakeEngine()
    with fleet(*fakes) as (engines, _):
        for fake in fakes:
            fake.logits = logits
        futures = [
            engines.threads.submit(
                engines.generate,
                request(SamplingParams(max_new_tokens=2), row=i // 4, sample=i % 4),
            )
            for i in range(16)
        ]
        while sum(len(fake.requests) for fake in fakes) < 16:
            threading.Event().wait(0.01)
        held.set()
        assert all(len(future.result().ids) == 2 for future in futures)
    assert [len(fake.requests) for fake in fakes] == [8, 8]


MESSAGES = {
    "dev mode": (
        FakeEngine(dev_mode=False),
        "start it with the environment variable VLLM_SERVER_DEV_MODE=1",
    ),
    "scale out": (FakeEngine(scale_out=False), "Scale-out endpoints are disabled"),
    "no transfer": (
        FakeEngine(transfer=None),
        "takes no weights; start it with --weight-transfer-config",
    ),
    "logits": (
        FakeEngine(log_probs="raw_logits"),
        "gives raw_logits; start it with --logprobs-mode processed_logprobs",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_what_a_server_lacks_is_one_sentence(name: str) -> None:
    fake, message = MESSAGES[name]
    with fake, pytest.raises(ConfigError, match=message):
        probe(fake)


def test_a_server_of_another_vocabulary_or_kind_is_refused() -> None:
    with FakeEngine() as fake, FakeEngine("sglang") as other:
        for size, words in ((VOCABULARY - 1, "more than 23"), (VOCABULARY + 1, "fewer than 25")):
            with pytest.raises(ConfigError, match=f"a model with {words} token ids"):
                probe(fake, size)
        with pytest.raises(
            ConfigError, match=r"looks like SGLang, which rollout.backend=sglang is for"
        ):
            SERVER_CLIENTS["vllm"].probe(Client(other.url), None)
        with pytest.raises(
            ConfigError, match=r"looks like vLLM, which rollout.backend=vllm is for"
        ):
            SERVER_CLIENTS["sglang"].probe(Client(fake.url), None)


STARTS = {
    "native": "`dovetail serve MODEL`",
    "vllm": "`vllm serve MODEL`",
    "sglang": "sglang.launch_server",
}


@pytest.mark.parametrize("backend", STARTS)
def test_where_no_server_listens_the_message_says_how_to_start_one(backend: str) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    rollout = {"backend": backend, "engines": [url]}
    given = {"model": {"path": "M"}, "data": {"train": "D"}, "run_dir": "R", "rollout": rollout}
    start = rf"Connection refused; start a server there: .*{re.escape(STARTS[backend])}"
    with pytest.raises(ConfigError, match=f"{start}.* or correct rollout.engines$"):
        connect(make_recipe(given), [url], None, None)


@KINDS
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_log_probs_that_training_does_not_compute_are_refused(kind: Any, mode: str) -> None:
    """vLLM gives them before the temperature or behind cuts; SGLang before the temperature, or between."""
    with FakeEngine(kind, log_probs=mode) as fake:
        server = probe(fake)
    fitting = {
        "raw": [
            SamplingParams(),
            SamplingParams(temperature=0.0),
            SamplingParams(top_p=0.9),
            SamplingParams(repetition_penalty=1.1),
        ],
        "penalized": [SamplingParams(), SamplingParams(top_p=0.9)],
        "processed": [
            SamplingParams(),
            SamplingParams(temperature=0.0, top_p=0.9),
            SamplingParams(temperature=0.5),
        ],
        "tempered": [
            SamplingParams(),
            SamplingParams(top_p=0.9),
            SamplingParams(temperature=0.5),
            SamplingParams(temperature=0.5, top_k=5),
        ],
    }
    kept = {
        ("vllm", "raw_logprobs"): "raw",
        ("vllm", "processed_logprobs"): "processed",
        ("sglang", "raw_logprobs"): "penalized",
    }
    assert server.log_probs == kept.get((kind, mode), "tempered")
    for drawing in {each for several in fitting.values() for each in several}:
        if drawing in fitting[server.log_probs] or drawing.temperature == 0:
            check_log_probs(fake.url, server, SERVER_CLIENTS[kind].starts, [drawing])
        else:
            with pytest.raises(ConfigError, match="training needs those at the temperature"):
                check_log_probs(fake.url, server, SERVER_CLIENTS[kind].starts, [drawing])


def test_the_message_on_log_probs_names_the_start_that_helps() -> None:
    with FakeEngine(log_probs="raw_logprobs") as fake:
        server = probe(fake)
    with pytest.raises(
        ConfigError,
        match=r"with temperature=0.5 training .*; start it with --logprobs-mode processed_logprobs$",
    ):
        check_log_probs(
            fake.url,
            server,
            SERVER_CLIENTS["vllm"].starts,
            [SamplingParams(), SamplingParams(temperature=0.5)],
        )
    with pytest.raises(
        ConfigError,
        match=r"no start of it gives these, so change one of temperature=0.5, top_p=0.9",
    ):
        check_log_probs(
            fake.url,
            server,
            SERVER_CLIENTS["vllm"].starts,
            [SamplingParams(temperature=0.5, top_p=0.9)],
        )


def test_a_paused_server_is_not_asked_for_tokens() -> None:
    """Its last trainer ended within a push; ours comes first."""
    with FakeEngine(paused=True) as fake:
        assert probe(fake).model == "policy" and not fake.requests


def test_the_key_is_sent_and_shown_nowhere() -> None:
    with FakeEngine(key="sk-secret-1") as fake:
        assert probe(fake).model == "policy"
        with pytest.raises(ServerError, match="HTTP 401") as error:
            SERVER_CLIENTS["vllm"].probe(Client(fake.url, key="sk-secret-2"), None)
    assert "secret" not in str(error.value)


class AwakePusher:
    """Stands in for a push: servers must be awake."""

    def __init__(self, *fakes: FakeEngine) -> None:
        self.fakes = fakes

    def push(self, weights: Iterable[object], version: int) -> list[ServerError | None]:
        for fake in self.fakes:
            assert not fake.asleep
            fake.version = str(version)
        return [None for _ in self.fakes]

    def close(self) -> None:
        pass


def test_engines_give_memory_back_between_samplings() -> None:
    one, other = fakes = (
        FakeEngine(asleep=True),
        FakeEngine(asleep=False),
    )  # the first as its last trainer left it
    with fleet(*fakes) as (engines, losses):
        assert one.calls == ["/wake_up"] and all(
            replica.server.sleeps for replica in engines.replicas
        )
        pusher: Any = AwakePusher(*fakes)
        sampler = RemoteSampler(
            Mesh.solo(torch.device("cpu")), torch.float32, VOCABULARY, engines, pusher, sleeps=True
        )
        params = SamplingParams(samples=4, max_new_tokens=3)
        for step in range(2):
            sampler.push([], step + 8)
            for _ in range(2):
                assert (
                    len(sampler.sample([TokenPrompt(0, PROMPT)], params)) == 4
                    and one.asleep
                    and other.asleep
                )
        assert other.calls == ["/sleep", "/wake_up"] * 3 + ["/sleep"] and not losses
        other.asleep = None  # it started anew
        assert len(sampler.sample([TokenPrompt(0, PROMPT)], params)) == 4
        assert [error.url for error in losses] == [other.url] and one.asleep
        sampler.push([], 12)
        assert not one.asleep and all(replica.serves for replica in engines.replicas)
        sampler.sample([TokenPrompt(0, PROMPT)], params)
    assert one.asleep, "the trainer may still hold its memory; the next run's probe wakes it"
