"""The main job in small for tests: a character model of 60k parameters, sums of two digits, and one run of a recipe.

Tests of the whole loop build their recipes here and play them on the harness's ranks; `plant` swaps one part for a
wrong one, so that a test can show what it would catch.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from dovetail.factory.run import Run, build_run
from dovetail.factory.setup import Start, prepare
from dovetail.recipe.schema import make_recipe
from dovetail.rl.step_metrics import Row
from dovetail.run.trainer import train
from examples.quickstart.scratch import character_tokenizer
from tests.golden.bugs import planted

MODEL, SFT_ROWS, RL_ROWS, REWARDS = "model", "sft.jsonl", "rl.jsonl", "digit_rewards.py"
REWARD_MODULE = '''
def closeness(data_source, solution_str, ground_truth, extra_info):
    """1 for the right sum, less the farther off it is; 0 for what is not a number."""
    if not solution_str.isdigit():
        return 0.0
    return 1.0 / (1 + abs(int(solution_str) - int(ground_truth)))

def share_of_digits(prompts, completions, **columns):
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]

def nothing(prompts, completions, **columns):
    return [None for _ in completions]

def some(prompts, completions, **columns):
    return [None if text[:1] in "02468" else float(len(text)) for text in completions]

def broken(data_source, solution_str, ground_truth, extra_info):
    raise RuntimeError("broken on purpose")
'''


@dataclass
class Played:
    """What one rank saw of a run: its rows, the ids that were sampled (on the first rank's disk), and how it ended."""

    rows: list[Row]
    ids: list[list[list[int]]]  # [step][sample]
    before: Row
    after: Row
    stopped: bool


def write_inputs(folder: Path, *, depth: int = 2, tied: bool = True) -> Path:
    """Model, data and rewards of all the tests' recipes; the same everywhere."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = character_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=depth,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
    model.config.pad_token_id = (
        None  # the sampler draws it, too, and in the curves its row learned like any other
    )
    model.save_pretrained(folder / MODEL)
    tokenizer.save_pretrained(folder / MODEL)
    sums = [(a, b) for a in range(10) for b in range(10)]
    random.Random(0).shuffle(sums)
    rows = [{"prompt": f"{a}+{b}=", "answer": f"{a + b:02d}"} for a, b in sums]
    demonstrations = [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows]
    for name, lines in ((RL_ROWS, rows), (SFT_ROWS, demonstrations)):
        (folder / name).write_text(
            "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
        )
    (folder / REWARDS).write_text(REWARD_MODULE, encoding="utf-8")
    return folder


def sft(inputs: Path, run_dir: Path, **sections: Any) -> dict[str, Any]:
    """Supervised fine-tuning as plain data; `sections` are merged into the recipe's."""
    return _merged(
        {
            "model": {"path": str(inputs / MODEL)},
            "algorithm": {"name": "sft"},
            "data": {"train": str(inputs / SFT_ROWS)},
            "optim": {"lr": 3e-3, "betas": [0.9, 0.95]},
            "trainer": {
                "steps": 10,
                "prompts_per_step": 16,
                "tokens_per_batch": 512,
                "save_every": 0,
            },
            "run_dir": str(run_dir),
        },
        sections,
    )


def rl(inputs: Path, run_dir: Path, name: str = "grpo", **sections: Any) -> dict[str, Any]:
    """RL by one of the algorithms, with a graded reward of the user's own."""
    return _merged(
        {
            "model": {"path": str(inputs / MODEL)},
            "algorithm": {"name": name},
            "data": {"train": str(inputs / RL_ROWS)},
            "rollout": {"samples_per_prompt": 4, "max_new_tokens": 3},
            "reward": {"import": f"{Path(REWARDS).stem}:closeness", "workers": 1},
            "optim": {"lr": 1e-3, "betas": [0.9, 0.95]},
            "trainer": {
                "steps": 3,
                "prompts_per_step": 8,
                "tokens_per_batch": 512,
                "save_every": 0,
            },
            "run_dir": str(run_dir),
        },
        sections,
    )


def built(given: Mapping[str, Any]) -> Run:
    """The run of a recipe, on the ranks of the default process group. Collective."""
    recipe = make_recipe(given)
    return build_run(
        prepare(recipe, Start(torch.device("cpu"), Path(str(recipe.data.train)).parent))
    )


def play(given: Mapping[str, Any], bug: str = "") -> Played:
    """Run a recipe from its first step to its last file, with one part swapped for a wrong one where asked. Collective."""
    job = built(given)
    try:
        job.start()
        with planted(bug):
            outcome = train(job.task, job.directory, job.recipe.trainer)
        job.directory.finish(outcome)
    finally:
        job.close()
    ids = sampled_ids(Path(given["run_dir"]))
    return Played(outcome.rows, ids, outcome.before, outcome.after, outcome.stopped)


def sampled_ids(run_dir: Path) -> list[list[list[int]]]:
    """Every step's completions as a run wrote them down: [step][sample] -> ids."""
    files = sorted((run_dir / "rollouts").glob("step_*.jsonl"))
    return [
        [json.loads(line)["token_ids"] for line in file.read_text().splitlines()] for file in files
    ]


def _merged(base: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    full = dict(base)
    for name, section in more.items():
        full[name] = {**full.get(name, {}), **section} if isinstance(section, Mapping) else section
    return full
