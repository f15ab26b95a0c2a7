"""YAML and `key.path=value` as plain data. `1e-6` is a number; duplicate keys are errors."""

import re
import sys
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dovetail.errors import ConfigError, quoted, short_words

KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
FLOAT = re.compile(
    r"[-+]?(\d[\d_]*+\.?+[\d_]*+|\.\d[\d_]*+)[eE][-+]?\d+$"
)  # possessive: linear time
MERGED = "tag:yaml.org,2002:merge"  # the key `<<`
LARGE = 2.0**53  # not every larger integer is a float
# Limits: characters, values (an alias counts as its target), depth, digits of an integer
MOST_TEXT = 1 << 18
MOST_VALUES = 10_000
DEEPEST = 32
MOST_DIGITS = 1000


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.count = 0
        self.depth = 0
        self.measured: dict[yaml.Node, tuple[int, int]] = {}  # number of values, depth

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = self.peek_event().start_mark
        is_alias = self.check_event(yaml.AliasEvent)
        self.count = self.count + 1
        self.depth = self.depth + 1
        _limit(self.count, self.depth, mark)
        node = super().compose_node(parent, index)
        assert node is not None
        self.depth -= 1
        if is_alias and node not in self.measured:
            raise yaml.MarkedYAMLError(
                None, None, "an alias stands inside of what it stands for", mark
            )
        if not is_alias:
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            inside = [part for pair in pairs for part in pair] or (
                node.value if isinstance(node.value, list) else []
            )
            counts, depths = zip((0, 0), *(self.measured[part] for part in inside), strict=True)
            self.measured[node] = 1 + sum(counts), 1 + max(depths)
            _limit(*self.measured[node], mark)
        return node

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


def _limit(count: int, depth: int, mark: yaml.Mark) -> None:
    if count > MOST_VALUES or depth > DEEPEST:
        most = f"{MOST_VALUES} values, with those of every alias, or {DEEPEST} inside each other"
        raise yaml.MarkedYAMLError(None, None, f"more than {most}; make it smaller", mark)


def _number(loader: _Loader, node: yaml.ScalarNode) -> float:
    value: float = loader.construct_yaml_float(node)
    return (
        int(value)
        if FLOAT.match(node.value) and value.is_integer() and abs(value) < LARGE
        else value
    )


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    if len(node.value) > MOST_DIGITS:
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
            return file.read(MOST_TEXT + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(
            f"recipe {str(path)!r} cannot be read: {reason}; give the path of a YAML file"
        ) from None


def read_mapping(path: Path) -> dict[str, Any]:
    text = read_text(path)
    value = _parse(text, f"recipe {str(path)!r}")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(
            f"recipe {str(path)!r} holds a {type(value).__name__}; expected a mapping of sections"
        )
    if odd := [key for key in value if not isinstance(key, str)]:
        raise ConfigError(
            f"recipe {str(path)!r}: the key {quoted(odd[0])} is not text; expected the name of a "
            "section"
        )
    return value


def parse_overrides(tokens: Sequence[str]) -> list[tuple[str, Any]]:
    overrides: list[tuple[str, Any]] = []
    for token in tokens:
        key, equals, text = token.partition("=")
        if not equals:
            raise ConfigError(f"override {quoted(token)} has no value; expected key.path=value")
        if not KEY.fullmatch(key) or key.count(".") > DEEPEST:
            raise ConfigError(
                f"override {quoted(token)}: {quoted(key)} is not a key; expected key.path=value"
            )
        overrides.append((key, _parse(text, f"override {quoted(token)}")))
    return overrides


def parse_value(text: str) -> Any:
    """Text that is no YAML stays as it is."""
    try:
        return _parse(text, "value")
    except ConfigError:
        return text


def dump_value(value: Any) -> str:
    """On one line."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, default_flow_style=True, width=sys.maxsize
    )
    return text.removesuffix("\n").removesuffix("\n...")


def merge(recipe: dict[str, Any], key: str, value: Any) -> None:
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
    if len(text) > MOST_TEXT:
        raise ConfigError(
            f"{source} has more than {MOST_TEXT} characters; a recipe takes a few thousand"
        )
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {_describe(error)}") from None


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
    """By dotted keys."""
    keys: dict[str, Any] = {}
    for key, value in section.items():
        keys |= (
            flat(value, f"{prefix}{key}.")
            if isinstance(value, Mapping) and value
            else {prefix + key: value}
        )
    return keys
