"""The sampler of engines out of process, over two ranks: the first one talks, all get its samples and its errors."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.arch.spec import MoeSpec
from dovetail.errors import DataError, MachineError
from dovetail.factory.engine import make_mesh
from dovetail.inference_servers.fleet import Fleet, Replica
from dovetail.inference_servers.http import Client, ServerError
from dovetail.inference_servers.push import Pusher
from dovetail.inference_servers.remote_sampler import RemoteSampler
from dovetail.inference_servers.vllm import Vllm
from dovetail.parallel.layout import Layout
from dovetail.sampler.base import SamplingParams, TokenPrompt
from tests.helpers.fake_engine import VOCABULARY, FakeEngine, hashed_experts
from tests.helpers.harness import run


class ScriptedPusher(Pusher):
    """Takes the first tensor, then does as told: an error's text for each replica that does not take them."""

    def __init__(self, fakes: list[FakeEngine], script: list[list[str | None]]) -> None:
        self.fakes, self.script = fakes, script

    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> list[ServerError | None]:
        next(iter(weights))
        errors: list[ServerError | None] = []
        for fake, text in zip(self.fakes, self.script.pop(0), strict=True):
            errors.append(
                None if text is None else ServerError(fake.url, "/update_weights", 500, text)
            )
            fake.version = str(version) if text is None else fake.version
        return errors

    def close(self) -> None:
        pass


def body() -> dict[str, Any]:
    fakes = [FakeEngine(experts=hashed_experts), FakeEngine(experts=hashed_experts)]
    losses, seen, moe = (
        list[str](),
        dict[str, Any](),
        MoeSpec(layers=(False, True, True), num_experts=8, top_k=2, ffn_width=16),
    )
    mesh = make_mesh(Layout(dp=2), torch.device("cpu"))

    def weights() -> Iterator[tuple[str, Tensor]]:
        for i in range(3):
            seen["tensors"] = i + 1
            yield f"w{i}", torch.zeros(2)

    with ExitStack() as stack:
        fleet = pusher = None
        if mesh["world"].rank == 0:
            for fake in fakes:
                stack.enter_context(fake)
            clients = [Client(fake.url, timeout=5.0) for fake in fakes]
            replicas = [Replica(client, Vllm().probe(client, VOCABULARY)) for client in clients]
            fleet = Fleet(
                replicas,
                Vllm(),
                timeout=5.0,
                on_server_lost=lambda error: losses.append(str(error)),
            )
            pusher = ScriptedPusher(
                fakes, [[None, None], [None, "a wrong sum"], ["gone", "gone, too"], [None, None]]
            )
        sampler = RemoteSampler(mesh, torch.float32, VOCABULARY, fleet, pusher, moe)
        prompts, params = (
            [TokenPrompt(4, [1, 2]), TokenPrompt(9, [3])],
            SamplingParams(samples=3, max_new_tokens=5, stop_ids=(7,)),
        )
        sampler.refill(weights())
        seen["first"] = [vars(completion) for completion in sampler.sample(prompts, params)]
        seen["traced"] = [
            (
                each.ids,
                each.routing.layers,
                each.routing.indices.tolist(),
                each.routing.valid.tolist(),
            )
            for each in sampler.sample(prompts, replace(params, trace=True))
            if each.routing is not None
        ]
        sampler.refill(weights())
        asked = len(fakes[1].requests)
        seen["second"] = [completion.versions for completion in sampler.sample(prompts, params)]
        seen["unused"] = len(fakes[1].requests) == asked
        seen["errors"] = []

        def foreign() -> None:
            sampler.refill(weights())
            fakes[0].version = fakes[1].version = "77"
            sampler.sample(prompts, params)

        def without_routes() -> None:
            for fake in fakes:
                fake.version, fake.experts = "4", None
            sampler.sample(prompts, replace(params, trace=True))

        for wrong in (
            lambda: sampler.refill(weights()),
            foreign,
            lambda: sampler.sample([TokenPrompt(0, [1], {})], params),
            without_routes,
        ):
            with pytest.raises((MachineError, DataError)) as error:
                wrong()
            seen["errors"].append(str(error.value))
        sampler.close()
    return {**seen, "losses": losses}


def test_all_ranks_get_the_first_one_s_samples_and_errors() -> None:
    first, second = run(2, body)
    assert (
        first["first"] == second["first"]
        and first["second"] == second["second"]
        and first["errors"] == second["errors"]
    )
    samples = first["first"]
    assert [each["id"][1:] for each in samples] == [(row, i) for row in (4, 9) for i in range(3)]
    for each in samples:
        ids = each["ids"]
        assert len(ids) == len(each["log_probs"]) and each["versions"] == ((1, 0, len(ids)),)
        assert each["finish"] == ("stop" if ids[-1] == 7 else "length") and len(ids) == (
            5 if ids[-1] != 7 else len(ids)
        )
    assert len({each["ids"] for each in samples}) > 3
    assert all(version == 2 for spans in first["second"] for version, _, _ in spans)
    assert first["tensors"] == second["tensors"] == 3, "a stream was not read to its end"
    assert first["unused"] and first["losses"][0].endswith("a wrong sum")
    lost, foreign, media, bare = first["errors"]
    assert "gone; " in lost and "gone, too" in lost
    assert "weights of version 77, but this run pushed 4" in foreign and "row 0 has images" in media
    assert (
        bare
        == "an engine returned no routes of experts; start it with --enable-return-routed-experts"
    )
    assert first["traced"] == second["traced"] and len(first["traced"]) == 6
    for slot, (ids, layers, experts, valid) in enumerate(first["traced"]):
        whole = [*([1, 2] if slot < 3 else [3]), *ids]
        assert layers == (1, 2) and valid == [True] * (len(whole) - 1) + [False]
        assert experts[:-1] == hashed_experts(whole[:-1])[:, 1:].tolist()
