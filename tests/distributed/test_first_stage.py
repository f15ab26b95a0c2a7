"""A first stage may start from embeddings in place of token ids, in every layout."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dovetail.batch.micro import MicroBatch
from dovetail.batch.packed import PackedBatch
from dovetail.factory.engine import from_pretrained
from dovetail.nn.decoder import Decoder
from dovetail.parallel.collectives import sum_over
from dovetail.parallel.layout import Layout
from tests.helpers.harness import run
from tests.helpers.parity_configs import VOCAB, save_tiny, tiny_configs
from tests.helpers.tolerances import EXACT, assert_close

LENGTHS = (5, 9, 2)


def embedded(path: Path, layout: Layout, halves: bool) -> None:
    """Scores of ids and of their embeddings are the same; each rank's gradient is that of its own rows."""
    engine = from_pretrained(path, layout=layout, dtype=torch.float64, device="cpu")
    model = engine.model
    mesh = engine.mesh
    draw = torch.Generator().manual_seed(0)
    batch = PackedBatch.pack([torch.randint(0, VOCAB, (n,), generator=draw) for n in LENGTHS])
    if halves:
        share = (mesh.token_multiple, engine.context_shard, mesh["tp"].size)
        micro = MicroBatch.halved(batch, 1, *share)
    else:
        micro = MicroBatch.of(batch, mesh.token_multiple, engine.context_shard)
    table = load_file(path / "model.safetensors")["model.embed_tokens.weight"].double()
    embeddings = table[micro.batch.tokens].requires_grad_()
    given = replace(micro, embeddings=embeddings)
    with torch.no_grad():
        by_ids = model(micro)
        by_embeddings = model(given)
    for scored, expected in zip(by_embeddings, by_ids, strict=True):
        assert len({float(x) for x in expected}) == len(expected)
        assert_close(scored, expected, EXACT)
    assert isinstance(model, Decoder)
    model.embed(given).square().sum().backward()
    assert isinstance(embeddings.grad, Tensor)
    gradient = sum_over(sum_over(embeddings.grad, mesh["cp"]), mesh["tp"])
    assert_close(gradient, 2 * embeddings.detach(), EXACT)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(tp=2, cp=2)], ids=str)
def test_embeddings_of_the_tokens_are_the_tokens(
    layout: Layout, halves: bool, tmp_path: Path
) -> None:
    save_tiny(tiny_configs()["llama_tied"], tmp_path)
    run(layout.num_ranks, embedded, tmp_path, layout, halves)
