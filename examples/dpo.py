"""Direct preference optimization with the library alone: python examples/dpo.py MODEL NEW_DIRECTORY"""

import sys

import torch

import dovetail as dt
from dovetail.rl.algorithms.dpo import DPOLoss

PAIRS = [  # prompt, chosen and rejected completion, as token ids
    ([1, 5, 7], [2, 9, 4], [8, 8, 6]),
    ([1, 3], [4, 2], [9, 9, 9, 1]),
    ([1, 6, 2], [7, 3, 5, 2], [4]),
]


def pair_batch() -> dt.PackedBatch:
    """A group for each pair, first the chosen one; only completions are counted."""
    return dt.PackedBatch.pack(
        dt.Sequence(
            [*prompt, *completion], [False] * len(prompt) + [True] * len(completion), group=number
        )
        for number, (prompt, *pair) in enumerate(PAIRS)
        for completion in pair
    )


def main(model: str, out: str, layout: dt.Layout) -> list[dt.StepReport]:
    """A few steps on all pairs. Every rank runs all of this, with the same batch."""
    options = dt.EngineOptions(optim=dt.OptimSettings(lr=1e-3), tokens_per_batch=64)
    engine = dt.from_pretrained(model, layout=layout, dtype=torch.float32, options=options)
    batch = pair_batch()
    batch = batch.with_fields(
        reference_logprob=engine.score(batch).logprob
    )  # precomputed: the model before training
    reports = [engine.train_step(batch, DPOLoss(beta=0.1)) for _ in range(4)]
    engine.save_pretrained(out)
    return reports


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    for report in main(sys.argv[1], sys.argv[2], dt.Layout()):
        accuracy, margin = (report.metrics[f"rewards/{name}"] for name in ("accuracies", "margins"))
        print(f"loss {report.loss:.4f}  accuracy {accuracy:.2f}  margin {margin:.4f}")
