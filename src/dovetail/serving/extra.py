"""The check for the packages of the extra `serve`. Imports none of them, and no torch."""

import importlib.util

from dovetail.errors import ConfigError

PACKAGES = ("uvicorn", "starlette", "httptools")


def require_serve(what: str) -> None:
    """Raises ConfigError if a package is missing. what: asked for the server."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        lacking = f"{what} needs {', '.join(missing)}, not installed here"
        raise ConfigError(f"{lacking}: pip install 'dovetail-rl[serve]'")
