"""What runs inside the sandbox: the program, and in another process the tests of its answer."""

import ast
import atexit
import builtins
import importlib
import os
import sys
import threading
from contextlib import suppress
from types import ModuleType
from typing import NoReturn

from dovetail.errors import Caught
from dovetail.rewards.sandbox.peer import Channel, Peer

FAILED = 1
MAIN = 0  # the number of the program's module among the objects of its process
FILE = "program.py"


def run_program(source: str) -> None:
    """As `python program.py`: ends this process with the program's status."""
    _end(_run(source, _main_module()))


def serve_program(source: str, channel: Channel) -> None:
    """Runs the program; then the tests, in the process at `channel`, use what it has defined."""
    module = _main_module()
    if _run(source, module) is not None:
        os._exit(FAILED)
    Peer(channel, only_public=False).serve(module)


def run_tests(source: str, channel: Channel) -> None:
    """Ends this process with status 0 if the tests run to their end.

    What they use of the program are stand-ins, so that no code of the program runs here.
    """
    peer = Peer(channel, only_public=True)
    defined = set(peer.ask("names", MAIN))
    module = _main_module()
    for name in _names_to_fetch(source, defined):
        vars(module)[name] = peer.ask("__getattr__", MAIN, name)
    _end(_run(source, module))


def _names_to_fetch(source: str, defined: set[str]) -> set[str]:
    """What tests use of a program.

    It may define a name like `all` or `sum`. Tests that use others of its names, too, mean
    Python's: a program must not decide what `all` means there.
    """
    nodes = ast.walk(ast.parse(source))
    used = {node.id for node in nodes if isinstance(node, ast.Name)} & defined
    used -= {name for name in used if name.startswith("__")}
    return used - vars(builtins).keys() or used


def _main_module() -> ModuleType:
    """The module that a program is, empty."""
    module = importlib.import_module("__main__")
    names = vars(module)
    names.clear()
    names.update({"__name__": "__main__", "__file__": FILE})
    sys.argv.clear()
    sys.argv.append(FILE)
    return module


def _run(source: str, module: ModuleType) -> int | None:
    """The status of a source that has ended the program; None: it ran to its end."""
    with Caught(BaseException) as caught:
        exec(compile(source, FILE, "exec"), vars(module))
    if isinstance(caught.error, SystemExit):
        code = caught.error.code
        return code if isinstance(code, int) else int(code is not None)
    return None if caught.error is None else FAILED


def _end(status: int | None) -> NoReturn:
    """As Python ends: after other threads and functions registered with atexit."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit((status or 0) & 0xFF)
