# %% [markdown]
# # A loop of your own
#
# `dovetail train` runs a recipe. Here the loop is yours: what is sampled, what it is worth, which loss, when to update,
# when to save. The model learns to name the larger of two digits, `3,8?` -> `8`, as in `first_run.py`.
#
# Every call of an engine is collective: a loop that `torchrun --nproc-per-node 8` starts is the same on eight ranks, and
# `dt.from_pretrained(..., layout=dt.Layout(tp=2))` shards the model.

# %%
import shutil
from pathlib import Path

import tiny
import torch

import dovetail as dt

WORK = Path("runs/tutorial-loop")
shutil.rmtree(WORK, ignore_errors=True)  # of an earlier try
tokenizer = tiny.language_model(WORK / "model")


def make_engine(path: Path) -> dt.SamplingEngine:
    options = dt.EngineOptions(optim=dt.OptimSettings(lr=3e-3), tokens_per_batch=1024)
    return dt.from_pretrained(path, device="cpu", options=options)


engine = make_engine(WORK / "model")

# %% [markdown]
# ## Sample, and reward
#
# `engine.generate` takes lists of ids and returns completions in order, with the log-probs that the sampler drew them
# by. A reward is whatever you compute from them.

# %%
PROMPTS, SAMPLES = [f"{a},{b}?" for a in range(10) for b in range(10)], 8


def reward(prompt: str, text: str) -> float:
    right = str(max(prompt[0], prompt[2]))
    return 0.5 * (text[:1] == right) + 0.5 * (text == right)


def sample(engine: dt.SamplingEngine, prompts: list[str]) -> tuple[list[dt.Turn], torch.Tensor]:
    """Turns, and their rewards [prompts, SAMPLES]."""
    ids, end = [tokenizer.encode(prompt) for prompt in prompts], [tokenizer.eos_token_id]
    drawn = engine.generate(ids, n=SAMPLES, max_tokens=3, temperature=1.0, stop_token_ids=end)
    texts = [tokenizer.decode(each.ids, skip_special_tokens=True) for each in drawn]
    rewards = [reward(prompts[each.row], text) for each, text in zip(drawn, texts, strict=True)]
    return drawn, torch.tensor(rewards).view(-1, SAMPLES)


# %% [markdown]
# ## A loss
#
# A loss gets log-probs of the tokens that count, and the batch's fields at the same tokens. It returns a sum and what
# to divide it by, never a mean: Dovetail cuts a batch over ranks and micro-batches, and divides once, at the end.


# %%
def policy_loss(stats: dt.TokenStats, batch: dt.PackedBatch) -> dt.Loss:
    """REINFORCE with the ratio to the sampler."""
    ratio, count = (stats.logprob - batch.fields["old_logprob"]).exp(), batch.mask.sum()
    return dt.Loss(
        -(ratio * batch.fields["advantage"]).sum(),
        count,
        {"ratio": dt.Sum(ratio.detach().sum(), count)},
    )


# %% [markdown]
# ## A step
#
# The mask says which ids were drawn and count; a field is a number for a whole sequence, or one for each id. Gradients of
# several `forward_backward` add up until `optim_step`.


# %%
def train_step(engine: dt.SamplingEngine, step: int) -> float:
    prompts = PROMPTS[step % 4 :: 4]
    drawn, rewards = sample(engine, prompts)
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten().tolist()
    rows = []
    for each, advantage in zip(drawn, advantages, strict=True):
        prompt, new = tokenizer.encode(prompts[each.row]), len(each.ids)
        fields = {"advantage": advantage, "old_logprob": [0.0] * len(prompt) + [*each.log_probs]}
        rows.append(dt.Sequence([*prompt, *each.ids], [False] * len(prompt) + [True] * new, fields))
    for half in (rows[::2], rows[1::2]):
        engine.forward_backward(dt.PackedBatch.pack(half), policy_loss)
    report = engine.optim_step()
    print(
        f"step {step}  reward {rewards.mean():.3f}  loss {report.loss:.4f}  ratio {report.metrics['ratio']:.4f}"
    )
    return float(rewards.mean())


# %% [markdown]
# ## Save, and go on
#
# `save_state` writes weights, optimizer and schedule, and a dictionary of yours; `load_state` returns that. Any layout
# reads what any other wrote.

# %%
STEPS, SAVED = 14, 10
rewards = []
for step in range(1, STEPS + 1):
    rewards.append(train_step(engine, step))
    if step == SAVED:
        engine.save_state(WORK / "state", {"step": step})
assert rewards[-1] > rewards[0] + 0.1

# %% [markdown]
# ```text
# step 1  reward 0.015  loss -0.0003  ratio 1.0000
# step 14  reward 0.292  loss 0.0066  ratio 1.0000
# ```
#
# A new process would do what this cell does. It ends with the same weights, to the bit: draws depend on `seed`, the
# number of updates, prompt and sample alone.

# %%
again = make_engine(WORK / "model")
begun = again.load_state(WORK / "state")["step"]
for step in range(begun + 1, STEPS + 1):
    train_step(again, step)
weights = dict(engine.weights())
print(
    "the same weights:", all(torch.equal(tensor, weights[name]) for name, tensor in again.weights())
)
again.save_pretrained(WORK / "hf")

# %% [markdown]
# ```text
# the same weights: True
# ```
#
# `runs/tutorial-loop/hf` is a Hugging Face directory. If the recipe's loop is nearly what you want, keep it, and change
# what you need by callbacks: `dt.Trainer(recipe, callbacks=[...])`. Both are explained in `dovetail docs library`.
