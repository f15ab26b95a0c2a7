"""One end of the conversation between the process of the program and that of its tests.

Plain data is copied. Every other object stays where it is, and the other side has a `StandIn`
for it, which asks for each operation.
"""

import json
import os
from types import CoroutineType
from typing import Any, NamedTuple, NoReturn

from dovetail.errors import Caught
from dovetail.rewards.sandbox.stand_in import OPERATIONS, StandIn, place_of
from dovetail.rewards.sandbox.values import builtin_type, pack, unpack

HEADER = 8  # bytes that hold the length of a message
MAX_READ = 1 << 20
FAILED = 1  # status of a process
MUTABLE = (list, dict, set, bytearray)
ATTRIBUTES = ("__getattr__", "__setattr__")
INTERNAL = ("_", "gi_", "cr_", "ag_", "tb_", "f_")  # lead to frames, from which all is reached


class Channel(NamedTuple):
    """Ends of two pipes."""

    source: int
    target: int


class Peer:
    """One end of a channel. only_public: what the other side may ask of objects here."""

    def __init__(self, channel: Channel, only_public: bool) -> None:
        self._channel = channel
        self._only_public = only_public
        self._objects: list[Any] = []  # those that the other side knows, by number
        self._numbers: dict[int, int] = {}  # by id
        self._classes: dict[int, type] = {}

    def ask(self, operation: str, number: int, *arguments: Any) -> Any:
        """The result of an operation on object `number` of the other side."""
        sent = [self._pack(argument) for argument in arguments]
        self._send({"ask": operation, "object": number, "arguments": sent})
        answer = self._receive()
        while "ask" in answer:  # the other side calls a function of ours before it answers
            self._answer(answer)
            answer = self._receive()
        if "error" in answer:
            raise self._exception(answer["error"])
        self._renew(arguments, sent, answer["arguments"])
        return self._unpack(answer["value"])

    def serve(self, first: Any) -> NoReturn:
        """Answers until the other side ends; `first` is object 0."""
        self._number(first)
        while True:
            self._answer(self._receive())

    def _answer(self, question: dict[str, Any]) -> None:
        with Caught(Exception) as caught:  # which the tests may expect
            arguments = [self._unpack(argument) for argument in question["arguments"]]
            value = self._operate(question["ask"], self._objects[question["object"]], arguments)
            packed = self._pack(value)
            changed = [self._pack(argument) for argument in arguments]
            answer = {"value": packed, "arguments": changed}
        if caught.error is not None:
            answer = {"error": self._pack_exception(caught.error)}
        self._send(answer)

    def _operate(self, name: str, value: Any, arguments: list[Any]) -> Any:
        if self._only_public and name in ATTRIBUTES and arguments[0].startswith(INTERNAL):
            raise AttributeError(arguments[0])
        return OPERATIONS[name](value, *arguments)

    def _renew(self, arguments: tuple[Any, ...], sent: list[Any], received: list[Any]) -> None:
        """A function may change the lists that it gets."""
        for argument, before, after in zip(arguments, sent, received, strict=True):
            if before == after:
                continue
            if isinstance(argument, tuple):  # the positional arguments of a call
                self._renew(argument, before["items"], after["items"])
            elif isinstance(argument, MUTABLE):
                _replace(argument, self._unpack(after))

    def _pack(self, value: Any) -> Any:
        return pack(value, self._name)

    def _unpack(self, packed: Any) -> Any:
        return unpack(packed, self._find)

    def _name(self, value: Any) -> dict[str, Any]:
        if isinstance(value, StandIn):
            return {"kind": "yours", "object": place_of(value)[1]}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"kind": "exception", "classes": self._ancestors(value)}
        kind = "coroutine" if isinstance(value, CoroutineType) else "mine"
        return {"kind": kind, "object": self._number(value)}

    def _find(self, packed: dict[str, Any]) -> Any:
        if packed["kind"] == "yours":
            return self._objects[packed["object"]]
        if packed["kind"] == "exception":
            return self._exception_class(packed["classes"])
        if packed["kind"] == "coroutine":
            return self._awaited(packed["object"])
        return StandIn(self, packed["object"])

    async def _awaited(self, number: int) -> Any:
        return self.ask("run", number)

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._numbers[id(value)]

    def _pack_exception(self, error: BaseException) -> dict[str, Any]:
        return {"classes": self._ancestors(type(error)), "values": self._pack(error.args)}

    def _ancestors(self, kind: type) -> list[list[Any]]:
        """[number, name] of each class up to the first built-in one, whose number is None."""
        found: list[list[Any]] = []
        for ancestor in kind.__mro__:
            if ancestor.__module__ == "builtins":
                found.append([None, ancestor.__name__])
                break
            if issubclass(ancestor, BaseException):
                found.append([self._number(ancestor), ancestor.__name__])
        return found

    def _exception_class(self, ancestors: list[list[Any]]) -> type[Exception]:
        """A class of our own for each exception class of the other side."""
        found: type = builtin_type(ancestors[-1][1])
        if not issubclass(found, Exception):
            raise TypeError(f"{found} is no exception")
        for number, name in reversed(ancestors[:-1]):
            if number not in self._classes:
                self._classes[number] = type(name, (found,), {})
            found = self._classes[number]
        return found

    def _exception(self, packed: dict[str, Any]) -> Exception:
        kind = self._exception_class(packed["classes"])
        values = self._unpack(packed["values"])
        try:
            return kind(*values)
        except TypeError:
            return Exception(*values)

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        left = len(data).to_bytes(HEADER, "big") + data
        try:
            while left:
                left = left[os.write(self._channel.target, left) :]
        except OSError:
            os._exit(FAILED)

    def _receive(self) -> dict[str, Any]:
        """Ends this process where the other one has ended, or sends anything else."""
        try:
            length = int.from_bytes(self._read(HEADER), "big")
            message = json.loads(self._read(length))
        except (OSError, EOFError, ValueError, RecursionError):
            os._exit(FAILED)
        if not isinstance(message, dict):
            os._exit(FAILED)
        return message

    def _read(self, count: int) -> bytes:
        parts = []
        while count:
            part = os.read(self._channel.source, min(count, MAX_READ))
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


def _replace(argument: Any, value: Any) -> None:
    """Gives a list, mapping, set or bytearray the contents of `value`."""
    argument.clear()
    if isinstance(argument, dict | set):
        argument.update(value)
    else:
        argument.extend(value)
