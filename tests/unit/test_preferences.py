"""Whole runs of preferences from a recipe, examples/dpo.py, what rows and recipes are refused, and mismatched completions."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import dovetail as dt
from bench.models import one_rank
from dovetail.data.examples import Limits, load_preferences
from dovetail.errors import ConfigError, DataError
from dovetail.recipe.schema import make_recipe
from dovetail.rl.algorithms.kto import mismatched
from examples import dpo
from tests.golden.job import MODEL, play, sft, write_inputs
from tests.helpers.tokenizers import make_tokenizer
from tests.helpers.tolerances import OP_FP32

ROOT = Path(__file__).parents[2]
STEPS = 6


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": f"{a + b:02d}", "rejected": f"{a}"}
        for a in range(6)
        for b in range(6)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with one_rank():
        yield folder


def recipe_of(inputs: Path, run_dir: Path, **algorithm: Any) -> dict[str, Any]:
    rows = str(inputs / "pairs.jsonl")
    data, trainer = {"train": rows, "eval": rows}, {"steps": STEPS, "tokens_per_batch": 64}
    return sft(inputs, run_dir, algorithm=algorithm, data=data, trainer=trainer)


def test_dpo_learns_and_a_precomputed_reference_is_the_live_one(
    inputs: Path, tmp_path: Path
) -> None:
    live = play(recipe_of(inputs, tmp_path / "live", name="dpo"))
    early = play(recipe_of(inputs, tmp_path / "early", name="dpo", precompute_ref_log_probs=True))
    assert live.before["eval_loss"] == pytest.approx(
        math.log(2), rel=OP_FP32
    )  # ln 2: policy and reference are one
    assert live.after["eval_rewards/accuracies"] > 0.9 and live.after["eval_rewards/margins"] > 0
    assert [row["loss"] for row in live.rows] == [row["loss"] for row in early.rows]


def test_a_reward_model_is_loaded_by_transformers(inputs: Path, tmp_path: Path) -> None:
    done = play(recipe_of(inputs, tmp_path, name="reward"))
    assert done.after["eval_rewards/accuracies"] > max(0.9, done.before["eval_rewards/accuracies"])
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        good, bad = (
            float(model(torch.tensor([[*tokenizer.encode(x), tokenizer.eos_token_id]])).logits)
            for x in ("2+3=05", "2+3=2")
        )
    assert good > bad


def test_the_example(inputs: Path, tmp_path: Path) -> None:
    reports = dpo.main(str(inputs / MODEL), str(tmp_path / "out"), dt.Layout())
    assert reports[-1].loss < reports[0].loss and reports[-1].metrics["rewards/margins"] > 0
    assert len((ROOT / "examples/dpo.py").read_text().splitlines()) < 60


def test_mismatched_completions() -> None:
    rows = [([1, 2], [3, 4, 5]), ([6], [7]), ([8, 9, 1], [2, 2])]
    batch = dt.PackedBatch.pack(
        dt.Sequence([*p, *c], [False] * len(p) + [True] * len(c)) for p, c in rows
    )
    wrong = mismatched(batch, 4)
    assert [x.tolist() for x in wrong.tokens.split(wrong.lengths)] == [
        [1, 2, 2, 2],
        [6, 3, 4, 5],
        [8, 9, 1, 7],
    ]
    assert [int(x.sum()) for x in wrong.mask.split(wrong.lengths)] == [2, 3, 1]


def test_lengths_are_cut_as_by_trl(tmp_path: Path) -> None:
    """keep_start and keep_end of each sequence; a pair that does not fit together, or loses a completion, is refused."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "abcd", "chosen": "efgh", "rejected": "i"}) + "\n")

    def load(**limits: Any) -> list[list[int]]:
        (row,) = load_preferences(
            file, make_tokenizer(), Limits(vocab_size=1000, **limits), paired=True
        )
        assert row.chosen is not None and row.rejected is not None
        return [list(row.chosen.ids), list(row.rejected.ids)]

    chosen, rejected = load()
    n = len(rejected)
    assert len(chosen) > n
    assert load(max_tokens=n, truncate="right") == [chosen[:n], rejected]
    assert load(max_tokens=n, truncate="left") == [chosen[-n:], rejected]
    with pytest.raises(
        DataError,
        match=r"the pair has .* since both share a micro-batch; raise trainer.tokens_per_batch",
    ):
        load(together=len(chosen) + n - 1)
    with pytest.raises(DataError, match="tokens, but at most 2 fit"):
        load(max_tokens=2, truncate="right")
    file.write_text(json.dumps({"prompt": "a", "completion": "b", "label": True}) + "\n")
    with pytest.raises(DataError, match="are for algorithm kto"):
        load()


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (
            {"name": "dpo", "loss": "ipo", "label_smoothing": 0.1},
            "label_smoothing has no meaning for the loss ipo",
        ),
        ({"name": "dpo", "label_smoothing": 0.5}, "label_smoothing"),
        ({"name": "kto", "num_mini_batches": 9}, "kto compares the rows of an optimizer step"),
    ],
)
def test_mistakes_in_a_recipe(
    inputs: Path, tmp_path: Path, algorithm: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_recipe(recipe_of(inputs, tmp_path, **algorithm))
