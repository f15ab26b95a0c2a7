"""Moments that wait on the host: the GPU's memory is less by them, nobody waits for their copies, no bit changes."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config

from bench.models import one_rank
from dovetail.batch.packed import PackedBatch
from dovetail.engine.native import Engine
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.optim.adamw import CPUOffloadAdamW
from dovetail.optim.optimizer import OptimSettings
from dovetail.optim.replicas import hash_bits
from dovetail.rl.algorithms.sft import SFTLoss
from tests.helpers.gpu_waits import no_waiting
from tests.helpers.parity_configs import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = Qwen2Config(  # 3.3e8 parameters, 2.4 GiB of moments, so that there are several buckets
    vocab_size=32768,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)
SMALL = (
    1 << 27
)  # bytes: what the allocator rounds up, counts of steps, the first kernels' workspaces
LENGTH = 256


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(CONFIG).save_pretrained(folder)
    return folder


def engine_of(source: Path, *, hosted: bool) -> Engine:
    optim = OptimSettings(lr=1e-3, weight_decay=0.1)
    options = EngineOptions(optim=optim, offload_optimizer=hosted, tokens_per_batch=LENGTH)
    engine = from_pretrained(source, dtype=torch.bfloat16, device="cuda", options=options)
    assert isinstance(engine, Engine)
    return engine


def batch() -> PackedBatch:
    draw = torch.Generator().manual_seed(0)
    return PackedBatch.pack([torch.randint(CONFIG.vocab_size, (LENGTH,), generator=draw)])


def state(engine: Engine) -> dict[str, Tensor]:
    """Parameters and moments, on the host."""
    optimizer = engine.optimizer
    found = {shard.name: shard.local.detach().cpu() for shard in optimizer.shards}
    for kind, tensors in optimizer.state_tensors().items():
        found |= {f"{kind} {name}": x.cpu() for name, x in tensors.items()}
    return found


def test_equal_gradients_leave_equal_bits(source: Path) -> None:
    """Several updates, one of them stopped, without the host waiting for any."""
    found: list[dict[str, Tensor]] = []
    for hosted in (False, True):
        engine, draw = engine_of(source, hosted=hosted), torch.Generator("cuda").manual_seed(0)
        optimizer = engine.optimizer
        optimizer.state_tensors()
        for stopped in (0.0, 0.0, 1.0, 0.0):
            optimizer.rule.found_inf = torch.tensor(stopped, device="cuda")
            for shard in optimizer.shards:
                shard.local.grad = torch.randn(shard.local.shape, device="cuda", generator=draw)
            torch.cuda.synchronize()
            with no_waiting():
                optimizer.rule.step()
        torch.cuda.synchronize()
        found.append(state(engine))
    resident, waiting = found
    assert resident.keys() == waiting.keys()
    assert all(torch.equal(resident[name], waiting[name]) for name in resident)


def test_memory_is_less_by_the_moments_but_for_two_buckets(source: Path) -> None:
    gc.collect()  # what the tests before held, now and not on the way
    held, peaks, moments, largest, alive = {}, {}, 0, 0, list[Engine]()
    for hosted in (False, True):
        before = torch.cuda.memory_allocated()
        engine = engine_of(source, hosted=hosted)
        alive.append(engine)  # what it holds does not leave while the other one is measured
        for _warm in range(2):
            engine.train_step(batch(), SFTLoss())
        torch.cuda.reset_peak_memory_stats()
        engine.train_step(batch(), SFTLoss())
        peaks[hosted] = torch.cuda.max_memory_allocated() - before
        held[hosted] = torch.cuda.memory_allocated() - before
        moments = 8 * sum(shard.local.numel() for shard in engine.optimizer.shards)
        tensors = [x for kind in engine.optimizer.state_tensors().values() for x in kind.values()]
        assert {x.device.type for x in tensors} == {"cpu" if hosted else "cuda"}
        if hosted:
            assert isinstance(engine.optimizer.rule, CPUOffloadAdamW)
            assert len(engine.optimizer.rule.buckets) > 3
            assert all(x.is_pinned() for x in tensors)
            largest = max(bucket.num_bytes for bucket in engine.optimizer.rule.buckets)
    assert abs(held[False] - held[True] - moments) < SMALL
    assert moments - 2 * largest - SMALL < peaks[False] - peaks[True] < moments + SMALL


def test_copies_are_over_when_a_step_is(source: Path) -> None:
    """What the host reads right after a step is what the device has at rest; the engine steps aside and comes back."""
    engine = engine_of(source, hosted=True)
    engine.train_step(batch(), SFTLoss())
    moments = [x for kind in engine.optimizer.state_tensors().values() for x in kind.values()]
    at_once = [int(hash_bits(x)) for x in moments]
    torch.cuda.synchronize()
    assert at_once == [int(hash_bits(x)) for x in moments]
    before, held = state(engine), torch.cuda.memory_allocated()
    engine.offload()
    assert held - torch.cuda.memory_allocated() >= 4 * sum(
        s.local.numel() for s in engine.optimizer.shards
    )
    engine.onload()
    after = state(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)
    engine.check_replicas()
