"""Writes docs/recipe.md, the page of every key of a recipe, from the schema, the rewards and the tables of names.

    python -m tools.recipe_page

A test compares the committed page with what `page` gives.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

from dovetail.recipe.keys import VARIANTS, keys_of, scalar
from dovetail.recipe.names import leaf_of
from dovetail.recipe.schema import Recipe
from dovetail.rewards.built_in import BUILT_IN, final_number

TARGET = Path(__file__).parents[1] / "docs" / "recipe.md"
INTRO = """# The keys of a recipe

Written by `python -m tools.recipe_page`, so that it says what the code does. A recipe is one YAML file; any key may be
changed on the command line, as in `dovetail train recipe.yaml optim.lr=2e-6`, and `dovetail train recipe.yaml --dry-run`
checks all of them and prints the recipe with every default. What stays the same between releases, and the rows of data
files: [contract.md](contract.md).

## Algorithms
"""
TITLES: Mapping[str, tuple[str, str]] = {
    "grpo": (
        "GRPO",
        "no KL term and the mean over all tokens; the paper's own form adds `aggregation: sequence, kl_coef: 0.04`",
    ),
    "dapo": (
        "DAPO",
        "more prompts are sampled until a step is full, at most ten times; the last 16 tokens of `rollout.max_new_tokens` "
        "cost reward (the paper: 4,096 of 20,480)",
    ),
    "dr_grpo": (
        "Dr. GRPO",
        "the constant that divides a response's sum is `rollout.max_new_tokens`",
    ),
    "gspo": ("GSPO", "one ratio for a whole response, with the paper's clips"),
    "rloo": (
        "RLOO",
        "no KL term; that of the paper lies in the reward: `kl_in: reward, kl_estimator: k1` and a `kl_coef`",
    ),
    "reinforce_plus_plus": (
        "REINFORCE++",
        "each token's KL penalty lies in its reward; whitened over all tokens of a step",
    ),
    "reinforce_plus_plus_baseline": (
        "REINFORCE++-baseline",
        "rewards less the mean of their prompt's samples, whitened over all tokens of a step; the KL term lies in the loss",
    ),
    "cispo": (
        "CISPO",
        "the clipped ratio weights log-probs, and no token loses its gradient; TRL's `epsilon_high` is 1 + `clip_high`",
    ),
    "gmpo": (
        "GMPO",
        "the geometric mean of a response's ratios, each clipped to e^-clip_low and e^clip_high",
    ),
    "sapo": (
        "SAPO",
        "a soft gate instead of the clip; `loss: {name: sapo, options: {tau_positive: 1.0, tau_negative: 1.05}}`",
    ),
    "ppo": (
        "PPO",
        "with a critic (section `critic`); the first `critic_warmup` steps train it alone",
    ),
    "sft": (
        "SFT",
        "rows with a completion, or with messages; sections `rollout` and `reward` are not used",
    ),
    "gkd": (
        "GKD",
        "half of the steps on the student's own samples; needs `teacher.path` ([distillation.md](distillation.md))",
    ),
    "on_policy_distillation": (
        "on-policy distillation",
        "a policy gradient with the teacher's log-probs; needs `teacher.path`",
    ),
}
AFTER_ALGORITHMS = """
Clips and ratios act where a step makes several updates, that is where `epochs` times `num_mini_batches` is more than 1: at
the first one the ratio is 1. A KL term (`kl_coef` above 0) loads a second model, the `reference`.
"""
REWARDS = """
## Rewards

`reward.name` is one of these, `reward.options` has its options; `reward.import: module:function` is a function of your own.
Judges, reward models and sums of several: [rewards.md](rewards.md).
"""
FROM_OTHERS = """
## From verl, TRL and others

Reward functions of verl and TRL run as they are, `async` ones too, and so do their rows ([data.md](data.md)); what only TRL's
trainer has is refused ([rewards.md](rewards.md)). Sizes count other
things: `num_mini_batches` is the number of updates in a pass over a step's rows, not the rows of one; `prompts_per_step` counts
prompts over all ranks, not completions of one; `tokens_per_batch` stands for every micro-batch size. All their names:
[coming-from-verl.md](coming-from-verl.md), [coming-from-trl.md](coming-from-trl.md). `dovetail import-config` turns a config of
verl, TRL, OpenRLHF, axolotl or slime into a recipe.
"""
KINDS: Mapping[str, str] = {
    "integer": "whole number", "number": "number", "string": "text", "boolean": "`true`, `false`", "null": "`null`",
    "array": "list", "object": "mapping",
}  # fmt: skip
BOUNDS: Mapping[str, str] = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
}


def page() -> str:
    """The whole page."""
    return "\n".join(
        [INTRO, *_algorithms(), AFTER_ALGORITHMS, *_keys(), REWARDS, *_rewards(), FROM_OTHERS]
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _algorithms() -> list[str]:
    rows = [
        (
            TITLES[name][0],
            f"`{{{', '.join(f'{key}: {scalar(value)}' for key, value in keys.items())}}}`",
            TITLES[name][1],
        )
        for name, keys in VARIANTS.items()
    ]
    return table(("", "`algorithm:`", ""), rows)


def _keys() -> Iterator[str]:
    """A table for each section."""
    alone = []
    for name, field in Recipe.model_fields.items():
        kinds = get_args(field.annotation) or (field.annotation,)
        if not issubclass(kinds[0], BaseModel):
            alone.append(name)
            continue
        about = (
            " ".join(str(inspect.getdoc(kinds[0])).split())
            if len(kinds) == 1
            else "What is learned from a step's rows."
        )
        yield f"\n## {name}\n\n{about}\n"
        yield from _table(name, {name: kinds})
    yield "\n## Outside the sections\n"
    yield from _table("", {})


def _table(section: str, kinds: Mapping[str, Sequence[type[BaseModel]]]) -> list[str]:
    """The keys of one section, and of those inside it but a layout's; without a section, the keys that stand alone."""
    schemas = [kind.model_json_schema() for kind in kinds.get(section, (Recipe,))]
    rows = []
    for name, key in keys_of(Recipe).items():
        inside = name.removeprefix(f"{section}.")
        if name.partition(".")[0] != section if section else "." in name:
            continue
        if ".layout." in name:
            continue
        defaults = {owner: _default(name, value) for owner, value in key.defaults.items()}
        first = next(iter(defaults.values()))
        others = [f"{owner}: {value}" for owner, value in defaults.items() if value != first]
        told = "to be given" if key.required else "; ".join([first, *others])
        if name == "algorithm.name":
            told = "`grpo`"
        takes = (
            ", ".join(f"`{owner}`" for owner in key.defaults)
            if name == "algorithm.name"
            else _takes(inside, schemas)
        )
        rows.append((f"`{inside}`", takes, told, key.text))
    rows.sort(key=lambda row: row[0] != "`name`")
    return table(("key", "takes", "default", "meaning"), rows)


def _default(name: str, value: Any) -> str:
    if (
        value is PydanticUndefined
        or isinstance(value, BaseModel)
        or (value is None and leaf_of(name) == "layout")
    ):
        return "empty"
    return f"`{scalar(to_jsonable_python(value))}`"


def _takes(key: str, schemas: Sequence[Mapping[str, Any]]) -> str:
    """What a key takes, by the first schema that has it."""
    first, _, rest = key.partition(".")
    having = [
        (schema["properties"][first], schema.get("$defs", {}))
        for schema in schemas
        if first in schema["properties"]
    ]
    if having and not rest:
        return " or ".join(_kind(each) for each in having[0][0].get("anyOf", [having[0][0]]))
    inside = []
    for field, definitions in having:
        field = field.get("items", field)
        kinds = [
            kind["$ref"].rpartition("/")[2]
            for kind in field.get("anyOf", [field])
            if "$ref" in kind
        ]
        inside += [{**definitions[kind], "$defs": definitions} for kind in kinds]
    if inside:
        return _takes(rest, inside)
    raise LookupError(key)


def _kind(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return "the keys of `layout`" if schema["$ref"].endswith("LayoutSection") else "mapping"
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    inner = schema.get("items", {}).get("enum", [])
    bounds = [f"{sign} {schema[name]:,}" for name, sign in BOUNDS.items() if name in schema]
    of = f" of {', '.join(f'`{value}`' for value in inner)}" if inner else ""
    return f"{KINDS[schema['type']]}{of} {' and '.join(bounds)}".strip()


def _rewards() -> Iterator[str]:
    rows = []
    for name, function in BUILT_IN.items():
        parameters = inspect.signature(function).parameters.values()
        options = [
            f"`{p.name}: {scalar(p.default)}`"
            for p in parameters
            if p.kind is inspect.Parameter.KEYWORD_ONLY
        ]
        rows.append((f"`{name}`", " ".join(str(function.__doc__).split()), ", ".join(options)))
    yield from table(("name", "what it gives", "options"), rows)
    yield f"\n`final_number`: {' '.join(str(final_number.__doc__).split())}"


if __name__ == "__main__":
    TARGET.write_text(page())
