"""Sample, reward, loss, step, save, resume: torchrun --nproc-per-node 2 examples/own_loop.py MODEL DIRECTORY"""

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

import dovetail as dt

PROMPTS, SAMPLES = ["1,2?", "7,3?", "4,4?"], 8


def reward(text: str) -> float:
    return sum(character.isdigit() for character in text) / max(len(text), 1)


def policy_loss(stats: dt.TokenStats, batch: dt.PackedBatch) -> dt.Loss:
    """REINFORCE with the ratio to the sampler: a sum over counted tokens, and how many they are."""
    ratio = (stats.logprob - batch.fields["old_logprob"]).exp()
    return dt.Loss(-(ratio * batch.fields["advantage"]).sum(), batch.mask.sum())


def train_step(engine: dt.SamplingEngine, tokenizer: AutoTokenizer) -> float:
    """Every rank runs all of this, with the same samples. The mean reward."""
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    drawn = engine.generate(
        prompts, n=SAMPLES, max_tokens=4, stop_token_ids=[tokenizer.eos_token_id]
    )
    rewards = torch.tensor(
        [reward(tokenizer.decode(each.ids, skip_special_tokens=True)) for each in drawn]
    )
    groups = rewards.view(-1, SAMPLES)
    advantages = (groups - groups.mean(1, keepdim=True)).flatten().tolist()
    rows = []
    for each, advantage in zip(drawn, advantages, strict=True):
        prompt = prompts[each.row]
        mask = [False] * len(prompt) + [True] * len(each.ids)  # which ids count
        fields = {"advantage": advantage, "old_logprob": [0.0] * len(prompt) + [*each.log_probs]}
        rows.append(dt.Sequence([*prompt, *each.ids], mask, fields))
    engine.forward_backward(
        dt.PackedBatch.pack(rows), policy_loss
    )  # gradients of several calls add up
    engine.optim_step()
    return float(rewards.mean())


def main(model: str, directory: str, steps: int = 20, save_every: int = 10) -> list[float]:
    tokenizer, folder = AutoTokenizer.from_pretrained(model), Path(directory)
    options = dt.EngineOptions(optim=dt.OptimSettings(lr=3e-3), tokens_per_batch=1024)
    engine = dt.from_pretrained(model, options=options)
    begun = max(
        (int(path.name.removeprefix("state-")) for path in folder.glob("state-*")), default=0
    )
    if begun:
        engine.load_state(folder / f"state-{begun}")
    rewards = []
    for step in range(begun + 1, steps + 1):
        rewards.append(train_step(engine, tokenizer))
        if step % save_every == 0:
            engine.save_state(folder / f"state-{step}")
    engine.save_pretrained(folder / f"hf-{steps}")
    return rewards


if __name__ == "__main__":
    print(main(sys.argv[1], sys.argv[2]) if len(sys.argv) == 3 else __doc__)
