"""Rows that pad a vocabulary stay zero in training, whatever lies in memory that nobody has written."""

from pathlib import Path

import pytest
import torch

from dovetail.optim.optimizer import OptimSettings
from dovetail.parallel.layout import Layout
from dovetail.parallel.placement import as_index
from tests.helpers.harness import run
from tests.helpers.layout_bodies import made, sequencewise, tokenwise
from tests.helpers.parity_configs import save_tiny, tiny_configs
from tests.helpers.parity_reference import make_batch

LOSSES = {"tokens": tokenwise, "sequences": sequencewise}


def padding(path: Path, layout: str, loss: str) -> tuple[int, float, list[bool]]:
    """After two steps: values of padding in weights and moments, the largest of them, and which steps were skipped.

    Every tensor that is made without values is full of what is not a number (torch.utils.deterministic).
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]  # a documented setting
    try:
        assert torch.empty(3).isnan().all()
        engine = made(path, Layout.parse(layout), OptimSettings(lr=0.1, weight_decay=0.1))
        skipped = [engine.train_step(make_batch(), LOSSES[loss]).skipped for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    found = []
    for shard in engine.optimizer.shards:
        of_nothing = torch.ones(shard.local.shape, dtype=torch.bool)
        for region in shard.regions:
            of_nothing[as_index(region.local_slice)] = False
        kept = (shard.local.detach(), *engine.optimizer.rule.state[shard.local].values())
        found += [
            values[of_nothing] for values in kept if values.shape == of_nothing.shape
        ]  # not the count of steps
    whole = torch.cat(found)
    return len(whole), float(whole.abs().max()) if len(whole) else 0.0, skipped


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
@pytest.mark.parametrize("loss", LOSSES)
def test_rows_of_padding_stay_zero(name: str, loss: str, tmp_path: Path) -> None:
    """Of 131 words two ranks have 66 each."""
    save_tiny(tiny_configs()[name], tmp_path)
    ranks = run(2, padding, tmp_path, "tp=2", loss)
    width = tiny_configs()[name].hidden_size
    tables = 1 if name == "llama_tied" else 2
    assert ranks == [(0, 0.0, [False] * 2), (3 * tables * width, 0.0, [False] * 2)]
