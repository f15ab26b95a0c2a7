"""Steps and evaluation of every algorithm of preferences: on each layout as on one rank; reward models elsewhere."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

import dovetail as dt
from dovetail.data.examples import Preference
from dovetail.recipe.schema import make_recipe
from dovetail.rl.algorithms.table import make_algorithm
from dovetail.rl.custom import Custom
from dovetail.rl.preference_task import PreferenceTask
from tests.helpers.harness import run
from tests.helpers.parity_configs import VOCAB, moe_configs, save_tiny, tiny_configs
from tests.helpers.tolerances import (
    CURVE_FP32,
    MODEL_FP32,
    SUM_ORDER,
    assert_close,
    assert_sum_close,
)

LENGTHS = (
    (9, 4),
    (5, 12),
    (7, 7),
    (3, 14),
    (11, 2),
    (6, 8),
)  # of completions; prompts have 3 tokens
BUDGET = 24  # of the longest pair 23
EPS = 1e-4  # a move g / (|g| + eps) has g's absolute error over eps, where g is its rounding alone
ALGORITHMS: dict[str, dict[str, Any]] = {
    "dpo": {},
    "dpo-ipo": {"loss": "ipo", "num_mini_batches": 2},
    "dpo-early": {"precompute_ref_log_probs": True},
    "kto": {"desirable_weight": 1.5, "num_mini_batches": 2},
    "cpo": {"label_smoothing": 0.1},
    "simpo": {"cpo_alpha": 0.3},
    "orpo": {"beta": 0.4},
    "reward": {"center_rewards_coefficient": 0.02},
}
HALVES = (("dpo", "dpo-ipo", "kto", "reward"), ("dpo-early", "cpo", "simpo", "orpo"))
LAYOUTS = ("tp=2", "dp=2", "pp=2", "cp=2")


def rows_of() -> list[Preference]:
    draw, rows = torch.Generator().manual_seed(3), []
    for number, lengths in enumerate(LENGTHS):
        prompt = torch.randint(1, VOCAB, (3,), generator=draw).tolist()
        own = [torch.randint(1, VOCAB, (n,), generator=draw).tolist() for n in lengths]
        pair = [dt.Sequence([*prompt, *ids], [False] * 3 + [True] * len(ids)) for ids in own]
        rows.append(Preference(number, *pair))
    return rows


def task_of(name: str, policy: Any, reference: Any = None) -> Any:
    algorithm = {"name": name.partition("-")[0], **ALGORITHMS[name]}
    trainer = {"prompts_per_step": 5, "steps": 3}
    recipe = make_recipe(
        {
            "model": {"path": "m"},
            "data": {"train": "d"},
            "run_dir": "r",
            "algorithm": algorithm,
            "trainer": trainer,
        }
    )
    rows = rows_of()
    if name == "kto":  # as many completions, without pairs
        rows = [replace(row, **{("chosen", "rejected")[i % 2]: None}) for i, row in enumerate(rows)]
    wanted = reference if recipe.algorithm.needs_reference else None
    made: Any = make_algorithm(recipe, Custom())
    given = {"recipe": recipe, "policy": policy, "reference": wanted, "algorithm": made}
    sets = {"more": rows[2:]}
    return PreferenceTask(**given, rows=rows, held_out=rows[:3], eval_sets=sets, max_tokens=18)


def engine_of(path: Path, layout: dt.Layout, head: Any = "lm", engine: Any = "auto") -> Any:
    optim = dt.OptimSettings(lr=1e-3, eps=EPS)
    options = dt.EngineOptions(
        optim=optim, tokens_per_batch=BUDGET, fresh_head_seed=1, head_bias=False, engine=engine
    )
    return dt.from_pretrained(
        path, layout=layout, dtype=torch.float64, device="cpu", head=head, options=options
    )


def train(
    path: Path,
    layout: dt.Layout,
    names: tuple[str, ...],
    saved: Path | None = None,
    engine: str = "auto",
) -> dict[str, Any]:
    """Rows of metrics and the weights after one step and an evaluation of each algorithm in turn."""
    found: dict[str, Any] = {}
    lm, reference = engine_of(path, layout, engine=engine), engine_of(path, layout, engine=engine)
    lm.train_step(
        dt.PackedBatch.pack([row.rejected for row in rows_of()[1:] if row.rejected]), likelihood
    )  # apart from the reference
    for name in names:
        policy = engine_of(path, layout, "value", engine) if name == "reward" else lm
        task = task_of(name, policy, reference)
        row = {**task.step(0), **task.evaluate(1)}
        assert not row.get("skipped") and task.reference is (
            reference if name in ("dpo", "dpo-ipo", "kto") else None
        )
        found |= {f"{name} {key}": x for key, x in row.items() if isinstance(x, float)}
        found |= {f"{name} {key}": x.clone() for key, x in policy.weights(torch.float64)}
        if name == "reward" and saved is not None:
            policy.save_pretrained(saved)
            batch = dt.PackedBatch.pack([row.chosen for row in rows_of() if row.chosen])
            found["scores"] = policy.values(batch)[batch.cu_seqlens[1:].long() - 1]
    return found


def likelihood(stats: dt.TokenStats, batch: dt.PackedBatch) -> dt.Loss:
    return dt.Loss(-stats.logprob.sum(), batch.mask.sum(), {})


DIFFERENCES = {  # of two means of the same row
    "rewards/margins": ("rewards/chosen", "rewards/rejected"),
    "log_odds_chosen": ("logps/chosen", "logps/rejected"),
}


def assert_same(found: dict[str, Any], alone: dict[str, Any], tolerance: float, what: str) -> None:
    """Fail unless the numbers and weights of `found` are those of one rank, differences against their terms."""
    expected = {name: torch.as_tensor(x, dtype=torch.float64) for name, x in alone.items()}
    for name, value in found.items():
        a = torch.as_tensor(value, dtype=torch.float64)
        b = expected[name]
        ending = next((key for key in DIFFERENCES if name.endswith(key)), None)
        if ending is None:
            assert_close(a, b, tolerance, f"{what}: {name}")
            continue
        row = name.removesuffix(ending)
        terms = [expected[row + term] for term in DIFFERENCES[ending]]
        assert_sum_close(a, b, terms, tolerance, f"{what}: {name}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(tiny_configs()["llama_tied"], folder)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[dict[str, Any], ...]:
    """What one rank gives for each half of the algorithms."""
    return tuple(
        run(1, train, folder, dt.Layout(), names, folder / "reward")[0] for names in HALVES
    )


@pytest.mark.parametrize(
    ("layout", "half"),
    [
        pytest.param(layout, half, marks=[pytest.mark.soak] * (half != number % 2))
        for number, layout in enumerate(LAYOUTS)
        for half in (0, 1)
    ],
)
def test_every_layout_is_one_rank(
    layout: str, half: int, folder: Path, alone: tuple[dict[str, Any], ...]
) -> None:
    """Every algorithm on two layouts of the four."""
    for found in run(2, train, folder, dt.Layout.parse(layout), HALVES[half]):
        assert found.keys() == alone[half].keys() - {"scores"}
        assert_same(found, alone[half], SUM_ORDER, layout)


@pytest.mark.parametrize(
    ("layout", "half"),
    [
        ("dp=2", 0),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in (("dp=2", 1), ("cp=2", 0), ("cp=2", 1))
        ),
    ],
)
def test_the_engine_of_transformers_does_the_same(
    layout: str, half: int, folder: Path, alone: tuple[dict[str, Any], ...]
) -> None:
    for found in run(2, train, folder, dt.Layout.parse(layout), HALVES[half], None, "transformers"):
        assert_same(found, alone[half], CURVE_FP32, layout)  # its norms and angles are float32


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["dp=2,ep=2", "tp=2,dp=2,ep=2"])
def test_experts(layout: str, tmp_path: Path) -> None:
    save_tiny(moe_configs()["qwen3_moe"], tmp_path)
    cut, names = dt.Layout.parse(layout), ("dpo", "kto", "orpo", "reward")
    one = run(1, train, tmp_path, dt.Layout(), names)[0]
    for found in run(cut.num_ranks, train, tmp_path, cut, names):
        assert_same(found, one, SUM_ORDER, layout)


def test_metrics(alone: tuple[dict[str, Any], ...]) -> None:
    whole = {**alone[0], **alone[1]}
    for name in ALGORITHMS:
        row = {key.partition(" ")[2]: x for key, x in whole.items() if key.startswith(f"{name} ")}
        margin = row["rewards/chosen"] - row["rewards/rejected"]
        assert row["rewards/margins"] == pytest.approx(margin)
        for prefix in ("eval_", "eval/more/"):
            assert {
                f"{prefix}{key}"
                for key in ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins")
            } <= row.keys()
        assert ("logps/chosen" in row) == (name != "reward")
        assert ("nll_loss" in row) == (name in ("cpo", "simpo", "orpo"))
    live, early = (whole[f"{name} eval_rewards/chosen"] for name in ("dpo-ipo", "dpo-early"))
    assert live != early  # after other steps


def test_a_saved_reward_model_scores_alike_in_transformers(
    folder: Path, alone: tuple[dict[str, Any], ...]
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder / "reward").eval()
    assert model.config.num_labels == 1
    scores: list[Tensor] = []
    with torch.no_grad():
        scores += [
            model(torch.tensor([row.chosen.ids])).logits[0, 0] for row in rows_of() if row.chosen
        ]
    assert_close(torch.stack(scores), alone[0]["scores"].float(), MODEL_FP32)
