"""What each rank of a job was given: its command and recipe, and the versions that it runs. Equal on all, or refused.

The ranks of one host share their files. Those of several hosts may have another recipe, or other code, at the same path.
Imports no torch.
"""

import argparse
import hashlib
import importlib.metadata
import json
import socket
from collections.abc import Mapping
from pathlib import Path

import dovetail
from dovetail.cli.arguments import recipe_of
from dovetail.errors import ConfigError, listing, unequal
from dovetail.launch.hosts import Store
from dovetail.recipe.yaml import flat

KEY, VERDICT = "dovetail/given", "dovetail/given/verdict"  # in the store of the ranks
LIBRARIES = ("torch", "transformers")
# Each host may have its own: what the first rank alone writes, and how run_dir is called, whose place is compared later.
OWN = ("out", "run_dir")
IN_RECIPE = ("recipe", "overrides", "layout", "dtype", "engine", "trust_remote_code")  # arguments of train


def given(args: argparse.Namespace) -> dict[str, str]:
    """The command, its arguments and its recipe's keys, and the versions of what runs it, by name, as text."""
    found = dict(vars(args))
    if args.command == "train":
        recipe = flat(recipe_of(args).model_dump(mode="json", by_alias=True))
        found = {**recipe, **{name: value for name, value in found.items() if name not in IN_RECIPE}}
    told = {name: json.dumps(value, default=str) for name, value in found.items() if name not in OWN}
    versions = {f"version of {name}": importlib.metadata.version(name) for name in LIBRARIES}
    return {**told, **versions, "version of dovetail": f"{dovetail.__version__} (source {_source()})"}


def refuse_differences(store: Store, rank: int, world: int, mine: Mapping[str, str]) -> None:
    """Raise ConfigError on every rank where not all ranks were given the same. Every rank calls it."""
    store.set(f"{KEY}/{rank}", json.dumps([socket.gethostname(), mine]))
    if rank == 0:
        everyone = [json.loads(store.get(f"{KEY}/{each}")) for each in range(world)]
        names = dict.fromkeys(name for _, theirs in everyone for name in theirs)
        values = {name: [theirs.get(name, "not given") for _, theirs in everyone] for name in names}
        store.set(VERDICT, listing(unequal(values, [host for host, _ in everyone])))
    problems = store.get(VERDICT).decode()
    if problems:
        raise ConfigError(
            f"the ranks of this job were given different things; make them equal, and start all again:\n{problems}"
        )


def _source() -> str:
    """A few digits for the text of all modules of this package."""
    root, digest = Path(dovetail.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
