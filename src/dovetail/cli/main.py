"""The command line: parse, start local ranks where more than one is asked for, run the command, report once.

Imports no torch, so help and mistakes answer at once. A command lives in `dovetail.cli.COMMAND`; its `run(args)`
returns an exit code or None, and finds the default process group initialized where the command runs on ranks.
"""

import argparse
import contextlib
import importlib
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType, TracebackType
from typing import NoReturn, Self

from dovetail.cli.arguments import COMMANDS, check_model, layout_of, parse, watch_of
from dovetail.cli.quiet import silence
from dovetail.errors import ConfigError, MachineError, SecondaryFailure, UserError, short_lines
from dovetail.launch.hosts import Store
from dovetail.launch.limits import limit_behind
from dovetail.launch.progress import Progress, patience
from dovetail.launch.rank import (
    DEFECT,
    INTERRUPTED,
    STOPPED,
    USER_ERROR,
    RankProcess,
    end_at_second_signal,
    is_first_rank,
    ranks_given,
)
from dovetail.launch.streams import open_closed_streams
from dovetail.launch.supervisor import refuse_too_many, run_ranks

UNWINDING_SECONDS = 30.0  # from the first signal, for all that is half-written to be removed


def main() -> NoReturn:
    """The program `dovetail`. Ends by `os._exit`: gloo's threads may abort a process that exits in the normal way."""
    open_closed_streams()
    stop = _Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop.unwind)
    end_at_second_signal(stop.unwind, UNWINDING_SECONDS)
    stop.me = me = RankProcess.take()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that knows no such letter ends no run
    code = run_command(sys.argv[1:], me)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody may listen any more
            stream.flush()
    os._exit(stop.code or code if code else code)


def run_command(argv: Sequence[str], me: RankProcess | None = None) -> int:
    """Run one command line; returns its exit code. What fails before the ranks have met, rank 0 reports for all.

    `me`: what this process is as a rank. Without it, it is one that nobody watches, such as a test.
    """
    rank = me or RankProcess()
    with _Outcome(rank.say if is_first_rank() else _silence) as outcome:
        args = parse(argv)
        if not COMMANDS[args.command].runs_on_ranks:
            outcome.code = importlib.import_module(f"dovetail.cli.{args.command}").run(args) or 0
        else:
            layout, given, watch = layout_of(args), ranks_given(), watch_of(args)
            layout = layout.resolve(given or layout.num_ranks)
            if given is None and (layout.num_ranks > 1 or watch.restarts):
                refuse_too_many(layout)
                check_model(args, layout)
                outcome.code = run_ranks([*_interpreter(), "-m", "dovetail", *argv], layout.num_ranks, watch)
            else:
                if watch.restarts and not rank.supervised:
                    raise ConfigError(
                        f"--restarts {watch.restarts}: another launcher started these ranks, so it has to restart them "
                        "(torchrun --max-restarts N); drop the flag"
                    )
                with rank.watched(watch.limits) if me else contextlib.nullcontext():
                    outcome.code = _run_as_rank(args, rank, patience(watch.limits))
    return outcome.code


class _Stop:
    """The first SIGTERM or SIGINT where nothing waits for it. Who waits for a second one is `end_at_second_signal`."""

    def __init__(self) -> None:
        self.me: RankProcess | None = None
        self.code: int | None = None

    def unwind(self, number: int, _: FrameType | None) -> NoReturn:
        """Unwind, so that nothing half-written stays.

        The exit may come up in the middle of anybody's import, who fails in another way for it, or swallows it: what is
        said from now on is no news, and the end comes in any case.
        """
        self.code = INTERRUPTED if number == signal.SIGINT else STOPPED
        if self.me is not None:
            self.me.silent = True
        signal.signal(number, _noted)
        end = threading.Timer(UNWINDING_SECONDS, os._exit, [self.code])
        end.daemon = True
        end.start()
        sys.exit(self.code)


def _noted(number: int, _: FrameType | None) -> None:
    """Unwinding goes on."""


def _interpreter() -> list[str]:
    """Python for the ranks: -m would let them import from the working directory, a model's perhaps. -P does not."""
    return [sys.executable] if os.getcwd() in map(os.path.abspath, sys.path) else [sys.executable, "-P"]


def _run_as_rank(args: argparse.Namespace, rank: RankProcess, waits: timedelta) -> int:
    """Run a command as one of its ranks, which wait for each other at most so long."""
    launch = importlib.import_module("dovetail.parallel.process_group")
    silence()
    device = launch.pick_device(args.device)

    def met(store: Store, me: int, world: int) -> None:
        rank.watch_hosts(store, me, world)
        if world > 1:
            given = importlib.import_module("dovetail.cli.given")
            given.refuse_differences(store, me, world, given.given(args))

    with _Outcome(rank.say) as outcome:
        with rank.naming_lost_hosts(), launch.ProcessGroup(device, waits, met):
            rank.progress.phase("load")
            run: Callable[[argparse.Namespace, Progress], int | None]
            run = importlib.import_module(f"dovetail.cli.{args.command}").run
            outcome.code = run(args, rank.progress) or 0
            rank.progress.phase("exit")
        rank.leave_hosts()
    return outcome.code


def _silence(_: str) -> None:
    """What a rank says that does not speak for the others."""


class _Outcome:
    """Turns whatever leaves the `with` block into an exit code and at most one report, which goes to `say`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.code = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, SystemExit):  # argparse has printed its help
            self.code = error.code if isinstance(error.code, int) else 0
        elif isinstance(error, KeyboardInterrupt):
            self.code = INTERRUPTED
        elif isinstance(error, SecondaryFailure):  # never 0: a launcher may look at this rank alone
            self.code = USER_ERROR if isinstance(error.__cause__, UserError) else DEFECT
        elif error is not None and (reason := limit_behind(error)):
            self.code = USER_ERROR if isinstance(error, UserError) else DEFECT
            self.say(f"dovetail: {reason}\n")
        elif isinstance(error, UserError | MachineError):
            self.code = USER_ERROR if isinstance(error, UserError) else DEFECT
            self.say(f"dovetail: {short_lines(str(error)) if isinstance(error, UserError) else error}\n")
        elif error is not None:
            self.code = DEFECT
            rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
            self.say(f"dovetail: {rank}this is a defect of ours\n{''.join(traceback.format_exception(error))}")
        return error is not None
