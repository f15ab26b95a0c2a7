"""Names of other projects: every one of verl's and TRL's has a key or a reason, and none gets a wrong suggestion."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.errors import ConfigError
from dovetail.recipe.messages import nearest
from dovetail.recipe.names import PROJECTS, USUAL, Meaning, Table, all_meanings, read_tables
from dovetail.recipe.schema import known_keys, make_recipe
from dovetail.recipe.yaml import merge

FOLDER = Path(__file__).parents[1] / "import_config"
TRL = {"SFTConfig": "sft", "GRPOConfig": "grpo", "DPOConfig": "dpo"}
REASONS = ("not supported, because ", "not supported yet: ")


def leaves(tree: Any, prefix: str = "") -> Iterator[str]:
    for part in tree:
        if isinstance(part, str):
            yield prefix + part
        else:
            for name, inside in part.items():
                yield from leaves(inside, f"{prefix}{name}.")


def outcome(table: Table, name: str) -> Meaning:
    meaning = table.find(table.current(name))
    assert meaning is not None, name
    assert meaning.key or meaning.text.startswith(REASONS), name
    return meaning


def test_the_tables_name_keys_that_exist() -> None:
    known = {*known_keys(), *(name.partition(".")[0] for name in known_keys())}
    degrees = ("tp", "pp", "cp", "ep", "virtual_stages")
    known |= {
        f"{owner}.layout.{degree}"
        for owner in ("critic", "reference", "rollout")
        for degree in degrees
    }
    for project in (*PROJECTS, USUAL):
        tables = read_tables(project)
        for table in tables.values():
            assert {meaning.key for meaning in table.meanings if meaning.key} <= known, project
            for name in (*table.defaults, *table.older.values()):
                assert any(other.find(name) for other in tables.values()), (project, name)


@pytest.mark.parametrize("stride", [8, pytest.param(1, marks=pytest.mark.soak)])
def test_every_leaf_of_verl_is_ours_or_has_a_reason(stride: int) -> None:
    """And is said to be that where it is typed: every eighth."""
    table, known, meanings = read_tables("verl")[""], known_keys(), all_meanings()
    names = list(leaves(yaml.safe_load((FOLDER / "names_of_verl.yaml").read_text())))
    assert len(names) > 700
    foreign = {name: outcome(table, name) for name in names if name not in known}
    for name, meaning in list(foreign.items())[::stride]:
        assert (meaning.key or meaning.text) in nearest(name, known, meanings), name


SECTIONS = ("", "trainer.", "algorithm.", "optim.", "data.", "rollout.", "model.")


@pytest.mark.parametrize("sections", [1, pytest.param(len(SECTIONS), marks=pytest.mark.soak)])
def test_every_field_of_trl_is_ours_or_has_a_reason(sections: int) -> None:
    """Wherever in a recipe it is typed: each name in so many sections, of which the next name has the next ones."""
    fields = yaml.safe_load((FOLDER / "names_of_trl.yaml").read_text())
    known, meanings = known_keys(), all_meanings()
    kinds = {kind: {*fields["TrainingArguments"], *fields[config]} for config, kind in TRL.items()}
    for number, name in enumerate(sorted(set().union(*kinds.values()))):
        own = [
            outcome(read_tables("trl")[kind], name)
            for kind, names in kinds.items()
            if name in names
        ]
        for section in (SECTIONS[(number + i) % len(SECTIONS)] for i in range(sections)):
            typed = section + name
            right = {m.key or m.text for m in meanings if m.matches(name) or m.matches(typed)}
            assert all((meaning.key or meaning.text) in right for meaning in own)
            if typed not in known and typed not in BY_SPELLING:
                said = nearest(typed, known, meanings)
                assert any(words in said for words in right), (section, name, said)


BY_SPELLING = ("optim.beta",)  # betas


@pytest.mark.soak
def test_the_list_of_fields_is_that_of_the_installed_trl() -> None:
    trl = pytest.importorskip("trl")
    from dataclasses import fields

    listed = yaml.safe_load((FOLDER / "names_of_trl.yaml").read_text())
    for config, kind in TRL.items():
        table = read_tables("trl")[kind]
        names = {field.name for field in fields(getattr(trl, config))}
        assert (
            names <= {*listed["TrainingArguments"], *listed[config]}
            or trl.__version__ != table.version
        )
        for name in names:
            outcome(table, name)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("algorithm.adv_estimator", "adv_estimator is verl's, here algorithm.name (gae: ppo"),
        ("actor_rollout_ref.actor.optim.lr", "lr is verl's, here optim.lr"),
        ("critic.optim.lr", "here critic.lr"),
        ("trainer.epochs", "here data.epochs (passes over the rows; algorithm.epochs are those"),
        ("trainer.total_epochs", "total_epochs is verl's, here data.epochs"),
        ("model.lora_rank", "lora_rank is verl's, not supported yet: LoRA"),
        ("lora", "lora: not supported yet: LoRA"),
        ("model.load_in_4bit", "not supported yet: quantized weights"),
        ("optim.learing_rate", "did you mean learning_rate? learning_rate is TRL's, here optim.lr"),
        ("learning_rate", "here optim.lr"),
        ("optim.optimizer", "here optim.name"),
        ("trainer.compile", "not supported, because not needed: kernels are compiled ahead"),
        ("trainer.gradient_accumulation_steps", "here trainer.prompts_per_step"),
        ("trainer.bf16", "here model.dtype"),
        ("trainer.profile_steps", "here trainer.profile.steps"),
        ("trainer.run_name", "here trainer.loggers ([{name: wandb, run_name: NAME}])"),
        ("trainer.checkpoint_dir", "here run_dir"),
        ("trainer.resume", "--resume"),
        ("rollout.engine", "did you mean rollout.engines?"),
        ("rollout.gpu_memory_utilization", "not needed: the embedded sampler chooses"),
        ("data.prompt_key", "here data.columns ({prompt: NAME})"),
        ("reward.weights", "did you mean reward.weight?"),
        ("algorithm.gae_lambda", "here algorithm.lam"),
        ("critic.warmup", "here algorithm.critic_warmup"),
        ("layout.ulysses", "here layout.cp (with layout.cp_mode=ulysses)"),
        (
            "beta",
            "beta is TRL's (grpo), here algorithm.kl_coef; beta is TRL's (dpo), here algorithm.beta",
        ),
        ("algorithm.ppo_mini_batch_size", "the number of updates in a pass"),
        ("trainer.save_total_limit", "here trainer.keep_last"),
        (
            "algorithm.overlong_buffer.len",
            "algorithm.overlong_buffer is {'len': 1}; expected a valid integer",
        ),
    ],
)
def test_a_name_of_another_project_is_understood(typed: str, words: str) -> None:
    recipe: dict[str, Any] = {
        "model": {"path": "M"},
        "data": {"train": "rows.jsonl"},
        "run_dir": "runs/x",
    }
    merge(recipe, typed, 1)
    with pytest.raises(ConfigError) as caught:
        make_recipe(recipe)
    assert words in str(caught.value)


def test_a_whole_config_of_another_project_leads_to_import_config() -> None:
    with pytest.raises(ConfigError) as caught:
        make_recipe(
            {
                "actor_rollout_ref": {
                    "model": {"path": "M"},
                    "actor": {"grad_clip": 1.0, "ppo_epochs": 2, "optim": {"lr": 1}},
                }
            }
        )
    for words in (
        "ppo_epochs is verl's, here algorithm.epochs",
        "grad_clip is verl's, here optim.clip_norm",
    ):
        assert words in str(caught.value)
    assert "`dovetail import-config FILE`" in str(caught.value)
