# %% [markdown]
# # Many GPUs
#
# A layout says how a model is sharded: `tp` cuts layers, `pp` stacks them on several ranks, `cp` cuts sequences, `dp`
# cuts the batch and, by FSDP2, the parameters. Ranks = tp x pp x cp x dp. Every layout computes the same numbers as
# one rank. This file shows it on a CPU with four ranks; on GPUs the commands are the same.

# %%
import shutil
from pathlib import Path

import tiny

WORK = Path("runs/tutorial-layouts")
shutil.rmtree(WORK, ignore_errors=True)  # of an earlier try
tiny.language_model(WORK / "model")
rows = [{"prompt": f"{a},{b}?", "answer": str(max(a, b))} for a in range(10) for b in range(10)]
tiny.write_rows(WORK / "train.jsonl", rows)
RECIPE = WORK / "recipe.yaml"
RECIPE.write_text(f"""\
model: {{path: {WORK}/model}}
algorithm: {{name: grpo}}
data: {{train: {WORK}/train.jsonl}}
rollout: {{samples_per_prompt: 8, max_new_tokens: 3}}
reward: {{name: number_only}}
optim: {{lr: 1.0e-3}}
trainer: {{steps: 3, prompts_per_step: 16, save_every: 0}}
run_dir: {WORK}/one
""")

# %% [markdown]
# ## One rank, and four
#
# The command starts its ranks itself. Under torchrun or Slurm it uses those that it is given.

# %%
tiny.sh(f"dovetail train {RECIPE} --device cpu")
LAYOUTS = ("tp=2,dp=2", "pp=2,cp=2")
for layout in LAYOUTS:
    tiny.sh(f"dovetail train {RECIPE} --device cpu --layout {layout} run_dir={WORK}/{layout}")

# %% [markdown]
# The same prompts, the same samples, the same losses: sampling noise depends on seed, step, prompt and sample, not on
# the rank that draws it, and losses are sums that are divided once, by the count over all ranks.

# %%
one = tiny.read_rows(WORK / "one/metrics.jsonl")
for layout in LAYOUTS:
    rows = tiny.read_rows(WORK / layout / "metrics.jsonl")
    for name in ("reward_mean", "loss", "grad_norm"):
        off = max(
            abs(a[name] - b[name]) / max(1.0, abs(b[name])) for a, b in zip(rows, one, strict=True)
        )
        print(f"{layout}  {name:12} differs by at most {off:.1e}")
        assert off < 1e-4

# %% [markdown]
# ```text
# tp=2,dp=2  reward_mean  differs by at most 0.0e+00
# tp=2,dp=2  loss         differs by at most 7.5e-09
# ```
#
# ## A layout that does not fit is refused at once
#
# Before any rank starts, all mistakes together:

# %%
tiny.sh(f"dovetail train {RECIPE} --device cpu --layout tp=3 run_dir={WORK}/three", exit_code=2)

# %% [markdown]
# ```text
# dovetail: layout tp=3: tp=3 does not fit this qwen2 model: 4 attention heads are not a multiple of 3; ...
# ```
#
# ## Which layout?
#
# | model and machine | layout |
# |---|---|
# | it fits on one GPU with 16 bytes a parameter (weights, gradients, moments) and activations | `dp=8`: FSDP2 shards all of it over eight GPUs anyway |
# | activations of one sequence are too large (long contexts) | `cp=2` or more: shards the sequence; `trainer.activation_checkpointing: selective` first |
# | layers are wide (32B and more), GPUs have NVLink | `tp=2` to `tp=8`, inside of one machine |
# | several machines with slow links | `pp` between machines, tp and dp inside; give a step 2 x pp micro-batches or more |
# | mixtures of experts | `ep=8`: divides dp x cp and adds no ranks |
#
# Change one thing at a time and compare `tokens_per_second` in `metrics.jsonl`, or let `python -m bench` measure
# layouts. The sampler has its own layout, `rollout.layout: {tp: 2}`, for models that do not fit on one GPU without
# training state. What each kind costs in memory and messages: `dovetail docs parallelism`, `dovetail docs moe`.
#
# A run may change its layout on the way: stop it, and start it again with another `--layout`. Any layout reads any
# other's checkpoint.
#
# ## The same on GPUs
#
# ```console
# $ dovetail train recipe.yaml --layout tp=2,dp=4                        # eight GPUs of this machine
#
# $ torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node1:29500 \
#     -m dovetail train recipe.yaml --layout tp=4,dp=4                   # on each of two machines
# ```
#
# With Slurm, one torchrun a machine:
#
# ```bash
# #!/bin/bash
# #SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64 --requeue --signal=TERM@120
# head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" \
#     --rdzv-endpoint "$head:29500" -m dovetail train recipe.yaml --layout tp=4,dp=4
# ```
#
# SIGTERM, two minutes before the time limit, saves a checkpoint; the requeued job runs the same command, which
# resumes, and a finished run that is started again says so and exits with 0. `run_dir` must be one directory that all
# machines see.
