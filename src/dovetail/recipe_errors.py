"""Turns a schema's validation errors into one message: dotted key, what was given, what was expected, nearest key."""

import difflib
from collections.abc import Mapping

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dovetail.errors import listing

REPHRASED: Mapping[str, str] = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "a valid tuple": "a list",
    "greater than or equal to 0": "0 or more",
    "greater than 0": "more than 0",
}


def explain(error: ValidationError, known: Mapping[str, str], source: str) -> str:
    """One message for all problems of `error`. `known`: every dotted key that exists, with its description."""
    problems: dict[str, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        key, extra = _key(detail["loc"], known)
        problems.setdefault(f"{key}.{extra}" if detail["type"] == "extra_forbidden" else key, []).append(detail)
    lines = [_line(key, details, known) for key, details in problems.items()]
    return f"{source}: {lines[0]}" if len(lines) == 1 else f"{source}:\n{listing(lines)}"


def nearest(key: str, known: Mapping[str, str]) -> str:
    """The key that `key` most likely meant: by its last part, by words of a description, or by similar letters."""
    leaf = key.rpartition(".")[2]
    twins = [other for other in known if other.rpartition(".")[2] == leaf]
    described = [other for other, text in known.items() if leaf.replace("_", " ") in text]
    sections = list(dict.fromkeys(other.split(".")[0] for other in known))
    choices = (sections if "." not in key else []) or twins or described or list(known)
    return difflib.get_close_matches(key, choices, n=1, cutoff=0.0)[0]


def _key(location: tuple[int | str, ...], known: Mapping[str, str]) -> tuple[str, str]:
    """The dotted key of an error, without the tags that unions add, and what follows it."""
    sections = {name.rpartition(".")[0] for name in known} | {name.split(".")[0] for name in known}
    key, rest = "", [str(part) for part in location]
    if len(rest) > 2 and rest[0] == "algorithm":
        del rest[1]  # the discriminator's tag
    while rest:
        longer = f"{key}.{rest[0]}" if key else rest[0]
        if longer not in known and longer not in sections:
            break
        key = longer
        del rest[0]
    return key, ".".join(rest)


def _line(key: str, details: list[ErrorDetails], known: Mapping[str, str]) -> str:
    first = details[0]
    if first["type"] == "extra_forbidden":
        name = key.strip(".")
        if name in known:  # a key of another algorithm
            return f"{name} does not belong to this algorithm: {known[name]}"
        section = name.rpartition(".")[0]
        inside = [k.removeprefix(f"{section}.") for k in known if k.rpartition(".")[0] == section and k != section]
        options = f" (keys of {section}: {', '.join(inside)})" if section else ""
        return f"unknown key {name}; did you mean {nearest(name, known)}?{options}"
    if first["type"] == "missing":
        return f"{key} is missing; expected {known.get(key) or 'a mapping'}"
    if first["type"] == "value_error":
        return f"{key}: {first['ctx']['error']}" if key else str(first["ctx"]["error"])
    if first["type"] == "union_tag_invalid":
        return f"{key}.name is {first['ctx']['tag']!r}; expected one of {first['ctx']['expected_tags']}"
    if first["type"] in ("model_type", "model_attributes_type"):
        return f"{key or 'the recipe'} is {first['input']!r}; expected a mapping of keys"
    expected = [_expected(detail["msg"]) for detail in details]
    return f"{key} is {first['input']!r}; expected {' or '.join(dict.fromkeys(expected))}"


def _expected(message: str) -> str:
    text = message.removeprefix("Input should be ")
    return REPHRASED.get(text, text)
