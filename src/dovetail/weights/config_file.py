"""The name of a model, and its config.json. Imports no torch."""

import re
from pathlib import Path
from typing import Any

from dovetail.errors import CheckpointError, quoted
from dovetail.jsonl import parse_json

CONFIG = "config.json"
ADAPTER = "adapter_config.json"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
COMMIT = re.compile(r"[0-9a-f]{40}")


def pinned(name: str | Path) -> tuple[str, str] | None:
    """Return repository and commit of OWNER/NAME@COMMIT; None for a directory. CheckpointError."""
    if Path(name).is_dir():
        return None
    repository, at, revision = str(name).partition("@")
    is_hub_name = HUB_NAME.fullmatch(repository) is not None
    newest = newest_commit(repository)
    if not at or not is_hub_name:
        remedy = "give one with config.json and safetensors files, or OWNER/NAME@COMMIT of the hub"
        if is_hub_name:
            remedy = f"for a hub model, pin it to a commit: {name}@COMMIT ({newest})"
        raise CheckpointError(f"{name} is not a directory; {remedy}")
    if not COMMIT.fullmatch(revision):
        moves = "a branch or tag can move, so give the 40 hexadecimal digits of one"
        raise CheckpointError(f"{name}: {quoted(revision)} is not a commit; {moves} ({newest})")
    return repository, revision


def newest_commit(repository: str) -> str:
    return f"git ls-remote https://huggingface.co/{repository} HEAD prints the newest"


def read_config(path: Path) -> dict[str, Any]:
    if (path / ADAPTER).is_file():
        raise unmerged(path, ADAPTER)
    if not (path / CONFIG).is_file():
        raise CheckpointError(
            f"{path} has no {CONFIG}; give a directory that transformers can load"
        )
    return parse_json((path / CONFIG).read_bytes(), str(path / CONFIG))


def unmerged(path: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{path} holds an adapter ({name}), which is not applied here; merge it into its model "
        "first: "
        "peft.AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload()"
        ".save_pretrained(NEW)"
    )
