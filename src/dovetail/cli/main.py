"""The command line: parse, start local ranks where more than one is asked for, run the command, report once.

Imports no torch, so help and mistakes answer at once. A command lives in `dovetail.cli.COMMAND`; its `run(args)`
returns an exit code or None, and finds the default process group initialized where the command runs on ranks.
"""

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import NoReturn, Self

from dovetail.cli.arguments import COMMANDS, layout_of, parse
from dovetail.cli.ranks import (
    DEFECT,
    INTERRUPTED,
    STOPPED,
    USER_ERROR,
    end_with_parent,
    is_first_rank,
    ranks_given,
    run_ranks,
)
from dovetail.errors import SecondaryFailure, UserError


def main() -> NoReturn:
    """The program `dovetail`. Ends by `os._exit`: gloo's threads may abort a process that exits in the normal way."""
    end_with_parent()
    signal.signal(signal.SIGTERM, _stop)
    code = run_command(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_command(argv: Sequence[str]) -> int:
    """Run one command line; returns its exit code. What fails before the ranks have met, rank 0 reports for all."""
    with _Outcome(speaks=is_first_rank()) as outcome:
        args = parse(argv)
        if not COMMANDS[args.command].runs_on_ranks:
            outcome.code = _run(args.command, args)
        else:
            layout, given = layout_of(args), ranks_given()
            ranks = layout.resolve(given or layout.num_ranks).num_ranks
            if given is None and ranks > 1:
                outcome.code = run_ranks([*_interpreter(), "-m", "dovetail", *argv], ranks)
            else:
                launch = importlib.import_module("dovetail.launch")
                device = launch.pick_device(args.device)
                with _Outcome(speaks=True) as outcome, launch.ProcessGroup(device):
                    outcome.code = _run(args.command, args)
    return outcome.code


def _stop(number: int, _: FrameType | None) -> NoReturn:
    """Unwind, so that nothing half-written stays; a second signal ends the process at once."""
    signal.signal(number, signal.SIG_DFL)
    sys.exit(STOPPED)


def _interpreter() -> list[str]:
    """Python for the ranks: -m would let them import from the working directory, a model's perhaps. -P does not."""
    return [sys.executable] if os.getcwd() in map(os.path.abspath, sys.path) else [sys.executable, "-P"]


def _run(command: str, args: object) -> int:
    code: int | None = importlib.import_module(f"dovetail.cli.{command}").run(args)
    return code or 0


class _Outcome:
    """Turns whatever leaves the `with` block into an exit code and at most one report on standard error."""

    def __init__(self, *, speaks: bool) -> None:
        self.speaks = speaks
        self.code = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, SystemExit):  # argparse has printed its help
            self.code = error.code if isinstance(error.code, int) else 0
        elif isinstance(error, UserError):
            self.code = USER_ERROR
            self._say(f"dovetail: {error}\n")
        elif isinstance(error, KeyboardInterrupt):
            self.code = INTERRUPTED
        elif isinstance(error, SecondaryFailure):
            self.code = DEFECT
        elif error is not None:
            self.code = DEFECT
            rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
            self._say(f"dovetail: {rank}this is a defect of ours\n{''.join(traceback.format_exception(error))}")
        return error is not None

    def _say(self, text: str) -> None:
        if self.speaks:
            sys.stderr.write(text)
