"""The real vLLM on a CPU, where DOVETAIL_VLLM_PYTHON names the Python of an environment with it (docs/rollouts.md).

Its weights are those that it loads: pushes have tests of their own.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.batch.packed import PackedBatch, Sequence as Row
from dovetail.factory.engine import from_pretrained
from dovetail.inference_servers.fleet import Fleet, Replica
from dovetail.inference_servers.http import Client, ServerError
from dovetail.inference_servers.remote_sampler import RemoteSampler
from dovetail.inference_servers.vllm import Vllm
from dovetail.launch.inference_servers import URLS, ServerStart, running
from dovetail.parallel.mesh import Mesh
from dovetail.sampler.base import SamplingParams, TokenPrompt
from dovetail.sampler.turn import Turn
from dovetail.system import children_of
from tests.helpers.tolerances import ENGINE_LOGPROB
from tests.helpers.vllm_runs import (
    CPU,
    MODEL,
    PYTHON,
    VersionPusher,
    free_port,
    process_group as process_group,
)

MISSING = PYTHON is None or not MODEL.is_dir()
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        MISSING, reason="DOVETAIL_VLLM_PYTHON, or the model of examples.quickstart, is not here"
    ),
]
FLAGS = (
    "--enable-scale-out", "--max-model-len", "512", "--max-num-seqs", "16", "--max-num-batched-tokens", "512", "--enforce-eager",
    "--logprobs-mode", "processed_logprobs", "--weight-transfer-config", '{"backend": "nccl"}', "--served-model-name", "policy",
    "--dtype", "float32",
)  # fmt: skip
PROMPTS = ("The capital of France is", "2 + 2 =", "Once upon a time", "def add(a, b):\n    return")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    command = [
        str(PYTHON),
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(MODEL),
        "--port",
        "PORT",
        *FLAGS,
    ]
    logs = tmp_path_factory.mktemp("logs")
    start = ServerStart(
        commands=[command] * 2,
        gpus_each=0,
        ranks_on_gpus=False,
        logs=logs,
        timeout=900.0,
        environment=CPU,
    )
    with running(start, 1, free_port, lambda: False) as engines:
        variables = engines.start_ended()
        yield variables[URLS].split(",")


def sampler(urls: Sequence[str], losses: list[ServerError]) -> RemoteSampler:
    clients = [Client(url) for url in urls]
    replicas = [Replica(client, Vllm().probe(client, 49152)) for client in clients]
    fleet = Fleet(replicas, Vllm(), timeout=300.0, on_server_lost=losses.append)
    return RemoteSampler(
        Mesh.solo(torch.device("cpu")), torch.bfloat16, 49152, fleet, VersionPusher(clients)
    )


def prompts() -> list[TokenPrompt]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    return [TokenPrompt(i, tokenizer(text)["input_ids"]) for i, text in enumerate(PROMPTS)]


@pytest.mark.usefixtures("process_group")
def test_log_probs_are_the_policy_s_and_a_killed_engine_loses_no_sample(servers: list[str]) -> None:
    policy = from_pretrained(MODEL, dtype="float32", device="cpu")
    losses: list[ServerError] = []
    made = sampler(servers, losses)
    made.refill(policy.weights(made.dtype))
    asked = prompts()
    for temperature in (1.0, 0.7):
        drawn = made.sample(
            asked, SamplingParams(samples=2, max_new_tokens=24, temperature=temperature, seed=3)
        )
        assert [(c.row, c.sample) for c in drawn] == [(i, k) for i in range(4) for k in range(2)]
        assert difference(policy, asked, drawn, temperature) <= ENGINE_LOGPROB
        assert all(c.versions == ((1, 0, len(c.ids)),) for c in drawn)

    def kill() -> None:
        time.sleep(3.0)
        os.killpg(leader_of(servers[0]), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    drawn = made.sample(
        asked, SamplingParams(samples=4, max_new_tokens=48, temperature=1.0, seed=4)
    )
    killer.join()
    assert len(losses) == 1 and losses[0].url == servers[0]
    assert len(drawn) == 16 and difference(policy, asked, drawn, 1.0) <= ENGINE_LOGPROB
    made.close()


def leader_of(url: str) -> int:
    """The child that was started for a port."""
    port = url.rpartition(":")[2].encode()
    commands = {
        pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        for pid in children_of([os.getpid()])
    }
    return next(pid for pid, words in commands.items() if port in words and os.getpgid(pid) == pid)


def difference(
    policy: Any, asked: Sequence[TokenPrompt], drawn: Sequence[Turn], temperature: float
) -> float:
    """Mean |log-prob of the server - ours| over all tokens."""
    rows = []
    for c in drawn:
        prompt = [*asked[c.row].ids]
        fields: dict[str, float | Sequence[float]] = {
            "temperature": temperature,
            "theirs": [0.0] * len(prompt) + [*c.log_probs],
        }
        rows.append(Row([*prompt, *c.ids], [False] * len(prompt) + [True] * len(c.ids), fields))
    batch = PackedBatch.pack(rows)
    theirs, counts = batch.fields["theirs"], batch.mask.bool()
    mean = float((policy.score(batch).logprob.to("cpu") - theirs)[counts].abs().mean())
    sys.stdout.write(
        f"temperature {temperature}: {int(counts.sum())} tokens, mean |log-prob difference| {mean:.5f}\n"
    )
    return mean
