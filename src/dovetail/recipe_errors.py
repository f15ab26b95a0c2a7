"""Turns a schema's validation errors into one message: dotted key, what was given, what was expected, nearest key."""

import difflib
import json
import re
from collections.abc import Mapping, Set

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dovetail.errors import listing, quoted, shortened
from dovetail.recipe_keys import FOREIGN, VARIANTS, Key

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
        key, extra = _key(detail["loc"], names)
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


def _key(location: tuple[int | str, ...], names: Set[str]) -> tuple[str, str]:
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
