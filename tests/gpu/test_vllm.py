"""What a real vLLM does on a GPU alone: routes, memory given back. DOVETAIL_VLLM_PYTHON: the Python of an environment with it."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from dovetail.arch.spec import ArchSpec
from dovetail.batch.packed import PackedBatch, Sequence as Row
from dovetail.engine.native import Engine
from dovetail.factory.engine import from_pretrained
from dovetail.inference_servers.fleet import Fleet, Replica
from dovetail.inference_servers.http import Client
from dovetail.inference_servers.protocol import RETURNS_ROUTES
from dovetail.inference_servers.push import Pusher
from dovetail.inference_servers.remote_sampler import RemoteSampler
from dovetail.inference_servers.vllm import Vllm
from dovetail.launch.inference_servers import URLS, ServerStart, running
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.process_group import temporary_process_group
from dovetail.recipe.rollout import PushSection
from dovetail.sampler.base import SamplingParams, TokenPrompt
from dovetail.sampler.turn import Turn
from tests.helpers.tolerances import ENGINE_LOGPROB_BF16
from tests.helpers.vllm_runs import PYTHON, VersionPusher, free_port
from tests.helpers.vllm_stand_in import PLUGIN, install_plugin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(PYTHON is None, reason="DOVETAIL_VLLM_PYTHON is not here"),
]
FLAGS = (
    "--enable-scale-out", "--max-model-len", "512", "--logprobs-mode", "processed_logprobs", "--served-model-name", "policy",
    "--dtype", "bfloat16", "--gpu-memory-utilization", "0.3", "--generation-config", "vllm",
    "--skip-tokenizer-init",
    "--compilation-config", json.dumps({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}),
)  # fmt: skip
SETTINGS = {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
TEXT = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1,
}  # fmt: skip


@contextmanager
def sampler(
    folder: Path, push: PushSection | None, *flags: str, **options: Any
) -> Iterator[RemoteSampler]:
    """push: None for the weights that the server loads."""
    transfer = json.dumps({"backend": "nccl" if push is None else f"dovetail_{push.transport}"})
    command = [
        str(PYTHON),
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(folder),
        "--port",
        "PORT",
        *FLAGS,
        *flags,
    ]
    install_plugin(folder / "site")
    paths = f"{folder / 'site'}:{PLUGIN}:{os.environ.get('PYTHONPATH', '')}"
    start = ServerStart(
        commands=[[*command, "--weight-transfer-config", transfer]], gpus_each=0, ranks_on_gpus=False,
        logs=folder / "logs", timeout=300.0, environment={**SETTINGS, "PYTHONPATH": paths},
    )  # fmt: skip
    with running(start, 1, free_port, lambda: False) as engines:
        variables = engines.start_ended()
        clients = [Client(url, timeout=120.0) for url in variables[URLS].split(",")]
        replicas = [Replica(client, Vllm().probe(client, None)) for client in clients]
        fleet = Fleet(replicas, Vllm(), timeout=120.0, on_server_lost=print)
        device = torch.device("cuda", 0)
        pusher = (
            VersionPusher(clients)
            if push is None
            else Pusher(clients, push, kind="vllm", device=device)
        )
        made = RemoteSampler(Mesh.solo(device), torch.bfloat16, 512, fleet, pusher, **options)
        yield made
        made.close()


def packed(asked: Sequence[TokenPrompt], drawn: Sequence[Turn]) -> PackedBatch:
    """With the server's log-probs as `theirs`."""
    rows = []
    for c in drawn:
        prompt = asked[c.row]
        ids, theirs = [*prompt.ids, *c.ids], [0.0] * len(prompt.ids) + [*c.log_probs]
        mask = [False] * len(prompt.ids) + [True] * len(c.ids)
        rows.append(Row(ids, mask, {"theirs": theirs}, routing=c.routing))
    return PackedBatch.pack(rows)


def difference(batch: PackedBatch, scored: Tensor) -> float:
    """Mean |log-prob of the server - ours|."""
    return float((scored.cpu() - batch.fields["theirs"])[batch.mask.bool()].abs().mean())


@pytest.fixture
def process_group() -> Iterator[None]:
    with temporary_process_group(torch.device("cuda", 0), timedelta(minutes=10)):
        yield


def saved(config: Any, folder: Path) -> Engine:
    """Random weights, in `folder` too."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.25)  # vLLM rounds logits to bfloat16
    model.save_pretrained(folder)
    policy = from_pretrained(folder, dtype="bfloat16", device="cuda")
    assert isinstance(policy, Engine)
    return policy


def prompts() -> list[TokenPrompt]:
    drawing = torch.Generator().manual_seed(1)
    lengths = (5, 40, 17, 120)
    return [
        TokenPrompt(i, torch.randint(3, 500, (n,), generator=drawing).tolist())
        for i, n in enumerate(lengths)
    ]


def free_bytes() -> int:
    return torch.cuda.mem_get_info(0)[0]


@pytest.mark.usefixtures("process_group")
def test_an_engine_of_the_same_gpu_gives_its_memory_back_between_samplings(tmp_path: Path) -> None:
    """Each push takes effect; the server starts with other random weights."""
    policy, asked = saved(transformers.LlamaConfig(**TEXT), tmp_path), prompts()
    params, total = (
        SamplingParams(samples=8, max_new_tokens=96, seed=3),
        torch.cuda.mem_get_info(0)[1],
    )
    flags = ("--enable-sleep-mode", "--load-format", "dummy")
    with sampler(tmp_path, PushSection(transport="ipc"), *flags, sleeps=True) as made:
        awake, off = free_bytes(), list[float]()
        for factor in (1.0, 1.5, 1.0):
            made.refill(
                (n, t * factor if "mlp" in n else t) for n, t in policy.weights(torch.bfloat16)
            )
            for _ in range(2):  # woken by the push, then without one
                batch = packed(asked, made.sample(asked, params))
                asleep = free_bytes()
                off.append(difference(batch, policy.score(batch).logprob))
                assert asleep - awake > 0.2 * total, (awake, asleep)
    sys.stdout.write(
        f"GiB free: awake {awake / 2**30:.1f}, asleep {asleep / 2**30:.1f}; mean differences {off}\n"
    )
    assert max(off[0], off[1], off[4], off[5]) <= ENGINE_LOGPROB_BF16 < min(off[2], off[3]) / 3


@pytest.mark.usefixtures("process_group")
def test_routes_of_a_server_are_those_of_its_log_probs(tmp_path: Path) -> None:
    """Replaying them brings the trainer nearer; few differ from its own choice."""
    config = transformers.Qwen3MoeConfig(
        **TEXT,
        moe_intermediate_size=128,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    )
    policy, asked = saved(config, tmp_path), prompts()
    params = SamplingParams(samples=8, max_new_tokens=96, seed=3, trace=True)
    assert isinstance(policy.model.spec, ArchSpec)
    with sampler(tmp_path, None, RETURNS_ROUTES, moe=policy.model.spec.moe) as made:
        made.refill([("weights", torch.zeros(1))])
        drawn = made.sample(asked, params)
    batch = packed(asked, drawn)
    theirs = batch.routing
    assert theirs is not None and theirs.valid.sum() == len(batch) - len(drawn)
    replayed = difference(batch, policy.score(batch).logprob)
    stats, ours = policy.score_and_trace(batch.with_routing(None))
    chosen = difference(batch, stats.logprob)
    same = (
        (theirs.indices.sort(-1).values == ours.indices.cpu().sort(-1).values)
        .all(-1)[theirs.valid]
        .float()
        .mean()
    )
    sys.stdout.write(
        f"mean difference: replayed {replayed:.5f}, chosen {chosen:.5f}; equal choices {same:.4f}\n"
    )
    assert replayed < chosen and replayed <= ENGINE_LOGPROB_BF16 and same > 0.9
    shuffled = theirs.map(lambda x: x.roll(1, 0))
    assert difference(batch, policy.score(batch.with_routing(shuffled)).logprob) > 3 * replayed
