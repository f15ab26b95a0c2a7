"""The recipe: defaults of the contract, precedence, and the messages of mistakes."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.errors import ConfigError
from dovetail.parallel.layout import Layout
from dovetail.recipe.algorithms import GRPOSection, PolicyGradientSection, PPOSection
from dovetail.recipe.keys import REMOVED, RENAMED
from dovetail.recipe.schema import Recipe, known_keys, load_recipe, make_recipe
from dovetail.recipe.tracking import LoggerSection
from dovetail.recipe.yaml import parse_overrides

SMALLEST: dict[str, Any] = {
    "model": {"path": "M"},
    "data": {"train": "rows.jsonl"},
    "run_dir": "runs/x",
}
ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def test_defaults_are_those_of_the_contract() -> None:
    text = Path("docs/contract.md").read_text()
    block = re.search(r"```yaml\n(model:.*?)```", text, re.S)
    assert block
    promised = yaml.safe_load(re.sub(r"\b(\d\.\de-\d)\b", r"\1", block[1]))
    promised["model"]["path"], promised["data"]["train"] = "M", "rows.jsonl"
    del promised["run_dir"]
    for name in ("critic", "reference", "rollout"):
        promised[name]["layout"] = None
    actual = yaml.safe_load(make_recipe(SMALLEST).to_yaml())
    for section, keys in promised.items():
        assert {key: actual[section][key] for key in keys} == keys, section


def test_yaml_round_trip(tmp_path: Path) -> None:
    given = {
        **SMALLEST,
        "algorithm": {"name": "ppo"},
        "reward": {"import": "a:b"},
        "layout": {"pp": 2, "pp_split": [1, 2]},
    }
    recipe = make_recipe(given)
    assert load_recipe(write(tmp_path, recipe.to_yaml())) == recipe
    assert isinstance(recipe.algorithm, PPOSection)
    assert recipe.reward.function == "a:b"
    assert recipe.reward.name is None


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("reward_model", "reward"), ("distill", "distillation"), ("reward", "reward")],
)
def test_an_algorithm_has_the_spellings_of_the_contract(spelling: str, name: str) -> None:
    given = {**SMALLEST, "teacher": {"path": "t"}, "algorithm": {"name": spelling}}
    assert make_recipe(given).algorithm.name == name


def test_precedence_and_spellings(tmp_path: Path) -> None:
    path = write(
        tmp_path, yaml.safe_dump({**SMALLEST, "layout": {"tp": 4, "dp": 2}, "optim": {"lr": 1.0}})
    )
    tokens = [
        "layout.tp=3",
        "optim.lr=1e-5",
        "trainer.loggers=[wandb]",
        "data.eval=null",
        "critic.layout.tp=2",
    ]
    recipe = load_recipe(path, tokens, {"layout.tp": 2})
    assert recipe.layout.to_layout() == Layout(tp=2, dp=2)
    assert recipe.optim.lr == 1e-5
    assert recipe.trainer.loggers == (LoggerSection(name="wandb"),)
    assert recipe.critic.layout is not None
    assert recipe.critic.layout.to_layout() == Layout(tp=2, dp=None)


def test_empty_sections_take_their_defaults() -> None:
    recipe = make_recipe({**SMALLEST, "critic": {"layout": {}}, "algorithm": {"clip_high": 0.28}})
    assert recipe.critic.layout is None
    assert isinstance(recipe.algorithm, GRPOSection)
    assert recipe.layout.to_layout().dp is None


@pytest.mark.parametrize("name", ["grpo", "rloo", "ppo"])
def test_the_estimator_of_a_kl_term_is_the_one_that_pulls_where_it_is(name: str) -> None:
    for place, kind in (("reward", "k1"), ("loss", "k3")):
        algorithm = make_recipe({**SMALLEST, "algorithm": {"name": name, "kl_in": place}}).algorithm
        assert isinstance(algorithm, PolicyGradientSection) and algorithm.kl_estimator == kind, (
            place
        )
        given = make_recipe(
            {**SMALLEST, "algorithm": {"name": name, "kl_in": place, "kl_estimator": "k2"}}
        ).algorithm
        assert isinstance(given, PolicyGradientSection) and given.kl_estimator == "k2"


def test_sections_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        make_recipe(SMALLEST).trainer.steps = 3  # type: ignore[misc]  # the point of the test


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"optim": {"lrr": 1.0}},
            "unknown key optim.lrr; did you mean optim.lr? (keys of optim: name, import,",
        ),
        (
            {"optim": {"learning_rate": 1.0}},
            "unknown key optim.learning_rate; learning_rate is TRL's, here optim.lr",
        ),
        ({"trainer": {"lr": 1.0}}, "unknown key trainer.lr; did you mean optim.lr?"),
        ({"optimizer": {}}, "unknown key optimizer; optimizer: here optim.name"),
        (
            {"critic": {"layout": {"tpp": 2}}},
            "unknown key critic.layout.tpp; did you mean critic.layout.tp?",
        ),
        (
            {"algorithm": {"gamma": 0.9}},
            "algorithm.gamma does not belong to this algorithm: discount",
        ),
        (
            {"algorithm": {"betta": 1.0}},
            "scale_by_std, drop_zero_std_groups, max_num_gen_batches)",
        ),
        (
            {"algorithm": {"name": "ppo", "x": 1}},
            "correction, overlong_buffer, overlong_penalty, gamma, lam, value_clip, value_coef, critic_warmup)",
        ),
        (
            {"algorithm": {"name": "GSPO"}},
            "; that one is {name: grpo, ratio: sequence, aggregation: sequence, clip_low: ",
        ),
        (
            {"algorithm": {"name": "dr-grpo"}},
            "; that one is {name: grpo, aggregation: sequence_sum, scale_by_std: false}",
        ),
        (
            {"algorithm": {"name": "dapo"}},
            "clip_high: 0.28, drop_zero_std_groups: true, max_num_gen_batches: 10, overlong_buffer: 16}",
        ),
        (
            {"algorithm": {"name": "ppoo"}},
            "algorithm.name is 'ppoo'; expected one of 'sft', 'grpo', 'ppo', 'rloo'",
        ),
        ({"optim": {"lr": "fast"}}, "optim.lr is 'fast'; expected a valid number"),
        ({"optim": {"lr": 0}}, "optim.lr is 0; expected greater than 0"),
        ({"optim": {"lr": float("nan")}}, "optim.lr is nan; expected a finite number"),
        ({"optim": {"betas": [0.9, 1.0]}}, "optim.betas is 1.0; expected less than 1"),
        ({"optim": {"betas": [0.9]}}, "optim.betas is [0.9]; expected 2 values"),
        (
            {"optim": {"betas": [0.9, 0.9, 0.9]}},
            "optim.betas is [0.9, 0.9, 0.9]; Tuple should have at most 2 items",
        ),
        ({"layout": {"dp": 0}}, "layout.dp is 0; expected greater than 0 or 'auto'"),
        ({"layout": {"tp": True}}, "layout.tp is True; expected a valid integer"),
        ({"model": {}}, "model.path is missing; expected HF directory"),
        ({"optim": 3}, "optim is 3; expected a mapping of keys"),
        (
            {"model": {"path": "M", "dtype": "fp16"}},
            "model.dtype is 'fp16'; expected 'float32' or 'bfloat16'",
        ),
        ({"rollout": {"samples_per_prompt": 1}}, "rollout.samples_per_prompt is 1; grpo compares"),
        (
            {"algorithm": {"num_mini_batches": 129}},
            "algorithm.num_mini_batches is 129, but a step has only 128 rows",
        ),
        ({"reward": {"name": "format", "import": "a:b"}}, "reward: give name or import, not both"),
        (
            {"reward": {"import": "a.b"}},
            "reward.import: 'a.b'; expected module:function, such as mine:score",
        ),
        (
            {"reward": {"options": {"x": b"\x80"}}},
            "reward.options: expected text, numbers, lists and mappings, as JSON",
        ),
        (
            {"reward": {"options": {"x": ENDLESS}}},
            "reward.options: expected text, numbers, lists and mappings, as JSON",
        ),
        (
            {"algorithm": {"clip_high": 1e300}},
            "algorithm.clip_high is 1e+300; expected less than or equal to",
        ),
        (
            {"algorithm": {"name": "ppo", "value_clip": 1e300}},
            "value_clip is 1e+300; expected less than or equal to",
        ),
        (
            {"trainer": {"mlp_tile_tokens": 1 << 70}},
            "mlp_tile_tokens is 1180591620717411303424; expected less than",
        ),
        (
            {"run_dir": "a\0b"},
            "run_dir: 'a\\x00b' holds a character that no name of a file may have",
        ),
        (
            {"data": {"train": "\ud800"}},
            "data.train: '\\ud800' holds a character that no name of a file may have",
        ),
    ],
)
def test_mistakes_name_key_value_and_expectation(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_recipe({**SMALLEST, **change}, "run.yaml")
    assert str(caught.value).startswith("run.yaml: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("lr", "optim.lr"),
        ("kl_coef", "algorithm.kl_coef"),
        ("optim.beta", "optim.betas"),
        ("tp", "layout.tp"),
        ("trainers", "trainer"),
    ],
)
def test_the_nearest_key(given: str, ours: str) -> None:
    section, _, leaf = given.rpartition(".")
    with pytest.raises(ConfigError) as caught:
        make_recipe({**SMALLEST, section: {leaf: 1}} if section else {**SMALLEST, leaf: 1})
    assert f"unknown key {given}; did you mean {ours}?" in str(caught.value)


def test_nothing_is_suggested_for_what_is_like_no_key() -> None:
    for name in ("zzzz", "a"):
        with pytest.raises(
            ConfigError, match=rf"unknown key {name} \(keys of a recipe: model, layout,"
        ):
            make_recipe({**SMALLEST, name: 1})


def test_all_mistakes_come_together() -> None:
    with pytest.raises(ConfigError) as caught:
        make_recipe({**SMALLEST, "optim": {"lr": "x"}, "trainer": {"steps": 0, "stepz": 1}})
    for message in (
        "optim.lr is 'x'",
        "trainer.steps is 0",
        "unknown key trainer.stepz; did you mean trainer.steps?",
    ):
        assert f"\n  - {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "is not valid YAML"),
        ("- a", "holds a list; expected a mapping of sections"),
        (
            "on: 2",
            "the recipe is True; Keys should be strings",
        ),  # as YAML reads it
        (yaml.safe_dump({**SMALLEST, "optim": {7: 2}}), "optim is 7; Keys should be strings"),
        ("optim: {lr: 1, lr: 2}", "the key 'lr' is given twice"),
        (
            "optim:\n  lr: 1\n  eps: 2\n  lr: 2\n",
            "recipe.yaml' is not valid YAML: line 4, column 3: the key 'lr' is given twice\n      lr: 2\n      ^",
        ),
        (
            "a: b\n  c: d\n",
            "recipe.yaml' is not valid YAML: line 2, column 4: mapping values are not allowed here\n",
        ),
        (
            "a: [\n",
            "line 2, column 1: expected the node content, but found '<stream end>' (while parsing a flow node)",
        ),
        ("a: \0", "special characters are not allowed: the character '\\x00' at place 3"),
        ("x: !!python/object/apply:os.system [ls]", "is not valid YAML"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_recipe(write(tmp_path, text))
    assert "unicode string" not in str(caught.value)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"recipe '.*none.yaml' cannot be read: No such file"):
        load_recipe(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("steps", "override 'steps' has no value; expected key.path=value"),
        ("a..b=1", "'a..b' is not a key"),
        ("a.b=[", "is not valid YAML"),
    ],
)
def test_broken_overrides_are_refused(token: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_overrides([token])


def test_override_below_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run_dir is 'runs/x', which has no keys of its own"):
        load_recipe(write(tmp_path, yaml.safe_dump(SMALLEST)), ["run_dir.name=1"])


def test_numbers_without_a_point_are_numbers() -> None:
    values = parse_overrides(["a=1e-6", "b=2E3", "c=-.5e+1", "d=1.5", "e=x1e5", "f=12"])
    assert [value for _, value in values] == [1e-6, 2000.0, -5.0, 1.5, "x1e5", 12]


def test_a_whole_number_with_an_exponent_counts_and_measures(tmp_path: Path) -> None:
    path = write(tmp_path, yaml.safe_dump(SMALLEST))
    recipe = load_recipe(
        path,
        ["trainer.steps=1e3", "rollout.max_new_tokens=1.5e2", "optim.lr=1e0", "optim.eps=1e-8"],
    )
    assert (recipe.trainer.steps, recipe.rollout.max_new_tokens) == (1000, 150)
    assert (recipe.optim.lr, recipe.optim.eps) == (1.0, 1e-8)
    assert load_recipe(write(tmp_path, recipe.to_yaml())) == recipe
    for given in ("1.5e0", "3.0", "1e60"):
        with pytest.raises(ConfigError, match=r"trainer.steps is .*; expected"):
            load_recipe(path, [f"trainer.steps={given}"])


def test_one_logger_needs_no_list() -> None:
    assert make_recipe({**SMALLEST, "trainer": {"loggers": "wandb"}}).trainer.loggers == (
        LoggerSection(name="wandb"),
    )
    with pytest.raises(ConfigError, match="expected 'wandb', 'mlflow'"):
        make_recipe({**SMALLEST, "trainer": {"loggers": "wandbs"}})


def test_every_key_is_described() -> None:
    sections = {name for name, field in Recipe.model_fields.items() if name != "run_dir"}
    described = known_keys()
    assert {key.split(".")[0] for key in described} == sections | {"run_dir"}
    assert [key.name for key in described.values() if not key.text] == []


@pytest.mark.parametrize(
    "key", ["model.path", "critic.path", "reference.path", "data.train", "data.eval", "run_dir"]
)
def test_a_home_directory_is_written_out(key: str) -> None:
    """Or a run would write into a folder of the name ~, here."""
    whole = re.escape(
        f"recipe: {key}: '~/x' begins with ~, which only a shell replaces; write the whole path"
    )
    with pytest.raises(ConfigError, match=f"^{whole}$"):
        make_recipe(merge_at(key, "~/x"))
    make_recipe(merge_at(key, "./~/x"))


def merge_at(key: str, value: str) -> dict[str, Any]:
    """The smallest recipe with one more key."""
    section, _, leaf = key.rpartition(".")
    return (
        {**SMALLEST, section: {**SMALLEST.get(section, {}), leaf: value}}
        if section
        else {**SMALLEST, leaf: value}
    )


def test_merged_keys_give_way_to_own_ones(tmp_path: Path) -> None:
    """Also where a mapping is merged before it is made itself, as one that lies deeper."""
    text = yaml.safe_dump(SMALLEST) + (
        "layout: &a {tp: 2, pp: 2}\nreward: {options: {x: {y: &b {<<: *a, tp: 3}}}}\ncritic: {layout: {<<: *b, cp: 5}}\n"
    )
    recipe = load_recipe(write(tmp_path, text))
    assert recipe.critic.layout is not None
    assert recipe.critic.layout.to_layout() == Layout(tp=3, pp=2, cp=5, dp=None)
    assert recipe.reward.options == {"x": {"y": {"tp": 3, "pp": 2}}}
    with pytest.raises(ConfigError, match="the key 'tp' is given twice"):
        load_recipe(write(tmp_path, text.replace("tp: 3", "tp: 3, tp: 4")))


def test_an_override_changes_its_own_section_where_two_are_one_alias(tmp_path: Path) -> None:
    path = write(tmp_path, yaml.safe_dump(SMALLEST) + "layout: &a {tp: 2}\ncritic: {layout: *a}\n")
    recipe = load_recipe(path, ["critic.layout.tp=4"])
    assert recipe.critic.layout is not None
    assert (recipe.layout.tp, recipe.critic.layout.tp) == (2, 4)


def test_text_that_looks_like_a_number_stays_text(tmp_path: Path) -> None:
    given = {
        **SMALLEST,
        "run_dir": "1e3",
        "reward": {"options": {"a": "1e-6", "b": "1.5e2", "c": 1e-6, "d": "2"}},
    }
    recipe = make_recipe(given)
    assert load_recipe(write(tmp_path, recipe.to_yaml())) == recipe


@pytest.mark.parametrize("value", ["2025-02-30", "0x_", "9" * 5000, "[" * 5000 + "]" * 5000])
def test_values_that_yaml_cannot_make_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="is not valid YAML"):
        parse_overrides([f"a={value}"])


def bomb(reference: str, first: str) -> str:
    """Twelve lines of which each names the one before nine times."""
    lines = (f"x{i}: &x{i} {reference.format(', '.join([f'*x{i - 1}'] * 9))}" for i in range(1, 12))
    return "\n".join([f"x0: &x0 {first}", *lines])


BOMBS = {
    "anchors": (
        bomb("[{}]", "[1, 2]"),
        "more than 10000 values, with those of every alias",
    ),
    "merges": (bomb("{{<<: [{}]}}", "{a: 1}"), "more than 10000 values, with those of every alias"),
    "chain": (
        "\n".join(f"x{i}: &x{i} [{f'*x{i - 1}' if i else 1}]" for i in range(99)),
        "or 32 inside each other; make it smaller",
    ),
    "itself": ("x: &a [*a]", "or 32 inside each other; make it smaller"),
    "keys": ("\n".join(f"k{i}: 1" for i in range(20_000)), "more than 10000 values"),
    "unknown keys": ("\n".join(f"k{i}: 1" for i in range(4_000)), "unknown key k16"),
    "characters": ("x: " + "y" * 20_000_000, "recipe.yaml' has more than 262144 characters"),
    "depth": ("x: " + "[" * 100_000, "lists and mappings lie too deep inside each other"),
    "digits": ("optim: {lr: " + "1" * 200_000 + "}", "is no int; quote what is text"),
    "exponent": ("optim: {lr: " + "1_" * 100_000 + "e}", "optim.lr is '1_1_"),
    "base 60": ("trainer: {steps: 1" + ":59" * 80_000 + "}", "is no int; quote what is text"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_recipes_that_would_take_minutes_or_the_memory_are_refused_at_once(
    name: str, tmp_path: Path
) -> None:
    text, words = BOMBS[name]
    path, begun = write(tmp_path, text), time.process_time()
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        load_recipe(path)
    assert time.process_time() - begun < 2.0
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "value",
    [
        "!!int x",
        "!!int ''",
        "!!float ''",
        "!!float x",
        "!!bool maybe",
        "!!timestamp x",
        "!!timestamp 2025-99-99",
    ],
)
def test_tags_that_do_not_fit_are_refused(value: str, tmp_path: Path) -> None:
    kind = value.partition(" ")[0].strip("!")
    with pytest.raises(
        ConfigError, match=f"line 1, column 18: '.*' is no {kind}; quote what is text"
    ):
        load_recipe(write(tmp_path, f"trainer: {{steps: {value}}}"))


def test_renamed_keys_are_accepted_with_a_note(tmp_path: Path) -> None:
    path = write(tmp_path, yaml.safe_dump({**SMALLEST, "trainer": {"keep": 9}}))
    recipe = load_recipe(path, ["data.overlong=drop", "algorithm.minibatches=2", "trainer.keep=3"])
    assert recipe.data.overlong_rows == "drop"
    assert recipe.algorithm.num_mini_batches == 2
    assert recipe.trainer.keep_last == 3
    assert load_recipe(path, ["trainer.keep_last=4"]).trainer.keep_last == 4
    assert "data.overlong is now data.overlong_rows; the old name stays accepted" in recipe.notes
    assert RENAMED.keys().isdisjoint(known_keys()) and set(RENAMED.values()) <= known_keys().keys()
    both = {**SMALLEST, "trainer": {"keep": 1, "keep_last": 1}}
    with pytest.raises(ConfigError, match=r"unknown key trainer\.keep; did you mean"):
        load_recipe(write(tmp_path, yaml.safe_dump(both)))


@pytest.mark.parametrize(("key", "instead"), REMOVED.items())
def test_a_removed_key_is_refused_with_what_to_do_instead(key: str, instead: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_recipe(merge_at(key, "true"))
    assert str(caught.value) == f"recipe: {key} is no key any more; {instead}"


def test_a_removed_key_of_any_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.layout\.copy_engines is no key any more"):
        make_recipe({**SMALLEST, "rollout": {"layout": {"copy_engines": True}}})
