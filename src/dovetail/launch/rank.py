"""This process as a rank: progress, report of a failure, end. Imports no torch."""

import faulthandler
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import IO, NoReturn

from dovetail.errors import ConfigError, LostStore, MachineError
from dovetail.jsonl import ODD_LETTERS
from dovetail.launch.hang import PROFILE_SIGNAL, WAITING_IN, dump_stacks_to
from dovetail.launch.hosts import HostWatch, Store
from dovetail.launch.process import complain
from dovetail.launch.progress import Phase, Progress, State, calling_every

PIPE = "DOVETAIL_PARENT_PIPE"
FOLDER = "DOVETAIL_WATCH"  # environment of a supervised rank
DEFECT = 1
USER_ERROR = 2
INTERRUPTED = 130
STOPPED = 143  # exit codes
STOP_CODES: Mapping[int, int] = {signal.SIGTERM: STOPPED, signal.SIGINT: INTERRUPTED}
UNWINDING_SECONDS = 30.0
SECOND_UNWINDING_SECONDS = 1.5  # after the first and the second signal
STARTING: Sequence[Phase] = ("init", "meet", "load")
SAME_SIGNAL_SECONDS = 1.0  # the launcher may repeat a signal
BEAT_SECONDS = LOOK_SECONDS = 0.5


class RankFiles:
    def __init__(self, folder: Path | str, rank: int | str) -> None:
        self.state, self.stacks, self.report = (
            Path(folder, f"rank_{rank}.{x}") for x in ("state", "stacks", "report")
        )


class RankProcess:
    def __init__(self, folder: str | None = None, pipe: str | None = None) -> None:
        self.files = RankFiles(folder, os.environ["RANK"]) if folder is not None else None
        self.silent = False  # after a signal
        self.progress = Progress(self.files.state if self.files else None)
        self._missing = ""  # who has not come to the meeting of the ranks
        self._hosts: HostWatch | None = None
        self._stacks: IO[str] | None = dump_stacks_to(self.files.stacks) if self.files else None
        if pipe is not None:
            threading.Thread(target=_end_with_parent, args=(int(pipe), folder), daemon=True).start()

    @classmethod
    def from_environment(cls) -> "RankProcess":
        """Children do not inherit its variables."""
        return cls(os.environ.pop(FOLDER, None), os.environ.pop(PIPE, None))

    def report(self, text: str) -> None:
        """To the supervisor, else to stderr."""
        if self.files is not None and not self.silent:
            self.files.report.write_text(text, encoding="utf-8", errors=ODD_LETTERS)
        elif not self.silent:
            complain(text)

    def watched(self, limits: Mapping[Phase, float]) -> AbstractContextManager[None]:
        """Heartbeats for the supervisor; without one, end a phase that lasts too long."""
        if self.files is not None:
            return calling_every(BEAT_SECONDS, self.progress.beat)
        return calling_every(LOOK_SECONDS, lambda: self._end_if_late(limits))

    def begin_meeting(self) -> None:
        """Enter phase `meet`, which a supervised rank needs not: the supervisor sees all ends."""
        if self.files is None:
            self.progress.phase("meet")

    def note_missing(self, missing: str) -> None:
        self._missing = missing

    def watch_hosts(self, store: Store, rank: int, world: int) -> None:
        self._missing = "a rank came and fell silent"
        if self.files is not None or world == 1 or os.environ.get("LOCAL_WORLD_SIZE") == str(world):
            return
        self._hosts = HostWatch(store, rank, os.environ["MASTER_ADDR"])
        threading.Thread(target=self._end_with_hosts, args=(self._hosts,), daemon=True).start()

    @contextmanager
    def among_hosts(self) -> Iterator[None]:
        """MachineError if a collective fails because another host is gone."""
        try:
            yield
        except RuntimeError as error:
            lost = self._hosts.lost() if self._hosts is not None and _may_be_lost(error) else ""
            if not lost:
                raise
            raise MachineError(f"{lost}; the job ends ({self._place()})") from error
        if self._hosts is not None:
            self._hosts.leave()

    def _place(self) -> str:
        return f"rank {os.environ['RANK']} on {socket.gethostname()} was in {self.progress.state.where()}"

    def _end_with_hosts(self, hosts: HostWatch) -> None:
        if reason := hosts.wait(_say_once):
            _say_once(f"{reason}; the job ends ({self._place()})")
            os._exit(DEFECT)

    def _end_if_late(self, limits: Mapping[Phase, float]) -> None:
        state = self.progress.state
        limit = limits[state.phase]
        seconds = time.monotonic() - state.since
        if seconds <= limit:
            return
        if state.phase == "meet":
            why = "a host is down, cut off from the network or slow to start"
            which = f"the limit is trainer.timeouts.meet={limit:g}"
            problem = f"{self._missing} within {seconds:.0f} s: {why}; {which}"
            _say_once(f"{problem}; the job ends ({self._place()})")
        else:
            _tell_where_it_hangs(state, seconds, limit)
        os._exit(DEFECT)


class StopHandler:
    """The first SIGTERM or SIGINT unwinds the main thread, a second one ends the process soon.

    The main thread may never return from a collective: a thread reads Python's wakeup pipe, and ends the process.
    """

    def __init__(self, rank: RankProcess) -> None:
        self.rank = rank
        self.code: int | None = None  # of the signal that unwinds
        for number in STOP_CODES:
            signal.signal(number, self.unwind)
        signal.signal(PROFILE_SIGNAL, rank.progress.want_profile)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._count, args=(reader,), daemon=True).start()

    def unwind(self, number: int, _: FrameType | None) -> NoReturn:
        self.code = STOP_CODES[number]
        self.rank.silent = True
        signal.signal(number, _ignore)
        sys.exit(self.code)

    def _seconds_to_unwind(self) -> float:
        """A rank that starts has nothing to save, and may wait for long inside torch."""
        starts = "RANK" in os.environ and self.rank.progress.state.phase in STARTING
        return SECOND_UNWINDING_SECONDS if starts else UNWINDING_SECONDS

    def _count(self, reader: int) -> None:
        first = None
        while True:
            (number,) = os.read(reader, 1)
            if number not in STOP_CODES:
                continue
            if first is None:
                first = time.monotonic()
                if signal.getsignal(number) in (self.unwind, _ignore):
                    end = threading.Timer(self._seconds_to_unwind(), os._exit, [STOP_CODES[number]])
                    end.daemon = True
                    end.start()
            elif "RANK" not in os.environ or time.monotonic() - first > SAME_SIGNAL_SECONDS:
                time.sleep(SECOND_UNWINDING_SECONDS)
                os._exit(STOP_CODES[number])


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


def ranks_given() -> int | None:
    """Returns the number of ranks that a launcher started; None: there is none."""
    rank = os.environ.get("RANK")
    world = os.environ.get("WORLD_SIZE")
    if rank is None or world is None:
        return None
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        raise ConfigError(
            f"RANK={rank} and WORLD_SIZE={world}: expected whole numbers, RANK below WORLD_SIZE"
        )
    return int(world)


def is_first_rank() -> bool:
    """Whether this process reports for its host."""
    rank = os.environ.get("RANK", "0")
    world = os.environ.get("WORLD_SIZE")
    if world is None or not rank.isdecimal():
        return True
    first = int(rank) == 0 or os.environ.get("LOCAL_RANK") == "0"
    return first or (world.isdecimal() and int(rank) >= int(world))


def _may_be_lost(error: RuntimeError) -> bool:
    if isinstance(error, LostStore):
        return is_first_rank()
    frames = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    collective = any(part in frames[-1] for part in WAITING_IN)
    return collective and (type(error) is RuntimeError or type(error).__name__.startswith("Dist"))


def _say_once(text: str) -> None:
    """One rank of each host speaks."""
    if is_first_rank() or "LOCAL_RANK" not in os.environ:
        complain(f"dovetail: {text}\n")


def _tell_where_it_hangs(state: State, seconds: float, limit: float) -> None:
    rank = "this process"
    if "RANK" in os.environ:
        rank = f"rank {os.environ['RANK']} ({socket.gethostname()})"
    where = f"in {state.where()} (limit {limit:g} s); where it is:\n"
    complain(f"dovetail: {rank} made no progress for {seconds:.0f} s {where}")
    faulthandler.dump_traceback(sys.stderr, all_threads=True)


def _end_with_parent(pipe: int, folder: str | None) -> None:
    os.read(pipe, 1)  # returns when the parent's end closes
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(DEFECT)
