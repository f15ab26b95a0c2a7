"""Recipes from configs of other projects."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dovetail.errors import ConfigError, quoted
from dovetail.recipe.names import Meaning, Table, leaf_of, read_tables
from dovetail.recipe.schema import Recipe, known_keys
from dovetail.recipe.yaml import dump_value, flat, merge, parse_value, read_mapping, read_text
from dovetail_tools.translation.conversions import CONVERSIONS
from dovetail_tools.translation.draft import Draft, is_number
from dovetail_tools.translation.shell import PROGRAM, read_command

IMPORTED = ("verl", "trl", "openrlhf", "axolotl", "slime")
SAID = 5  # weight of the trainer's name in the command
OFF = (None, False, 0, -1, 1, "", "none", "no", "disabled", "null")  # values that ask for nothing
UNSET = re.compile(
    r"\?\?\?.*|\$\{(?!oc\.env:)[^}]*\}+", re.DOTALL
)  # values that OmegaConf leaves open
SECRET = re.compile(r"(wandb|hub|api|auth|access).*(key|token)|password|secret")
REFERENCE = re.compile(r"\$\{(?:oc\.(?:select|env):)?([\w.]+)(?:, ?([^{}]*))?\}")  # of OmegaConf
OTHERS = re.compile(
    r"(?<![a-z])(dpo|kto|rm|reward|gkd|kd|orpo|cpo|rloo|prm|bco|nash_md|xpo)(?![a-z])"
)  # trainers
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
NAMES_A_PATH = (
    "model.path",
    "critic.path",
    "reference.path",
    "reward.model.path",
    "data.train",
    "data.eval",
)
REQUIRED: Mapping[str, str] = {
    "model.path": "MODEL",
    "data.train": "ROWS.jsonl",
    "run_dir": "runs/imported",
}

COUNTED = (  # others are divided by what these are made of
    "algorithm.epochs", "algorithm.num_mini_batches", "rollout.samples_per_prompt", "trainer.prompts_per_step"
)  # fmt: skip

CORRECTION = "algorithm.correction"
IN_VERL = "algorithm.rollout_correction."
IN_TRL = "vllm_importance_sampling_"
IN_OPENRLHF = "algo.advantage.is_correction_"
OLDER_VERL = "actor_rollout_ref.actor.tis_imp_ratio_cap"
REJECTED: Mapping[str, tuple[str, str]] = {  # of verl's rollout_rs, those that are a ratio here
    "seq_sum_k1": ("sequence", "drop"),
    "seq_mean_k1": ("geometric", "drop"),
    "token_k1": ("token", "mask"),
}


def import_config(path: Path, project: str = "") -> Draft:
    """project: such as `verl` or `trl-sft`; "": recognized."""
    words, given = _read(path)
    name, _, kind = project.partition("-")
    table, kind = _recognized(words, given, name, kind, path)
    given = {
        key: value
        for key, value in given.items()
        if not (isinstance(value, str) and UNSET.fullmatch(value))
    }
    given = _grouped(table, given)
    older = {table.current(key): value for key, value in given.items()}
    draft = Draft(
        table, kind, known_keys(), older | {key: given[key] for key in older.keys() & given.keys()}
    )
    _numbers(draft)
    CONVERSIONS[table.title](draft)
    _correction(draft)
    _copy(draft)
    _require(draft, path)
    _drop_impossible(draft)
    return draft


def _read(path: Path) -> tuple[list[str], dict[str, Any]]:
    text = read_text(path)
    if path.suffix in (".yaml", ".yml", ".json"):
        given = flat(read_mapping(path))
        references = {
            name: value for name, value in given.items() if isinstance(value, str | int | float)
        }
        return [], {name: _resolved(value, references) for name, value in given.items()}
    words, given = read_command(text)
    if not given:
        raise ConfigError(
            f"{path} sets nothing; give a YAML file, or a shell script with key=value or --name "
            "value"
        )
    return words, {name: _resolved(value, {}) for name, value in given.items()}


def _resolved(value: Any, references: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_resolved(part, references) for part in value]
    if not isinstance(value, str):
        return value
    if value.startswith("[") and isinstance(parts := parse_value(value), list):
        return _resolved(parts, references)
    value = f"$HOME{value[1:]}" if value == "~" or value.startswith("~/") else value
    whole = REFERENCE.fullmatch(value)
    if whole and (whole[1] in references or whole[2]):
        return references.get(whole[1], parse_value(whole[2] or ""))
    return REFERENCE.sub(lambda match: str(references.get(match[1], match[2] or match[0])), value)


def _recognized(
    words: Sequence[str], given: Mapping[str, Any], project: str, kind: str, path: Path
) -> tuple[Table, str]:
    """The table that knows most names."""
    command = " ".join([*words[:2], *[word for word in words if PROGRAM.fullmatch(word)][:1]])
    if project and project not in IMPORTED:
        raise ConfigError(f"--from {project}: expected one of {', '.join(IMPORTED)}")
    ranked = []
    for name in (project,) if project else IMPORTED:
        for its_kind, table in read_tables(name).items():
            own = [m for m in table.meanings if m.kind == its_kind and its_kind]
            if kind and its_kind != kind:
                continue
            known = sum(table.find(table.current(key)) is not None for key in given)
            typical = sum(any(m.matches(table.current(key)) for m in own) for key in given)
            said = (
                bool(its_kind) and re.search(rf"(?<![a-z]){its_kind}(?![a-z])", command) is not None
            )
            ranked.append((known + SAID * said, not its_kind, typical, table, its_kind))
    if not ranked:
        raise ConfigError(
            f"--from {project}-{kind}: no such trainer; give verl, trl-sft, trl-grpo, openrlhf, ..."
        )
    known, _, _, table, chosen = max(ranked, key=lambda rank: rank[:3])
    if not known:
        raise ConfigError(
            f"{path}: none of its names is known; say whose it is: --from {'|'.join(IMPORTED)}"
        )
    if (
        (other := OTHERS.search(command))
        and table.title in ("TRL", "OpenRLHF")
        and other[0] != chosen
    ):
        raise ConfigError(
            f"{path}: {other[0]} of {table.title} is not supported yet; sft, grpo, rloo and ppo are"
        )
    if table.title == "TRL" and not chosen:
        raise ConfigError(
            f"{path}: no name in it tells TRL's trainers apart; give --from trl-sft, trl-grpo or "
            "trl-dpo"
        )
    return table, chosen


def _grouped(table: Table, given: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping's names are its value where no table has them."""
    grouped: dict[str, Any] = {}
    for name, value in given.items():
        outer = name if table.find(table.current(name)) else name.rpartition(".")[0]
        while outer and not (table.find(table.current(outer)) or outer.endswith("_kwargs")):
            outer = outer.rpartition(".")[0]
        if outer in ("", name):
            grouped[name] = value
        else:
            inside = grouped.get(outer)
            grouped[outer] = dict(inside) if isinstance(inside, Mapping) else {}
            merge(grouped[outer], name.removeprefix(f"{outer}."), value)
    return grouped


def _numbers(draft: Draft) -> None:
    """Numeric text as numbers. What is none, where one belongs, is left out of `given`, for the user."""
    given: dict[str, Any] = {}
    for name, value in draft.given.items():
        meaning = draft.table.find(name)
        if meaning is None or meaning.key is None:
            given[name] = value
            continue
        ours = (
            next(iter(draft.keys[meaning.key].defaults.values()), None)
            if meaning.key in draft.keys
            else None
        )
        theirs = draft.table.defaults.get(name, ours if meaning.copied else None)
        is_text = meaning.key in (*NAMES_A_PATH, *REQUIRED) or isinstance(
            meaning.entry.get("item", ours), str
        )
        number = value if is_text or not isinstance(value, str) else _number(value)
        known = isinstance(value, str | int | None) and value in meaning.entry.get("values", ())
        if is_number(number) and number < 1 and meaning.key in COUNTED and not known:
            draft.reject(name, value, theirs, "less than 1")
        elif (
            known
            or number is None
            or is_number(number)
            or not (is_number(theirs) or isinstance(number, float))
        ):
            given[name] = number
        else:
            draft.reject(name, value, theirs)
    draft.given = given


def _number(text: str) -> Any:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _copy(draft: Draft) -> None:
    """What conversions left: given values, then defaults."""
    defaults = {
        name: value for name, value in draft.table.defaults.items() if name not in draft.given
    }
    for is_default, values in ((False, draft.given), (True, defaults)):
        for name, value in values.items():
            if name not in draft.used:
                _copy_one(draft, name, value, is_default)
    draft.set_items()


def _copy_one(draft: Draft, name: str, value: Any, is_default: bool) -> None:
    meaning = draft.table.find(name)
    table = draft.table
    shown = f"{name}={'...' if SECRET.search(name) else dump_value(value)}"
    is_off = (value is not True and (value in ([], {}) or value in OFF)) or value in table.same.get(
        name, ()
    )
    if meaning is None:
        draft.leave_out(f"no name of {table.title} {table.version}", shown)
    elif meaning.entry.get("group") == "unneeded" or draft.without_effect(meaning.key):
        draft.unneeded += [] if is_default else [name]
    elif value is None and None not in meaning.entry.get("values", ()):
        pass  # their default
    elif meaning.key is None or not meaning.copied:
        if not is_default and not is_off:
            draft.leave_out(meaning.describe(), shown)
    else:
        try:
            ours = draft.whole(meaning.key, meaning.ours(value))
        except ValueError as error:
            draft.to_decide += [] if is_default or value is None else [f"{shown}: {error}"]
            return
        if meaning.entry.get("decide") and not is_off and not is_default:
            draft.to_decide.append(f"{shown}: {meaning.describe()}")
        _put(draft, meaning, ours, is_default)


def _put(draft: Draft, meaning: Meaning, ours: Any, is_default: bool) -> None:
    key = str(meaning.key)
    item = meaning.entry.get("item")
    steps = draft.recipe.get("trainer.steps")
    comment = f"{draft.table.title}'s default" if is_default else ""
    if item is not None:
        draft.set_item(key, item, ours)
    elif meaning.entry.get("share"):
        if ours and steps:
            draft.set_key(key, round(ours * steps), f"{ours:g} of {steps} steps")
        elif ours:
            draft.to_decide.append(f"{key}: {ours:g} of all steps there; give a number of steps")
    elif not ((ours is None or is_default) and ours == draft.default_of(key)):
        draft.set_key(key, ours, comment)


def _require(draft: Draft, path: Path) -> None:
    for key, stand_in in REQUIRED.items():
        if key not in draft.recipe:
            draft.set_key(key, stand_in)
            draft.to_decide.append(f"{key}: {path.name} does not say it")
    unset = []
    named = []
    for key, value in draft.recipe.items():
        parts = value if isinstance(value, list) else [value]
        for text in [
            part.get("path", part.get("data")) if isinstance(part, Mapping) else part
            for part in parts
        ]:
            if isinstance(text, str) and "$" in text:
                unset.append(f"{key}={text}")
            elif (
                isinstance(text, str)
                and key in NAMES_A_PATH
                and HUB_NAME.fullmatch(text)
                and not Path(text).exists()
            ):
                named.append(f"{key}={text}")
    hints = {
        "write what the variable stands for": unset,
        "a local path, or NAME@COMMIT on the hub": named,
    }
    draft.to_decide += [f"{', '.join(names)}: {what}" for what, names in hints.items() if names]


def _drop_impossible(draft: Draft) -> None:
    for _ in [*draft.recipe]:
        try:
            Recipe.model_validate(nested(draft.recipe))
            return
        except ValidationError as error:
            left = [*draft.recipe]
            for detail in error.errors(include_url=False):
                path = [str(part) for part in detail["loc"] if not isinstance(part, int)]
                if path and path[0] == "algorithm":
                    del path[1:2]  # the algorithm's name
                dotted = ".".join(path)
                key = next(
                    (key for key in left if dotted and f"{dotted}.".startswith(f"{key}.")), ""
                )
                key = key or next(
                    (key for key in left if key in detail["msg"]), ""
                )  # of a check of several keys
                if not key:
                    raise ConfigError(
                        f"the recipe is not one that can run: {detail['msg']}"
                    ) from error
                if key in draft.recipe:
                    draft.to_decide.append(
                        f"{key}={quoted(draft.recipe.pop(key))} is not possible: {detail['msg']}"
                    )
                if key in REQUIRED:
                    draft.set_key(key, REQUIRED[key])


def nested(recipe: Mapping[str, Any]) -> dict[str, Any]:
    sections: dict[str, Any] = {}
    for key, value in recipe.items():
        merge(sections, key, value)
    return sections


def to_yaml(draft: Draft, source: str) -> str:
    lines = [
        f"# From {source}, of {draft.table.title} ({draft.table.version}), by dovetail "
        "import-config."
    ]

    def write(section: Mapping[str, Any], prefix: str, indent: str) -> None:
        for name, value in section.items():
            key = prefix + name
            if isinstance(value, dict) and key not in draft.recipe:
                lines.append(f"{indent}{name}:")
                write(value, f"{key}.", f"{indent}  ")
            else:
                comment = f" # {draft.comments[key]}" if draft.comments.get(key) else ""
                lines.append(f"{indent}{name}: {dump_value(value)}{comment}")

    order = [*draft.keys]
    inside = [key for key in draft.recipe if key not in draft.keys]  # of a layout
    places = {key: (leaf_of(key) != "name", n) for n, key in enumerate([*order, *inside])}
    ranked = sorted(draft.recipe, key=places.__getitem__)
    sections = nested({key: draft.recipe[key] for key in ranked})
    write({name: sections[name] for name in Recipe.model_fields if name in sections}, "", "")
    return "\n".join([*lines, ""])


def _correction(draft: Draft) -> None:
    """Importance sampling of other projects as `algorithm.correction`."""
    projects = {"verl": _verl, "TRL": _trl, "OpenRLHF": _openrlhf, "slime": _slime}
    if draft.table.title in projects and draft.algorithm in (
        "grpo",
        "rloo",
        "ppo",
        "reinforce_plus_plus",
    ):
        try:
            projects[draft.table.title](draft)
        except (ArithmeticError, TypeError, ValueError) as error:  # bounds that are none
            draft.to_decide.append(f"{CORRECTION}: {error}")


def _put_correction(draft: Draft, ratio: str, low: float, high: float, outside: str) -> None:
    draft.set_key(CORRECTION, {"ratio": ratio, "bounds": [low, high], "outside": outside})


def _verl(draft: Draft) -> None:
    level = draft.use(f"{IN_VERL}rollout_is")
    threshold = draft.use(f"{IN_VERL}rollout_is_threshold", 2.0)
    rejected = draft.use(f"{IN_VERL}rollout_rs")
    limits = draft.use(f"{IN_VERL}rollout_rs_threshold")
    if draft.use(f"{IN_VERL}bypass_mode"):
        draft.set_key(CORRECTION, {"old": "sampler"})
        if rejected or draft.value_of(f"{IN_VERL}loss_type", "ppo_clip") != "ppo_clip":
            draft.to_decide.append(
                f"{CORRECTION}: bypass_mode also rejects, or has a loss without clip; here old: "
                "sampler alone"
            )
    elif rejected in REJECTED:
        ratio, outside = REJECTED[rejected]
        low, high = _bounds(limits)
        _put_correction(
            draft, ratio, 1 / high, 1 / (low or 1 / high), outside
        )  # theirs are of the inverse ratio
        draft.to_decide.append(
            f"{CORRECTION}: rollout_rs={rejected} there rejects, with weights by "
            f"rollout_is={level}; here the ratio that is "
            "bounded is the weight, too"
            + (", and masked tokens count" if outside == "mask" else "")
        )
    elif rejected:
        draft.to_decide.append(
            f"{CORRECTION}: rollout_rs={rejected} is not one of ours; token, sequence and "
            "geometric are"
        )
    elif level:
        low, high = _bounds(threshold)
        _put_correction(draft, level, low or 0.0, high, "clamp" if low is None else "mask")
    elif (cap := draft.use(OLDER_VERL, -1)) and cap > 0:
        _put_correction(draft, "token", 0.0, cap, "clamp")


def _bounds(threshold: Any) -> tuple[float | None, float]:
    """Reads the bounds of verl's 2.0, "2.0" or "0.5_5.0"."""
    low, _, high = str(threshold).rpartition("_")
    return float(low) if low else None, float(high)


def _trl(draft: Draft) -> None:
    given = [name for name in draft.given if name.startswith(IN_TRL)]
    level, _, limit = str(draft.use(f"{IN_TRL}mode", "sequence_mask")).partition("_")
    low = draft.use(f"{IN_TRL}clip_min")
    high = draft.use(f"{IN_TRL}clip_max", 3.0)
    is_on = draft.use(f"{IN_TRL}correction", True)
    if not (given and draft.value_of("use_vllm")):
        return
    if not is_on:
        draft.set_key(CORRECTION, {"ratio": "none"})
    elif high is None:
        draft.to_decide.append(
            f"{CORRECTION}: {IN_TRL}clip_max=null is no bound there; give bounds"
        )
    else:
        _put_correction(draft, level, low or 0.0, high, "mask" if limit == "mask" else "clamp")


def _openrlhf(draft: Draft) -> None:
    (low, high) = draft.use(f"{IN_OPENRLHF}threshold", [0.5, 5.0])
    kind = draft.use(f"{IN_OPENRLHF}type", "tis")
    if draft.use(f"{IN_OPENRLHF}enable"):
        _put_correction(draft, "token", low, high, "clamp" if kind == "tis" else "mask")
        if kind == "seq-mask-tis":
            draft.to_decide.append(
                f"{CORRECTION}: {kind} masks responses by their geometric mean, tokens by their "
                "ratio here"
            )


def _slime(draft: Draft) -> None:
    low = draft.use("tis_clip_low", 0.0)
    high = draft.use("tis_clip", 2.0)
    if draft.use("use_tis"):
        _put_correction(draft, "token", low, high, "clamp")
    elif draft.use("use_rollout_logprobs"):
        draft.set_key(CORRECTION, {"old": "sampler"})
    draft.used.add("use_rollout_logprobs")
