"""Writes the tables of docs/coming-from-verl.md and docs/coming-from-trl.md from the names that a recipe understands.

    python -m tools.names_page

A test compares the committed pages with what `page` gives. The prose before `MARK` is written by hand.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dovetail.recipe.names import Meaning, Table, read_tables
from tools.recipe_page import table

DOCS = Path(__file__).parents[1] / "docs"
MARK = "<!-- What follows is written by `python -m tools.names_page`. -->\n"
PAGES: Mapping[str, str] = {"verl": "coming-from-verl.md", "trl": "coming-from-trl.md"}
TITLES: Mapping[str, str] = {
    "": "Names of all its trainers",
    "grpo": "GRPO",
    "sft": "SFT",
    "dpo": "DPO",
}


def page(project: str) -> str:
    """The whole page: its prose, and its tables anew."""
    prose = (DOCS / PAGES[project]).read_text().partition(MARK)[0]
    tables = read_tables(project)
    lines = [line for kind in tables for line in _part(tables[kind], kind, alone=len(tables) < 3)]
    return prose + MARK + "\n".join([*lines, ""])


def _part(names: Table, kind: str, *, alone: bool) -> Iterator[str]:
    own = [meaning for meaning in names.meanings if meaning.kind == kind]
    yield f"\n## {'Names of its PPO trainer' if alone and not kind else TITLES[kind]} ({names.title} {names.version})\n"
    if keys := [meaning for meaning in own if meaning.key]:
        rows = [
            (f"`{meaning.name}`", f"`{meaning.key}`", _escaped(meaning.text)) for meaning in keys
        ]
        yield from table(("there", "here", ""), rows)
        yield ""
    reasons: dict[str, list[Meaning]] = {}
    for meaning in own:
        if not meaning.key:
            reasons.setdefault(meaning.text, []).append(meaning)
    yield from table(
        ("without a key", ""), [(_listed(same), _escaped(text)) for text, same in reasons.items()]
    )


def _listed(meanings: Sequence[Meaning]) -> str:
    return ", ".join(f"`{meaning.name}`" for meaning in meanings)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for project, name in PAGES.items():
        (DOCS / name).write_text(page(project))
