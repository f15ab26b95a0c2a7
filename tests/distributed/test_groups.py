"""A pairwise loss on groups of two sequences: on every layout that of a dense computation in float64."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dovetail as dt
from dovetail.engine.native import Engine
from dovetail.parallel.layout import Layout
from tests.helpers.harness import run
from tests.helpers.parity_configs import VOCAB, save_tiny, tiny_configs
from tests.helpers.probe import PROBE, gradients
from tests.helpers.tolerances import (
    MODEL_FP32,
    SUM_ORDER,
    assert_all_close,
    assert_close,
    worst_error,
)

LENGTHS = ((9, 4), (5, 12), (7, 7), (3, 14), (11, 2))  # of pairs: chosen, rejected
ALONE = (6, 8)  # without a group
BUDGET = 24
LAYOUTS = (Layout(), Layout(dp=2), Layout(tp=2), Layout(cp=2), Layout(pp=2))


def rows_of() -> list[dt.Sequence]:
    """All chosen sequences, those without a group, and all rejected ones from the last pair to the first."""
    draw = torch.Generator().manual_seed(3)
    chosen, rejected = zip(*LENGTHS, strict=True)
    lengths = (*chosen, *ALONE, *reversed(rejected))
    groups = (*range(5), None, None, *reversed(range(5)))
    made = [torch.randint(VOCAB, (n,), generator=draw).tolist() for n in lengths]
    return [dt.Sequence(ids, group=group) for ids, group in zip(made, groups, strict=True)]


def bradley_terry(stats: dt.TokenStats, batch: dt.PackedBatch) -> dt.Loss:
    """-log sigmoid of a pair's difference of log-probs."""
    sums = stats.logprob.new_zeros(batch.num_sequences).index_add(
        0, batch.sequence_ids, stats.logprob
    )
    chosen, rejected = sums[batch.group_ids >= 0].view(-1, 2).unbind(1)
    return dt.Loss(-F.logsigmoid((chosen - rejected) / 8).sum(), torch.tensor(len(chosen)))


def train(path: Path, layout: Layout) -> dict[str, Tensor]:
    """The loss and all gradients of one step."""
    options = dt.EngineOptions(optim=PROBE, tokens_per_batch=BUDGET, dual_batch=layout.tp > 1)
    engine = dt.from_pretrained(
        path, layout=layout, dtype=torch.float64, device="cpu", options=options
    )
    assert isinstance(engine, Engine)
    batch = dt.PackedBatch.pack(rows_of())
    report = engine.train_step(batch, bradley_terry)
    if layout.tp > 1:
        assert any(micro.halves for _, micro in engine.micro_batches(batch))
    found, stray = gradients(engine)
    assert stray == 0.0
    return {"loss": torch.tensor(report.loss, dtype=torch.float64), **found}


def dense(path: Path, *, wrong: bool = False) -> dict[str, Tensor]:
    """The same from transformers, each sequence by itself. wrong: with other pairs."""
    model = save_tiny(tiny_configs()["llama"], path).to(torch.float64)
    sums = []
    for row in rows_of():
        ids = torch.tensor([row.ids])
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        sums.append(logprobs.gather(-1, ids[0, 1:, None]).sum())
    pairs = [(sums[i], sums[i - len(LENGTHS) if wrong else -1 - i]) for i in range(len(LENGTHS))]
    loss = torch.stack(
        [-F.logsigmoid((chosen - rejected) / 8) for chosen, rejected in pairs]
    ).mean()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def test_a_pairwise_loss_is_that_of_the_pairs_on_every_layout(tmp_path: Path) -> None:
    expected = dense(tmp_path)
    alone = run(1, train, tmp_path, LAYOUTS[0])[0]
    assert_all_close(alone, expected, MODEL_FP32)
    assert worst_error(alone, dense(tmp_path, wrong=True))[0] > MODEL_FP32
    for layout in LAYOUTS[1:]:
        for found in run(2, train, tmp_path, layout):
            assert_close(found["loss"], alone["loss"], SUM_ORDER, str(layout))
            assert worst_error(found, alone)[0] <= SUM_ORDER, layout


def test_ranks_with_other_groups_are_refused(tmp_path: Path) -> None:
    save_tiny(tiny_configs()["llama"], tmp_path)
    with pytest.raises(AssertionError, match="rank 1 differs from rank 0 in groups"):
        run(2, other_groups, tmp_path)


def other_groups(path: Path) -> None:
    engine = dt.from_pretrained(path, layout=Layout(dp=2), dtype=torch.float64, device="cpu")
    rank = torch.distributed.get_rank()
    engine.score(
        dt.PackedBatch.pack([dt.Sequence([1, 2, 3], group=rank), dt.Sequence([4, 5], group=0)])
    )
