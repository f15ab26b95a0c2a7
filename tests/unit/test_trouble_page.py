"""docs/when-something-goes-wrong.md quotes messages of the source, and names keys, flags and commands that exist."""

import ast
import re
from argparse import ArgumentParser
from pathlib import Path

from dovetail.cli.arguments import all_commands
from dovetail.recipe.schema import known_keys

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/when-something-goes-wrong.md").read_text()
MESSAGES = re.findall(r"```text\n(.*?)```", TEXT, re.S)
PROSE = re.sub(r"```text\n.*?```", "", TEXT, flags=re.S)
OTHERS = {
    "--max-restarts",
    "--shm-size",
    "--ipc",
    "--local-dir",
    "--help",
}  # flags of other programs, and of all
LEAST = 11  # characters of a literal that identifies a message


def test_keys_flags_and_commands_exist() -> None:
    keys = known_keys()
    sections = {name.partition(".")[0] for name in keys}
    named = {
        key
        for key in re.findall(r"`([a-z]+(?:\.[a-z_]+)+)", PROSE)
        if key.partition(".")[0] in sections
    }
    named |= set(re.findall(r"\b((?:trainer|optim|algorithm|rollout|model|data)\.[a-z_]+)=?", TEXT))
    files = {name for name in named if name.endswith((".py", ".md", ".json", ".jsonl"))}
    assert len(named) > 40
    assert {
        key
        for key in named - files
        if key not in keys and not any(k.startswith(f"{key}.") for k in keys)
    } == set()
    parser = ArgumentParser()
    for command in all_commands().values():
        part = ArgumentParser()
        command.add_arguments(part)
        parser._option_string_actions |= part._option_string_actions
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", PROSE)) <= {
        *parser._option_string_actions,
        *OTHERS,
    }
    assert set(re.findall(r"`dovetail ([a-z]+)", PROSE)) <= set(all_commands())


def test_messages_are_those_of_the_source() -> None:
    """Every line has a literal of the source, with what the code fills in left out."""
    literals = set[str]()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and len(node.value.strip()) >= LEAST
            ):
                literals |= {
                    part.strip() for part in node.value.split("\n") if len(part.strip()) >= LEAST
                }
    lines = [line for block in MESSAGES for line in block.splitlines() if "rank 3" not in line]
    assert len(lines) > 30
    assert [line for line in lines if not any(literal in line for literal in literals)] == []


def test_links_lead_somewhere_and_readme_has_every_page() -> None:
    headings = re.findall(r"^## (.*)$", TEXT, re.M)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([\w-]+)\)", TEXT)) == anchors
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", TEXT)) <= pages
    assert set(re.findall(r"\(docs/([\w-]+\.md)\)", (ROOT / "README.md").read_text())) == pages
