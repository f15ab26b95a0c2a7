"""What a process knows of being a rank of this machine: who it is, whom it tells where it is, and when it ends.

A rank that `supervisor.run_ranks` started holds the end of a pipe: when that process goes in any way, the pipe closes and
the rank ends itself. It also has a folder in which it tells its supervisor where it is, and why it failed. A rank that
another launcher started, and a command of one rank, watch themselves. Imports no torch.
"""

import contextlib
import faulthandler
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import IO, NamedTuple

from dovetail.errors import ConfigError, LostStore, MachineError
from dovetail.jsonl import ODD_LETTERS
from dovetail.launch.hang import WAITING_IN, answer_with_stacks
from dovetail.launch.hosts import HostWatch, Store
from dovetail.launch.progress import Phase, Progress
from dovetail.launch.streams import complain

PIPE, FOLDER = "DOVETAIL_PARENT_PIPE", "DOVETAIL_WATCH"
DEFECT, USER_ERROR, INTERRUPTED, STOPPED = 1, 2, 130, 143  # exit codes
SAME_WISH_SECONDS = 1.0  # a rank may get one signal twice, straight and by its launcher
UNWINDING_SECONDS = 1.5  # after the second signal, for what is half-written to be removed
LOOK_SECONDS = 0.5

Handler = Callable[[int, FrameType | None], object]


class RankFiles(NamedTuple):
    """Where a rank tells its supervisor how it is."""

    state: Path
    stacks: Path
    report: Path  # what it has to say of its failure

    @classmethod
    def of(cls, folder: Path, rank: int) -> "RankFiles":
        return cls(*(folder / f"rank_{rank}.{kind}" for kind in cls._fields))


class RankProcess:
    """This process as a rank, or as the only one: where it tells its progress and what went wrong."""

    def __init__(self, folder: str | None = None, pipe: str | None = None) -> None:
        self.files = RankFiles.of(Path(folder), int(os.environ["RANK"])) if folder is not None else None
        self.silent = False  # since it was told to end: whatever fails on the way
        self.progress = Progress(self.files.state if self.files else None)
        self._hosts: HostWatch | None = None
        self._stacks: IO[str] | None = answer_with_stacks(self.files.stacks) if self.files else None
        if pipe is not None:
            threading.Thread(target=_wait_for_end, args=(int(pipe), folder), daemon=True).start()

    @classmethod
    def take(cls) -> "RankProcess":
        """What the environment says of this process, which its children shall not inherit."""
        return cls(os.environ.pop(FOLDER, None), os.environ.pop(PIPE, None))

    @property
    def supervised(self) -> bool:
        return self.files is not None

    def say(self, text: str) -> None:
        """A failure, for the user: through the supervisor, who knows which rank failed first, or straight."""
        if self.silent:
            return
        if self.files is not None:
            self.files.report.write_text(text, encoding="utf-8", errors=ODD_LETTERS)
        else:
            complain(text)

    @contextmanager
    def watched(self, limits: Mapping[Phase, float]) -> Iterator[None]:
        """Beat for the supervisor; without one, end this process when its main thread stays too long in a phase."""
        done = threading.Event()
        with contextlib.ExitStack() as ending:
            if self.supervised:
                ending.enter_context(self.progress.beating())
            else:
                threading.Thread(target=_watch_oneself, args=(self.progress, limits, done), daemon=True).start()
                ending.callback(done.set)
            yield

    def watch_hosts(self, store: Store, rank: int, world: int) -> None:
        """From now on this process ends soon after a host of the job falls silent, where there are several."""
        if self.supervised or world == 1 or os.environ.get("LOCAL_WORLD_SIZE") == str(world):
            return
        launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None  # which outlives its ranks
        self._hosts = HostWatch(store, rank, os.environ["MASTER_ADDR"], launcher)
        threading.Thread(target=self._end_with_hosts, args=(self._hosts,), daemon=True).start()

    @contextmanager
    def naming_lost_hosts(self) -> Iterator[None]:
        """Raise MachineError for a collective of the block that failed because a process on another host is gone."""
        try:
            yield
        except RuntimeError as error:
            lost = self._hosts.lost() if self._hosts is not None and _may_be_lost(error) else ""
            if not lost:
                raise
            raise MachineError(f"{lost}; the job ends ({self._place()})") from error

    def leave_hosts(self) -> None:
        """This process ends, and the job is done: nobody is to wait for signs of it."""
        if self._hosts is not None:
            self._hosts.leave()

    def _place(self) -> str:
        return f"rank {os.environ['RANK']} on {socket.gethostname()} was in {self.progress.state.where()}"

    def _end_with_hosts(self, hosts: HostWatch) -> None:
        say = sys.stderr.write if is_first_rank() or "LOCAL_RANK" not in os.environ else _nothing
        reason = hosts.wait(lambda text: say(f"dovetail: {text}\n"))
        if reason:
            say(f"dovetail: {reason}; the job ends ({self._place()})\n")
            sys.stderr.flush()
            os._exit(DEFECT)


def _may_be_lost(error: RuntimeError) -> bool:
    """Whether a failure may be that of another rank: of a collective, or of the store. One rank a host says the latter."""
    if isinstance(error, LostStore):
        return is_first_rank()
    frames = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    collective = any(part in frames[-1] for part in WAITING_IN)
    return collective and (type(error) is RuntimeError or type(error).__name__.startswith("Dist"))


def _nothing(_: str) -> None:
    """What one rank of each host says for the others."""


def ranks_given() -> int | None:
    """The number of ranks where a launcher has started this process as one of them, else None."""
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or world is None:
        return None
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        raise ConfigError(f"RANK={rank} and WORLD_SIZE={world}: expected whole numbers, RANK below WORLD_SIZE")
    return int(world)


def is_first_rank() -> bool:
    """Whether this process speaks for all ranks of its host: those of other hosts may fail for want of a file here.

    One that is no rank, whatever its RANK says, speaks for itself.
    """
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE")
    if world is None or not rank.isdecimal():
        return True
    first = int(rank) == 0 or os.environ.get("LOCAL_RANK") == "0"
    return first or (world.isdecimal() and int(rank) >= int(world))


def end_at_second_signal(unwind: Handler, seconds: float) -> None:
    """Have a second SIGTERM or SIGINT end this process soon, even where its main thread never returns to Python.

    The interpreter notes signals in a pipe as they come, in whatever thread; handlers run in the main thread alone. The
    first signal ends it, too, where `unwind` is what handles it and has not begun after so many seconds, such as in a rank
    that waits for others to join it: nobody may be there to ask again.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_count_signals, args=(reader, unwind, seconds), daemon=True).start()


def _count_signals(reader: int, unwind: Handler, seconds: float) -> None:
    first = None
    while True:
        numbers = [number for number in os.read(reader, 1) if number in (signal.SIGTERM, signal.SIGINT)]
        if first is None and numbers and signal.getsignal(numbers[0]) == unwind:
            end = threading.Timer(seconds, _end_unheard, [numbers[0], unwind])
            end.daemon = True
            end.start()
        if first is not None and numbers and ("RANK" not in os.environ or time.monotonic() - first > SAME_WISH_SECONDS):
            break
        first = time.monotonic() if numbers and first is None else first
    time.sleep(UNWINDING_SECONDS)
    os._exit(INTERRUPTED if numbers[0] == signal.SIGINT else STOPPED)


def _end_unheard(number: int, unwind: Handler) -> None:
    """Where the handler that replaces itself when it begins is still there."""
    if signal.getsignal(number) == unwind:
        os._exit(INTERRUPTED if number == signal.SIGINT else STOPPED)


def _watch_oneself(progress: Progress, limits: Mapping[Phase, float], done: threading.Event) -> None:
    while not done.wait(LOOK_SECONDS):
        state = progress.state
        seconds = time.monotonic() - state.since
        if seconds > limits[state.phase]:
            rank = f"rank {os.environ['RANK']} ({socket.gethostname()})" if "RANK" in os.environ else "this process"
            sys.stderr.write(
                f"dovetail: {rank} made no progress for {seconds:.0f} s in {state.where()} (limit "
                f"{limits[state.phase]:g} s); where it is:\n"
            )
            sys.stderr.flush()
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            os._exit(DEFECT)


def _wait_for_end(pipe: int, folder: str | None) -> None:
    os.read(pipe, 1)  # returns when the parent's end closes; nothing is ever written
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(DEFECT)
