"""On a GPU no micro-batch of a step has the host wait: forward and backward passes of whole engines, FSDP's work included.

`tests/unit/test_no_waiting.py` shows the same of the model alone, without a GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Literal
from unittest import mock

import pytest
import torch
from transformers import PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from bench.models import one_rank
from dovetail.batch.loss import LossFn
from dovetail.batch.packed import PackedBatch
from dovetail.engine.native import Engine
from dovetail.engine.stage import TrainingRunner
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.optim.optimizer import OptimSettings
from dovetail.rl.algorithms.ppo import ValueLoss
from dovetail.rl.algorithms.sft import SFTLoss
from dovetail.rl.losses import PolicyLoss, weight_fields
from tests.helpers.gpu_waits import no_waiting
from tests.helpers.parity_configs import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Role = Literal["lm", "value"]
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
MODELS: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=64),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, head_dim=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64
    ),
}
LOSSES: dict[str, tuple[Role, LossFn]] = {
    "sft": ("lm", SFTLoss()),
    "grpo": ("lm", PolicyLoss(clip_high=0.28, kl_coef=0.05)),
    "gspo": ("lm", PolicyLoss(ratio="sequence")),
    "value": ("value", ValueLoss()),
}


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with one_rank():
        yield


def batch() -> PackedBatch:
    """Of many micro-batches of several lengths."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 120, (24,), generator=draw).tolist()
    packed = PackedBatch.pack([torch.randint(512, (n,), generator=draw) for n in lengths])
    names = ("advantage", "old_logprob", "reference_logprob", "return", "old_value")
    packed = packed.with_fields(
        **{name: torch.randn(len(packed), generator=draw) for name in names}
    )
    return packed.with_fields(**weight_fields(packed, "sequence"))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", MODELS)
def test_micro_batches_of_a_step(tmp_path: Path, name: str, loss: str) -> None:
    play(tmp_path, MODELS[name], *LOSSES[loss], "cuda", no_waiting())


@pytest.mark.parametrize("on_host", [False, True])
def test_a_step_returns_before_its_update_ends(tmp_path: Path, on_host: bool) -> None:
    """Unless the moments are to be in host memory by then. Steps that begin meanwhile have the same bits."""
    tiny_model(MODELS["qwen2"]).save_pretrained(tmp_path)
    options = EngineOptions(
        tokens_per_batch=256, optim=OptimSettings(lr=1e-3), offload_optimizer=on_host
    )
    found = []
    for late in (False, True):
        engine = from_pretrained(tmp_path, dtype=torch.bfloat16, device="cuda", options=options)
        assert isinstance(engine, Engine)
        engine.train_step(batch(), SFTLoss())
        rule = engine.optimizer.rule
        with mock.patch.object(
            rule, "step", partial(updated_late, rule.step) if late else rule.step
        ):
            for _step in range(3):
                engine.train_step(batch(), SFTLoss())
            done = torch.cuda.current_stream().query()
        assert not late or done == on_host
        found.append([parameter.detach().clone() for parameter in engine.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def updated_late(step: Callable[[], object]) -> None:
    """Parameters are, some tenths of a second after the device could."""
    torch.cuda._sleep(500_000_000)
    step()


def play(
    folder: Path,
    config: PreTrainedConfig,
    head: Role,
    fn: LossFn,
    device: str,
    guard: AbstractContextManager[None],
) -> None:
    """Two steps, so that everything has been compiled and allocated, and the micro-batches of a third within `guard`."""
    tiny_model(config).save_pretrained(folder)
    options = EngineOptions(tokens_per_batch=256, fresh_head_seed=0)
    engine = from_pretrained(
        folder, dtype=torch.bfloat16, device=device, head=head, options=options
    )
    assert isinstance(engine, Engine)
    for _warm in range(2):
        engine.train_step(batch(), fn)
    pairs = list(engine.micro_batches(batch()))
    assert len(pairs) > 2
    micros = [micro for _, micro in pairs]
    stages = TrainingRunner(engine.model, engine.mesh, micros, engine.dtype, fn)
    with guard:
        stages.run()
        stages.finish()
    assert torch.isfinite(stages.sums[""][0])
