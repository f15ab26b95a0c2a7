"""Pushes to the real vLLM on a CPU, by gloo through our plugin, where DOVETAIL_VLLM_PYTHON names a Python with vLLM 0.32 or 0.33.

It starts with random weights: whatever it says after a push comes from that push.
"""

import contextlib
import importlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.batch.packed import PackedBatch, Sequence as Row
from dovetail.factory.engine import from_pretrained
from dovetail.inference_servers.http import Client, ServerError
from dovetail.inference_servers.push import Pusher
from dovetail.inference_servers.transports import WeightBucket
from dovetail.parallel.process_group import temporary_process_group
from dovetail.recipe.rollout import PushSection
from tests.helpers.tolerances import ENGINE_LOGPROB
from tests.helpers.vllm_stand_in import PLUGIN, install_plugin

PYTHON, MODEL = (
    os.environ.get("DOVETAIL_VLLM_PYTHON"),
    Path.home() / ".cache/dovetail/smollm2-135m-instruct",
)
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        PYTHON is None or not MODEL.is_dir(),
        reason="DOVETAIL_VLLM_PYTHON, or the model of examples.quickstart, is not here",
    ),
]
SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
WORDS = (
    "-m", "vllm.entrypoints.cli.main", "serve", str(MODEL), "--host", "127.0.0.1", "--enable-scale-out", "--max-model-len", "512",
    "--max-num-seqs", "16", "--max-num-batched-tokens", "512", "--enforce-eager", "--load-format", "dummy", "--dtype", "float32",
    "--logprobs-mode", "processed_logprobs", "--served-model-name", "policy",
    "--weight-transfer-config", '{"backend": "dovetail_nccl"}',
)  # fmt: skip
PROMPT = [504, 3575, 282, 4649, 314]  # The capital of France is
Weights = list[tuple[str, torch.Tensor]]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("vllm")
    install_plugin(folder / "site")
    port = 8400 + os.getpid() % 500
    path = f"{folder / 'site'}:{PLUGIN}:{os.environ.get('PYTHONPATH', '')}"
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [str(PYTHON), *WORDS, "--port", str(port)],
            env={**os.environ, **SETTINGS, "PYTHONPATH": path},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    made = Client(f"http://127.0.0.1:{port}", timeout=300.0)
    try:
        while True:
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            with contextlib.suppress(ServerError):
                made.get("/health", timeout=5)
                break
            time.sleep(2)
        yield made
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def policy() -> Iterator[Any]:
    with temporary_process_group(torch.device("cpu"), timedelta(hours=1)):
        yield from_pretrained(MODEL, dtype="float32", device="cpu")


def pusher(client: Client, bucket_mb: int = 32) -> Pusher:
    return Pusher([client], PushSection(timeout=300.0, bucket_mb=bucket_mb), kind="vllm")


def generated(client: Client, tokens: int, **sampling: Any) -> dict[str, Any]:
    given = {
        "max_tokens": tokens,
        "temperature": 0.0,
        "logprobs": 0,
        "ignore_eos": True,
        "detokenize": False,
        **sampling,
    }
    body = {"token_ids": PROMPT, "model": "policy", "sampling_params": given}
    choice: dict[str, Any] = client.post("/inference/v1/generate", body)["choices"][0]
    return choice


def log_probs(choice: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


def changed(weights: Weights) -> Weights:
    return [
        (name, tensor * 1.25 if "layers.7.self_attn.q_proj" in name else tensor)
        for name, tensor in weights
    ]


def test_three_pushes_through_a_running_request(client: Client, policy: Any) -> None:
    weights = list(policy.weights(torch.float32))
    made = pusher(client)
    assert made.push(iter(weights), 1) == [None]
    first = generated(client, 12)
    fields = {"theirs": [0.0] * len(PROMPT) + log_probs(first)}
    row = Row([*PROMPT, *first["token_ids"]], [False] * len(PROMPT) + [True] * 12, fields)
    batch = PackedBatch.pack([row])
    mean = float(
        (policy.score(batch).logprob - batch.fields["theirs"])[batch.mask.bool()].abs().mean()
    )
    assert mean <= ENGINE_LOGPROB, mean
    assert made.push(iter(changed(weights)), 2) == [None]
    assert log_probs(generated(client, 12)) != log_probs(first), (
        "linear layers, which a CPU packs, take pushes, too"
    )

    found: list[dict[str, Any]] = []
    request = threading.Thread(target=lambda: found.append(generated(client, 400, temperature=1.0)))
    request.start()
    for version in (3, 4, 5):
        time.sleep(2.0)
        assert made.push(iter(weights), version) == [None]
    request.join()
    spans = found[0]["weight_versions"]
    assert [span["version"] for span in spans] == ["2", "3", "4", "5"]
    assert [span["start"] for span in spans] == [
        0,
        *(span["end"] for span in spans[:-1]),
    ] and spans[-1]["end"] == 400
    assert log_probs(generated(client, 12)) == log_probs(first)
    made.close()


def test_what_is_not_as_sent_is_refused_by_name(
    client: Client, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, draw = list(policy.weights(torch.float32)), random.Random(3)
    part = [
        (name, tensor) for name, tensor in weights if ".layers.0." in name or ".layers.1." in name
    ]
    made, module = pusher(client, 2), importlib.import_module("dovetail.inference_servers.push")
    fill = module.fill
    assert made.push(iter(weights), 10) == [None]
    right = log_probs(generated(client, 8))

    def tampered(tamper: Callable[[list[WeightBucket]], list[WeightBucket]]) -> str:
        def filled(*given: Any, **options: Any) -> list[WeightBucket]:
            return tamper(
                [replace(bucket, data=bucket.data.clone()) for bucket in fill(*given, **options)]
            )

        with monkeypatch.context() as patch:
            patch.setattr(module, "fill", filled)
            (error,) = made.push(iter(part), 11)
        assert error is not None and ".layers." in error.message, error
        assert client.get("/is_paused")["is_paused"]
        return error.message

    def flipped(buckets: list[WeightBucket]) -> list[WeightBucket]:
        bucket = buckets[draw.randrange(3)]
        entry = draw.choice(bucket.entries)
        size = dict(part)[entry.name].nbytes
        bucket.data[entry.start + draw.randrange(size)] ^= 1 << draw.randrange(8)
        hit.append(entry.name)
        return buckets

    hit: list[str] = []
    for _ in range(100):
        message = tampered(flipped)
        assert f"{hit[-1]}: its bytes have the sum" in message, (hit[-1], message)
    for attempt in range(20):
        for tamper in damages(draw.randrange(3), renumber=attempt % 2 == 1):
            tampered(tamper)
    assert made.push(iter(weights), 12) == [None] and not client.get("/is_paused")["is_paused"]
    assert log_probs(generated(client, 8)) == right
    made.close()


def damages(i: int, *, renumber: bool) -> list[Callable[[list[WeightBucket]], list[WeightBucket]]]:
    """Buckets that swap, repeat and lack; or with numbers as if nothing were wrong."""

    def swapped(b: list[WeightBucket]) -> list[WeightBucket]:
        if renumber:  # their bytes alone
            return [
                *b[:i],
                replace(b[i], data=b[i + 1].data),
                replace(b[i + 1], data=b[i].data),
                *b[i + 2 :],
            ]
        return [*b[:i], b[i + 1], b[i], *b[i + 2 :]]

    def repeated(b: list[WeightBucket]) -> list[WeightBucket]:
        all_ = [*b[: i + 1], *b[i:]]
        return [replace(bucket, number=n) for n, bucket in enumerate(all_)] if renumber else all_

    def missing(b: list[WeightBucket]) -> list[WeightBucket]:
        return [*b[:i], *b[i + 1 :]]

    return [swapped, repeated, missing]


def test_a_trainer_that_is_killed_in_a_push_and_starts_again(client: Client, policy: Any) -> None:
    weights = list(policy.weights(torch.float32))
    made = pusher(client)
    assert made.push(iter(weights), 20) == [None]
    right = log_probs(generated(client, 8))
    made.close()
    for delay in (0.0, 0.7, 2.0):
        trainer = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.pushing", client.url], stdout=subprocess.PIPE
        )
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"pushing\n"
        time.sleep(delay)
        trainer.kill()
        trainer.wait()
        again = pusher(client)
        assert again.push(iter(weights), 21) == [None]
        assert client.get("/weight_info") == {"weight_version": "21"}
        assert log_probs(generated(client, 8)) == right
        again.close()
