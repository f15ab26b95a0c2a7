"""Values as JSON between the two processes of a test: plain data, and names for the rest.

JSON has numbers, text, lists, booleans and null. All else is {"kind": ..., ...}: {"kind": "tuple",
"items": [...]}. Reading a message runs no code of its sender.
"""

import builtins
import importlib
from collections import deque
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

SEQUENCES: Mapping[str, Any] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "list": list,
}
# modules of classes with a text form, which are imported where one occurs
TEXTS: Mapping[str, str] = {"complex": "builtins", "Decimal": "decimal", "Fraction": "fractions"}
DATES: Mapping[str, str] = {"datetime": "datetime", "date": "datetime", "time": "datetime"}
LARGEST = 1 << 63
PLAIN_ARRAYS = "biufc"  # kinds of numpy's dtypes

Name = Callable[[Any], dict[str, Any]]  # of an object that stays where it is
Find = Callable[[dict[str, Any]], Any]  # the object behind a name


def pack(value: Any, name: Name) -> Any:
    """Something JSON can hold. Objects of other classes become what `name` says."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        whole = int(value)
        return whole if abs(whole) < LARGEST else {"kind": "int", "hex": hex(whole)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes | bytearray):
        return {"kind": type(value).__name__, "hex": bytes(value).hex()}
    if isinstance(value, dict):
        items = [[pack(key, name), pack(item, name)] for key, item in value.items()]
        return {"kind": "dict", "items": items}
    for kind in SEQUENCES.values():
        if isinstance(value, kind):
            items = [pack(item, name) for item in value]
            return items if kind is list else {"kind": kind.__name__, "items": items}
    return _pack_rare(value, name)


def _pack_rare(value: Any, name: Name) -> dict[str, Any]:
    kind = type(value).__name__
    module = type(value).__module__
    if TEXTS.get(kind) == module:
        return {"kind": kind, "text": str(value)}
    if DATES.get(kind) == module:
        return {"kind": kind, "text": value.isoformat()}
    if kind == "timedelta" and module == "datetime":
        return {"kind": kind, "parts": [value.days, value.seconds, value.microseconds]}
    if type(value) is range:
        return {"kind": kind, "parts": [value.start, value.stop, value.step]}
    if isinstance(value, ModuleType):
        return {"kind": "module", "name": value.__name__}
    if isinstance(value, type) and value.__module__ == "builtins":
        return {"kind": "type", "name": value.__name__}
    if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        return _pack_array(value, name)
    return name(value)


def _pack_array(value: Any, name: Name) -> dict[str, Any]:
    if value.dtype.kind not in PLAIN_ARRAYS:
        return name(value)
    array = {"dtype": value.dtype.str, "shape": list(value.shape), "hex": value.tobytes().hex()}
    return {"kind": "array", **array}


def unpack(packed: Any, find: Find) -> Any:
    """What was packed. ValueError or another exception for what cannot have been."""
    if isinstance(packed, list):
        return [unpack(item, find) for item in packed]
    if not isinstance(packed, dict):
        return packed
    kind = packed["kind"]
    if kind == "dict":
        return {unpack(key, find): unpack(item, find) for key, item in packed["items"]}
    if kind in SEQUENCES:
        return SEQUENCES[kind](unpack(item, find) for item in packed["items"])
    if kind in ("bytes", "bytearray"):
        data = bytes.fromhex(packed["hex"])
        return data if kind == "bytes" else bytearray(data)
    if kind == "int":
        return int(packed["hex"], 16)
    return _unpack_rare(kind, packed, find)


def _unpack_rare(kind: str, packed: dict[str, Any], find: Find) -> Any:
    if kind in TEXTS:
        return _class(TEXTS[kind], kind)(packed["text"])
    if kind in DATES:
        return _class(DATES[kind], kind).fromisoformat(packed["text"])
    if kind == "timedelta":
        return _class("datetime", kind)(*packed["parts"])
    if kind == "range":
        return range(*packed["parts"])
    if kind == "module":
        return importlib.import_module(packed["name"])
    if kind == "type":
        return builtin_type(packed["name"])
    if kind == "array":
        numpy = importlib.import_module("numpy")
        array = numpy.frombuffer(bytes.fromhex(packed["hex"]), numpy.dtype(packed["dtype"]))
        return array.reshape(packed["shape"]).copy()[()]
    return find(packed)


def _class(module: str, name: str) -> Any:
    return vars(importlib.import_module(module))[name]


def builtin_type(name: str) -> type:
    found = vars(builtins)[name]
    if not isinstance(found, type):
        raise ValueError(f"{name} is no class")
    return found
