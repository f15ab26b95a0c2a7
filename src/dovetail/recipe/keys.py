"""Dotted keys, renamed and removed ones, and the message for invalid recipes."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dovetail.errors import listing, quoted, shortened
from dovetail.recipe.names import Meaning, all_meanings, hint, leaf_of, meant
from dovetail.recipe.yaml import flat

# `algorithm` of published methods.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"name": "grpo"},
    "dapo": {
        "name": "grpo", "aggregation": "token", "clip_low": 0.2, "clip_high": 0.28, "drop_zero_std_groups": True,
        "max_num_gen_batches": 10, "overlong_buffer": 16,
    },
    "dr_grpo": {"name": "grpo", "aggregation": "sequence_sum", "scale_by_std": False},
    "gspo": {
        "name": "grpo", "ratio": "sequence", "aggregation": "sequence", "clip_low": 3e-4, "clip_high": 4e-4,
        "num_mini_batches": 4,
    },
    "rloo": {"name": "rloo"},
    "reinforce_plus_plus": {"name": "reinforce_plus_plus", "kl_coef": 0.01},
    "reinforce_plus_plus_baseline": {"name": "reinforce_plus_plus", "group_baseline": True, "kl_coef": 0.01},
    "cispo": {"name": "grpo", "loss": "cispo", "clip_low": 1.0, "clip_high": 4.0, "num_mini_batches": 4},
    "gmpo": {
        "name": "grpo", "loss": "gmpo", "aggregation": "sequence", "clip_low": 0.4, "clip_high": 0.4, "num_mini_batches": 4,
    },
    "sapo": {"name": "grpo", "loss": "sapo", "aggregation": "sequence", "num_mini_batches": 4},
    "ppo": {"name": "ppo", "critic_warmup": 3, "num_mini_batches": 4},
    "sft": {"name": "sft"},
    "gkd": {"name": "distillation", "divergence": "jsd", "beta": 0.5, "lmbda": 0.5},
    "on_policy_distillation": {"name": "distillation", "divergence": "sampled_reverse_kl"},
}  # fmt: skip

RENAMED: Mapping[str, str] = {  # the old names stay accepted (contract.md)
    "data.overlong": "data.overlong_rows",
    "algorithm.minibatches": "algorithm.num_mini_batches",
    "trainer.keep": "trainer.keep_last",
}
REMOVED: Mapping[str, str] = {  # and what to do instead; `layout` is that of any section
    "algorithm.skip_equal_groups": "set algorithm.drop_zero_std_groups",
    "rollout.replay": "set rollout.router_replay",
    "rollout.monitor": "set rollout.mismatch_metrics",
    "layout.copy_engines": "leave it out, since NCCL runs all collectives",
}

MAX_SHOWN = 20  # problems of one recipe
KEYS_OF = " (keys of "
UNKNOWN = "extra_forbidden"  # pydantic's name
# least similarity: to a sibling key, to one that beats other projects' names, to a section
CLOSE = 0.75
CLOSER = 0.85
SIMILAR = 0.7
MANY = 4  # unknown keys of a foreign config


@dataclass(frozen=True)
class Key:
    """defaults: by algorithm, or "" for all."""

    name: str
    text: str
    defaults: Mapping[str, Any]
    required: bool = False


def rename_keys(recipe: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The recipe with current names, and notes."""
    renamed = dict(recipe)
    notes = []
    for old, new in RENAMED.items():
        section, _, leaf = old.partition(".")
        keys = renamed.get(section)
        if isinstance(keys, Mapping) and leaf in keys and leaf_of(new) not in keys:
            renamed[section] = {
                leaf_of(new) if name == leaf else name: value for name, value in keys.items()
            }
            notes.append(renamed_note(old))
    return renamed, notes


def renamed_note(old: str) -> str:
    return f"{old} is now {RENAMED[old]}; the old name stays accepted"


def keys_of(recipe: type[BaseModel]) -> dict[str, Key]:
    """A union is the section `algorithm`."""
    keys: dict[str, Key] = {}
    for name, field in recipe.model_fields.items():
        if kinds := get_args(field.annotation):
            keys |= _shared(name, kinds)
        elif _is_section(field.annotation):
            keys |= {key.name: key for key in _inside(name, field.annotation)}
        else:
            keys[name] = _key(name, field)
    return keys


def _inside(prefix: str, section: Any) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        key = f"{prefix}.{field.alias or name}"
        yield _key(key, field)
        inner = next(filter(_is_section, (field.annotation, *get_args(field.annotation))), None)
        if inner is not None and not issubclass(
            section, inner
        ):  # `reward.parts` has the keys of `reward`
            yield from _inside(key, inner)


def _shared(prefix: str, kinds: Sequence[Any]) -> dict[str, Key]:
    texts: dict[str, str] = {}
    defaults: dict[str, dict[str, Any]] = {}
    names = [str(kind.model_fields["name"].default) for kind in kinds]
    for algorithm, kind in zip(names, kinds, strict=True):
        for key in _inside(prefix, kind):
            texts.setdefault(key.name, key.text)
            defaults.setdefault(key.name, {})[algorithm] = key.defaults[""]
    owners = {
        name: "" if len(own) == len(kinds) else f" ({', '.join(own)})"
        for name, own in defaults.items()
    }
    texts[f"{prefix}.name"] = f"{', '.join(names[:-1])} or {names[-1]}"
    return {name: Key(name, text + owners[name], defaults[name]) for name, text in texts.items()}


def _key(name: str, field: FieldInfo) -> Key:
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return Key(name, field.description or "", {"": default}, field.is_required())


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def explain(error: ValidationError, known: Mapping[str, Key], source: str) -> str:
    problems: dict[str, list[ErrorDetails]] = {}
    names = {
        *known,
        *(name.rpartition(".")[0] for name in known),
        *(name.split(".")[0] for name in known),
    }
    for detail in error.errors(include_url=False):
        path = [
            str(part) for part in detail["loc"] if part != "parts" and not isinstance(part, int)
        ]
        if len(path) > 2 and path[0] == "algorithm":
            del path[1]  # the union's tag
        dotted = [".".join(path[: n + 1]) for n in range(len(path))]
        key = next(
            (name for name in reversed(dotted) if name in names), ""
        )  # without indices and tags of unions
        problems.setdefault(dotted[-1] if detail["type"] == "extra_forbidden" else key, []).append(
            detail
        )
    meanings = (
        all_meanings()
        if any(details[0]["type"] == UNKNOWN for details in problems.values())
        else []
    )
    first = list(problems.items())[:MAX_SHOWN]
    lines = _without_repeats(
        [line for key, details in first for line in _lines(key, details, known, meanings)]
    )
    shown = lines[:MAX_SHOWN]
    more = max(len(lines), len(problems)) - MAX_SHOWN
    text = f"{source}: {lines[0]}" if len(lines) == 1 else f"{source}:\n{listing(shown)}"
    text += f"\n  ... and {more} more" if more > 0 else ""
    foreign = sum("'s, " in line for line in lines) >= MANY
    hint = "\n`dovetail import-config FILE` turns a config of verl, TRL, OpenRLHF, axolotl or slime into a recipe"
    return text + hint * foreign


def nearest(key: str, known: Mapping[str, Key], meanings: Sequence[Meaning]) -> str:
    """Hint for an unknown key, or ""."""
    section, _, leaf = key.rpartition(".")
    siblings = {leaf_of(other): other for other in known if other.rpartition(".")[0] == section}
    close = difflib.get_close_matches(leaf, siblings, n=1, cutoff=CLOSE) if section else []
    alike = [other for other in close if abs(len(other) - len(leaf)) < 2]
    closer = difflib.get_close_matches(leaf, alike, cutoff=CLOSER)
    if key in RENAMED:
        return f"did you mean {RENAMED[key]}?"
    foreign = meant(key, meanings)
    twins = [other for other in known if leaf_of(other) == leaf]
    same = [
        twin for twin in twins if [meaning.key for meaning in foreign if meaning.title] == [twin]
    ]
    if not closer and not (same and key.count(".") < 2):
        said = hint(key, meanings)
        if said and not (close and said.startswith("did you mean")):
            return said
    twins = same or twins
    sections = list(dict.fromkeys(other.split(".")[0] for other in known))
    similar = [] if section else difflib.get_close_matches(key, sections, n=1, cutoff=SIMILAR)
    choices = [siblings[name] for name in close] or twins or similar
    return (
        f"did you mean {difflib.get_close_matches(key, choices, n=1, cutoff=0.0)[0]}?"
        if choices
        else ""
    )


def _without_repeats(lines: Sequence[str]) -> list[str]:
    """Each list of keys is shown once."""
    seen = set[str]()
    short = list[str]()
    for line in lines:
        words, listed, keys = line.rpartition(KEYS_OF)
        short.append(words if listed and keys in seen else line)
        seen.add(keys)
    return short


def _lines(
    key: str, details: list[ErrorDetails], known: Mapping[str, Key], meanings: Sequence[Meaning]
) -> Sequence[str]:
    first = details[0]
    if first["type"] != UNKNOWN:
        return [_line(key, details, known)]
    algorithm = str(first["loc"][1]) if first["loc"][0] == "algorithm" else ""
    inside = (
        flat(first["input"], f"{key}.")
        if isinstance(first["input"], Mapping) and first["input"]
        else {}
    )
    foreign = [name for name in [*inside][:MAX_SHOWN] if meant(name, meanings)]
    return [_unknown_key(name.strip("."), algorithm, known, meanings) for name in foreign or [key]]


def _line(key: str, details: list[ErrorDetails], known: Mapping[str, Key]) -> str:
    first = details[0]
    kind = first["type"]
    given = quoted(first["input"])
    if kind == "missing" and not isinstance(first["input"], (list, tuple)):
        return f"{key} is missing; expected {known[key].text if key in known else 'a mapping'}"
    if kind == "value_error":
        return f"{key}: {first['ctx']['error']}" if key else str(first["ctx"]["error"])
    if kind == "union_tag_invalid":
        tag = first["ctx"]["tag"]
        keys = VARIANTS.get(re.sub(r"[^a-z]+", "_", str(tag).lower()).strip("_"), {})
        written = ", ".join(f"{name}: {scalar(value)}" for name, value in keys.items())
        hint = f"; that one is {{{written}}}" if keys else ""
        return f"{key}.name is {quoted(tag)}; expected one of {first['ctx']['expected_tags']}{hint}"
    expected = "expected " if first["msg"].startswith("Input") else ""
    expected += " or ".join(
        dict.fromkeys(detail["msg"].removeprefix("Input should be ") for detail in details)
    )
    expected = expected.replace("a valid tuple", "a list").replace(
        "a valid dictionary", "a mapping"
    )
    if kind in ("model_type", "model_attributes_type"):
        expected = "expected a mapping of keys"
    if kind == "missing":  # an item of a tuple
        expected = f"expected {len(first['input']) + len(details)} values"
    return f"{key or 'the recipe'} is {given}; {expected}"


def _unknown_key(
    name: str, algorithm: str, known: Mapping[str, Key], meanings: Sequence[Meaning]
) -> str:
    if name in known:
        return f"{name} does not belong to this algorithm: {known[name].text}"
    section = name.rpartition(".")[0]
    instead = REMOVED.get(f"{leaf_of(section)}.{leaf_of(name)}")
    if instead is not None:
        return f"{name} is no key any more; {instead}"
    known = {
        k: key for k, key in known.items() if not algorithm or key.defaults.keys() & {"", algorithm}
    }
    near = nearest(name, known, meanings)
    siblings = [leaf_of(k) for k in known if k.rpartition(".")[0] == section]
    if not section or not siblings:
        section = "a recipe"
        siblings = list(dict.fromkeys(k.split(".")[0] for k in known))
    options = f"{KEYS_OF}{shortened(section)}: {', '.join(siblings)})"
    hint = f"; {near}" if near else ""
    return f"unknown key {shortened(name)}{hint}{options if not near or near.startswith('did you') else ''}"


def scalar(value: object) -> str:
    if value is None:
        return "null"
    return value if isinstance(value, str) else json.dumps(value)
