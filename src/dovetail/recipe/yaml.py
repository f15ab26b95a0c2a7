"""Reads and writes YAML, and reads `key.path=value`. `1e-6` is a number; duplicate keys are errors."""

import re
import sys
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dovetail.errors import ConfigError, quoted, short_words, shortened

KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
FLOAT = re.compile(
    r"[-+]?(\d[\d_]*+\.?+[\d_]*+|\.\d[\d_]*+)[eE][-+]?\d+$"
)  # possessive: linear time
MERGED = "tag:yaml.org,2002:merge"  # the key `<<`
LARGE = 2.0**53  # not every larger integer is a float
# Limits, since a recipe may be somebody else's; an alias counts as its target.
MAX_CHARACTERS = 1 << 18
MAX_VALUES = 10_000
MAX_DEPTH = 32
MAX_DIGITS = 1000  # of an integer
TOO_LARGE = (
    f"has more than {MAX_VALUES} values, with those of every alias, "
    f"or {MAX_DEPTH} inside each other; make it smaller"
)


class _Loader(yaml.SafeLoader):
    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Resolves `<<`. Refuses merges that multiply."""
        super().flatten_mapping(node)
        if len(node.value) > MAX_VALUES:
            raise yaml.MarkedYAMLError(None, None, f"it {TOO_LARGE}", node.start_mark)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError):
            problem = (
                f"{quoted(node.value)} is no {node.tag.rpartition(':')[2]}; quote what is text"
            )
            raise yaml.MarkedYAMLError(None, None, problem, node.start_mark) from None

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuses duplicate keys, before `<<` merges."""
        node = super().compose_mapping_node(anchor)
        seen: set[Hashable] = set()
        for name, _ in node.value:
            key = None if name.tag == MERGED else self.construct_object(name, deep=True)
            if key is not None and isinstance(key, Hashable):  # the base class refuses others
                if key in seen:
                    problem = f"the key {quoted(key)} is given twice"
                    raise yaml.MarkedYAMLError(None, None, problem, name.start_mark)
                seen.add(key)
        return node


def _number(loader: _Loader, node: yaml.ScalarNode) -> float:
    """Returns a float, or an int for one such as `1e6`."""
    value: float = loader.construct_yaml_float(node)
    is_whole = value.is_integer() and abs(value) < LARGE
    return int(value) if is_whole and FLOAT.match(node.value) else value


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    if len(node.value) > MAX_DIGITS:
        raise ValueError(node.value)
    return loader.construct_yaml_int(node)


class _Dumper(yaml.SafeDumper):  # quotes text that `_Loader` would read as a number
    pass


_Loader.add_constructor("tag:yaml.org,2002:float", _number)
_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
for kind in (_Loader, _Dumper):
    kind.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))


def dump_mapping(value: Mapping[str, Any]) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


def read_text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(
            f"recipe {str(path)!r} cannot be read: {reason}; give the path of a YAML file"
        ) from None


def read_mapping(path: Path) -> dict[str, Any]:
    if path.suffix == ".jsonl":
        edit = "give a YAML file as the recipe, and these as data.train"
        raise ConfigError(f"recipe {str(path)!r} is a file of rows (JSON lines); {edit}")
    text = read_text(path)
    value = _parse(text, f"recipe {str(path)!r}")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(
            f"recipe {str(path)!r} holds a {type(value).__name__}; expected a mapping of sections"
        )
    return value


def parse_overrides(tokens: Sequence[str]) -> list[tuple[str, Any]]:
    overrides: list[tuple[str, Any]] = []
    for token in tokens:
        key, equals, text = token.partition("=")
        if not equals:
            raise ConfigError(f"override {quoted(token)} has no value; expected key.path=value")
        if not KEY.fullmatch(key) or key.count(".") > MAX_DEPTH:
            bare = key.lstrip("+")  # as hydra writes a new key
            expected = "expected key.path=value"
            if bare != key and KEY.fullmatch(bare):
                expected = f"drop the +: {shortened(bare)}=value"
            raise ConfigError(f"override {quoted(token)}: {quoted(key)} is not a key; {expected}")
        overrides.append((key, _parse(text, f"override {quoted(token)}")))
    return overrides


def parse_value(text: str) -> Any:
    """Returns the value of a text, or the text itself where that is no YAML."""
    try:
        return _parse(text, "value")
    except ConfigError:
        return text


def dump_value(value: Any) -> str:
    """Returns YAML of one line."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, default_flow_style=True, width=sys.maxsize
    )
    return text.removesuffix("\n").removesuffix("\n...")


def merge(recipe: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key of a recipe."""
    *sections, leaf = key.split(".")
    inner = recipe
    for depth, name in enumerate(sections, 1):
        section = {} if inner.get(name) is None else inner[name]
        if not isinstance(section, dict):
            given = f"{'.'.join(sections[:depth])} is {quoted(section)}"
            raise ConfigError(
                f"override {key}={quoted(value)}: {given}, which has no keys of its own"
            )
        inner[name] = inner = dict(section)  # a copy: an alias makes two sections one object
    inner[leaf] = value


def _parse(text: str, source: str) -> Any:
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(
            f"{source} has more than {MAX_CHARACTERS} characters; a recipe takes a few thousand"
        )
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {_describe(error)}") from None
    except RecursionError:
        problem = "lists and mappings lie too deep inside each other"
        raise ConfigError(f"{source} is not valid YAML: {problem}") from None
    if not _is_small(value):
        raise ConfigError(f"{source} {TOO_LARGE}")
    return value


def _is_small(value: Any) -> bool:
    """Whether a value keeps to the limits, with everything inside it."""
    waiting = [(value, 1)]
    for _ in range(MAX_VALUES):
        if not waiting:
            return True
        item, depth = waiting.pop()
        if depth > MAX_DEPTH:
            return False
        if isinstance(item, dict):
            waiting += [(part, depth + 1) for part in item.values()]
        elif isinstance(item, list):
            waiting += [(part, depth + 1) for part in item]
    return False


def _describe(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        return f"{error.reason}: the character {chr(error.character)!r} at place {error.position}"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return short_words(" ".join(str(error).split()))
    mark = error.problem_mark
    shown = error.problem_mark.get_snippet()
    snippet = f"\n{shown}" if shown and shown.split("\n")[0].strip() else ""
    context = f" ({short_words(error.context)})" if error.context else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {short_words(str(error.problem))}{context}{snippet}"


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of a mapping and of those inside it, by dotted keys."""
    keys: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            keys |= flat(value, f"{prefix}{key}.")
        else:
            keys[f"{prefix}{key}"] = value
    return keys
