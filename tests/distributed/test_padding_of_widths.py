"""Zeros that make widths and vocabularies divide: they stay zeros, whatever memory held, and so do their moments."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.optim.optimizer import OptimSettings
from dovetail.parallel.layout import Layout
from dovetail.parallel.placement import as_index
from tests.helpers.harness import run
from tests.helpers.parity_configs import moe_configs, save_tiny, tiny_configs
from tests.helpers.parity_reference import make_batch, objective

LAYOUT = Layout(tp=2, dp=2)
PADDED = {
    "llama_biases": (
        "embed_tokens.weight",
        "lm_head.weight",
        "gate_up_proj.weight",
        "gate_up_proj.bias",
        "down_proj.weight",
    ),
    "deepseek_v2": (
        "embed_tokens.weight",
        "lm_head.weight",
        "experts.gate_up_proj",
        "experts.down_proj",
    ),
}


@contextmanager
def empty_memory_is_not_zero() -> Iterator[None]:
    """Every new tensor that is not filled is filled with NaN: torch's default where it is to be deterministic."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def padded(path: Path) -> tuple[dict[str, int], float]:
    """How many numbers of padding each parameter of this rank has, and the largest of them after two steps."""
    options = EngineOptions(optim=OptimSettings(lr=1e-2, weight_decay=0.1))
    with empty_memory_is_not_zero():
        engine = from_pretrained(path, layout=LAYOUT, device="cpu", options=options)
        for _ in range(2):
            assert not engine.train_step(make_batch(), objective).skipped
    found, largest = dict[str, int](), 0.0
    for shard in engine.optimizer.shards:
        outside = torch.ones_like(shard.local, dtype=torch.bool)
        for region in shard.regions:
            outside[as_index(region.local_slice)] = False
        state = engine.optimizer.rule.state[shard.local]
        for tensor in (shard.local, state["exp_avg"], state["exp_avg_sq"]):
            assert not tensor[~outside].isnan().any()
            largest = max(
                largest, float(tensor.detach()[outside].abs().nan_to_num(nan=torch.inf).sum())
            )
        found[shard.name] = int(outside.sum())
    return found, largest


def test_padding_stays_zero(tmp_path: Path) -> None:
    for name, endings in PADDED.items():
        save_tiny((tiny_configs() | moe_configs())[name], tmp_path / name)
        ranks = run(LAYOUT.num_ranks, padded, tmp_path / name)
        for ending in endings:
            assert (
                sum(count for found, _ in ranks for n, count in found.items() if n.endswith(ending))
                > 0
            ), ending
        assert [largest for _, largest in ranks] == [0.0] * LAYOUT.num_ranks
