"""Runs with several rewards: a function, a judge and a reward model, against their parts computed by hand and by transformers."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from tests.helpers.program import (
    VOCAB,
    here,
    on_ranks,
    read_rows,
    refusal,
    write_recipe,
    write_rows,
)
from tests.helpers.tokenizers import make_tokenizer
from tests.helpers.tolerances import MODEL_FP32, assert_sum_close

USER = {"role": "user", "content": "hi"}
ROWS = [{"prompt": "ab", "answer": "c"}, {"prompt": [USER], "answer": "h", "id": "hi"}]
JUDGE = {"url": "http://127.0.0.1:9/v1", "model": "m", "prompt": "{completion}", "retries": 0}
MODULE = """
def length(completions, prompts):
    return [float(len(c if isinstance(c, str) else c[0]["content"])) for c in completions]

print("IMPORTED")

def nothing(completions, prompts):
    print("CALLED for", len(completions))
    return [None] * len(completions)

def logs(completions, completion_ids, trainer_state, log_metric, log_extra, **columns):
    log_metric("tokens", sum(map(len, completion_ids)) / len(completion_ids))
    log_extra("step", [trainer_state.global_step] * len(completions))
    return [trainer_state.epoch + i for i in range(len(completions))]

def fails(completions, prompts):
    raise RuntimeError("broken on purpose")
"""


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward") / "model"
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_labels=1, initializer_range=0.5, pad_token_id=0,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def by_transformers(folder: Path, row: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A reward model's score as TRL asks for it, and the products of its head, whose sum it is.

    Of the rendered conversation, or of the joined text, without special tokens.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    text = row["prompt"]
    if isinstance(text, str):
        text += row["completion"]
    else:
        text = tokenizer.apply_chat_template(
            [*text, {"role": "assistant", "content": row["completion"]}], tokenize=False
        )
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        score = model(**ids).logits[0, 0]
        hidden = model.model(**ids).last_hidden_state[0, -1]
        return score, hidden * model.score.weight[0]


@pytest.mark.parametrize("layout", ["tp=1", "tp=2"])
def test_a_sum_of_rewards_is_that_of_its_parts(
    layout: str, model: Path, reward_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    reward = [
        {"import": "mine:length", "weight": 0.5},
        {"model": {"path": str(reward_model)}, "weight": -2.0},
        {"import": "mine:nothing", "weight": 100.0},
    ]
    recipe = write_recipe(
        tmp_path / "r.yaml",
        model,
        write_rows(tmp_path / "rl.jsonl", ROWS),
        algorithm={"name": "grpo"},
        reward=reward,
    )
    ended = (
        [here("train", recipe)]
        if layout == "tp=1"
        else on_ranks(2, "train", recipe, "--layout", layout)
    )
    assert {each.code for each in ended} == {0}, ended
    printed = (tmp_path / "run/logs/rewards.log").read_text()
    assert "IMPORTED" in printed
    assert "CALLED for 1" in printed
    shown = capfd.readouterr()
    assert "CALLED" not in shown.out + shown.err
    metrics = read_rows(tmp_path / "run" / "metrics.jsonl")
    for row in metrics:
        samples = read_rows(tmp_path / "run" / "rollouts" / f"step_{row['step']:06}.jsonl")
        assert {type(sample["prompt"]) for sample in samples} == {str, list}
        for sample in samples:
            parts = sample["rewards"]
            assert parts["length"] == len(sample["completion"])
            assert parts["nothing"] is None
            score, terms = by_transformers(reward_model, sample)
            assert_sum_close(torch.tensor(parts["model"]), score, terms, MODEL_FP32)
            assert sample["reward"] == 0.5 * parts["length"] - 2.0 * parts["model"]
        rewards = [sample["reward"] for sample in samples]
        assert row["reward_mean"] == statistics.mean(rewards)
        assert (row["reward_min"], row["reward_max"]) == (min(rewards), max(rewards))
        assert row["reward_std"] == statistics.pstdev(rewards)
        for name in ("length", "model"):
            values = [sample["rewards"][name] for sample in samples]
            assert row[f"reward/{name}"] == statistics.mean(values)
        assert row["reward/nothing"] is None


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (
            [{"import": "mine:length"}, {"import": "mine:fails"}],
            "completion 'c': RuntimeError: broken on purpose",
        ),
        (
            [{"import": "mine:nothing"}, {"import": "mine:nothing"}],
            "3 steps in a row have no sample with a reward",
        ),
        (
            [{"import": "mine:length"}, {"import": "mine:absent"}],
            "mine.py has no function 'absent'; it has ",
        ),
        (
            [{"import": "mine:length", "wieght": 2}],
            "unknown key reward.wieght; did you mean reward.weight?",
        ),
        ({"model": {"path": "nowhere"}}, "nowhere"),
        ({"judge": JUDGE}, ": ConnectionError: the server at http://127.0.0.1:9/v1: "),
        (
            {"judge": {**JUDGE, "key_env": "NO_SUCH"}},
            "variable NO_SUCH, which key_env names, is not set\n",
        ),
    ],
)
def test_what_is_wrong_with_rewards_is_named(
    reward: Any, words: str, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    rows = write_rows(tmp_path / "rl.jsonl", ROWS[:1])
    trainer = {"steps": 5, "save_every": 0}
    recipe = write_recipe(
        tmp_path / "r.yaml",
        model,
        rows,
        algorithm={"name": "grpo"},
        trainer=trainer,
        reward=json.loads(json.dumps(reward)),
    )
    assert words in refusal(here("train", recipe))


def test_what_a_trl_function_logs(model: Path, tmp_path: Path) -> None:
    """Metrics are means over the calls of a step, extra columns stand in the rows of samples."""
    (tmp_path / "mine.py").write_text(MODULE)
    rows = write_rows(tmp_path / "rl.jsonl", ROWS)
    recipe = write_recipe(
        tmp_path / "r.yaml",
        model,
        rows,
        algorithm={"name": "grpo"},
        reward={"import": "mine:logs", "batch": "group"},
        data={"eval": str(rows)},
        trainer={"eval_every": 1},
    )
    assert here("train", recipe).code == 0
    metrics = read_rows(tmp_path / "run" / "metrics.jsonl")
    for step, row in enumerate(metrics):
        samples = read_rows(tmp_path / "run" / "rollouts" / f"step_{row['step']:06}.jsonl")
        assert [sample["extra"] for sample in samples] == [{"step": step}] * len(samples)
        lengths = [len(sample["token_ids"]) for sample in samples]
        assert row["reward_metric/tokens"] == statistics.mean(lengths)
        assert {sample["reward"] - step for sample in samples} == {0, 1}, "two rows: one step"
        assert row["eval_reward_metric/tokens"] > 0
