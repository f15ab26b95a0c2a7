"""A loop of your own: python examples/own_loop.py MODEL RUN_DIRECTORY. The same command again goes on where it ended."""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import dovetail as dt

PROMPTS, SAMPLES = [[1, 5, 7], [1, 9, 4]], 8  # ids of your tokenizer


def reward(ids: Sequence[int]) -> float:
    return sum(token % 2 == 0 for token in ids) / len(ids)


def policy_loss(stats: dt.TokenStats, batch: dt.PackedBatch) -> dt.Loss:
    """REINFORCE with the ratio to the sampler: a sum over tokens and their number, never a mean."""
    ratio, count = (stats.logprob - batch.fields["old_logprob"]).exp(), batch.mask.sum()
    return dt.Loss(-(ratio * batch.fields["advantage"]).sum(), count, {"ratio": dt.Sum(ratio.detach().sum(), count)})


def train_step(engine: dt.SamplingEngine) -> dt.StepReport:
    completions = engine.generate(PROMPTS, n=SAMPLES, max_tokens=8, temperature=1.0)
    rewards = torch.tensor([reward(completion.ids) for completion in completions]).view(len(PROMPTS), SAMPLES)
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten().tolist()
    rows = []
    for completion, advantage in zip(completions, advantages, strict=True):
        prompt, new = PROMPTS[completion.row], len(completion.ids)
        old = [0.0] * len(prompt) + [*completion.log_probs]  # entry j: of ids[j]
        fields = {"advantage": advantage, "old_logprob": old}
        rows.append(dt.Sequence([*prompt, *completion.ids], [False] * len(prompt) + [True] * new, fields))
    for half in (rows[::2], rows[1::2]):  # gradients and counts add up
        engine.forward_backward(dt.PackedBatch.pack(half), policy_loss)
    report = engine.optim_step()
    print(
        f"update {engine.updates}  reward {rewards.mean():.3f}  loss {report.loss:.4f}  grad_norm {report.grad_norm:.3f}"
    )
    return report


def main(model: str, run: Path, steps: int = 20, save_every: int = 10) -> dt.SamplingEngine:
    options = dt.EngineOptions(optim=dt.OptimSettings(lr=1e-2), tokens_per_batch=64)
    engine = dt.from_pretrained(model, options=options)
    saved = sorted(run.glob("step_*"))
    done = engine.load_state(saved[-1])["done"] if saved else 0
    for step in range(done + 1, steps + 1):
        train_step(engine)
        if step % save_every == 0 or step == steps:
            engine.save_state(run / f"step_{step:06}", {"done": step})
    return engine


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2])).save_pretrained(Path(sys.argv[2]) / "hf")
