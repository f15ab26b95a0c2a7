"""Objects of another process, and what can be asked of them."""

import importlib
import operator
from collections.abc import Callable, Mapping
from typing import Any, Protocol

ARITHMETIC = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"
)  # fmt: skip
COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")


def _reflected(name: str) -> Callable[[Any, Any], Any]:
    operation = vars(operator)[name]
    return lambda value, other: operation(other, value)


def _run_coroutine(value: Any) -> Any:
    return importlib.import_module("asyncio").run(value)  # slow to import, and rarely needed


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    **{name: vars(operator)[name] for name in COMPARISONS},
    **{f"__{name}__": vars(operator)[f"__{name}__"] for name in ARITHMETIC},
    **{f"__r{name}__": _reflected(f"__{name}__") for name in ARITHMETIC},
    "__neg__": operator.neg,
    "__abs__": abs,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__delitem__": operator.delitem,
    "__contains__": operator.contains,
    "__len__": len,
    "__bool__": bool,
    "__int__": int,
    "__float__": float,
    "__str__": str,
    "__repr__": repr,
    "__hash__": hash,
    "__iter__": iter,
    "__next__": next,
    "__enter__": lambda value: value.__enter__(),
    "__exit__": lambda value: value.__exit__(None, None, None),
    "__instancecheck__": lambda value, other: isinstance(other, value),
    "__getattr__": getattr,
    "__setattr__": setattr,
    "__call__": lambda value, positional, named: value(*positional, **named),
    "names": lambda module: list(vars(module)),
    "run": _run_coroutine,
}


class Asks(Protocol):
    """A way to the other process."""

    def ask(self, operation: str, number: int, *arguments: Any) -> Any: ...


def _asking(name: str) -> Callable[..., Any]:
    def ask(self: "StandIn", *arguments: Any) -> Any:
        peer, number = place_of(self)
        return peer.ask(name, number, *arguments)

    return ask


def _comparing(name: str) -> Callable[..., Any]:
    """Data is not shown to an object of a class that would compare itself with it."""

    def compare(self: "StandIn", other: Any) -> Any:
        if not isinstance(other, StandIn):
            return NotImplemented
        peer, number = place_of(self)
        return peer.ask(name, number, other)

    return compare


def _with_operations(kind: type["StandIn"]) -> type["StandIn"]:
    """Adds the special methods of `OPERATIONS` that the class does not define."""
    for name in OPERATIONS:
        if name.startswith("__") and name not in vars(kind):
            setattr(kind, name, _comparing(name) if name in COMPARISONS else _asking(name))
    return kind


@_with_operations
class StandIn:
    """Object `number` of the other process, which does these operations there."""

    def __init__(self, peer: Asks, number: int) -> None:
        object.__setattr__(self, "_place_of_stand_in", (peer, number))

    def __call__(self, *positional: Any, **named: Any) -> Any:
        peer, number = place_of(self)
        return peer.ask("__call__", number, positional, named)

    def __exit__(self, *_: object) -> None:
        peer, number = place_of(self)
        peer.ask("__exit__", number)


def place_of(stand_in: StandIn) -> tuple[Asks, int]:
    place: tuple[Asks, int] = object.__getattribute__(stand_in, "_place_of_stand_in")
    return place
