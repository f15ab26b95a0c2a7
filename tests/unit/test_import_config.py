"""`dovetail import-config` on configs as verl, TRL, OpenRLHF, axolotl and slime publish them (facts of them, typed anew).

What sizes mean there is in those projects' documentation; the numbers here are worked out from it by hand.
"""

import contextlib
import io
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dovetail.cli.main import run_command
from dovetail.errors import ConfigError
from dovetail.recipe.names import read_tables
from dovetail.recipe.schema import Recipe, load_recipe
from dovetail.recipe.yaml import dump_mapping, flat, read_mapping
from dovetail_tools.translation.importing import import_config, nested, to_yaml
from dovetail_tools.translation.shell import read_command

FOLDER = Path(__file__).parents[1] / "import_config"
# Of each file: keys of the recipe, and words of the lists of what it lacks.
CASES: Mapping[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {
    "verl_grpo.sh": (
        {
            "model.dtype": "bfloat16", "algorithm.name": "grpo", "algorithm.num_mini_batches": 4, "algorithm.kl_in": "loss",
            "algorithm.kl_coef": 0.001, "algorithm.kl_estimator": "k3", "algorithm.dual_clip": 3.0,
            "data.overlong_rows": "drop", "data.epochs": 15, "rollout.layout.tp": 2, "rollout.samples_per_prompt": 5,
            "optim.weight_decay": 0.01, "trainer.prompts_per_step": 1024, "trainer.tokens_per_batch": 40 * 1536,
            "trainer.loggers": [{"name": "wandb", "project": "gsm8k", "run_name": "qwen"}], "run_dir": "runs/verl",
        },
        ("ranks: 1 x 8 GPUs there", "what verl chooses by data_source"),
    ),
    "verl_dapo.sh": (
        {
            "model.path": "$HOME/models/Qwen2.5-Math-7B", "layout.cp": 4, "layout.cp_mode": "ulysses",
            "algorithm.num_mini_batches": 16, "algorithm.clip_high": 0.28, "algorithm.dual_clip": 10.0,
            "algorithm.drop_zero_std_groups": True, "algorithm.kl_coef": 0.0, "data.truncate": "left",
            "algorithm.correction": {"ratio": "token", "bounds": [0.5, 5.0], "outside": "mask"},
            "rollout.max_new_tokens": 8192, "trainer.steps": 400, "trainer.tokens_per_batch": 4 * 10240,
            "eval.sets": [{"name": "val", "data": "data/aime.parquet", "samples": 4, "temperature": 1.0}],
        },
        ("how often more prompts are sampled", "data.gen_batch_size=1536: not supported", "write what the variable stands for"),
    ),
    "verl_ppo.yaml": (
        {
            "algorithm.name": "ppo", "algorithm.kl_in": "reward", "algorithm.kl_coef": 0.002, "algorithm.kl_estimator": "k1",
            "algorithm.lam": 0.95, "algorithm.value_clip": 0.4, "critic.lr": 1e-5, "layout.tp": 4, "layout.pp": 2,
            "layout.virtual_stages": 1, "data.columns": {"prompt": "question"}, "reward.import": "gsm:my_score",
            "optim.warmup_steps": 20, "trainer.seed": 7, "trainer.keep_last": 5, "run_dir": "checkpoints/p/e",
            "rollout.max_new_tokens": 512, "trainer.tokens_per_batch": 1024,
        },
        ("lora_rank=32: not supported yet: LoRA", "critic.optim.clip_grad=0.5", "put rewards/gsm.py into"),
    ),
    "verl_sft.sh": (
        {
            "algorithm.name": "sft", "data.columns": {"messages": "conversation"}, "data.truncate": "right",
            "layout.cp": 2, "optim.betas": [0.9, 0.95], "optim.schedule": "cosine", "trainer.prompts_per_step": 96,
            "trainer.tokens_per_batch": 4096, "trainer.save_every": 0, "data.epochs": 2,
        },
        ("not needed here: nproc_per_node, engine",),
    ),
    "trl_grpo.sh": (
        {
            "algorithm.num_mini_batches": 2, "algorithm.aggregation": "sequence_sum", "algorithm.scale_by_std": False,
            "algorithm.clip_low": 0.1, "algorithm.clip_high": 0.3, "algorithm.kl_coef": 0.04,
            "algorithm.correction": {"ratio": "token", "bounds": [0.0, 2.5], "outside": "clamp"},
            "trainer.prompts_per_step": 8 * 8 * 8 // 8, "trainer.steps": 200, "trainer.save_every": 50,
            "optim.warmup_steps": 20, "optim.schedule": "linear", "trainer.seed": 42, "model.dtype": "bfloat16",
            "reward.parts": [{"name": "math_verify"}, {"import": "my.rewards:short", "weight": 0.5}],
        },
        ("use_vllm=true: here rollout.engines", "use_peft=true, lora_r=16", "use_bias_correction_kl"),
    ),
    "trl_grpo.yaml": (
        {
            "rollout.samples_per_prompt": 16, "rollout.max_new_tokens": 512, "trainer.prompts_per_step": 1,
            "reward.import": "rewards:score", "data.epochs": 3, "optim.schedule": "linear",
            "trainer.activation_checkpointing": "full",
        },
        ("that of one process, as theirs are not counted; multiply it",),
    ),
    "trl_dpo.yaml": (
        {
            "algorithm.name": "dpo", "algorithm.loss": "robust", "algorithm.beta": 0.05, "algorithm.label_smoothing": 0.1,
            "algorithm.precompute_ref_log_probs": True, "data.max_length": 2048, "data.truncate": "left", "optim.lr": 5e-7,
            "data.overlong_rows": "drop", "trainer.prompts_per_step": 32,
        },
        ("sync_ref_model", "the reference does not move"),
    ),
    "trl_sft.yaml": (
        {
            "algorithm.name": "sft", "data.train": "trl-lib/Capybara", "trainer.prompts_per_step": 16,
            "data.eval": [{"path": "trl-lib/Capybara", "split": "test"}], "trainer.tokens_per_batch": 2048,
            "data.truncate": "right", "trainer.eval_every": 100, "optim.lr": 2e-5,
        },
        ("packing: a row there has max_length tokens", "hub_token=...", "TRL trains all their tokens", "NAME@COMMIT"),
    ),
    "openrlhf_ppo.sh": (
        {
            "algorithm.name": "ppo", "algorithm.num_mini_batches": 8, "algorithm.kl_coef": 0.01,
            "algorithm.kl_in": "reward", "algorithm.value_clip": 0.5, "critic.lr": 9e-6, "optim.betas": [0.9, 0.95],
            "optim.schedule": "cosine", "optim.min_lr_ratio": 0.1, "reward.model.path": "models/rm",
            "rollout.max_new_tokens": 1024, "data.columns": {"prompt": "context_messages"},
            "trainer.loggers": [{"name": "wandb", "project": "rlhf"}],
        },
        ("reward.normalize_enable=true", "optim.warmup_steps: 0.03 of all steps there"),
    ),
    "openrlhf_grpo.sh": (
        {
            "algorithm.name": "grpo", "algorithm.num_mini_batches": 4, "algorithm.kl_in": "loss",
            "algorithm.kl_estimator": "k3", "algorithm.clip_high": 0.28, "layout.cp": 2, "data.max_prompt_length": 1024,
            "rollout.max_new_tokens": 3072, "reward.import": "reward_func:reward_func", "data.epochs": 2,
        },
        ("put ./reward_func.py into the directory",),
    ),
    "openrlhf_sft.sh": (
        {
            "algorithm.name": "sft", "trainer.prompts_per_step": 256, "trainer.tokens_per_batch": 2048, "data.epochs": 1,
            "data.columns": {"prompt": "question", "completion": "response"}, "optim.lr": 5e-6,
        },
        ("not needed here: ds.zero_stage, ds.packing_samples",),
    ),
    "axolotl_sft.yaml": (
        {
            "data.train": [{"path": "tatsu-lab/alpaca", "format": "alpaca"}, {"path": "chat.jsonl"}],
            "data.overlong_rows": "drop", "trainer.prompts_per_step": 8, "trainer.tokens_per_batch": 8192,
            "trainer.loggers": [{"name": "wandb", "project": "ax"}], "optim.schedule": "cosine",
            "optim.name": "muon",
        },
        ("trainer.save_every: saves_per_epoch there", "axolotl holds rows back", "sample_packing: a row there"),
    ),
    "axolotl_qlora.yaml": (
        {"data.truncate": "right", "trainer.steps": 500, "optim.warmup_steps": 10, "trainer.save_every": 100,
         "optim.name": "adamw8bit"},
        ("adapter: LoRA is not supported yet", "load_in_4bit=true: not supported yet", "lora_r=32, lora_alpha=16"),
    ),
    "axolotl_grpo.yaml": (
        {
            "algorithm.name": "grpo", "trainer.prompts_per_step": 4, "rollout.samples_per_prompt": 4,
            "algorithm.aggregation": "sequence_sum", "reward.import": "rewards:math", "optim.warmup_steps": 2,
            "algorithm.epochs": 2, "trainer.steps": 50,  # of 100 updates
            "data.train": [{"path": "openai/gsm8k", "subset": "main", "split": "train"}],
        },
        ("trl.use_vllm=true: not supported yet",),
    ),
    "slime_grpo.sh": (
        {
            "algorithm.num_mini_batches": 2, "algorithm.aggregation": "sequence", "algorithm.kl_estimator": "k3",
            "algorithm.correction": {"ratio": "token", "bounds": [0.0, 3.0], "outside": "clamp"},
            "layout.tp": 2, "layout.cp": 2, "trainer.tokens_per_batch": 2 * 9216, "trainer.steps": 3000,
            "optim.betas": [0.9, 0.98], "optim.min_lr_ratio": 0.1, "data.shuffle": True, "reward.name": "math_verify",
            "rollout.temperature": 0.8,
            "eval.sets": [{"name": "aime", "data": "aime-2024.jsonl", "samples": 16, "temperature": 0.8}],
        },
        ("ref_load=", "rm_type=deepscaler"),
    ),
}  # fmt: skip


def imported(*argv: str) -> tuple[int, str]:
    """Exit code and standard error."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = run_command(["import-config", *argv])
    return code, errors.getvalue()


@pytest.mark.parametrize("name", CASES)
def test_a_config_becomes_a_recipe_that_means_the_same(tmp_path: Path, name: str) -> None:
    out = tmp_path / "recipe.yaml"
    code, told = imported(str(FOLDER / name), "-o", str(out))
    assert code == 0, told
    load_recipe(out)
    expected, words = CASES[name]
    written = {**flat(read_mapping(out)), **read_mapping(out)["data"], **read_mapping(out)}
    written["algorithm.correction"] = read_mapping(out)["algorithm"].get("correction")
    got = {
        key: read_mapping(out)["data"]["columns"] if key == "data.columns" else written.get(key)
        for key in expected
    }
    assert got == expected
    for word in words:
        assert word in told
    assert "secret" not in told + out.read_text()


def test_a_recipe_says_where_its_values_are_from(tmp_path: Path) -> None:
    assert imported(str(FOLDER / "verl_grpo.sh"), "-o", str(tmp_path / "recipe.yaml"))[0] == 0
    lines = (tmp_path / "recipe.yaml").read_text().splitlines()
    assert {"  name: grpo", "  num_mini_batches: 4 # train_batch_size / ppo_mini_batch_size"} <= {
        *lines
    }


def test_what_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    for text, message in {
        "rl: kto\nbase_model: M\nsequence_len: 4\n": "rl: kto is not supported yet; sft, grpo, rloo and ppo are",
        "x: 1\n": "none of its names is known; say whose it is: --from verl|trl|openrlhf|axolotl|slime",
        "learning_rate: 1\nreport_to: none\n": "no name in it tells TRL's trainers apart; give --from trl-sft, trl-grpo",
    }.items():
        (tmp_path / "c.yaml").write_text(text)
        code, told = imported(str(tmp_path / "c.yaml"))
        assert (code, message in told) == (2, True), told
    assert imported(str(tmp_path / "c.yaml"), "--from", "trl-sft")[0] == 0
    assert (
        "--from trl-x: no such trainer" in imported(str(tmp_path / "c.yaml"), "--from", "trl-x")[1]
    )
    assert "--from megatron" in imported(str(tmp_path / "c.yaml"), "--from", "megatron")[1]
    (tmp_path / "c.sh").write_text("trl kto --beta 0.1 --model_name_or_path M")
    assert "kto of TRL is not supported yet" in imported(str(tmp_path / "c.sh"))[1]
    (tmp_path / "c.sh").write_text("echo 'open")
    assert "whose quotes are closed" in imported(str(tmp_path / "c.sh"))[1]


def test_variables_arrays_and_sums_of_a_script() -> None:
    script = """
    A=${OTHER:-$((2 * 3))} # a comment
    B="$A/x"; export C=$(date)
    MORE=(c=$((A+1)) 'd=[1, "two"]'
       e=$C)
    WORDS="i=1 j=2"
    if [ -n "$X" ]; then K=1; fi
    run --num_processes 4 main.py a=$B b=${UNKNOWN} "${MORE[@]}" \\
      f=$(( (A + 2) * 2 )) --g-h 1 -2.5 $WORDS --flag $@
    """
    words, settings = read_command(script)
    assert words[0] == "run"
    assert settings == {
        "num_processes": 4, "a": "6/x", "b": "$UNKNOWN", "c": 7, "d": [1, "two"], "e": "$COMMAND", "f": 16,
        "g_h": [1, -2.5, "i=1", "j=2"], "flag": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("project", "text", "expected", "words"),
    [
        ("verl", "rollout_is: sequence", {"ratio": "sequence", "bounds": [0.0, 2.0], "outside": "clamp"}, ""),
        ("verl", "bypass_mode: true", {"old": "sampler"}, ""),
        (
            "verl", "rollout_rs: seq_mean_k1, rollout_rs_threshold: 0.8_1.6",
            {"ratio": "geometric", "bounds": [1 / 1.6, 1 / 0.8], "outside": "drop"},
            "rollout_rs=seq_mean_k1 there rejects, with weights by rollout_is=None; here the ratio",
        ),
        ("verl", "rollout_rs: seq_max_k3, rollout_rs_threshold: 0.1", None, "rollout_rs=seq_max_k3 is not one of ours"),
        ("verl", "rollout_is: token, rollout_is_threshold: much", None, "could not convert string to float: 'much'"),
        ("verl", "rollout_is: null, rollout_is_threshold: 2.0", None, ""),
        ("trl-grpo", "correction: false", {"ratio": "none"}, ""),
        ("trl-grpo", "clip_max: null", None, "vllm_importance_sampling_clip_max=null is no bound there; give bounds"),
        ("openrlhf", "enable: true, type: icepop", {"ratio": "token", "bounds": [0.5, 5.0], "outside": "mask"}, ""),
        ("slime", "use_rollout_logprobs: true", {"old": "sampler"}, ""),
    ],
)  # fmt: skip
def test_corrections_of_other_projects(
    tmp_path: Path, project: str, text: str, expected: Any, words: str
) -> None:
    starts = {
        "verl": "algorithm.rollout_correction.",
        "openrlhf": "algo.advantage.is_correction_",
        "slime": "",
    }
    starts["trl-grpo"] = "vllm_importance_sampling_"
    lines = [starts[project] + pair for pair in text.split(", ")]
    lines += ["use_vllm: true"] if project == "trl-grpo" else []
    (tmp_path / "c.yaml").write_text("\n".join(lines))
    out = tmp_path / "recipe.yaml"
    code, told = imported(str(tmp_path / "c.yaml"), "--from", project, "-o", str(out))
    assert (code, read_mapping(out)["algorithm"].get("correction")) == (
        0,
        expected,
    ) and words in told, told


VERL = {
    "actor_rollout_ref.model.path": "/m",
    "data.train_files": "a",
    "algorithm.adv_estimator": "grpo",
}
TRL = {"model_name_or_path": "/m", "dataset_name": "a"}
USUAL: Mapping[str, Mapping[str, Any]] = {
    "verl": {**VERL, "data.train_batch_size": 8, "actor_rollout_ref.rollout.n": 4},
    "verl-sft": {"model.path": "/m", "data.train_files": "a"},
    "trl-grpo": {**TRL, "num_generations": 4, "per_device_train_batch_size": 4},
    "trl-sft": TRL,
    "trl-dpo": TRL,
    "openrlhf": {
        "actor.model_name_or_path": "/m",
        "data.prompt_dataset": "a",
        "algo.advantage.estimator": "group_norm",
    },
    "axolotl": {"base_model": "/m", "datasets": [{"path": "a"}], "micro_batch_size": 2},
    "axolotl-grpo": {"base_model": "/m", "rl": "grpo", "datasets": "a", "trl.num_generations": 4},
    "slime": {
        "hf_checkpoint": "/m",
        "prompt_data": "a",
        "n_samples_per_prompt": 4,
        "rollout_batch_size": 8,
    },
}
OWN = "reward.custom_reward_function.path"
NAN = float("nan")
ODD: tuple[Any, ...] = (
    "$LEN",
    0,
    -1,
    True,
    [],
    [1],
    ["a", "b"],
    [{}],
    {"a": 1},
    0.5,
    NAN,
    1e400,
    "1e-6",
    10**400,
)


def converted(folder: Path, project: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The recipe, and what the user is to decide or loses."""
    (folder / "c.yaml").write_text(dump_mapping(dict(given)))
    draft = import_config(folder / "c.yaml", "axolotl" if "axolotl" in project else project)
    assert to_yaml(draft, "c.yaml")
    return draft.recipe, "\n".join(
        [*draft.to_decide, *(f"{names}: {why}" for why, names in draft.left_out.items())]
    )


@pytest.mark.parametrize("drawn", [30, pytest.param(0, marks=pytest.mark.soak)])
def test_no_value_of_a_known_name_is_a_crash(tmp_path: Path, drawn: int) -> None:
    """So many times an odd value for each of ten names of a project; 0: every value of every name, alone."""
    pairs: list[tuple[str, dict[str, Any]]] = []
    draw = random.Random(0)
    for project in USUAL:
        title, _, kind = project.partition("-")
        table = read_tables(title)[kind if title != "axolotl" else ""]
        names = sorted(
            {m.name for m in table.meanings if m.key and "*" not in m.name} | table.defaults.keys()
        )
        if not drawn:
            pairs += [(project, {name: odd}) for name in names for odd in ODD]
        for _ in range(drawn // len(USUAL)):
            pairs.append((project, {name: draw.choice(ODD) for name in draw.sample(names, 10)}))
    for project, odd in pairs:
        with contextlib.suppress(ConfigError):
            recipe, _ = converted(tmp_path, project, {**USUAL[project], **odd})
            Recipe.model_validate(nested(recipe))


@pytest.mark.parametrize(
    ("project", "given", "expected", "words"),
    [
        # rewards
        ("verl", {OWN: "${oc.env:HOME}/r.py"}, {"reward.import": "r:compute_score"}, "put ${oc.env:HOME}/r.py into"),
        ("verl", {OWN: "${oc.env:R}"}, {"reward.import": None}, "${oc.env:R} is no path of a Python file; exact_match stands"),
        ("verl", {OWN: "my-reward.py"}, {"reward.import": None}, "rename my-reward.py to my_reward.py and give my_reward"),
        ("verl", {OWN: ["a.py", "b.py"]}, {"reward.import": None}, "is no path of a Python file; exact_match stands here"),
        ("verl", {OWN: "pkg://my.mod"}, {"reward.import": "my.mod:compute_score"}, "my.mod is imported as Python finds it"),
        ("verl", {OWN: "r.py", f"{OWN[:-4]}reward_kwargs": {"a": 1, "b": {}}}, {"reward.options": {"a": 1, "b": {}}}, ""),
        ("trl-grpo", {"reward_funcs": ["mine.f", "think"]}, {"reward.import": "mine:f"}, "for think; it is left out here"),
        ("trl-grpo", {"reward_funcs": ["think"]}, {"reward.import": None}, "for think; exact_match stands here"),
        # mappings, lists and numbers as text
        ("trl-sft", {"lr_scheduler_kwargs": {"min_lr": 1e-7}}, {}, "1.0e-07}']: here optim.min_lr_ratio (or"),
        ("trl-grpo", {"chat_template_kwargs": {"think": False}}, {"data.chat_template_kwargs": {"think": False}}, ""),
        ("trl-sft", {"learning_rate": "2e-5", "max_steps": "40"}, {"optim.lr": 2e-5, "trainer.steps": 40}, ""),
        ("trl-sft", {"save_strategy": False}, {"trainer.save_every": 0}, ""),
        ("verl", {"data.train_files": "['a.parquet','b.parquet']"}, {"data.train": ["a.parquet", "b.parquet"]}, ""),
        ("axolotl", {"datasets": "a.jsonl"}, {"data.train": [{"path": "a.jsonl"}]}, ""),
        ("axolotl", {"datasets": ["a", {"data_files": ["b", "c"], "path": "json"}, {"type": "alpaca"}]},
         {"data.train": [{"path": "a"}, {"path": "b"}, {"path": "c"}]}, "{'type': 'alpaca'} names no path; it is left out"),
        # what is no number
        ("trl-grpo", {"max_steps": "$STEPS"}, {"trainer.steps": None}, "max_steps=$STEPS is no number; it is left out"),
        ("trl-sft", {"save_steps": "$N"}, {"trainer.save_every": 500}, "save_steps=$N is no number; 500 stands for it"),
        ("verl", {"actor_rollout_ref.actor.optim.lr": "${oc.env:LR}"}, {"optim.lr": None}, "lr=${oc.env:LR} is no number; 1e-06"),
        ("verl", {"actor_rollout_ref.actor.optim.lr": "${oc.env:LR,2e-6}"}, {"optim.lr": 2e-6}, ""),
        ("verl", {"actor_rollout_ref.actor.ppo_mini_batch_size": 0}, {}, "ppo_mini_batch_size=0 is less than 1; 256 stands"),
        ("verl", {"actor_rollout_ref.actor.optim.lr": NAN}, {"optim.lr": None}, "lr=nan is no number; 1e-06 stands"),
        ("slime", {"rollout_temperature": "$T"}, {"rollout.temperature": None}, "rollout_temperature=$T is no number; 1.0"),
        ("trl-grpo", {"num_generations": 0}, {"trainer.prompts_per_step": 1}, "num_generations=0 is less than 1; 8 stands"),
        ("verl", {"algorithm.adv_estimator": ["a"]}, {"algorithm.name": "grpo"}, "adv_estimator=['a'] is not supported yet"),
        ("slime", {"eval_prompt_data": "aime"}, {"eval.sets": None}, "eval_prompt_data=aime']: here eval.sets"),
        ("trl-sft", {"model_name_or_path": [3]}, {"model.path": "MODEL"}, "model.path=[3] is not possible: Input"),
    ],
)  # fmt: skip
def test_odd_values_are_converted_or_named(
    tmp_path: Path, project: str, given: Mapping[str, Any], expected: Mapping[str, Any], words: str
) -> None:
    recipe, told = converted(tmp_path, project, {**USUAL[project], **given})
    assert {key: recipe.get(key) for key in expected} == expected and words in told, told
