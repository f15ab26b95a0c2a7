"""The commands and snippets of README.md and docs/*.md, and a folder with the files they name."""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as arrow
import pyarrow.parquet as parquet
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

from tests.helpers.parity_configs import moe_configs, save_tiny
from tests.helpers.program import VOCAB, make_model, write_rows
from tests.helpers.report_runs import make_run, sample
from tests.helpers.tokenizers import make_tokenizer

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTION = re.compile(r"(\w+):")

MODELS = ("MODEL", "STUDENT", "TEACHER", "CRITIC", ".cache/dovetail/smollm2-135m-instruct")
ASKED = {"prompt": "What is 17 + 25?", "answer": "42"}  # as in README.md
CHAT = [{"role": "user", "content": "What is 2+2?"}]
PLAIN = ("train", "eval", "prompts", "test", "aime", "FILE", "rows")
QUICKSTART = ("runs/inputs/largest_train", "runs/inputs/largest_eval")
OTHERS = {
    "completions": {"prompt": "What is 17 + 25?", "completion": " 42"},  # as in README.md
    "gsm8k_test": {"prompt": CHAT, "answer": "4"},
    "math": {"problem": "2+2=", "meta": {"target": "4"}},
    "pairs": {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
    "demonstrations": {"prompt": "2+2=", "completion": "4"},
}
RECIPE = {
    "model": {"path": "M"},
    "layout": {"dp": 2},
    "data": {"train": "train.jsonl"},
    "rollout": {"samples_per_prompt": 2, "max_new_tokens": 4},
    "trainer": {"steps": 6, "prompts_per_step": 2, "save_every": 1},
    "run_dir": "runs/first",
}
WHOLE = {"model", "data", "run_dir"}  # sections of a recipe that needs no more
TRL = """trl grpo --model_name_or_path M --dataset_name train.jsonl \\
    --max_steps 2 --output_dir runs/trl
"""
VERL = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
    data.train_files=train.parquet \\
    actor_rollout_ref.model.path=M actor_rollout_ref.rollout.n=2 data.max_response_length=4 \\
    data.train_batch_size=8 trainer.total_training_steps=2 trainer.default_local_dir=runs/verl
"""
METRIC = """
def boxed_share(completions, **columns):
    return 0.5
"""
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return 1.0
"""
OPTIMIZER = """
import torch


class Lion(torch.optim.SGD):
    def __init__(self, params, lr=1e-3, beta=0.9):
        super().__init__(params, lr=lr, momentum=beta)
"""
MODULES = {"my_metrics": METRIC, "my_rewards": REWARD, "mine": OPTIMIZER}


class Block(NamedTuple):
    """A fenced block: its page, the line of its fence, its language and its text."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """The words of each line after a prompt, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ ")]

    @property
    def output(self) -> str:
        """What the block shows below its commands."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return "\n".join(line for line in lines if not line.startswith("$ "))

    @property
    def recipes(self) -> Iterator[str]:
        """The block as recipes, with what they lack; a section that comes again begins another."""
        sections: dict[str, list[str]] = {}
        name = ""
        for line in self.text.splitlines():
            begins = SECTION.match(line)
            if begins and begins[1] in sections:
                yield _whole(sections)
                sections = {}
            name = begins[1] if begins else name
            sections.setdefault(name, []).append(line)
        yield _whole(sections)


def _whole(sections: dict[str, list[str]]) -> str:
    lines = [line for section in sections.values() for line in section]
    if not set(sections) >= WHOLE:
        rest = {name: keys for name, keys in RECIPE.items() if name not in sections}
        lines.append(yaml.safe_dump(rest))
    return "\n".join(lines)


def blocks(language: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page.relative_to(ROOT).as_posix(), line, match[1], match[2]))
    return [block for block in found if block.language == language]


def make_folder(folder: Path) -> Path:
    """A directory with everything that the pages name but finished runs and sharded checkpoints."""
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = make_model(folder / "M", max_position_embeddings=4096, **heads)
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "runs" / "inputs").mkdir(parents=True)
    (folder / ".cache" / "dovetail").mkdir(parents=True)
    for name in MODELS:
        (folder / name).symlink_to(model)
    save_tiny(moe_configs()["qwen3_moe"], folder / "MIXTURE")
    _make_reward_model(folder / "path" / "to" / "reward-model")
    _make_adapter(model, folder / "adapter")
    for name in (*PLAIN, *QUICKSTART):
        write_rows(folder / f"{name}.jsonl", [ASKED, {"prompt": "2+2=", "answer": "4"}] * 8)
    for name, row in OTHERS.items():
        write_rows(folder / f"{name}.jsonl", [row] * 4)
    verl = {
        "data_source": "math",
        "prompt": CHAT,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 0},
    }
    parquet.write_table(arrow.Table.from_pylist([verl] * 8), folder / "train.parquet")
    for name in ("recipe", "RECIPE"):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(RECIPE))
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    shutil.copy(ROOT / "examples" / "own_loss.py", folder)
    (folder / "grpo.sh").write_text(TRL)
    (folder / "run_grpo.sh").write_text(VERL)
    return folder


def make_runs(folder: Path) -> None:
    for name in ("first", "second"):
        run = make_run(folder / "runs" / name, 3)
        (run / "hf").mkdir()
        shown = {**sample(17, 0, 3), "id": "17", "prompt": "13 + 4"}
        with (run / "rollouts" / "step_000003.jsonl").open("a") as file:
            file.write(json.dumps(shown) + "\n")


def _make_adapter(model: Path, path: Path) -> None:
    adapter = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model), LoraConfig(target_modules=["q_proj"])
    )
    adapter.save_pretrained(str(path))


def _make_reward_model(path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=1,
        pad_token_id=0,
    )
    LlamaForSequenceClassification(config).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
