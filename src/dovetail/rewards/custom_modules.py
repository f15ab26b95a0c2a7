"""Modules of users, from the directory of a recipe."""

import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path

from dovetail.errors import ConfigError

OURS = (
    "dovetail", "torch", "transformers", "safetensors", "pydantic", "yaml", "rich", "numpy",
    "tokenizers", "packaging", "jinja2", "tqdm", "regex", "filelock", "huggingface_hub",
)  # fmt: skip


def look_in(folder: Path | str, module: str) -> None:
    """Put `folder` on `sys.path`, behind Python's own modules. ConfigError as `refuse_names`."""
    refuse_names(folder, module)
    paths = search_path(folder)
    sys.path.clear()
    sys.path.extend(paths)


def search_path(folder: Path | str) -> list[str]:
    """`sys.path` with Python's own modules first, then `folder`, then the working directory and all else."""
    entry = str(Path(folder).resolve())
    standard = sysconfig.get_path("stdlib")
    paths = [path for path in sys.path if path != entry]
    own = [path for path in paths if path.startswith(standard) and "site-packages" not in path]
    return [*own, entry, *(path for path in paths if path not in own)]


def refuse_names(folder: Path | str, module: str) -> None:
    """ConfigError where `folder` would replace a package that ours needs, or one of Python's by `module`."""
    top = module.partition(".")[0]
    entry = str(Path(folder).resolve())
    others = [path for path in sys.path if path != entry]
    for name in {*OURS, top} & {*OURS, *sys.stdlib_module_names}:
        here = PathFinder.find_spec(name, [entry])
        other = PathFinder.find_spec(name, others)
        loaded = sys.modules[name].__spec__ if name in sys.modules else None
        known = {spec.origin for spec in (other, loaded) if spec is not None}
        if here is not None and here.origin is not None and here.origin not in known:
            raise ConfigError(
                f"{here.origin} has the name of a module that dovetail or Python needs; rename it"
            )
