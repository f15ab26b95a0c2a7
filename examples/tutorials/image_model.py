# %% [markdown]
# # An image model
#
# A vision-language model learns by GRPO to name the color of a picture: 1 red, 2 green, 3 blue. The model is a
# Qwen2.5-VL of random weights with one token for every 8 x 8 pixels, so this runs on a CPU, in about a minute. Needs
# pillow: `pip install 'dovetail-rl[vision]'`.

# %%
import random
import shutil
from pathlib import Path

import tiny
from PIL import Image

WORK = Path("runs/tutorial-image")
shutil.rmtree(WORK, ignore_errors=True)  # of an earlier try
tiny.vision_model(WORK / "model")

# %% [markdown]
# ## Rows with images
#
# A row is a conversation whose content has parts. `path` is relative to the file of the rows; `base64` works too, and
# verl's parquet rows with `<image>` and a column `images` are read as they are. Nothing is downloaded: an `http`
# address is refused.

# %%
COLORS = ((220, 30, 30), (30, 220, 30), (30, 30, 220))
draw, rows = random.Random(0), []
(WORK / "pictures").mkdir()
for i in range(60):
    color = draw.randrange(3)
    picture = Image.new("RGB", (16, 16), COLORS[color])
    for _ in range(12):
        picture.putpixel(
            (draw.randrange(16), draw.randrange(16)), tuple(draw.randrange(256) for _ in range(3))
        )
    picture.save(WORK / f"pictures/{i}.png")
    content = [{"type": "image", "path": f"pictures/{i}.png"}, {"type": "text", "text": "?"}]
    rows.append({"prompt": [{"role": "user", "content": content}], "answer": str(color + 1)})
tiny.write_rows(WORK / "train.jsonl", rows[:40])
tiny.write_rows(WORK / "eval.jsonl", rows[40:])

# %% [markdown]
# ## The recipe
#
# Two keys differ from a run on text. `rollout.backend: transformers` samples with the model's own `generate`: the
# embedded sampler has no image towers. And image tokens count in `tokens_per_batch`: a picture of 1,000 x 1,000
# pixels is about 1,300 tokens of Qwen2.5-VL, so look at the line `rows` of the output before you choose it.

# %%
RECIPE = WORK / "recipe.yaml"
RECIPE.write_text(f"""\
model: {{path: {WORK}/model}}
algorithm: {{name: grpo}}
data: {{train: {WORK}/train.jsonl, eval: {WORK}/eval.jsonl}}
rollout: {{backend: transformers, samples_per_prompt: 16, max_new_tokens: 2}}
reward: {{name: number_only}}
optim: {{lr: 3.0e-3, betas: [0.9, 0.95]}} # a real model wants about 1e-6
trainer: {{steps: 60, prompts_per_step: 8, stop_at_reward: 0.9}}
run_dir: {WORK}/run
""")
tiny.sh(f"dovetail train {RECIPE} --device cpu")
metrics = tiny.read_rows(WORK / "run/metrics.jsonl")
assert max(row["reward_mean"] for row in metrics[-10:]) > metrics[0]["reward_mean"] + 0.4

# %% [markdown]
# Every prompt has 7 tokens here: the marks around the image, its four tokens, and the question.
#
# ```text
# rows     40 of 7 to 7 tokens (median 7); 20 held out
# before training: eval_reward_mean 0.000  eval_solved 0.000
# ...
# eval_reward_mean   0.000 -> 0.820
# eval_solved        0.000 -> 0.800
# ```
#
# The reward stays near 0.3 for a while: the model has learned to answer one color always. It then learns to look.
#
# ## The result, and real models
#
# `hf/` has the processor's files too. With a real model, such as Qwen2.5-VL-3B-Instruct, change `model.path`,
# `model.dtype: bfloat16`, `optim.lr` and lengths; `examples/recipes/image_grpo.yaml` is such a recipe. Layouts of
# vision-language models are cp and dp (FSDP2): `--layout cp=2,dp=4` shards long sequences over two GPUs and
# everything else over eight.

# %%
from transformers import AutoModelForImageTextToText

AutoModelForImageTextToText.from_pretrained(WORK / "run/hf")
print(sorted(path.name for path in (WORK / "run/hf").iterdir()))
