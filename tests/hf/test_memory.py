"""What the transformers engine costs a rank: its own pieces while loading, and its share of the tokens' activations."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import LlamaConfig

from dovetail.batch.packed import PackedBatch
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.hf.transformers_model import make_model
from dovetail.parallel.layout import Layout
from tests.helpers.families import TEXT, _make
from tests.helpers.harness import run
from tests.helpers.parity_configs import tiny_model
from tests.helpers.parity_reference import objective
from tests.helpers.probe import PROBE
from tests.helpers.weights_memory import LARGE, M_MMAP_THRESHOLD, MIB, PEAKS, resident, write_large

FOREIGN = EngineOptions(engine="transformers")
SHARE = 1.02  # of an even split, which the few statistics of a token are not part of


def _load(source: Path, layout: Layout) -> dict[str, int]:
    ctypes.CDLL(None).mallopt(
        M_MMAP_THRESHOLD, MIB
    )  # give freed blocks back at once, so that only live ones count
    make_model(TEXT["llama"]().to_dict())  # what transformers' modules take is not the model's
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest so far
    before = resident("VmRSS")
    engine = from_pretrained(source, layout=layout, device="cpu", options=FOREIGN)
    peak = resident("VmHWM") - before
    return {"load": peak, "own": sum(4 * shard.local.numel() for shard in engine.optimizer.shards)}


@PEAKS
@pytest.mark.parametrize(
    ("layout", "tied", "width"),
    [
        (Layout(dp=2), False, 1024),
        pytest.param(Layout(dp=2), False, 2048, marks=pytest.mark.soak),
        pytest.param(Layout(cp=2), True, 2048, marks=pytest.mark.soak),
    ],
)
def test_a_rank_pays_for_its_own_pieces(
    tmp_path: Path, layout: Layout, tied: bool, width: int
) -> None:
    size = write_large(tmp_path / "source", tied=tied, hidden_size=width)
    tensor = 4 * width * max(LARGE["vocab_size"], LARGE["intermediate_size"])
    for figures in run(2, _load, tmp_path / "source", layout):
        assert 0.49 * size < figures["own"] < 0.51 * size
        assert figures["load"] <= 1.2 * (figures["own"] + tensor), figures


def _saved(folder: Path, layout: Layout, lengths: tuple[int, int]) -> float:
    """Bytes that one more token of a sequence has this rank keep for its backward pass."""
    options = EngineOptions(engine="transformers", optim=PROBE)
    engine = from_pretrained(folder, layout=layout, device="cpu", options=options)
    found = []
    for length in lengths:
        kept: dict[int, tuple[torch.UntypedStorage, int]] = {}

        def pack(x: Tensor, kept: dict[int, tuple[torch.UntypedStorage, int]] = kept) -> Tensor:
            storage = (
                x.untyped_storage()
            )  # held, since gathered weights are freed and their places used again
            kept[storage._cdata] = (storage, storage.nbytes())
            return x

        row = torch.arange(length) % 100
        batch = PackedBatch.pack([row]).with_fields(w0=torch.ones(length), w1=torch.ones(length))
        with saved_tensors_hooks(pack, lambda x: x):
            engine.train_step(batch, objective)
        found.append(sum(size for _, size in kept.values()))
    return (found[1] - found[0]) / (lengths[1] - lengths[0])


def test_activations_fall_with_the_ranks_of_ulysses(tmp_path: Path) -> None:
    """As 1 / cp, but for attention's output, which is kept on both sides of its exchange. Weights do not grow with tokens."""
    config = _make(LlamaConfig, num_key_value_heads=4)()
    tiny_model(config).save_pretrained(tmp_path)
    (alone,) = run(1, _saved, tmp_path, Layout(), (256, 512))
    twice = 4 * config.num_hidden_layers * config.hidden_size
    assert twice < 0.1 * alone
    for cp in (2, 4):
        for found in run(cp, _saved, tmp_path, Layout(cp=cp, cp_mode="ulysses"), (256, 512)):
            assert found <= SHARE * (alone + twice) / cp, (found, alone, cp)
