"""Every key of a recipe arrives where it is used: one table of all keys, with a value that is not the default of any.

The parts that a run is built from are stand-ins that keep what they are given, so no model is made.
"""

import ast
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import Qwen3MoeConfig

from dovetail.data.examples import sequences_of
from dovetail.factory import job, rewards, tokenizer
from dovetail.factory.job import Builder, Job
from dovetail.factory.sampler import backend_layout
from dovetail.launch.progress import collective_timeout
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.recipe.schema import known_keys, make_recipe
from dovetail.run.directory import RunDirectory
from examples.quickstart.scratch import character_tokenizer
from tests.unit.wiring import (
    EVAL,
    JUDGE,
    LAYOUT,
    MODELS,
    PAIRED,
    PAIRS,
    REQUEST,
    ROWS,
    SAME,
    SERVER,
    TOO_LONG,
    WIRED,
    Leaf,
    balance,
    eval_set,
    first_prompt,
    grouped,
    logger,
    noted,
    of_folder,
    optims,
    part,
    reward,
    trained,
    wired,
)

RANKS, UPDATES = 16, 2 * 3  # UPDATES: optimizer steps of a step, algorithm.epochs x algorithm.num_mini_batches
LOGS = [("name", "tensorboard"), ("project", "p"), ("entity", "e"), ("run_name", "r"), ("tags", ("t",)), ("group", "g")]
LAYOUTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "layout": ("task.policy.mesh.layout", LAYOUT),
    "critic.layout": ("task.critic.mesh.layout", {**LAYOUT, "pp_split": (1, 1, 3, 3)}),
    "reference.layout": ("task.reference.mesh.layout", {**LAYOUT, "pp_split": (2, 1, 2, 3)}),
    "rollout.layout": ("task.sampler.asked", {**LAYOUT, "pp_split": (3, 2, 2, 1)}),
}
TABLE = (
    *(
        Leaf(f"{section}.{name}", value, part(f"{path}.{name}"))
        for section, (path, values) in LAYOUTS.items()
        for name, value in values.items()
    ),
    *(Leaf(f"{section}.copy_engines", False, noted(f"{section}.copy_engines"), True) for section in LAYOUTS),
    Leaf("model.path", "FOLDER/policy", lambda job: str(job.task.policy.source.path)),
    Leaf("model.engine", "transformers", lambda job: type(job.task.policy.source.spec).__name__, "TransformersSpec", "rloo"),
    Leaf("model.dtype", "bfloat16", lambda job: [part(f"task.{name}.dtype")(job) for name in MODELS], [torch.bfloat16] * 4),
    Leaf("model.dtype", "bfloat16", part("task.reference.options.master_dtype"), torch.bfloat16),
    Leaf("model.save_dtype", "float16", trained("save_dtype"), [torch.float16] * 2),
    Leaf("model.trust_remote_code", True, lambda job: job.task.decode.keywords["tokenizer"].trusted),
    Leaf("model.moe.aux_loss_coef", 0.01, balance("aux_coef")),
    Leaf("model.moe.z_loss_coef", 0.02, balance("z_coef")),
    Leaf("model.moe.bias_update_rate", 0.03, balance("bias_rate")),
    Leaf("critic.path", "FOLDER/critic", lambda job: str(job.task.critic.source.path)),
    Leaf("critic.lr", 0.25, part("task.critic.options.optim.lr")),
    Leaf("reference.path", "FOLDER/reference", lambda job: str(job.task.reference.source.path)),
    Leaf("algorithm.name", "ppo", part("task.recipe.algorithm.name")),
    Leaf("algorithm.name", "rloo", part("task.recipe.algorithm.name"), algorithm="rloo"),
    Leaf("algorithm.name", "sft", lambda job: type(job.task).__name__, "SupervisedTask", "sft"),
    Leaf("algorithm.loss.name", "sapo", part("task.policy_loss.term"), algorithm="grpo"),
    Leaf("algorithm.loss.options", {"tau_negative": 1.5}, part("task.policy_loss.tau_negative"), 1.5, "grpo"),
    Leaf("algorithm.loss.import", "wired:loss", lambda job: wired(job.task.policy_loss.own), algorithm="rloo-import"),
    Leaf("algorithm.loss.options", {"c": 3}, lambda job: job.task.policy_loss.own.keywords, algorithm="rloo-import"),
    Leaf("algorithm.loss.import", "wired:loss", lambda job: wired(job.task.loss.own), algorithm="sft"),
    Leaf("algorithm.advantage.import", "wired:advantage", lambda job: wired(job.task.advantage), algorithm="rloo-import"),
    Leaf("algorithm.advantage.options", {"d": 4}, lambda job: job.task.advantage.keywords, algorithm="rloo-import"),
    Leaf("algorithm.name", "reinforce_plus_plus", part("task.recipe.algorithm.name"), algorithm="reinforce_plus_plus"),
    Leaf("algorithm.group_baseline", True, part("task.recipe.algorithm.group_baseline"), algorithm="reinforce_plus_plus"),
    *(Leaf("algorithm.name", name, lambda job: type(job.task.loss).__name__, f"{x}Loss", name) for name, x in PAIRED.items()),
    *(Leaf("algorithm.beta", 0.37, part("task.loss.beta"), algorithm=name) for name in PAIRED if name != "reward"),
    *(Leaf("algorithm.num_mini_batches", 2, part("task.recipe.algorithm.num_mini_batches"), algorithm=n) for n in PAIRED),
    Leaf("algorithm.loss", "robust", part("task.loss.kind"), algorithm="dpo"),
    Leaf("algorithm.loss", "hinge", part("task.loss.kind"), algorithm="cpo"),
    Leaf("algorithm.label_smoothing", 0.2, part("task.loss.label_smoothing"), algorithm="dpo"),
    Leaf("algorithm.label_smoothing", 0.2, part("task.loss.label_smoothing"), algorithm="simpo"),
    Leaf("algorithm.precompute_ref_log_probs", True, part("task.precompute"), algorithm="dpo"),
    Leaf("algorithm.desirable_weight", 1.25, part("task.loss.desirable_weight"), algorithm="kto"),
    Leaf("algorithm.undesirable_weight", 1.5, part("task.loss.undesirable_weight"), algorithm="kto"),
    Leaf("algorithm.cpo_alpha", 0.75, part("task.recipe.algorithm.cpo_alpha"), algorithm="cpo"),
    Leaf("algorithm.cpo_alpha", 0.75, part("task.recipe.algorithm.cpo_alpha"), algorithm="simpo"),
    Leaf("algorithm.simpo_gamma", 0.25, part("task.loss.gamma"), algorithm="simpo"),
    Leaf("algorithm.center_rewards_coefficient", 0.01, part("task.loss.center"), algorithm="reward"),
    Leaf("reference.path", "FOLDER/reference", lambda job: str(job.task.reference.source.path), algorithm="dpo"),
    Leaf("data.max_length", 5, part("task.longest"), algorithm="dpo"),
    Leaf("data.truncate", "right", lambda job: [len(x.ids) for x in sequences_of(job.task.rows[6])], [5, 4], "dpo"),
    Leaf("algorithm.epochs", 2, part("task.recipe.algorithm.epochs")),
    Leaf("algorithm.epochs", 2, part("task.recipe.algorithm.epochs"), algorithm="sft"),
    Leaf("algorithm.num_mini_batches", 3, part("task.recipe.algorithm.num_mini_batches")),
    Leaf("algorithm.num_mini_batches", 3, part("task.needs_old_logprobs"), True),
    Leaf("algorithm.num_mini_batches", 3, part("task.recipe.algorithm.num_mini_batches"), algorithm="sft"),
    Leaf("algorithm.aggregation", "sequence_sum", part("task.recipe.algorithm.aggregation")),
    Leaf("algorithm.aggregation", "sequence", part("task.recipe.algorithm.aggregation"), algorithm="sft"),
    Leaf("algorithm.clip_low", 0.11, part("task.policy_loss.clip_low")),
    Leaf("algorithm.clip_high", 0.29, part("task.policy_loss.clip_high")),
    Leaf("algorithm.dual_clip", 3.5, part("task.policy_loss.dual_clip")),
    Leaf("algorithm.ratio", "sequence", part("task.policy_loss.ratio")),
    Leaf("algorithm.entropy_coef", 0.04, part("task.policy_loss.entropy_coef")),
    Leaf("algorithm.kl_in", "loss", part("task.recipe.algorithm.kl_in")),
    Leaf("algorithm.kl_coef", 0.05, part("task.policy_loss.kl_coef")),
    Leaf("algorithm.kl_estimator", "k2", part("task.policy_loss.kl_estimator")),
    Leaf("algorithm.kl_in", "reward", part("task.policy_loss.kl_coef"), 0.0, "grpo"),
    Leaf("algorithm.kl_coef", 0.06, part("task.recipe.algorithm.kl_coef"), algorithm="grpo"),
    Leaf("algorithm.kl_estimator", "k2", part("task.recipe.algorithm.kl_estimator"), algorithm="grpo"),
    Leaf("algorithm.normalize_advantage", False, part("task.recipe.algorithm.normalize_advantage")),
    Leaf("algorithm.normalize_advantage", True, part("task.recipe.algorithm.normalize_advantage"), algorithm="grpo"),
    Leaf("algorithm.scale_by_std", False, part("task.recipe.algorithm.scale_by_std"), algorithm="grpo"),
    Leaf("algorithm.drop_zero_std_groups", True, part("task.recipe.algorithm.drop_zero_std_groups"), algorithm="grpo"),
    Leaf("algorithm.max_num_gen_batches", 5, part("task.recipe.algorithm.max_num_gen_batches"), algorithm="grpo"),
    Leaf("algorithm.overlong_buffer", 6, part("task.recipe.algorithm.overlong_buffer")),
    Leaf("algorithm.overlong_penalty", 0.25, part("task.recipe.algorithm.overlong_penalty")),
    Leaf("algorithm.gamma", 0.9, part("task.recipe.algorithm.gamma")),
    Leaf("algorithm.lam", 0.8, part("task.recipe.algorithm.lam")),
    Leaf("algorithm.value_clip", 0.3, part("task.value_loss.clip")),
    Leaf("algorithm.value_coef", 0.7, part("task.value_loss.coef")),
    Leaf("algorithm.critic_warmup", 7, part("task.recipe.algorithm.critic_warmup")),
    Leaf("algorithm.critic_warmup", 7, optims("total_steps"), [(50 - 7) * UPDATES, 50 * UPDATES]),
    Leaf("data.train", "FOLDER/train.jsonl", lambda job: [p.answer for p in job.task.prompts], [r["answer"] for r in ROWS]),
    Leaf("data.eval", "FOLDER/eval.jsonl", lambda job: [p.answer for p in job.task.held_out], [ROWS[3]["answer"]]),
    Leaf("data.eval", "FOLDER/eval.jsonl", lambda job: len(job.task.held_out), 1, "sft"),
    Leaf("data.train", [{"path": "FOLDER/train.jsonl", "weight": 3.0}], part("task.parts"), ((len(ROWS), 3.0),), "rloo"),
    Leaf("data.format", "trl", noted("read as TRL's"), True),
    Leaf("data.columns", {"answer": "completion"}, lambda job: [dict(p.columns) for p in job.task.prompts], [{}] * 6, "rloo"),
    Leaf("data.apply_chat_template", True, lambda job: job.task.prompts[0].prompt[0]["role"], "user"),
    Leaf("data.chat_template", "FOLDER/template.jinja", first_prompt, "+0+0="),
    Leaf("data.chat_template_kwargs", {"mark": "+"}, first_prompt, "+0+0="),
    Leaf("data.max_prompt_length", 3, lambda job: [len(p.ids) for p in job.task.prompts], [3] * 7, "grpo"),
    Leaf("data.truncate", "left", first_prompt, "+0=", "grpo"),
    Leaf("data.epochs", 9, part("recipe.trainer.steps"), 4, "rloo"),
    Leaf("data.epochs", 9, part("run.console._steps"), 4, "rloo"),
    Leaf("data.overlong_rows", "drop", lambda job: len(job.task.prompts), len(ROWS)),
    Leaf("data.overlong_rows", "drop", lambda job: len(job.task.rows), len(ROWS), "sft"),
    Leaf("data.shuffle", False, part("task.recipe.data.shuffle")),
    Leaf("rollout.backend", "transformers", part("task.sampler.backend"), algorithm="rloo"),
    Leaf("rollout.samples_per_prompt", 5, part("task.sampling.samples")),
    Leaf("rollout.max_new_tokens", 9, part("task.sampling.max_new_tokens")),
    Leaf("rollout.max_new_tokens", 9, part("task.recipe.rollout.max_new_tokens")),
    Leaf("rollout.temperature", 0.6, part("task.sampling.temperature")),
    Leaf("rollout.top_p", 0.95, part("task.sampling.top_p")),
    Leaf("rollout.top_k", 11, part("task.sampling.top_k")),
    Leaf("rollout.router_replay", "rollout", part("task.recipe.rollout.router_replay")),
    Leaf("rollout.router_replay", "rollout", part("task.sampling.trace"), True),
    Leaf("rollout.mismatch_metrics", True, part("task.recipe.rollout.mismatch_metrics"), algorithm="grpo"),
    Leaf("rollout.mismatch_metrics", True, part("task.sampling.trace"), True, "grpo"),
    Leaf("reward.name", "format", reward("runner.name")),
    Leaf("reward.options", {"pattern": "x"}, reward("runner.options")),
    Leaf("reward.timeout_seconds", 2.5, reward("runner.timeout")),
    Leaf("reward.workers", 3, reward("runner.limits.workers")),
    Leaf("reward.batch", "group", reward("runner.limits.batch")),
    Leaf("reward.concurrency", 7, reward("runner.limits.concurrency")),
    Leaf("reward.weight", 0.5, part("rewards.weights"), [0.5]),
    *(Leaf(f"reward.judge.{k}", v, reward(f"runner.address.{k}"), algorithm="rloo") for k, v in JUDGE.items()),
    *(Leaf(f"reward.judge.{k}", v, reward(f"runner.address.request.{k}"), algorithm="rloo") for k, v in REQUEST.items()),
    Leaf("reward.judge.cache", False, reward("runner.address.cache"), None, "rloo"),
    Leaf("reward.import", "mine:score", reward("runner.function"), algorithm="rloo-import"),
    Leaf("reward.model.path", "FOLDER/critic", lambda job: str(reward("engine.source.path")(job)), algorithm="rloo-model"),
    Leaf("reward.model.layout.copy_engines", False, noted("reward.model.layout.copy_engines"), True, "rloo-model"),
    *(Leaf(f"reward.model.layout.{k}", v, reward(f"engine.mesh.layout.{k}"), algorithm="rloo-model") for k, v in LAYOUT.items()),
    *(Leaf(f"reward.model.server.{k}", v, reward(f"runner.address.{k}"), algorithm="rloo-server") for k, v in SERVER.items()),
    Leaf(
        "reward.parts",
        [
            {"import": "mine:score"},
            {"model": {"path": "FOLDER/critic", "layout": {"tp": 2, "dp": 8}}, "weight": -0.5},
            {"model": {"server": SERVER}},
        ],
        part("rewards.weights"),
        [1.0, -0.5, 1.0],
        "grpo",
    ),
    *(Leaf(f"eval.sets.{k}", v, eval_set(k), algorithm="rloo") for k, v in EVAL.items()),
    Leaf("eval.sets.data", "FOLDER/eval.jsonl", lambda job: [p.answer for p in job.task.eval_sets[0].prompts], ["6"], "rloo"),
    Leaf("eval.sets", {"name": "a", "data": "FOLDER/eval.jsonl"}, lambda job: [*job.task.eval_sets], ["a"], "sft"),
    Leaf("optim.lr", 0.125, part("task.policy.options.optim.lr")),
    Leaf("optim.lr", 0.125, part("task.policy.options.optim.lr"), algorithm="sft"),
    Leaf("optim.schedule", "wsd", optims("schedule"), ["wsd"] * 2),
    Leaf("optim.warmup_steps", 4, optims("warmup_steps"), [4 * UPDATES] * 2),
    Leaf("optim.decay_steps", 5, optims("decay_steps"), [5 * UPDATES] * 2),
    Leaf("optim.min_lr_ratio", 0.1, optims("min_lr_ratio"), [0.1] * 2),
    Leaf("optim.weight_decay", 0.2, optims("weight_decay"), [0.2] * 2),
    Leaf("optim.clip_norm", 0.5, optims("clip_norm"), [0.5] * 2),
    Leaf("optim.betas", (0.8, 0.99), optims("betas"), [(0.8, 0.99)] * 2),
    Leaf("optim.eps", 1e-6, optims("eps"), [1e-6] * 2),
    Leaf("optim.groups.pattern", "*.layers.0.*", grouped("pattern"), [["*.layers.0.*"], []]),
    Leaf("optim.groups.lr", 1e-4, grouped("lr"), [[1e-4], []]),
    Leaf("optim.groups.weight_decay", 0.3, grouped("weight_decay"), [[0.3], []]),
    Leaf("optim.frozen", ["model.embed_tokens.*"], optims("frozen"), [("model.embed_tokens.*",), ()]),
    Leaf("trainer.steps", 50, part("recipe.trainer.steps")),
    Leaf("trainer.steps", 50, part("run.console._steps")),
    Leaf("trainer.seed", 13, part("recipe.trainer.seed")),
    Leaf("trainer.seed", 13, part("task.sampling.seed")),
    Leaf("trainer.seed", 13, part("task.critic.options.fresh_head_seed")),
    Leaf("trainer.prompts_per_step", 4, part("task.recipe.trainer.prompts_per_step")),
    Leaf("trainer.tokens_per_batch", 40, trained("tokens_per_batch"), [40] * 2),
    Leaf("trainer.tokens_per_batch", 40, part("task.reference.options.tokens_per_batch")),
    Leaf("trainer.save_every", 10, part("recipe.trainer.save_every")),
    Leaf("trainer.save_every", 0, part("run.recipe.trainer.save_every"), algorithm="grpo"),
    Leaf("trainer.save_on_stop", False, part("recipe.trainer.save_on_stop")),
    Leaf("trainer.deterministic", False, part("recipe.trainer.deterministic")),
    Leaf("trainer.keep_last", 3, part("run.retention.last")),
    Leaf("trainer.keep_every", 20, part("run.retention.every")),
    Leaf("trainer.keep_best", 1, part("run.retention.best")),
    Leaf("trainer.async_save", False, part("run.recipe.trainer.async_save")),
    Leaf("trainer.eval_every", 8, part("recipe.trainer.eval_every")),
    Leaf("trainer.stop_at_reward", 0.5, part("recipe.trainer.stop_at_reward")),
    Leaf("trainer.time_budget_seconds", 60.0, part("recipe.trainer.time_budget_seconds")),
    *(Leaf(f"trainer.loggers.{n}", x, logger(n)) for n, x in LOGS),
    Leaf("trainer.profile.steps", (3, 5), part("run.profiler.steps")),
    Leaf("trainer.profile.memory", True, part("run.profiler.memory")),
    Leaf("trainer.max_skipped_steps", 4, part("recipe.trainer.max_skipped_steps")),
    Leaf("trainer.check_replicas_every", 6, part("recipe.trainer.check_replicas_every")),
    Leaf("trainer.timeouts", {"rollout": 1e5}, part("task.policy.mesh.timeout"), collective_timeout({"rollout": 1e5})),
    Leaf("trainer.activation_checkpointing", "selective", trained("recompute"), ["selective"] * 2),
    Leaf("trainer.offload_activations", True, trained("offload_activations"), [True] * 2),
    Leaf("trainer.offload_optimizer", True, trained("offload_optimizer"), [True] * 2),
    Leaf("trainer.mlp_tile_tokens", 16, trained("mlp_tile_tokens"), [16] * 2),
    Leaf("run_dir", "FOLDER/run", lambda job: str(job.run.path)),
)  # fmt: skip
SOURCE = Path(job.__file__).parents[1]
ALGORITHMS = (
    "ppo",
    "grpo",
    "rloo",
    "sft",
    "reinforce_plus_plus",
    "rloo-import",
    "rloo-model",
    "rloo-server",
    *PAIRED,
)  # a reward of a kind each


def make_mesh(layout: Layout, device: torch.device, *, timeout: timedelta) -> Mesh:
    """The mesh of one process that says it is of some layout."""
    return replace(Mesh.solo(device), layout=layout, timeout=timeout)


def make_engine(source: Any, mesh: Mesh, dtype: torch.dtype, head: str, options: Any) -> SimpleNamespace:
    return SimpleNamespace(
        source=source, mesh=mesh, dtype=dtype, head=head, options=options, origin=SimpleNamespace(sides={})
    )


def load_tokenizer(source: Any, *, trust_remote_code: bool) -> Any:
    loaded: Any = tokenizer.load_tokenizer(source, trust_remote_code=trust_remote_code)
    loaded.trusted = trust_remote_code
    return loaded


def reward_runner(name: str | None, **given: Any) -> SimpleNamespace:
    return SimpleNamespace(name=name, close=lambda: None, **given)


def recipe_of(folder: Path, algorithm: str) -> dict[str, Any]:
    """All values of the table for one algorithm, as a recipe's nested sections."""
    given: dict[str, Any] = {}
    needed: dict[str, Any] = {
        "model.path": "FOLDER/policy",
        "data.train": f"FOLDER/{'pairs' if algorithm in PAIRED else 'train'}.jsonl",
        "run_dir": "FOLDER/run",
    }
    needed |= {
        "algorithm.name": algorithm.partition("-")[0],
        "data.overlong_rows": "drop",
        "trainer.tokens_per_batch": 40,
    }
    needed |= {"rollout.max_new_tokens": 9}
    for key, value in [*needed.items(), *((leaf.key, leaf.value) for leaf in TABLE if leaf.algorithm == algorithm)]:
        *path, last = key.split(".")
        section = given
        for name in path:
            section = section.setdefault(name, {})
        section[last] = of_folder(value, folder)
    return given


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wiring")
    tokenizer = character_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
        head_dim=8, num_experts=8, moe_intermediate_size=16, intermediate_size=32, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    for name in ("policy", "critic", "reference"):
        config.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "wired.py").write_text(WIRED)
    (folder / "template.jinja").write_text("{{ mark }}{% for m in messages %}{{ m.content }}{% endfor %}")
    (folder / "tensorboard").mkdir()
    (folder / "tensorboard" / "__init__.py").touch()
    for name, rows in {"train": [*ROWS, TOO_LONG], "eval": ROWS[3:4], "pairs": PAIRS}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def jobs(folder: Path) -> Iterator[dict[str, Job]]:
    """The job of each algorithm."""
    asked: list[Layout] = []

    def keep(source: Any, layout: Layout, backend: Any) -> Layout:
        asked.append(layout)
        return backend_layout(source, layout, backend)

    def make_sampler(source: Any, mesh: Mesh, dtype: torch.dtype, backend: str) -> SimpleNamespace:
        return SimpleNamespace(source=source, mesh=mesh, dtype=dtype, backend=backend, asked=asked[-1])

    stand_ins: dict[str, Any] = {
        "num_ranks": lambda: RANKS,
        "make_mesh": make_mesh,
        "load_tokenizer": load_tokenizer,
        "make_engine": make_engine,
        "make_sampler": make_sampler,
        "backend_layout": keep,
    }
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)  # where a package named tensorboard is
        stack.enter_context(mock.patch.multiple(job, **stand_ins))
        stack.enter_context(mock.patch.object(rewards, "RewardRunner", reward_runner))
        stack.enter_context(mock.patch.object(RunDirectory, "check_space"))
        found = {}
        for name in ALGORITHMS:
            recipe = make_recipe(recipe_of(folder, name))
            found[name] = Builder(recipe, torch.device("cpu"), folder, lambda: False).job()
            stack.callback(found[name].close)
        yield found


@pytest.mark.parametrize("leaf", TABLE, ids=lambda leaf: f"{leaf.key}-{leaf.algorithm}")
def test_a_key_arrives_where_it_is_used(leaf: Leaf, jobs: Mapping[str, Job], folder: Path) -> None:
    expected = of_folder(leaf.value if leaf.expected is SAME else leaf.expected, folder)
    assert leaf.arrived(jobs[leaf.algorithm]) == expected, f"{leaf.key} of the recipe did not arrive"


def leaves() -> list[str]:
    """Every key of a recipe that is no section."""
    known = known_keys()
    return [key for key in known if not any(other.startswith(f"{key}.") for other in known)]


@pytest.mark.parametrize("key", leaves())
def test_every_key_is_in_the_table_with_a_value_that_is_not_its_default(key: str) -> None:
    rows = [leaf for leaf in TABLE if leaf.key == key]
    assert rows, (
        f"{key} is a key of the recipe, and {Path(__file__).name} has no row for it. Add to its TABLE\n"
        f'    Leaf("{key}", VALUE, part("PATH")),\n'
        "VALUE: one that is not the default. PATH: the attribute of the built Job that holds it, such as recipe.trainer.steps or "
        "task.policy.options.recompute. Where no part of the job holds it, nothing reads the key: take it out."
    )
    for leaf in rows:
        defaults = known_keys()[key].defaults
        default = "grpo" if key == "algorithm.name" else defaults.get("", defaults.get(leaf.algorithm))
        assert leaf.value != default, f"{leaf} has the default, which would arrive by itself"


def test_the_table_has_no_key_that_recipes_lack() -> None:
    assert {leaf.key for leaf in TABLE} <= set(known_keys())


def test_every_key_is_read_outside_the_recipe() -> None:
    """Parts get whole sections, so a key that arrives may still be without effect."""
    read = set()
    for file in SOURCE.rglob("*.py"):
        if file.parent.name != "recipe":
            read |= {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
    names = {key.rpartition(".")[2] for key in leaves()}
    assert names - read == {"import", *LAYOUT} - read, (
        "reward.import is field `function`; a layout is made of its section"
    )
