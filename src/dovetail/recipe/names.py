"""Names of other projects, from projects/*.yaml."""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from dovetail.recipe.yaml import read_mapping

FOLDER = Path(__file__).parent / "projects"
PROJECTS = ("verl", "trl", "openrlhf", "axolotl", "slime", "prime_rl")
USUAL = "usual"  # names of no project
WITHOUT_KEY: Mapping[str, str] = {  # groups of a file, and what they say
    "unneeded": "not supported, because not needed: {}",
    "unsupported": "not supported, because {}",
    "later": "not supported yet: {}",
}
CLOSE = 0.85  # similarity of 1 to a name of another project
COPIED = frozenset({"values", "item", "share", "gives", "decide"})
MAX_VALUES = 6  # of a name, in a message


@dataclass(frozen=True)
class Meaning:
    """A name of another project. key: ours. text: what differs, or why there is no key.

    entry: values (theirs to ours; others: more are equal), item (of a list or mapping), share (of all steps), gives (a
    constant), decide (tell the user the text).
    """

    title: str | None
    name: str  # `*` stands for anything
    key: str | None
    text: str
    entry: Mapping[str, Any]
    kind: str = ""  # their trainer; "": all

    @property
    def copied(self) -> bool:
        return self.key is not None and (
            not self.entry.get("note") or not COPIED.isdisjoint(self.entry)
        )

    def ours(self, value: Any) -> Any:
        """Raises ValueError."""
        values = self.entry.get("values", {})
        hashable = isinstance(value, str | int | float | None)
        if hashable and value in values:
            return values[value]
        if values and not self.entry.get("others"):
            raise ValueError(f"{self.key} has no such value ({self.text})")
        return self.entry.get("gives", value)

    def describe(self) -> str:
        if not self.key:
            return self.text
        return f"here {self.key} ({self.text})" if self.text else f"here {self.key}"

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self.name) if "*" in self.name else name == self.name


@dataclass(frozen=True)
class Table:
    """The names of a project, or of one of its trainers."""

    title: str
    version: str
    meanings: Sequence[Meaning]  # of one name, the first one counts
    older: Mapping[str, str]  # names of earlier releases
    defaults: Mapping[str, Any]
    same: Mapping[str, Sequence[Any]]  # values that change nothing here

    def find(self, name: str) -> Meaning | None:
        """Finds a key by name, else the enclosing mapping's if that has no key here."""
        by_name = next((meaning for meaning in self.meanings if meaning.name == name), None)
        patterns = [meaning for meaning in self.meanings if meaning.matches(name)]
        own = by_name or max(patterns, key=lambda meaning: meaning.name.count("."), default=None)
        outside = self.find(name.rpartition(".")[0]) if own is None and "." in name else None
        return outside if outside and not outside.key else own

    def current(self, name: str) -> str:
        own = any(meaning.name == name for meaning in self.meanings)
        return name if own else self.older.get(name, name)


@cache
def read_tables(project: str) -> dict[str, Table]:
    """Returns tables by trainer; "": all."""
    content = read_mapping(FOLDER / f"{project}.yaml")
    title = content["title"]
    tables = {}
    for kind, part in {"": {}, **content.get("kinds", {})}.items():
        meanings = [*_meanings(title, part, kind), *_meanings(title, content, "")]
        defaults = {**content.get("defaults", {}), **part.get("defaults", {})}
        older = content.get("older", {})
        same = content.get("same", {})
        tables[kind] = Table(title, str(content["version"]), meanings, older, defaults, same)
    return tables


@cache
def all_meanings() -> list[Meaning]:
    meanings: list[Meaning] = []
    for project in (USUAL, *PROJECTS):
        for table in read_tables(project).values():
            older = {old: table.find(new) for old, new in table.older.items()}
            meanings += [*table.meanings, *(replace(m, name=old) for old, m in older.items() if m)]
    return meanings


def _meanings(title: str | None, part: Mapping[str, Any], kind: str) -> Iterator[Meaning]:
    for name, given in part.get("keys", {}).items():
        entry: Mapping[str, Any] = {"key": given} if isinstance(given, str) else given
        text = entry.get("note") or _listed(entry.get("values", {}))
        yield Meaning(title, name, entry["key"], text, entry, kind)
    for group, words in WITHOUT_KEY.items():
        for reason, names in part.get(group, {}).items():
            for name in names:
                yield Meaning(title, name, None, words.format(reason), {"group": group}, kind)


def _listed(values: Mapping[Any, Any]) -> str:
    shown = [f"{_word(theirs)}: {_word(ours)}" for theirs, ours in values.items() if theirs != ours]
    return ", ".join([*shown[:MAX_VALUES], *(["..."] if len(shown) > MAX_VALUES else [])])


def _word(value: Any) -> str:
    return json.dumps(value).strip('"')


def leaf_of(key: str) -> str:
    return key.rpartition(".")[2]


def meant(typed: str, meanings: Sequence[Meaning]) -> list[Meaning]:
    """Meanings of an unknown key: whole names, then endings, then a unique last part."""
    whole = [
        m
        for m in meanings
        if m.matches(typed) or m.matches(leaf_of(typed)) or typed.endswith(f".{m.name}")
    ]
    if whole:
        best = max(_rank(m, typed) for m in whole)
        whole = [m for m in whole if _rank(m, typed) == best]
        return _different([m for m in whole if m.title is None] or whole)
    if "." in typed and (part := [m for m in meanings if m.name.endswith(f".{typed}")]):
        return _different(part)[:1]
    leaf = _different([m for m in meanings if leaf_of(m.name) == leaf_of(typed)])
    return leaf if len(leaf) == 1 else []


def _rank(meaning: Meaning, typed: str) -> tuple[bool, bool, int]:
    return meaning.matches(typed), "*" not in meaning.name, meaning.name.count(".")


def _different(meanings: Sequence[Meaning]) -> list[Meaning]:
    by_outcome: dict[str, Meaning] = {}
    for meaning in meanings:
        by_outcome.setdefault(meaning.key or meaning.entry["group"], meaning)
    return list(by_outcome.values())


def hint(typed: str, meanings: Sequence[Meaning]) -> str:
    if whole := meant(typed, meanings):
        return "; ".join(_sentence(typed, meaning) for meaning in whole)
    leaves = {leaf_of(m.name): m for m in meanings if "*" not in m.name}
    near = difflib.get_close_matches(leaf_of(typed), leaves, n=1, cutoff=CLOSE)
    others = meant(near[0], meanings) if near else []
    return f"did you mean {near[0]}? {_sentence(near[0], others[0])}" if len(others) == 1 else ""


def _sentence(typed: str, meaning: Meaning) -> str:
    if not meaning.title:
        return f"{leaf_of(typed)}: {meaning.describe()}"
    kind = f" ({meaning.kind})" if meaning.kind else ""
    return f"{leaf_of(typed)} is {meaning.title}'s{kind}, {meaning.describe()}"
