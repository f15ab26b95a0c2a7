"""RL with the library alone, on two ranks: torchrun --nproc-per-node 2 examples/grpo_loss.py MODEL NEW_DIRECTORY"""

import sys

import torch

import dovetail as dt

PROMPT = [1, 5, 7]
ANSWERS = [[2, 9], [2, 4, 3], [8, 8, 6]]  # what your sampler drew for it, as token ids
REWARDS = torch.tensor([1.0, 0.0, 0.0])


def clipped(stats: dt.TokenStats, batch: dt.PackedBatch) -> dt.Loss:
    """PPO's clipped objective: a sum over `batch`, which has the counted tokens of some sequences, and how many they are."""
    advantage, ratio = (
        batch.fields["advantage"],
        (stats.logprob - batch.fields["old_logprob"]).exp(),
    )
    loss = -torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2))
    count = batch.mask.sum()
    return dt.Loss(loss.sum(), count, {"ratio": dt.Sum(ratio.detach().sum(), count)})


def main(model: str, out: str, layout: dt.Layout) -> list[dt.StepReport]:
    """A few updates on one group of samples. Every rank runs all of this, with the same batch."""
    options = dt.EngineOptions(optim=dt.OptimSettings(lr=1e-3), tokens_per_batch=64)
    engine = dt.from_pretrained(model, layout=layout, dtype=torch.float32, options=options)
    advantages = ((REWARDS - REWARDS.mean()) / REWARDS.std()).tolist()
    batch = dt.PackedBatch.pack(
        dt.Sequence(
            [*PROMPT, *answer],
            mask=[False] * len(PROMPT)
            + [True] * len(answer),  # entry j: whether the prediction of ids[j] counts
            fields={
                "advantage": advantage,
                "temperature": 0.7,
            },  # temperature divides the logits, as it did in sampling
        )
        for answer, advantage in zip(ANSWERS, advantages, strict=True)
    )
    batch = batch.with_fields(old_logprob=engine.score(batch).logprob)
    reports = [engine.train_step(batch, clipped) for _ in range(4)]
    engine.save_pretrained(out)
    return reports


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    reports = main(sys.argv[1], sys.argv[2], dt.Layout(tp=2))
    for report in reports if torch.distributed.get_rank() == 0 else ():
        print(
            f"loss {report.loss:.4f}  ratio {report.metrics['ratio']:.4f}  grad_norm {report.grad_norm:.3f}"
        )
