# %% [markdown]
# # A reward of your own
#
# A reward is a Python function in a file of yours. Functions of verl's form and of TRL's run as they are. Here a
# model learns to add two digits, `3+4?` -> `07`, from two functions and their weighted sum. `first_run.py` explains
# recipe and output.

# %%
import shutil
import sys
from pathlib import Path

import tiny

WORK = Path("runs/tutorial-reward")
shutil.rmtree(WORK, ignore_errors=True)  # of an earlier try
tiny.language_model(WORK / "model")
sums = [(a, b) for a in range(10) for b in range(10)]
tiny.write_rows(
    WORK / "train.jsonl", [{"prompt": f"{a}+{b}?", "answer": f"{a + b:02d}"} for a, b in sums]
)

# %% [markdown]
# ## Two forms
#
# `close` has verl's form: one completion, one number (or a mapping with `score`). `ended` has TRL's form: lists in, a
# list out. Every column of a row is an argument: `answer` reaches verl's form as `ground_truth`, the rest is in
# `extra_info`. `finish` is `stop` if the model ended its completion by itself and `length` if
# `rollout.max_new_tokens` cut it.

# %%
(WORK / "my_rewards.py").write_text('''\
def close(data_source, solution_str, ground_truth, extra_info):
    """1 for the right sum, less the farther off it is, 0 for no number."""
    text = solution_str.strip()
    if not text.isdigit():
        return 0.0
    return 1.0 / (1 + abs(int(text) - int(ground_truth)))


def ended(prompts, completions, finish, **columns):
    return [float(end == "stop") for end in finish]


def best_of_group(prompts, completions, answer, **columns):
    """The sample nearest to the answer gets 1, all others 0: needs the whole group (batch: group)."""
    errors = [abs(int(text) - int(right)) if text.isdigit() else 1000 for text, right in zip(completions, answer)]
    return [float(error == min(errors)) for error in errors]


def broken(data_source, solution_str, ground_truth, extra_info):
    return extra_info["difficulty"]  # no row has such a column
''')

# %% [markdown]
# ## Test it before you train with it
#
# It is plain Python. Give it right, wrong and strange completions: the model will find every gap.

# %%
sys.path.insert(0, str(WORK))
import my_rewards

for completion in ("07", "7", "09", "", "7 7", "-7", "9" * 30):
    print(f"{completion[:9]!r:12} {my_rewards.close(None, completion, '07', {}):.3g}")
assert my_rewards.close(None, "07", "07", {}) == 1.0
assert my_rewards.best_of_group([], ["05", "08", "x"], ["07"] * 3) == [0.0, 1.0, 0.0]

# %% [markdown]
# ```text
# '07'         1
# '7'          1
# '09'         0.333
# ```
#
# `7` is rewarded as `07` is: if only two digits are right, the function has to say so. Rewards are what you write,
# not what you mean.
#
# ## A weighted sum
#
# `import: "module:function"` is looked up in the directory of the recipe, then among installed modules. With several
# rewards `metrics.jsonl` has the mean of each.

# %%
RECIPE = WORK / "recipe.yaml"
RECIPE.write_text(f"""\
model: {{path: {WORK}/model}}
algorithm: {{name: grpo}}
data: {{train: {WORK}/train.jsonl}}
rollout: {{samples_per_prompt: 16, max_new_tokens: 3}}
reward:
  - {{import: "my_rewards:close"}}
  - {{import: "my_rewards:ended", weight: 0.2}}
optim: {{lr: 3.0e-3}}
trainer: {{steps: 25, prompts_per_step: 16}}
run_dir: {WORK}/run
""")
tiny.sh(f"dovetail train {RECIPE} --device cpu")
metrics = tiny.read_rows(WORK / "run/metrics.jsonl")
for row in metrics[::8]:
    parts = "  ".join(
        f"{name} {row[name]:.2f}" for name in ("reward_mean", "reward/close", "reward/ended")
    )
    print(f"step {row['step']:2}  {parts}")
assert metrics[-1]["reward_mean"] > metrics[0]["reward_mean"] + 0.2

# %% [markdown]
# The parts tell what is learned first: here to end the completion, which is easier than to add. If such a part alone
# carries the reward, lower its weight.
#
# ## A reward that fails
#
# An exception, NaN, a hang or `os._exit` costs one sample (`reward_errors` counts them). If all of the first eight
# samples fail, or more than 5 % of a step, the run ends with exit code 2 and the first cause, before time is lost:
#
# ```text
# ...
# dovetail: step 1: the reward failed on all of the first 8 of 256 samples (the others were not scored); first cause: ...
# ```

# %%
tiny.sh(
    f"dovetail train {RECIPE} --device cpu 'reward={{import: \"my_rewards:broken\"}}' run_dir={WORK}/broken",
    exit_code=2,
)

# %% [markdown]
# ## Groups, judges, programs
#
# ```yaml
# reward: {import: "my_rewards:best_of_group", batch: group}   # all samples of a prompt in one call; step: all of a step
# reward: {name: math_verify}                                  # pip install 'dovetail-rl[math]'
# reward: {name: code, timeout_seconds: 60}                    # runs the completion's program against tests, without network
# reward: {judge: {url: "http://localhost:8000/v1", model: qwen, prompt: "Rate 0 to 10: {completion}", scale: 10}}
# reward: {model: {path: path/to/reward-model}}                # a sequence classifier, sharded like the policy
# ```
#
# `async` functions are awaited, `reward.concurrency` calls at a time. A function that returns None leaves its sample
# out. Functions run in processes of their own (`reward.workers`), with a limit of `reward.timeout_seconds` a sample.
# All of it: `dovetail docs rewards`.
