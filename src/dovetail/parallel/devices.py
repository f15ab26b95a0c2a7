"""Refuses devices that are not there, before ranks start and on each rank. Imports no torch."""

import importlib.util

from dovetail.errors import ConfigError, LayoutError


def has_npu() -> bool:
    return importlib.util.find_spec("torch_npu") is not None


def refuse_absent(name: str) -> None:
    raise ConfigError(f"device {name!r}: this process sees none here; use --device cpu or auto")


def check_count(name: str, ranks: int, count: int) -> None:
    """Raises LayoutError unless each rank of this machine has a device of its own."""
    if ranks > count:
        need = f"{ranks} ranks on this machine need a {name} device each, there are {count}"
        raise LayoutError(f"{need}; use fewer ranks a machine, or --device cpu")
