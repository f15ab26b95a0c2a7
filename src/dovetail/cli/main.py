"""The command line. Imports no torch."""

import argparse
import contextlib
import errno
import importlib
import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import NoReturn, Self, TypeGuard

from dovetail.cli.arguments import ON_RANKS, TOOLS, layout_of, parse, recipe_of, supervision_of
from dovetail.cli.header import header
from dovetail.errors import (
    ConfigError,
    MachineError,
    SecondaryFailure,
    UserError,
    disk_problem,
    exit_line,
    one_line,
    quoted,
    short_lines,
)
from dovetail.launch.hosts import Store
from dovetail.launch.process import (
    MAX_CAUSE,
    end_with_launcher,
    limit_behind,
    open_closed_streams,
    python_module,
    tell,
)
from dovetail.launch.progress import collective_timeout
from dovetail.launch.rank import (
    DEFECT,
    INTERRUPTED,
    USER_ERROR,
    RankProcess,
    StopHandler,
    is_first_rank,
    ranks_given,
)
from dovetail.launch.supervisor import run_ranks
from dovetail.launch.wrap import for_terminal

COMPILING = r"Argument aux_data .* cannot be converted to a JitArgument"  # FlashAttention-4, for every kernel
CLEAN_UP = (
    "Ignoring clean_up_tokenization_spaces=True for BPE tokenizer"  # transformers, on every rank
)
TOKENIZERS = ("transformers.tokenization_utils_tokenizers", "transformers.tokenization_utils_base")


def main() -> NoReturn:
    """Ends by `os._exit`: gloo's threads may abort a normal exit."""
    end_with_launcher()
    open_closed_streams()
    rank = RankProcess.from_environment()
    stop = StopHandler(rank)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    code = run_command(sys.argv[1:], rank)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # without a reader
            stream.flush()
    os._exit(stop.code or code if code else 0)


def run_command(argv: Sequence[str], rank: RankProcess | None = None) -> int:
    me = rank or RankProcess()
    with _ExitCode(me.report if is_first_rank() else lambda _: None) as exit_code:
        exit_code.value = _dispatch(argv, me, watched=rank is not None)
    return exit_code.value


def _dispatch(argv: Sequence[str], rank: RankProcess, *, watched: bool) -> int:
    args = parse(argv)
    if args.command not in ON_RANKS:
        return _module(args.command).run(args) or 0
    layout = layout_of(args)
    given = ranks_given()
    supervision = supervision_of(args)
    layout = layout.resolve(given or layout.num_ranks)
    if given is None:  # a module that needs pydantic
        if not importlib.import_module("dovetail.cli.preflight").preflight(args, layout):
            return 0
    is_first = rank.files is None and os.environ.get("RANK", "0") == "0"
    if args.command == "train" and is_first and not args.dry_run:
        if given is not None:  # torchrun has started the ranks, which find mistakes themselves
            importlib.import_module("dovetail.cli.preflight").tell_notes_on_rows(recipe_of(args))
        tell(for_terminal(header(recipe_of(args), layout, args.device), sys.stdout))
    if given is None and (layout.num_ranks > 1 or supervision.restarts or supervision.servers):
        return run_ranks([*python_module("dovetail"), *argv], layout.num_ranks, supervision)
    if supervision.restarts and rank.files is None:
        restarts = f"--restarts {supervision.restarts}: another launcher started these ranks"
        raise ConfigError(
            f"{restarts}, so it has to restart them (torchrun --max-restarts N); drop the flag"
        )
    with rank.watched(supervision.limits) if watched else contextlib.nullcontext():
        return _run_as_rank(args, rank, collective_timeout(supervision.limits))


def _module(command: str) -> ModuleType:
    """Returns the module whose `run` is the command."""
    name = command.replace("-", "_")
    if command in TOOLS:
        return importlib.import_module(f"dovetail_tools.cli.{name}")
    return importlib.import_module(f"dovetail.cli.{name}")


def _run_as_rank(args: argparse.Namespace, rank: RankProcess, timeout: timedelta) -> int:
    process_group = importlib.import_module("dovetail.parallel.process_group")
    warnings.filterwarnings("ignore", COMPILING, UserWarning)
    for name in TOKENIZERS:
        logging.getLogger(name).addFilter(
            lambda record: not record.getMessage().startswith(CLEAN_UP)
        )
    device = process_group.pick_device(args.device)

    def on_rendezvous(store: Store, me: int, world: int) -> None:
        rank.watch_hosts(store, me, world)
        if world > 1:
            consistency = importlib.import_module("dovetail.cli.consistency")
            consistency.refuse_differences(store, me, world, consistency.job_inputs(args))
        rank.progress.phase("init")

    with _ExitCode(rank.report) as exit_code:
        rank.begin_meeting()
        group = process_group.process_group(device, timeout, on_rendezvous, rank.note_missing)
        with rank.among_hosts(), group:
            rank.progress.phase("load")
            run = _module(args.command).run
            try:
                exit_code.value = run(args, rank.progress) or 0
            except SystemExit as error:
                if not (place := exit_line(error)):
                    raise
                raise ConfigError(
                    f"{place} ended the program by sys.exit({error.code!r})"
                ) from error
            rank.progress.phase("exit")
    return exit_code.value


class _ExitCode:
    """Turns an exception into an exit code and at most one report."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self.report = report
        self.value = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, SystemExit):  # argparse has printed its help
            self.value = error.code if isinstance(error.code, int) else 0
        elif isinstance(error, KeyboardInterrupt):
            self.value = INTERRUPTED
        elif isinstance(error, SecondaryFailure):  # never 0
            self.value = USER_ERROR if isinstance(error.__cause__, UserError) else DEFECT
        elif error is not None:
            self.value = (
                USER_ERROR if isinstance(error, UserError) or is_long_name(error) else DEFECT
            )
            self.report(f"dovetail: {_message(error)}\n")
        return True


def is_long_name(error: BaseException) -> TypeGuard[OSError]:
    return isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG


def _message(error: BaseException) -> str:
    if reason := limit_behind(error):
        return reason
    if isinstance(error, UserError):
        return short_lines(str(error))
    if isinstance(error, MachineError):
        return str(error)
    if is_long_name(error):
        return f"{quoted(str(error.filename))}: {error.strerror}; give a shorter path"
    if isinstance(error, OSError) and (problem := disk_problem(error)):
        return problem
    rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    if "gloo/transport/" in str(error):
        why = "its process ended, or its host is cut off from the network"
        return f"{rank}the connection to another rank broke: {why} ({one_line(error)[:MAX_CAUSE]})"
    return f"{rank}this is a defect of ours\n{''.join(traceback.format_exception(error))}".rstrip(
        "\n"
    )
