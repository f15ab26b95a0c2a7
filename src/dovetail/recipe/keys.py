"""What the keys of a recipe are called: every dotted key, names of verl and TRL for them, algorithms by their papers' names."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dovetail.errors import listing, quoted, shortened

# Algorithms by the names that papers gave them, as the keys of section `algorithm`.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"name": "grpo"},
    "dapo": {
        "name": "grpo", "aggregation": "token", "clip_low": 0.2, "clip_high": 0.28, "skip_equal_groups": True
    },
    "dr_grpo": {"name": "grpo", "aggregation": "sequence_sum", "scale_by_std": False},
    "gspo": {
        "name": "grpo", "ratio": "sequence", "aggregation": "sequence", "clip_low": 3e-4, "clip_high": 4e-4,
        "minibatches": 4,
    },
    "rloo": {"name": "rloo"},
    "ppo": {"name": "ppo", "critic_warmup": 3, "minibatches": 4},
    "sft": {"name": "sft"},
}  # fmt: skip


# What others call a key: the last part of its name, or more of it where that alone says too little.
FOREIGN: Mapping[str, Sequence[str]] = {
    "model.path": ("model_name_or_path", "model_name", "pretrained_model_name_or_path"),
    "layout.tp": ("tensor_model_parallel_size", "tensor_parallel_size"),
    "layout.pp": ("pipeline_model_parallel_size", "pipeline_parallel_size"),
    "layout.cp": ("context_parallel_size", "ulysses_sequence_parallel_size"),
    "layout.ep": ("expert_model_parallel_size", "expert_parallel_size"),
    "algorithm.name": ("adv_estimator",),
    "algorithm.epochs": ("num_iterations", "ppo_epochs", "num_ppo_epochs"),
    "algorithm.minibatches": ("ppo_mini_batch_size", "num_mini_batches"),
    "algorithm.aggregation": ("loss_agg_mode", "loss_type"),
    "algorithm.clip_low": ("epsilon", "clip_ratio", "clip_ratio_low", "cliprange"),
    "algorithm.clip_high": ("epsilon_high", "clip_ratio_high"),
    "algorithm.dual_clip": ("delta", "clip_ratio_c"),
    "algorithm.ratio": ("importance_sampling_level",),
    "algorithm.entropy_coef": ("entropy_coeff",),
    "algorithm.kl_coef": ("beta", "kl_loss_coef", "kl_ctrl"),
    "algorithm.kl_estimator": ("kl_loss_type", "kl_penalty"),
    "algorithm.kl_in": ("use_kl_in_reward", "use_kl_loss"),
    "algorithm.scale_by_std": ("scale_rewards", "norm_adv_by_std_in_grpo"),
    "algorithm.skip_equal_groups": ("filter_groups",),
    "algorithm.value_clip": ("cliprange_value",),
    "algorithm.value_coef": ("vf_coef",),
    "data.train": ("train_files", "dataset_name"),
    "data.eval": ("val_files",),
    "rollout.samples_per_prompt": ("num_generations", "rollout.n", "num_samples"),
    "rollout.max_new_tokens": ("max_completion_length", "response_length", "max_response_length"),
    "reward.import": ("reward_funcs", "custom_reward_function", "reward_fn"),
    "optim.lr": ("learning_rate",),
    "optim.schedule": ("lr_scheduler_type", "lr_decay_style"),
    "optim.warmup_steps": ("lr_warmup_steps",),
    "optim.clip_norm": ("max_grad_norm", "grad_clip"),
    "trainer.steps": ("max_steps", "total_training_steps", "total_epochs", "num_train_epochs"),
    "trainer.prompts_per_step": ("batch_size", "train_batch_size", "per_device_train_batch_size"),
    "trainer.tokens_per_batch": ("ppo_max_token_len_per_gpu", "micro_batch_size", "ppo_micro_batch_size_per_gpu"),
    "trainer.save_every": ("save_steps", "save_freq"),
    "trainer.keep": ("save_total_limit", "max_ckpt_to_keep"),
    "trainer.eval_every": ("eval_steps", "test_freq"),
    "trainer.loggers": ("report_to", "logger"),
    "trainer.activation_checkpointing": ("gradient_checkpointing", "enable_gradient_checkpointing"),
    "run_dir": ("output_dir", "default_local_dir"),
}


@dataclass(frozen=True)
class Key:
    """A dotted key: its meaning, its default by algorithm ("" where all have it), whether it must be given."""

    name: str
    text: str
    defaults: Mapping[str, Any]
    required: bool = False

    def belongs_to(self, algorithm: str) -> bool:
        """Whether an algorithm takes this key; any takes what lies outside section `algorithm`."""
        return "" in self.defaults or algorithm in self.defaults


def keys_of(recipe: type[BaseModel]) -> dict[str, Key]:
    """Every dotted key of a recipe, in order; a section that is one of several is an algorithm, by its field `name`."""
    found: dict[str, Key] = {}
    for name, field in recipe.model_fields.items():
        kinds = get_args(field.annotation)
        if kinds:
            found |= _shared(name, kinds)
        elif _is_section(field.annotation):
            found |= {key.name: key for key in _inside(name, field.annotation)}
        else:
            found[name] = _key(name, field)
    return found


def _inside(prefix: str, section: Any) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        key = f"{prefix}.{field.alias or name}"
        yield _key(key, field)
        inner = next(filter(_is_section, (field.annotation, *get_args(field.annotation))), None)
        if inner is not None:
            yield from _inside(key, inner)


def _shared(prefix: str, kinds: Sequence[Any]) -> dict[str, Key]:
    """The keys of all `kinds`; those that some kinds lack say which have them."""
    merged: dict[str, Key] = {}
    for kind in kinds:
        algorithm = str(kind.model_fields["name"].default)
        for key in _inside(prefix, kind):
            first = merged.get(key.name, key)
            earlier = first.defaults if key.name in merged else {}
            merged[key.name] = Key(key.name, first.text, {**earlier, algorithm: key.defaults[""]})
    names = [str(kind.model_fields["name"].default) for kind in kinds]
    for key in list(merged.values()):
        owners = "" if len(key.defaults) == len(kinds) else f" ({', '.join(key.defaults)})"
        text = f"{', '.join(names[:-1])} or {names[-1]}" if key.name == f"{prefix}.name" else key.text + owners
        merged[key.name] = Key(key.name, text, key.defaults)
    return merged


def _key(name: str, field: FieldInfo) -> Key:
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return Key(name, field.description or "", {"": default}, field.is_required())


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


REPHRASED: Mapping[str, str] = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "a valid tuple": "a list",
    "greater than or equal to 0": "0 or more",
    "greater than 0": "more than 0",
}


SHOWN = 20  # problems of one recipe


CLOSE, SIMILAR = 0.75, 0.6  # of 1: how many letters must agree, of a key of the same section and of a section


def explain(error: ValidationError, known: Mapping[str, Key], source: str) -> str:
    """One message for all problems of `error`. `known`: every dotted key that exists."""
    problems: dict[str, list[ErrorDetails]] = {}
    names = {*known, *(name.rpartition(".")[0] for name in known), *(name.split(".")[0] for name in known)}
    for detail in error.errors(include_url=False):
        key, extra = _key_at(detail["loc"], names)
        problems.setdefault(f"{key}.{extra}" if detail["type"] == "extra_forbidden" else key, []).append(detail)
    lines = [_line(key, details, known) for key, details in list(problems.items())[:SHOWN]]
    more = f"\n  ... and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return f"{source}: {lines[0]}" if len(lines) == 1 else f"{source}:\n{listing(lines)}{more}"


def nearest(key: str, known: Mapping[str, Key]) -> str:
    """The key, or the section, that `key` most likely meant.

    In this order: one of its section's, by its letters; what another project calls so; one of that name elsewhere; a
    section; one whose description has its words; by its letters.
    """
    section, _, leaf = key.rpartition(".")
    beside = {leaf_of(other): other for other in known if other.rpartition(".")[0] == section}
    close = difflib.get_close_matches(leaf, beside, n=1, cutoff=CLOSE) if section else []
    if close:
        return beside[close[0]]
    foreign = [
        ours for ours, theirs in FOREIGN.items() if leaf in theirs or f".{key}".endswith(tuple("." + t for t in theirs))
    ]
    twins = [other for other in known if leaf_of(other) == leaf]
    sections = list(dict.fromkeys(other.split(".")[0] for other in known))
    similar = [] if section else difflib.get_close_matches(key, sections, n=1, cutoff=SIMILAR)
    words = leaf.replace("_", " ")
    described = [other for other, found in known.items() if len(words) > 3 and words in found.text]
    choices = foreign or twins or similar or described or list(beside.values() if section else sections) or list(known)
    return difflib.get_close_matches(key, choices, n=1, cutoff=0.0)[0]


def leaf_of(key: str) -> str:
    return key.rpartition(".")[2]


def _key_at(location: tuple[int | str, ...], names: Set[str]) -> tuple[str, str]:
    """The dotted key of an error, without the tags that unions add, and what follows it. `names`: of keys and sections."""
    key, rest = "", [str(part) for part in location]
    if len(rest) > 2 and rest[0] == "algorithm":
        del rest[1]  # the discriminator's tag
    while rest:
        longer = f"{key}.{rest[0]}" if key else rest[0]
        if longer not in names:
            break
        key = longer
        del rest[0]
    return key, ".".join(rest)


def _line(key: str, details: list[ErrorDetails], known: Mapping[str, Key]) -> str:
    first = details[0]
    if first["type"] == "extra_forbidden":
        name = key.strip(".")
        if name in known:  # a key of another algorithm
            return f"{name} does not belong to this algorithm: {known[name].text}"
        section, algorithm = name.rpartition(".")[0], str(first["loc"][1]) if first["loc"][0] == "algorithm" else ""
        known = {k: found for k, found in known.items() if not algorithm or found.belongs_to(algorithm)}
        inside = [leaf_of(k) for k in known if k.rpartition(".")[0] == section]
        options = f" (keys of {shortened(section)}: {', '.join(inside)})" if section else ""
        return f"unknown key {shortened(name)}; did you mean {nearest(name, known)}?{options}"
    if first["type"] == "missing" and isinstance(first["input"], (list, tuple)):  # of the last of its items
        return f"{key} is {quoted(first['input'])}; expected a longer list"
    if first["type"] == "too_long":
        return f"{key} is {quoted(first['input'])}; expected a shorter list"
    if first["type"] == "missing":
        return f"{key} is missing; expected {known[key].text if key in known else 'a mapping'}"
    if first["type"] == "value_error":
        return f"{key}: {first['ctx']['error']}" if key else str(first["ctx"]["error"])
    if first["type"] == "union_tag_invalid":
        tag = first["ctx"]["tag"]
        keys = VARIANTS.get(re.sub(r"[^a-z]+", "_", str(tag).lower()).strip("_"), {})
        hint = (
            f"; that one is {{{', '.join(f'{name}: {scalar(value)}' for name, value in keys.items())}}}" if keys else ""
        )
        return f"{key}.name is {quoted(tag)}; expected one of {first['ctx']['expected_tags']}{hint}"
    if first["type"] == "invalid_key":
        return f"{key}: the key {quoted(first['input'])} is not text; expected the name of a key"
    if first["type"] in ("model_type", "model_attributes_type"):
        return f"{key or 'the recipe'} is {quoted(first['input'])}; expected a mapping of keys"
    expected = [_expected(detail["msg"]) for detail in details]
    return f"{key} is {quoted(first['input'])}; expected {' or '.join(dict.fromkeys(expected))}"


def scalar(value: object) -> str:
    """A value as one writes it in a recipe."""
    return "null" if value is None else value if isinstance(value, str) else json.dumps(value)


def _expected(message: str) -> str:
    text = message.removeprefix("Input should be ")
    return REPHRASED.get(text, text)
