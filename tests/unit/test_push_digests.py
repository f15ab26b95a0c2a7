"""Pushes that servers' own checksums prove, and SGLang's messages (stand-ins: no SGLang was ever run)."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dovetail.errors import ConfigError
from dovetail.inference_servers.http import Client
from dovetail.inference_servers.push import Pusher
from dovetail.inference_servers.vllm_digests import EMPTY, ExpectedDigests
from dovetail.recipe.rollout import PushSection
from tests.helpers.fake_engine import FakeEngine

WIDTH, HEADS, KV, HEAD, FFN, VOCAB = 8, 4, 2, 4, 12, 70
LAYER = "model.layers.0."
WEIGHTS = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(len(name))).to(torch.bfloat16)
    for name, shape in {
        "model.embed_tokens.weight": (VOCAB, WIDTH),
        LAYER + "self_attn.q_proj.weight": (HEADS * HEAD, WIDTH),
        LAYER + "self_attn.k_proj.weight": (KV * HEAD, WIDTH),
        LAYER + "self_attn.v_proj.weight": (KV * HEAD, WIDTH),
        LAYER + "self_attn.q_proj.bias": (HEADS * HEAD,),
        LAYER + "self_attn.k_proj.bias": (KV * HEAD,),
        LAYER + "self_attn.v_proj.bias": (KV * HEAD,),
        LAYER + "self_attn.o_proj.weight": (WIDTH, HEADS * HEAD),
        LAYER + "mlp.gate_proj.weight": (FFN, WIDTH),
        LAYER + "mlp.up_proj.weight": (FFN, WIDTH),
        LAYER + "mlp.down_proj.weight": (WIDTH, FFN),
        LAYER + "input_layernorm.weight": (WIDTH,),
        "model.norm.weight": (WIDTH,),
        LAYER + "mlp.experts.0.up_proj.weight": (FFN, WIDTH),
    }.items()
}
W = {name.removeprefix(LAYER): tensor for name, tensor in WEIGHTS.items()}


def held(tp: int) -> dict[str, str]:
    """What vLLM holds on each rank, row by row."""
    heads, kv, ffn, rows = HEADS // tp, max(1, KV // tp), FFN // tp, 128 // tp
    vocab = torch.zeros(128, WIDTH, dtype=torch.bfloat16)
    vocab[:VOCAB] = W["model.embed_tokens.weight"]
    found = {}
    for rank in range(tp):
        mine = slice(rank * heads * HEAD, (rank + 1) * heads * HEAD)
        first = rank * KV // tp
        keys = slice(first * HEAD, (first + kv) * HEAD)
        cut = slice(rank * ffn, (rank + 1) * ffn)
        parts = {
            "model.embed_tokens.weight": [vocab[rank * rows : (rank + 1) * rows]],
            "model.norm.weight": [W["model.norm.weight"]],
            LAYER + "input_layernorm.weight": [W["input_layernorm.weight"]],
            LAYER + "self_attn.o_proj.weight": [W["self_attn.o_proj.weight"][:, mine]],
            LAYER + "mlp.gate_up_proj.weight": [
                W["mlp.gate_proj.weight"][cut],
                W["mlp.up_proj.weight"][cut],
            ],
            LAYER + "mlp.down_proj.weight": [W["mlp.down_proj.weight"][:, cut]],
        }
        for kind in ("weight", "bias"):
            q, k, v = (W[f"self_attn.{x}_proj.{kind}"] for x in "qkv")
            parts[LAYER + f"self_attn.qkv_proj.{kind}"] = [q[mine], k[keys], v[keys]]
        for name, pieces in parts.items():
            data = b"".join(
                piece.contiguous().view(torch.uint8).numpy().tobytes() for piece in pieces
            )
            found[f"dp0:pp0:pcp0:tp{rank}:{name}"] = hashlib.sha256(data).hexdigest()
    return found


def expected(kv_heads: int | None = KV) -> ExpectedDigests:
    made = ExpectedDigests({1, 2, 4}, kv_heads)
    for name, tensor in WEIGHTS.items():
        made.add(name, tensor)
    return made


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_digests_are_those_of_fused_and_cut_parameters(tp: int) -> None:
    answer = held(tp)
    assert expected().problems(tp, answer) == ([], set())
    for name in answer:
        assert expected().problems(tp, {**answer, name: "0" * 64}) == ([name], set())
    assert expected().problems(
        tp, {**answer, "dp0:pp0:pcp0:tp0:model.layers.0.mlp.experts.w13_weight": "1"}
    )[1] == {"dp0:pp0:pcp0:tp0:model.layers.0.mlp.experts.w13_weight"}
    emptied = next(name for name in answer if "down_proj" in name)
    assert expected().problems(tp, {**answer, emptied: EMPTY}) == ([], {emptied})


def test_where_heads_are_unknown_fused_ones_are_left_out() -> None:
    wrong, unknown = expected(None).problems(2, held(2))
    assert not wrong and {name.rpartition(":")[2] for name in unknown} == {
        LAYER + "self_attn.qkv_proj.weight",
        LAYER + "self_attn.qkv_proj.bias",
    }


class Answer:
    """A server's checksums, for `_compare`."""

    tp, alignment = 1, 1

    def __init__(self, digests: Mapping[str, str]) -> None:
        self.client, self.given = Client("http://127.0.0.1:9"), digests

    def digests(self) -> Mapping[str, str]:
        return self.given


def test_servers_that_differ_are_not_used() -> None:
    def compared(*answers: Mapping[str, str], version: int = 1) -> list[int]:
        pusher._targets, pusher._errors = [Answer(answer) for answer in answers], {}  # type: ignore[misc]
        pusher._compare(expected(), version)
        return sorted(pusher._errors)

    pusher = Pusher([], PushSection(proof="checker"), kind="vllm", device="cuda")
    right = held(1)
    wrong = {**right, "dp0:pp0:pcp0:tp0:model.norm.weight": "0" * 64}
    other, third = (
        {**right, "dp0:pp0:pcp0:tp0:experts": "a"},
        {**right, "dp0:pp0:pcp0:tp0:experts": "b"},
    )
    assert compared(right, right) == []
    assert compared(right, wrong) == [1]
    assert compared(other, third) == [0, 1], "nobody knows which is right"
    assert compared(other, other) == [] and pusher.proved == (len(other), 1)
    assert compared(third, third, version=2) == [], "other weights"
    assert compared(other, other, version=2) == [0, 1], "the same weights as in the push before"


@pytest.mark.parametrize(
    ("options", "kind", "device", "says"),
    [
        ({"transport": "nccl"}, "sglang", "cpu", "SGLang takes weights by file alone"),
        ({"proof": "checker"}, "vllm", "cpu", "by nccl on GPUs alone"),
        ({"proof": "checker", "transport": "ipc"}, "vllm", "cuda", "by nccl on GPUs alone"),
    ],
)
def test_what_cannot_be_is_refused(options: Any, kind: Any, device: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Pusher([], PushSection(**options), kind=kind, device=device)


# Fields of SGLang's message classes for pushes, from srt/managers/io_struct.py.
FIELDS: Mapping[str, set[str]] = {
    "/pause_generation": {"mode"},
    "/continue_generation": {"torch_empty_cache"},
    "/update_weights_from_disk": {
        "model_path", "load_format", "abort_all_requests", "weight_version", "is_async", "torch_empty_cache", "keep_pause",
        "recapture_cuda_graph", "token_step", "flush_cache", "manifest",
    },
    "/weights_checker": {"action", "allow_quant_error"},
}  # fmt: skip


class Sglang(FakeEngine):
    """Reads what it is told to; the rest is the fake engine's."""

    def __init__(self) -> None:
        super().__init__(kind="sglang")
        self.weights: dict[str, torch.Tensor] = {}
        self.refuses = False

    def reply(self, path: str, body: Any) -> Any:
        if path not in FIELDS:
            return super().reply(path, body)
        assert set(body) <= FIELDS[path], body
        self.requests.append(body)
        if path == "/pause_generation":
            assert body["mode"] in ("abort", "retract", "in_place")
            self.paused = True
        elif path == "/continue_generation":
            self.paused = False
        elif path == "/update_weights_from_disk":
            assert self.paused
            if self.refuses:
                return {"success": False, "message": "planted", "num_paused_requests": 0}
            for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
                self.weights.update(load_file(file))
            self.version = body["weight_version"]
        return {"success": True, "message": "", "num_paused_requests": 0}


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_sglang_by_files(kv: Any, tmp_path: Path) -> None:
    section = PushSection(transport="file", directory=str(tmp_path / "push"), kv=kv, timeout=10.0)
    with Sglang() as good, Sglang() as bad:
        pusher = Pusher([Client(good.url), Client(bad.url)], section, kind="sglang")
        assert pusher.push(iter(WEIGHTS.items()), 7) == [None, None]
        bad.refuses = True
        other, error = pusher.push(iter(WEIGHTS.items()), 8)
    assert good.weights.keys() == WEIGHTS.keys()
    assert all(torch.equal(good.weights[name], tensor) for name, tensor in WEIGHTS.items())
    assert other is None and good.version == "8" and not good.paused
    assert error is not None and "planted" in error.message and bad.paused
    assert good.requests[0] == {"mode": "retract" if kv == "recompute" else "in_place"}
    assert not list((tmp_path / "push").glob("*/*"))
