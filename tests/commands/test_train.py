"""`dovetail train`: what a run leaves behind, which setting wins, and that a dry run checks all and does nothing."""

import errno
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dovetail.checkpoint.reader import ShardedReader
from dovetail.recipe.schema import load_recipe
from tests.helpers.checkpoints import assert_same_tensors, digests, tensors_of
from tests.helpers.parity_configs import tiny_configs, tiny_model
from tests.helpers.program import (
    Ended,
    here,
    make_model,
    on_ranks,
    read_rows,
    refusal,
    write_recipe,
    write_rows,
)
from tests.helpers.tolerances import CURVE_FP32, MODEL_FP32

ALWAYS = {
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "step_seconds",
    "tokens_per_second",
    "peak_memory_gib",
}
RL = {
    "reward_mean",
    "response_length_mean",
    "entropy_mean",
    "kl_mean",
    "clip_fraction",
    "reward_errors",
}
SFT_ROWS = [{"prompt": a, "completion": b} for a, b in (("ab", "cd"), ("x", ""), ("hi", "ho"))]
RL_ROWS = [{"prompt": "ab", "answer": "c"}, {"prompt": "hi", "answer": "h", "id": "hi"}]
ALGORITHMS, LAYOUTS = ("sft", "grpo", "ppo", "rloo"), ("tp=1", "tp=2", "dp=2")
QUICK = {
    "sft-dp=2",
    "grpo-tp=2",
    "ppo-dp=2",
    "rloo-tp=1",
    "ppo-tp=1",
}  # each algorithm, each layout
USER: dict[str, Any] = {"role": "user", "content": "hi"}
CHAT = {
    "prompt": [USER],
    "answer": "h",
    "messages": [USER, {"role": "assistant", "content": "ho"}],
}  # of either kind


@pytest.fixture
def sft_rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "sft.jsonl", SFT_ROWS)


@pytest.fixture
def rl_rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rl.jsonl", RL_ROWS)


@pytest.mark.parametrize(
    ("algorithm", "layout"),
    [
        pytest.param(a, b, marks=[pytest.mark.soak] * (f"{a}-{b}" not in QUICK))
        for a, b in product(ALGORITHMS, LAYOUTS)
    ],
)
def test_rows_of_metrics_have_every_key(
    algorithm: str, layout: str, model: Path, sft_rows: Path, rl_rows: Path, tmp_path: Path
) -> None:
    data = sft_rows if algorithm == "sft" else rl_rows
    if layout == "dp=2":  # a process for chat templates takes its time
        write_rows(data, [*read_rows(data)[:1], CHAT])
    argv = [
        "train",
        write_recipe(tmp_path / "r.yaml", model, data, algorithm={"name": algorithm}),
        "--layout",
        layout,
    ]
    codes = [here(*argv).code] if layout == "tp=1" else [ended.code for ended in on_ranks(2, *argv)]
    assert set(codes) == {0}
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row.keys() >= (ALWAYS if algorithm == "sft" else ALWAYS | RL)
        assert all(isinstance(row[key], (int, float)) for key in row if key != "skipped"), row
        assert "flops" not in str(list(row)), "a count for mfu, not a metric"
    samples = sorted((tmp_path / "run" / "rollouts").iterdir())
    assert [path.name for path in samples] == (
        [] if algorithm == "sft" else ["step_000001.jsonl", "step_000002.jsonl"]
    )


def test_a_run_directory_holds_what_was_promised(
    model: Path, rl_rows: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(
        tmp_path / "r.yaml",
        model,
        rl_rows,
        algorithm={"name": "grpo"},
        trainer={"steps": 5, "save_every": 2, "keep_last": 2},
    )
    ended = here("train", recipe, "trainer.seed=7")
    assert (ended.code, ended.err) == (0, "")
    run = tmp_path / "run"
    names = {path.name for path in run.iterdir()}
    assert names == {
        "config.yaml",
        "metrics.jsonl",
        "console.log",
        "logs",
        "rollouts",
        "checkpoints",
        "hf",
    }
    assert load_recipe(run / "config.yaml") == load_recipe(recipe, ["trainer.seed=7"])
    links = {path.name: path for path in (run / "checkpoints").iterdir() if path.is_symlink()}
    assert set(links) == {"step_000004", "step_000005"}, "the latest two of steps 2, 4 and the last"
    for name, link in links.items():
        assert link.resolve().name.startswith(f"{name}.")
        assert link.resolve().parent == (run / "checkpoints").resolve()
        ShardedReader(link).verify()
    assert len(list((run / "checkpoints").iterdir())) == 5, (
        "two directories, their links and `latest`: no rests of older or unfinished ones"
    )
    (first, *_) = read_rows(run / "rollouts" / "step_000001.jsonl")
    assert first.keys() >= {
        "id",
        "prompt",
        "completion",
        "answer",
        "reward",
        "token_ids",
        "log_probs",
        "finish",
    }


def test_the_final_model_loads_in_transformers_as_it_is(
    model: Path, sft_rows: Path, tmp_path: Path
) -> None:
    assert here("train", write_recipe(tmp_path / "r.yaml", model, sft_rows)).code == 0
    hf = tmp_path / "run" / "hf"
    same = {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    for name in same:
        assert (hf / name).read_bytes() == (model / name).read_bytes(), name
    loaded, info = AutoModelForCausalLM.from_pretrained(hf, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert GenerationConfig.from_pretrained(hf).eos_token_id == 3
    tokenizer = AutoTokenizer.from_pretrained(hf)
    assert "<|im_start|>" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], tokenize=False
    )
    out = tmp_path / "out.jsonl"
    rows = write_rows(tmp_path / "ids.jsonl", [{"input_ids": [5, 6, 7]}])
    assert here("score", "--model", hf, "--data", rows, "--out", out).code == 0
    with torch.no_grad():
        logp = torch.log_softmax(loaded(torch.tensor([[5, 6, 7]])).logits[0], -1)
    assert read_rows(out)[0]["log_probs"] == pytest.approx(
        [float(logp[0, 6]), float(logp[1, 7])], abs=MODEL_FP32
    )
    before = load_file(model / "model.safetensors")
    assert not torch.equal(
        load_file(hf / "model.safetensors")["lm_head.weight"], before["lm_head.weight"]
    )


def test_saved_tensors_keep_the_sources_dtype_or_take_the_one_asked_for(
    sft_rows: Path, tmp_path: Path
) -> None:
    source = make_model(tmp_path / "bf16", dtype=torch.bfloat16)
    recipe = write_recipe(tmp_path / "r.yaml", source, sft_rows, trainer={"save_every": 2})
    assert here("train", recipe).code == 0
    hf = tmp_path / "run" / "hf"
    assert {t.dtype for t in tensors_of(hf).values()} == {torch.bfloat16}
    assert (hf / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert here("train", recipe, "model.save_dtype=float32", f"run_dir={tmp_path}/b").code == 0
    assert {t.dtype for t in tensors_of(tmp_path / "b/hf").values()} == {torch.float32}
    assert json.loads((tmp_path / "b/hf/config.json").read_text())["dtype"] == "float32"


def test_training_goes_on_from_a_sharded_checkpoint_and_from_a_converted_one(
    model: Path, sft_rows: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path / "r.yaml", model, sft_rows, trainer={"save_every": 2})
    assert [ended.code for ended in on_ranks(2, "train", recipe, "--layout", "tp=2")] == [0, 0]
    assert here("convert", tmp_path / "run/hf", tmp_path / "cut", "--to", "sharded").code == 0
    starts = [tmp_path / "run/checkpoints/step_000002", tmp_path / "run/hf", tmp_path / "cut"]
    found = []
    for number, start in enumerate(starts):
        given = [f"model.path={start}", f"run_dir={tmp_path}/{number}", "trainer.save_every=0"]
        assert here("train", recipe, *given).code == 0
        found.append([row["loss"] for row in read_rows(tmp_path / str(number) / "metrics.jsonl")])
    assert found[0] == found[1] == found[2]


def test_flags_beat_overrides_which_beat_the_recipe(
    model: Path, sft_rows: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(
        tmp_path / "r.yaml",
        model,
        sft_rows,
        layout={"tp": 4},
        optim={"lr": 1.0},
        model={"dtype": "float32"},
    )
    flags = ["--layout", "tp=1", "--dtype", "bfloat16"]
    ended = here(
        "train",
        recipe,
        "layout.tp=2",
        "model.dtype=float32",
        "optim.lr=0.5",
        "--trainer.steps",
        1,
        *flags,
        "--dry-run",
    )
    assert (ended.code, ended.err) == (0, "")
    shown = yaml.safe_load(ended.out)
    assert (shown["layout"]["tp"], shown["model"]["dtype"]) == (1, "bfloat16")
    assert (shown["optim"]["lr"], shown["trainer"]["steps"]) == (0.5, 1)
    (tmp_path / "shown.yaml").write_text(ended.out)
    given = ["layout.tp=1", "model.dtype=bfloat16", "optim.lr=0.5", "trainer.steps=1"]
    assert load_recipe(tmp_path / "shown.yaml") == load_recipe(recipe, given)


@pytest.mark.parametrize("algorithm", ["sft", "ppo"])
def test_a_dry_run_writes_nothing(
    algorithm: str, model: Path, sft_rows: Path, rl_rows: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(
        tmp_path / "r.yaml",
        model,
        sft_rows if algorithm == "sft" else rl_rows,
        algorithm={"name": algorithm},
    )
    before = sorted(tmp_path.rglob("*"))
    assert here("train", recipe, "--dry-run").code == 0
    first, second = on_ranks(2, "train", recipe, "--layout", "tp=2", "--dry-run")
    assert (first.code, second.code, second.out) == (0, 0, "")
    assert yaml.safe_load(first.out)["layout"]["tp"] == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_a_value_model_as_critic_under_its_own_layout(
    model: Path, rl_rows: Path, tmp_path: Path
) -> None:
    config = tiny_configs()["llama"]
    vars(config).update(vocab_size=260, eos_token_id=3)
    tiny_model(config, values=True, seed=1).save_pretrained(tmp_path / "critic")
    recipe = write_recipe(
        tmp_path / "r.yaml", model, rl_rows, algorithm={"name": "ppo", "kl_coef": 0.1}
    )
    given = [
        f"critic.path={tmp_path}/critic",
        "critic.layout.tp=2",
        f"reference.path={model}",
        "rollout.layout.tp=2",
    ]
    assert [ended.code for ended in on_ranks(2, "train", recipe, "--layout", "dp=2", *given)] == [
        0,
        0,
    ]
    assert {"critic_loss", "critic_grad_norm"} <= read_rows(tmp_path / "run/metrics.jsonl")[
        0
    ].keys()


def test_one_row_on_two_replicas(model: Path, tmp_path: Path) -> None:
    """A replica without rows takes part in every collective."""
    rows = write_rows(tmp_path / "rows.jsonl", SFT_ROWS[:1])
    recipe = write_recipe(tmp_path / "r.yaml", model, rows, trainer={"prompts_per_step": 1})
    assert [ended.code for ended in on_ranks(2, "train", recipe)] == [0, 0]
    assert here("train", recipe, f"run_dir={tmp_path}/one").code == 0
    curves = [
        [row["loss"] for row in read_rows(tmp_path / name / "metrics.jsonl")]
        for name in ("run", "one")
    ]
    assert curves[0] == pytest.approx(curves[1], rel=CURVE_FP32)


def test_an_empty_completion_trains_its_eos_alone(model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "completion": ""}])
    recipe = write_recipe(
        tmp_path / "r.yaml", model, rows, trainer={"prompts_per_step": 1, "steps": 1}
    )
    assert here("train", recipe).code == 0
    ids = write_rows(tmp_path / "ids.jsonl", [{"prompt": "ab", "completion": "<|im_end|>"}])
    assert here("score", "--model", model, "--data", ids, "--out", tmp_path / "o").code == 0
    (row,) = read_rows(tmp_path / "run/metrics.jsonl")
    assert row["loss"] == pytest.approx(
        -read_rows(tmp_path / "o")[0]["log_probs"][-1], abs=MODEL_FP32
    )


def test_stop_at_reward_and_evaluation(model: Path, rl_rows: Path, tmp_path: Path) -> None:
    (tmp_path / "always.py").write_text(
        "def one(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
    )
    recipe = write_recipe(
        tmp_path / "r.yaml",
        model,
        rl_rows,
        algorithm={"name": "grpo"},
        data={"eval": str(rl_rows)},
        reward={"import": "always:one"},
        trainer={"steps": 9, "stop_at_reward": 1.0},
    )
    assert (ended := here("train", recipe)).code == 0
    (row,) = read_rows(tmp_path / "run/metrics.jsonl")
    assert row["reward_mean"] == 1.0
    assert row["grad_norm"] == row["loss"] == 0.0, "rewards that are all equal have the advantage 0"
    assert "eval_solved        1.000 -> 1.000" in ended.out
    assert_same_tensors(tensors_of(tmp_path / "run/hf"), tensors_of(model))


def test_a_run_that_is_finished_is_left_alone(model: Path, sft_rows: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "r.yaml", model, sft_rows)
    (tmp_path / "run").mkdir()
    assert here("train", recipe, "--resume", "auto").code == 0, "an empty run_dir is a fresh start"
    before = digests(tmp_path / "run")
    for flags in (["--resume", "auto"], ["--dry-run"], []):
        assert (
            f"run_dir {tmp_path}/run holds this run, which is finished: "
            in here("train", recipe, *flags).err
        )
    assert "is not empty; choose another run_dir" in refusal(
        here("train", recipe, "--resume", "never")
    )
    assert "'sometimes'; expected auto, never or step=N" in refusal(
        here("train", recipe, "--resume", "sometimes")
    )
    assert digests(tmp_path / "run") == before


def test_a_directory_that_is_there_need_not_be_made(
    model: Path, sft_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mounted volume, for example, whose parent is not the user's."""
    (tmp_path / "run").mkdir()
    make_file = tempfile.TemporaryFile

    def refuse_parent(**options: Any) -> Any:
        if options.get("dir") == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied")
        return make_file(**options)

    monkeypatch.setattr("tempfile.TemporaryFile", refuse_parent)
    recipe = write_recipe(tmp_path / "r.yaml", model, sft_rows, trainer={"save_every": 2})
    assert here("train", recipe).code == 0
    assert "is no directory that you may write to" in refusal(
        here("train", recipe, f"run_dir={tmp_path}/other")
    )


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_directory_that_cannot_be_made_is_named(
    model: Path, sft_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc looks writable to root, and takes no directory."""
    monkeypatch.setattr("os.access", lambda *_: True)
    recipe = write_recipe(tmp_path / "r.yaml", model, sft_rows)
    told = refusal(here("train", recipe, "run_dir=/proc/dovetail"))
    assert told.startswith("run_dir /proc/dovetail cannot be written: /proc is no directory"), told


def test_evaluations_join_the_rows(model: Path, sft_rows: Path, tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path / "r.yaml",
        model,
        sft_rows,
        data={"eval": str(sft_rows)},
        trainer={"steps": 3, "eval_every": 2},
    )
    assert (ended := here("train", recipe)).code == 0
    found = [
        [key for key in row if key.startswith("eval")]
        for row in read_rows(tmp_path / "run/metrics.jsonl")
    ]
    assert found == [["eval_loss_before"], ["eval_loss"], ["eval_loss"]]
    assert (
        "before training: eval_loss" in ended.out
        and "note: trainer.prompts_per_step" not in ended.out
    )


def test_what_a_run_tells_as_it_starts_and_as_it_goes_on(
    model: Path, rl_rows: Path, tmp_path: Path
) -> None:
    """Keys without effect, at every start; how good the model was before training, at the first only."""
    recipe = write_recipe(
        tmp_path / "r.yaml",
        model,
        rl_rows,
        algorithm={"name": "grpo"},
        data={"eval": str(rl_rows)},
        critic={"lr": 1.0},
    )
    first = here("train", recipe, "trainer.steps=1", "trainer.save_every=1")
    (tmp_path / "run/hf").rename(tmp_path / "hf")  # the run is not finished
    second = here("train", recipe, "trainer.steps=2", "trainer.save_every=1")
    assert (first.code, second.code) == (0, 0), second
    for ended in (first, second):
        assert ended.out.count("note: without effect, since algorithm.name is grpo: critic.lr") == 1
        assert "reward_mean over" not in ended.out, "too few steps for a chart"
    assert [ended.out.count("before training: ") for ended in (first, second)] == [1, 0]


def test_a_defect_ends_with_1_and_a_traceback(
    model: Path, sft_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("dovetail.factory.trainer.train", broken)
    ended: Ended = here("train", write_recipe(tmp_path / "r.yaml", model, sft_rows))
    assert ended.code == 1
    assert ended.err.startswith("dovetail: this is a defect of ours\nTraceback")
    assert ended.err.endswith("ZeroDivisionError: planted\n")
