# %% [markdown]
# # Your first RL run
#
# A language model learns, by reinforcement alone, to name the larger of two digits: `3,8?` -> `8`. It starts from
# random weights, so that this file needs no download and no GPU: half a minute on two cores. The steps are those of a
# 7B on eight GPUs; the last cell says what changes.
#
# Run it as it is (`python examples/tutorials/first_run.py`), or cell by cell: VS Code and Jupyter (with jupytext)
# open files with `# %%` as notebooks.

# %%
import shutil
from pathlib import Path

import tiny

WORK = Path("runs/tutorial-first")
shutil.rmtree(WORK, ignore_errors=True)  # of an earlier try

# %% [markdown]
# ## Model and rows
#
# A model is a Hugging Face directory. Rows are JSONL with a `prompt` and an `answer`; `reward: {name: ...}` compares
# the two. Rows of verl (parquet), TRL, OpenAI and others are read as they are: `dovetail docs data`.

# %%
tiny.language_model(WORK / "model")
rows = [{"prompt": f"{a},{b}?", "answer": str(max(a, b))} for a in range(10) for b in range(10)]
held_out = rows[::5]
tiny.write_rows(WORK / "train.jsonl", [row for row in rows if row not in held_out])
tiny.write_rows(WORK / "eval.jsonl", held_out)

# %% [markdown]
# ## The recipe
#
# One YAML file is one run. What you know by other names: `samples_per_prompt` is TRL's `num_generations` and verl's
# `rollout.n`; `prompts_per_step` counts prompts, over all GPUs (verl's `train_batch_size`; TRL counts completions of
# one GPU); `tokens_per_batch` replaces every micro-batch size: sequences are packed without padding. The whole table:
# `dovetail docs recipe`.
#
# The built-in reward `number_only` gives 1 for exactly the number, and 0.3 or 0.1 for less. Such steps in between
# matter here: a random model is almost never exactly right, and GRPO learns only from prompts whose samples differ in
# reward.

# %%
RECIPE = WORK / "recipe.yaml"
RECIPE.write_text(f"""\
model: {{path: {WORK}/model}}
algorithm: {{name: grpo}}
data: {{train: {WORK}/train.jsonl, eval: {WORK}/eval.jsonl}}
rollout: {{samples_per_prompt: 16, max_new_tokens: 3}}
reward: {{name: number_only}}
optim: {{lr: 3.0e-3}} # a real model wants about 1e-6
trainer: {{steps: 60, prompts_per_step: 16, stop_at_reward: 0.9}}
run_dir: {WORK}/run
""")

# %% [markdown]
# ## Train
#
# This is the command of the shell; the helper `sh` only shows its output here. Everything is checked before anything
# slow starts: `--dry-run` stops there. The first lines say what will run:
#
# ```text
# dovetail 0.1.0: grpo
# model    runs/tutorial-first/model (qwen2, 76.4 k parameters), float32
# layout   tp=1 (1 rank)
# ...
# before training: eval_reward_mean 0.000  eval_solved 0.000
# step 1/60  loss 0.0021  reward 0.003  grad 0.488  entropy 3.135  kl 0.0000  length 2.9  lr 3.00e-03  tok/s 7,610  s 0.3
# ```

# %%
tiny.sh(f"dovetail train {RECIPE} --device cpu")

# %% [markdown]
# The mean reward of a step passes 0.9 after about 45 steps. The first ten steps look as if nothing happened: rewards
# are rare, and the curve is flat until some samples are right by chance. `entropy` falls from 3 (any of 32 tokens) as
# the model commits itself; a note says so, since in a long run on a real model that would be too early. On one
# machine the run ended with
#
# ```text
# eval_reward_mean   0.000 -> 0.750
# eval_solved        0.000 -> 0.750
# ```
#
# `eval_solved` is the share of held-out prompts with reward 1 under greedy decoding: prompts that were never trained
# on.
#
# ## What is in run_dir
#
# `metrics.jsonl` has a row a step. Its keys are explained by `dovetail docs tracking`, the same ones go to wandb and
# others.

# %%
metrics = tiny.read_rows(WORK / "run/metrics.jsonl")
for row in metrics[::10]:
    print(
        f"step {row['step']:2}  reward {row['reward_mean']:.2f}  equal groups {row['equal_groups']:.0%}"
    )
assert metrics[-1]["reward_mean"] > metrics[0]["reward_mean"] + 0.5

# %% [markdown]
# Rewards alone can lie; look at what the model writes. `dovetail report RUN` makes one HTML file of curves and
# samples.

# %%
tiny.sh(f"dovetail rollouts {WORK}/run --limit 2")

# %% [markdown]
# ## The result
#
# `hf/` is the trained model as a Hugging Face directory, with tokenizer and config: transformers, vLLM and SGLang
# load it as it is.

# %%
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(WORK / "run/hf")
model = AutoModelForCausalLM.from_pretrained(WORK / "run/hf")
prompt = tokenizer("3,8?", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=3, do_sample=False)[0]))

# %% [markdown]
# ## Go on, or break it
#
# - Start the same command again: a finished run says so and changes nothing; one that was killed goes on where it
#   was, bit for bit.
# - `dovetail train recipe.yaml optim.lr=6e-3 run_dir=runs/fast` overrides keys. With this rate entropy collapses
#   within 30 steps and the reward stays near 0.5: the model is sure of wrong answers, all samples of a prompt are
#   equal, and nothing is left to learn from.
# - `dovetail docs when-something-goes-wrong` lists symptoms, reasons and keys.
#
# ## With a real model
#
# ```yaml
# model: {path: Qwen/Qwen2.5-0.5B-Instruct@COMMIT, dtype: bfloat16} # or a directory; a hub name is pinned to a commit
# data: {train: gsm8k.jsonl}                                      # prompts as messages: the chat template is applied
# rollout: {samples_per_prompt: 8, max_new_tokens: 512}
# reward: {name: numeric_match}
# optim: {lr: 1.0e-6}
# ```
#
# Next: `own_reward.py`, `image_model.py`, `many_gpus.py`.
