"""Reads a recipe's YAML and the `key.path=value` overrides of it, as plain data without any meaning.

YAML 1.1 takes `1e-6` for a string and the later of two equal keys for the truth; here the first is a number (and `1e3` a
whole one) and the second a mistake.
"""

import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dovetail.errors import ConfigError

KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")
MERGED = "tag:yaml.org,2002:merge"  # the key `<<`
LARGE = 2.0**53  # from here on not every whole number is a float


class _Loader(yaml.SafeLoader):
    """The safe loader, without its two surprises."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Keys are compared as they are written: later `<<` has brought in those of other mappings."""
        node = super().compose_mapping_node(anchor)
        seen: set[Hashable] = set()
        for name, _ in node.value:
            key = None if name.tag == MERGED else self.construct_object(name, deep=True)
            if key is not None and isinstance(key, Hashable):  # what is not, the base class refuses
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} is given twice", name.start_mark
                    )
                seen.add(key)
        return node


def _number(loader: _Loader, node: yaml.ScalarNode) -> float:
    """A number with an exponent is whole where its value is: `1e3` may count steps."""
    value: float = loader.construct_yaml_float(node)
    return int(value) if FLOAT.match(node.value) and value.is_integer() and abs(value) < LARGE else value


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would take for a number."""


_Loader.add_constructor("tag:yaml.org,2002:float", _number)
for kind in (_Loader, _Dumper):
    kind.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))


def dump_mapping(value: Mapping[str, Any]) -> str:
    """YAML text of which `read_mapping` makes an equal mapping."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


def read_mapping(path: Path) -> dict[str, Any]:
    """The top-level mapping of a YAML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"recipe {str(path)!r} cannot be read: {reason}; give the path of a YAML file") from None
    value = _parse(text, f"recipe {str(path)!r}")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"recipe {str(path)!r} holds a {type(value).__name__}; expected a mapping of sections")
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(f"recipe {str(path)!r}: the key {key!r} is not text; expected the name of a section")
    return value


def parse_overrides(tokens: Sequence[str]) -> list[tuple[str, Any]]:
    """`a.b=1` as (dotted key, value read as YAML), in the order given."""
    found: list[tuple[str, Any]] = []
    for token in tokens:
        key, equals, text = token.partition("=")
        if not equals:
            raise ConfigError(f"override {token!r} has no value; expected key.path=value")
        if not KEY.fullmatch(key):
            raise ConfigError(f"override {token!r}: {key!r} is not a key; expected key.path=value")
        found.append((key, _parse(text, f"override {token!r}")))
    return found


def merge(recipe: dict[str, Any], key: str, value: Any) -> None:
    """Set `recipe[a][b] = value` for the key `a.b`, making sections that are missing."""
    *sections, leaf = key.split(".")
    inner = recipe
    for depth, name in enumerate(sections, 1):
        if inner.get(name) is None:
            inner[name] = {}
        if not isinstance(inner[name], dict):
            where = ".".join(sections[:depth])
            raise ConfigError(f"override {key}={value!r}: {where} is {inner[name]!r}, which has no keys of its own")
        inner[name] = dict(inner[name])  # a copy, since an alias may have another section be the same mapping
        inner = inner[name]
    inner[leaf] = value


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {_told(error)}") from None
    except (ValueError, RecursionError) as error:  # 2025-02-30, which is no day; lists in lists without end
        raise ConfigError(f"{source} is not valid YAML: {error}; quote what is text") from None


def _told(error: yaml.YAMLError) -> str:
    """What is wrong and where: the line and a caret under it."""
    if isinstance(error, yaml.reader.ReaderError):
        return f"{error.reason}: the character {chr(error.character)!r} at place {error.position}"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    mark = error.problem_mark
    shown = mark.get_snippet()
    snippet = f"\n{shown}" if shown and shown.split("\n")[0].strip() else ""
    context = f" ({error.context})" if error.context else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}{context}{snippet}"


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A recipe's plain data by dotted key."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
