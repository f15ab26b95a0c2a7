"""Refuses ranks with other commands, recipes or versions. Imports no torch."""

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

KEY = "dovetail/inputs"
VERDICT = "dovetail/inputs/verdict"  # in the store
LIBRARIES = ("torch", "transformers")
MAY_DIFFER = ("out", "run_dir")
# Arguments of train.
IN_RECIPE = ("recipe", "overrides", "layout", "dtype", "engine", "trust_remote_code", "recipe_read")


def job_inputs(args: argparse.Namespace) -> dict[str, str]:
    inputs = dict(vars(args))
    if args.command == "train":
        recipe = flat(recipe_of(args).model_dump(mode="json", by_alias=True))
        inputs = {
            **recipe,
            **{name: value for name, value in inputs.items() if name not in IN_RECIPE},
        }
    texts = {
        name: json.dumps(value, default=str)
        for name, value in inputs.items()
        if name not in MAY_DIFFER
    }
    versions = {f"version of {name}": importlib.metadata.version(name) for name in LIBRARIES}
    return {
        **texts,
        **versions,
        "version of dovetail": f"{dovetail.__version__} (source {_source_digest()})",
    }


def refuse_differences(store: Store, rank: int, world: int, inputs: Mapping[str, str]) -> None:
    store.set(f"{KEY}/{rank}", json.dumps([socket.gethostname(), inputs]))
    if rank == 0:
        ranks = [json.loads(store.get(f"{KEY}/{other}")) for other in range(world)]
        names = dict.fromkeys(name for _, theirs in ranks for name in theirs)
        values = {name: [theirs.get(name, "not given") for _, theirs in ranks] for name in names}
        store.set(VERDICT, listing(unequal(values, [host for host, _ in ranks])))
    if problems := store.get(VERDICT).decode():
        raise ConfigError(
            "the ranks were given different things; make them equal, and start all "
            f"again:\n{problems}"
        )


def _source_digest() -> str:
    root = Path(dovetail.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(
            path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0"
        )
    return digest.hexdigest()[:12]
