"""Experts that engines return: vLLM's and SGLang's encodings, the servers' flags, and what is refused."""

import base64
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dovetail.arch.spec import MoeSpec
from dovetail.errors import MachineError
from dovetail.inference_servers.protocol import ServerRequest
from dovetail.inference_servers.routes import read_experts, read_trace
from dovetail.sampler.base import SamplingParams
from dovetail.sampler.turn import Turn
from tests.helpers.fake_engine import FakeEngine, as_int32, as_npy, hashed_experts
from tests.helpers.fleets import KINDS, PROMPT, fleet, probe, request

RECORDED = json.loads((Path(__file__).parents[1] / "helpers" / "vllm_replies.json").read_text())
MOE = MoeSpec(layers=(False, True, True), num_experts=8, top_k=2, ffn_width=16)


@pytest.mark.parametrize("name", ["routes", "routes of many experts"])
def test_experts_of_a_reply_that_vllm_s_own_classes_wrote(name: str) -> None:
    reply = RECORDED[name]
    choice = json.loads(reply["event"])["choices"][0]
    layers, experts = tuple(reply["sparse"]), np.array(reply["experts"])
    moe = MoeSpec(
        layers=layers, num_experts=reply["num_experts"], top_k=experts.shape[2], ffn_width=16
    )
    drawn = read_experts(choice["routed_experts"], len(experts) + 1, moe)
    assert drawn.tolist() == experts[:, list(moe.numbers)].tolist()
    assert as_npy(experts.astype(reply["dtype"])) == choice["routed_experts"], (
        "the stand-in writes otherwise"
    )


def traced(params: SamplingParams, row: int = 0) -> ServerRequest:
    read_routes = partial(read_trace, moe=MOE) if params.trace else None
    return replace(request(params, row), read_routes=read_routes)


def experts_of(turn: Turn, new_tokens: int) -> Tensor:
    """Without the last token, which was not routed."""
    assert turn.routing is not None and len(turn.routing.indices) == len(PROMPT) + new_tokens
    return turn.routing.indices[:-1]


@KINDS
def test_routes_come_with_a_sample_where_they_are_asked_for(kind: Any) -> None:
    fake = FakeEngine(kind, experts=hashed_experts, stream_interval=4)
    with fleet(fake) as (engines, _):
        found, plain = (
            engines.threads.submit(
                engines.generate, traced(SamplingParams(max_new_tokens=9, trace=trace))
            ).result()
            for trace in (True, False)
        )
        assert engines.replicas[0].server.routes and plain.routing is None
    experts = experts_of(found, 9)
    assert experts.tolist() == hashed_experts([*PROMPT, *found.ids][:-1])[:, 1:].tolist()
    with FakeEngine(kind) as fake:
        assert not probe(fake).routes


@KINDS
def test_a_traced_sample_of_a_lost_replica_begins_anew(kind: Any) -> None:
    """The routes of its first part are lost with the replica: they come with the last token."""
    params = SamplingParams(max_new_tokens=30, trace=True)
    dying = FakeEngine(kind, experts=hashed_experts, stream_interval=4, dies_after=10)
    other = FakeEngine(kind, experts=hashed_experts)
    with fleet(dying, other) as (engines, losses):
        replies = [
            engines.threads.submit(engines.generate, traced(params, row=i)).result(20)
            for i in range(2)
        ]
    assert len(losses) == 1 and all(
        (each.get("token_ids") or each["input_ids"]) == PROMPT for each in other.requests
    )
    for reply in replies:
        experts = experts_of(reply, 30)
        assert experts.tolist() == hashed_experts([*PROMPT, *reply.ids][:-1])[:, 1:].tolist()


def test_routes_of_another_model_or_of_no_choice_are_refused() -> None:
    experts = hashed_experts([3, 1, 4, 1])
    assert read_experts(as_int32(experts), 5, MOE).dtype == torch.uint8
    wrong = {
        "no routes of experts; start it with --enable-return-routed-experts": "",
        "cannot be read": as_npy(experts)[:-8],
        r"shape \(4, 3, 2\) and type uint8, expected \(5, 3, 2\)": as_npy(experts)[:],
        r"shape \(24,\) and type int32, expected \(5, 3, 2\)": as_int32(experts),
        "type float64, expected": as_npy(experts.astype(float)),
    }
    for message, text in wrong.items():
        with pytest.raises(MachineError, match=message):
            read_experts(text, 6, MOE)
    with pytest.raises(MachineError, match=r"expected \(4, 2, 3\)"):
        read_experts(
            as_npy(experts), 5, MoeSpec(layers=(True, True), num_experts=8, top_k=3, ffn_width=16)
        )  # as many numbers, other ones
    for place, value in ((1, 8), (1, -1), (2, experts[0, 2, 0])):
        bad = experts.astype(np.int32)
        bad[0, place, 1] = value
        with pytest.raises(MachineError, match="no choice of 2 out of 8 experts"):
            read_experts(as_int32(bad), 5, MOE)
    with pytest.raises(MachineError, match="cannot be read"):
        read_experts(base64.b64encode(b"xyz").decode(), 5, MOE)
