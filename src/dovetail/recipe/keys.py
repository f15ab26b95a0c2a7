"""The keys of a recipe by dotted name, renamed and removed ones, and keys of published methods."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dovetail.recipe.names import leaf_of

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


@dataclass(frozen=True)
class Key:
    """A key of a recipe. defaults: by algorithm, or "" for all."""

    name: str
    text: str
    defaults: Mapping[str, Any]
    required: bool = False


def rename_keys(recipe: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the recipe with current names, and notes."""
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
    """Returns all keys. A union of sections is `algorithm`."""
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
        is_recursive = inner is not None and issubclass(section, inner)  # `reward.parts`
        if inner is not None and not is_recursive:
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


def scalar(value: object) -> str:
    if value is None:
        return "null"
    return value if isinstance(value, str) else json.dumps(value)
