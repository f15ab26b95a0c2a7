"""The message for an invalid recipe: every problem with what was expected, and the nearest known key."""

import difflib
import re
from collections.abc import Mapping, Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dovetail.errors import listing, quoted, shortened
from dovetail.recipe.keys import REMOVED, RENAMED, VARIANTS, Key, scalar
from dovetail.recipe.names import Meaning, all_meanings, hint, leaf_of, meant
from dovetail.recipe.yaml import flat

COMMAND_LINE = "command line"
MAX_SHOWN = 20  # problems of one recipe
KEYS_OF = " (keys of "
UNKNOWN = "extra_forbidden"  # pydantic's name
# least similarity: to a sibling key, to one that beats other projects' names, to a section
CLOSE = 0.75
CLOSER = 0.85
SIMILAR = 0.7
MANY = 4  # unknown keys of a foreign config
FOREIGN = (
    "\n`dovetail import-config FILE` turns a config of verl, TRL, OpenRLHF, axolotl or slime "
    "into a recipe"
)


def explain(
    error: ValidationError, known: Mapping[str, Key], source: str, typed: Sequence[str] = ()
) -> str:
    """Returns one message for all problems of a recipe.

    source: the file. typed: keys that the command line gives, whose problems are said to be there.
    """
    problems = _by_key(error, known)
    shown = list(problems.items())[:MAX_SHOWN]
    is_unknown = any(details[0]["type"] == UNKNOWN for details in problems.values())
    meanings = all_meanings() if is_unknown else []
    of_command = [_is_typed(key, details[0], typed) for key, details in shown]
    if all(of_command):
        source = COMMAND_LINE
    lines: list[str] = []
    for (key, details), is_typed in zip(shown, of_command, strict=True):
        place = f"{COMMAND_LINE}: " if is_typed and source != COMMAND_LINE else ""
        lines += [place + line for line in _lines(key, details, known, meanings)]
    lines = _without_repeats(lines)
    if len(lines) == 1:
        text = f"{source}: {lines[0]}"
    else:
        text = f"{source}:\n{listing(lines[:MAX_SHOWN])}"
    more = max(len(lines), len(problems)) - MAX_SHOWN
    if more > 0:
        text += f"\n  ... and {more} more"
    is_foreign = sum("'s, " in line for line in lines) >= MANY
    return text + FOREIGN if is_foreign else text


def _by_key(error: ValidationError, known: Mapping[str, Key]) -> dict[str, list[ErrorDetails]]:
    """Returns the problems of each dotted key, without indices and tags of unions."""
    names = {*known}
    for name in known:
        names |= {name.rpartition(".")[0], name.split(".")[0]}
    problems: dict[str, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        parts = [part for part in detail["loc"] if part != "parts" and not isinstance(part, int)]
        path = [str(part) for part in parts]
        if len(path) > 2 and path[0] == "algorithm":
            del path[1]  # the union's tag
        dotted = [".".join(path[: n + 1]) for n in range(len(path))]
        key = next((name for name in reversed(dotted) if name in names), "")
        if detail["type"] == UNKNOWN:
            key = dotted[-1]
        problems.setdefault(key, []).append(detail)
    return problems


def _is_typed(key: str, detail: ErrorDetails, typed: Sequence[str]) -> bool:
    """Whether the command line gives the key of a problem, or one that its message names."""
    if key in typed or detail["type"] != "value_error":
        return any(_encloses(name, key) or _encloses(key, name) for name in typed)
    text = str(detail["ctx"]["error"])
    inside = [name.removeprefix(f"{key}.") for name in typed if not key or _encloses(key, name)]
    return any(re.search(rf"\b{re.escape(name)}\b", text) for name in inside)


def _encloses(section: str, key: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def nearest(key: str, known: Mapping[str, Key], meanings: Sequence[Meaning]) -> str:
    """Returns a hint for an unknown key, or ""."""
    if key in RENAMED:
        return f"did you mean {RENAMED[key]}?"
    section, _, leaf = key.rpartition(".")
    siblings = {leaf_of(other): other for other in known if other.rpartition(".")[0] == section}
    close = difflib.get_close_matches(leaf, siblings, n=1, cutoff=CLOSE) if section else []
    alike = [other for other in close if abs(len(other) - len(leaf)) < 2]
    closer = difflib.get_close_matches(leaf, alike, cutoff=CLOSER)
    sections = list(dict.fromkeys(other.split(".")[0] for other in known))
    similar = [] if section else difflib.get_close_matches(key, sections, n=1, cutoff=SIMILAR)
    twins = [other for other in known if leaf_of(other) == leaf]
    foreign = [meaning.key for meaning in meant(key, meanings) if meaning.title]
    same = [twin for twin in twins if foreign == [twin]]
    if not closer and not (same and key.count(".") < 2):
        said = hint(key, meanings)
        is_guess = said.startswith("did you mean")
        if said and not (is_guess and (close or similar)):
            return said
    choices = [siblings[name] for name in close] or same or twins or similar
    if not choices:
        return ""
    best = difflib.get_close_matches(key, choices, n=1, cutoff=0.0)[0]
    return f"did you mean {best}?"


def _without_repeats(lines: Sequence[str]) -> list[str]:
    """Returns the lines with each list of keys once."""
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
    given = first["input"]
    if first["type"] != UNKNOWN:
        return [_line(key, details, known)]
    algorithm = str(first["loc"][1]) if first["loc"][0] == "algorithm" else ""
    inside = flat(given, f"{key}.") if isinstance(given, Mapping) and given else {}
    foreign = [name for name in [*inside][:MAX_SHOWN] if meant(name, meanings)]
    return [_unknown_key(name.strip("."), algorithm, known, meanings) for name in foreign or [key]]


def _line(key: str, details: list[ErrorDetails], known: Mapping[str, Key]) -> str:
    first = details[0]
    kind = first["type"]
    given = quoted(first["input"])
    if kind == "missing" and not isinstance(first["input"], (list, tuple)):
        return f"{key} is missing; expected {known[key].text if key in known else 'a mapping'}"
    if kind == "value_error":
        problem = str(first["ctx"]["error"])
        return f"{key}: {problem}" if key else problem
    if kind == "union_tag_invalid":
        tag = first["ctx"]["tag"]
        expected = f"expected one of {first['ctx']['expected_tags']}"
        return f"{key}.name is {quoted(tag)}; {expected}{_variant(str(tag))}"
    return f"{key or 'the recipe'} is {given}; {_expected(details)}"


def _expected(details: list[ErrorDetails]) -> str:
    first = details[0]
    if first["type"] in ("model_type", "model_attributes_type"):
        return "expected a mapping of keys"
    if first["type"] == "missing":  # an item of a tuple
        return f"expected {len(first['input']) + len(details)} values"
    choices = [detail["msg"].removeprefix("Input should be ") for detail in details]
    text = " or ".join(dict.fromkeys(choices))
    text = text.replace("a valid tuple", "a list").replace("a valid dictionary", "a mapping")
    return f"expected {text}" if first["msg"].startswith("Input") else text


def _variant(name: str) -> str:
    """Returns how a published method is written, or ""."""
    keys = VARIANTS.get(re.sub(r"[^a-z]+", "_", name.lower()).strip("_"))
    if keys is None:
        return ""
    written = ", ".join(f"{key}: {scalar(value)}" for key, value in keys.items())
    return f"; that one is {{{written}}}"


def _unknown_key(
    name: str, algorithm: str, known: Mapping[str, Key], meanings: Sequence[Meaning]
) -> str:
    if name in known:
        return f"{name} does not belong to this algorithm: {known[name].text}"
    section = name.rpartition(".")[0]
    instead = REMOVED.get(f"{leaf_of(section)}.{leaf_of(name)}")
    if instead is not None:
        return f"{name} is no key any more; {instead}"
    owners = {"", algorithm}
    if algorithm:
        known = {k: key for k, key in known.items() if key.defaults.keys() & owners}
    text = f"unknown key {shortened(name)}"
    near = nearest(name, known, meanings)
    if near:
        text += f"; {near}"
        if not near.startswith("did you"):
            return text
    siblings = [leaf_of(k) for k in known if k.rpartition(".")[0] == section]
    if not section or not siblings:
        section = "a recipe"
        siblings = list(dict.fromkeys(k.split(".")[0] for k in known))
    return f"{text}{KEYS_OF}{shortened(section)}: {', '.join(siblings)})"
