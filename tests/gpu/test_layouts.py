"""Layouts over several GPUs and NCCL against one GPU: the executor by itself, then whole models, in float32 and bfloat16.

Compared are log-probs and entropies before and after two training steps, and the steps' losses and gradient norms.
`weights()` gives the file's bits before, and the same bits on every rank after.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config, Qwen3MoeConfig

from bench.engines import layout_of
from dovetail.factory.engine import EngineOptions, make_engine, make_mesh
from dovetail.optim.replicas import hash_bits
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.process_group import pick_device
from dovetail.weights.hf_directory import Pretrained
from tests.helpers.harness import needs_gpus, run
from tests.helpers.matrix import LOSSES, STEP, random_batch
from tests.helpers.parity_configs import VOCAB
from tests.helpers.plans import check_all, every_schedule, random_plans
from tests.helpers.tolerances import CURVE_FP32, HALF_SHARE, MODEL_FP32, STEP_BF16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = (700, 5, 300, 1, 64, 129, 17, 511, 2, 256, 333, 90)
BUDGET = 768  # several micro-batches on every layout
TIMEOUT = 240.0  # of one layout; a deadlock costs that. Kernels of experts are compiled for more than a minute
SMALL_STEP = replace(
    STEP, lr=2e-5
)  # so small that hardly a token goes to another expert for rounding's sake
DENSE = (
    *("tp=2,pp=2,cp=2", "tp=2,pp=2,dp=2", "tp=4,pp=2", "cp=8,cp_mode=gather", "cp=8"),
    *("pp=4,dp=2,virtual_stages=2,schedule=interleaved", "pp=4,dp=2,schedule=zero_bubble"),
    *(
        "tp=4",
        "tp=2,dp=2",
        "tp=2,pp=2",
        "tp=2,pp=2,schedule=zero_bubble",
        "pp=4",
        "cp=4",
        "pp=2,dp=2,schedule=zero_bubble",
        "pp=2,cp=2",
    ),
    *(
        "tp=2",
        "dp=2",
        "cp=2",
        "cp=2,cp_mode=gather",
        "cp=4,cp_mode=gather",
        "tp=2,cp=2,cp_mode=gather",
        "pp=2",
    ),
    *("pp=2,schedule=zero_bubble", "pp=2,virtual_stages=2,schedule=interleaved"),
)
EXPERTS = (
    "ep=8,dp=8",
    "ep=2,tp=2,pp=2,dp=2",
    "ep=4,tp=2,dp=4",
    "ep=4,dp=4",
    "ep=2,tp=2,dp=2",
    "ep=2,dp=2",
    "dp=2",
    "ep=2,cp=2",
)


class Shown(NamedTuple):
    """What one rank shows of two steps."""

    outputs: tuple[Tensor, ...]  # log-probs and entropies, before and after
    losses: list[float]
    norms: list[float]
    unlike_file: list[str]  # names of streamed tensors that are not the file's bits
    bits: dict[str, int]  # hashes of what is streamed after the steps


def configs() -> dict[str, PreTrainedConfig]:
    """Eight layers with heads of 64, so that the kernels of real models run."""
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 512,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    }
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
    }
    return {
        "dense": Qwen2Config(**shape, tie_word_embeddings=True),
        "experts": Qwen3MoeConfig(**shape, **experts, head_dim=64),
    }


def save_random(config: PreTrainedConfig, path: Path) -> None:
    """A model with no weight at its initial 0 or 1."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(path)


def trained(
    folder: str, text: str, dtypes: tuple[torch.dtype, ...], device: str = "cuda"
) -> dict[torch.dtype, Shown]:
    """Two steps of one model on one layout, once for every compute dtype."""
    layout = layout_of(text) if text else Layout()
    mesh = make_mesh(layout, pick_device(device))
    return {dtype: _trained(Path(folder), mesh, dtype) for dtype in dtypes}


def _trained(folder: Path, mesh: Mesh, dtype: torch.dtype) -> Shown:
    options = EngineOptions(optim=SMALL_STEP, tokens_per_batch=BUDGET)
    engine = make_engine(Pretrained.open(folder, "native"), mesh, dtype, "lm", options)
    file, streamed = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    for name, tensor in engine.weights():
        streamed[name] = tensor.cpu()
    unlike = [
        name
        for name in {*file, *streamed}
        if name not in streamed or not torch.equal(streamed[name], file[name])
    ]
    batch = random_batch(LENGTHS, "sft", torch.float32)
    before = engine.score(batch)
    reports = [engine.train_step(batch, LOSSES["sft"]) for _ in range(2)]
    after = engine.score(batch)
    engine.check_replicas()
    bits = {name: int(hash_bits(tensor)) for name, tensor in engine.weights(torch.float32)}
    return Shown(
        (*before, *after), [r.loss for r in reports], [r.grad_norm for r in reports], unlike, bits
    )


@pytest.fixture(scope="module")
def alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[str, dict[torch.dtype, Shown]]]:
    """For every model its directory, and what one GPU shows."""
    folder, found = tmp_path_factory.mktemp("models"), {}
    for name, config in configs().items():
        save_random(config, folder / name)
        (only,) = run(
            1, trained, str(folder / name), "", (torch.float32, torch.bfloat16), device="cuda"
        )
        found[name] = str(folder / name), only
    return found


def check(shown: list[Shown], one: Shown, exact: Shown, dtype: torch.dtype) -> None:
    """What all ranks show against one GPU, whose float32 result is `exact`."""
    first = shown[0]
    assert not [each.unlike_file for each in shown if each.unlike_file]
    assert all(each.bits == first.bits for each in shown), "ranks stream different weights"
    assert all(each.losses == first.losses and each.norms == first.norms for each in shown)
    half = dtype != torch.float32
    bound = STEP_BF16 if half else CURVE_FP32
    for a, b in zip(first.losses, exact.losses, strict=True):
        assert abs(a - b) <= bound * (1 + abs(b)), f"loss {a}, one GPU {b}"
    for a, b in zip(first.norms, exact.norms, strict=True):
        assert abs(a / b - 1) <= bound, f"gradient norm {a}, one GPU {b}"
    for i, (ours, alone, true) in enumerate(
        zip(first.outputs, one.outputs, exact.outputs, strict=True)
    ):
        error, peer = (ours - true).abs(), (alone - true).abs()
        if half:
            told = f"mean error of output {i}: {error.mean():.3e}, one GPU's {peer.mean():.3e}"
            assert float(error.mean()) <= HALF_SHARE * float(peer.mean()), told
        else:
            relative = float((error / true.abs().clamp(min=1.0)).max())
            assert relative <= (MODEL_FP32 if i < 2 else CURVE_FP32), f"output {i}: {relative:.2e}"


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_plan_over_nccl(ranks: int) -> None:
    needs_gpus(ranks)
    for plans in (every_schedule(ranks), random_plans(ranks)):
        if ranks == 1:  # nobody to send to
            plans = {1: plans[1]}
        run(ranks, check_all, ranks, plans, "cuda", device="cuda", timeout=TIMEOUT)


@pytest.mark.parametrize(
    ("model", "text"),
    [*(("dense", text) for text in DENSE), *(("experts", text) for text in EXPERTS)],
)
def test_layout_equals_one_gpu(
    model: str, text: str, alone: dict[str, tuple[str, dict[torch.dtype, Shown]]]
) -> None:
    ranks = layout_of(text).num_ranks
    needs_gpus(ranks)
    folder, one = alone[model]
    shown = run(ranks, trained, folder, text, tuple(one), device="cuda", timeout=TIMEOUT)
    for dtype in one:
        check([each[dtype] for each in shown], one[dtype], one[torch.float32], dtype)
