"""Starts the ranks of a command on this machine and outlives none of them: all end when one fails. Imports no torch.

Every rank is the same command with `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT` set, in a
session of its own, so a Ctrl-C reaches this process only and is passed on in order. A rank also holds the end of a
pipe: when this process goes in any way, the pipe closes and the rank ends itself.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from dovetail.errors import ConfigError

PIPE = "DOVETAIL_PARENT_PIPE"
GRACE_SECONDS = 3.0  # after the first failure, for the others to notice
POLL_SECONDS = 0.02
DEFECT, USER_ERROR, INTERRUPTED, STOPPED = 1, 2, 130, 143  # exit codes


def ranks_given() -> int | None:
    """The number of ranks where a launcher has started this process as one of them, else None."""
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or world is None:
        return None
    if not (rank.isdigit() and world.isdigit() and int(rank) < int(world)):
        raise ConfigError(f"RANK={rank} and WORLD_SIZE={world}: expected whole numbers, RANK below WORLD_SIZE")
    return int(world)


def is_first_rank() -> bool:
    """Whether this process speaks for all ranks."""
    return os.environ.get("RANK", "0") == "0"


def end_with_parent() -> None:
    """In a rank that `run_ranks` started: end this process as soon as the parent is gone."""
    pipe = os.environ.pop(PIPE, None)
    if pipe is not None:
        threading.Thread(target=_wait_for_end, args=(int(pipe),), daemon=True).start()


def run_ranks(command: Sequence[str], ranks: int) -> int:
    """Run `command` as that many local ranks; returns the exit code of the whole."""
    reader, writer = os.pipe()
    local = _Ranks()
    before = {number: signal.signal(number, local.forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        shared = {**os.environ, **_environment(ranks), PIPE: str(reader)}
        for rank in range(ranks):
            mine = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            local.add(subprocess.Popen(command, env=mine, pass_fds=(reader,), start_new_session=True))
        return local.wait()
    finally:
        local.kill()
        os.close(writer)
        os.close(reader)
        for number, action in before.items():
            signal.signal(number, action)


class _Ranks:
    """The running ranks and the first signal that was passed on to them."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.signal: int | None = None

    def add(self, process: subprocess.Popen[bytes]) -> None:
        self.processes.append(process)
        if self.signal is not None:
            process.send_signal(self.signal)

    def forward(self, number: int, _: FrameType | None) -> None:
        """Pass a signal on; the second one ends everything."""
        if self.signal is not None:
            self.kill()
        self.signal = self.signal or number
        for process in self.processes:
            process.send_signal(number)

    def wait(self) -> int:
        """Wait for all ranks. After a failure the others have a moment to end, then they are killed."""
        deadline = None
        while any(process.poll() is None for process in self.processes):
            if deadline is None and any(process.poll() not in (None, 0, STOPPED) for process in self.processes):
                deadline = time.monotonic() + GRACE_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        codes = [process.poll() for process in self.processes]
        self.kill()
        return self._summary(codes)

    def kill(self) -> None:
        """End every rank that still runs, with the processes that it started."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def _summary(self, codes: list[int | None]) -> int:
        """One exit code for all. `None` is a rank that was killed because another one failed."""
        if not any(codes) and None not in codes:
            return 0
        if self.signal is not None and DEFECT not in codes and USER_ERROR not in codes:
            return INTERRUPTED if self.signal == signal.SIGINT and STOPPED not in codes else STOPPED
        if set(codes) <= {0, STOPPED}:
            return STOPPED
        if USER_ERROR in codes:
            return USER_ERROR
        for rank, code in enumerate(codes):
            if code is not None and code < 0:
                sys.stderr.write(f"dovetail: rank {rank} was killed by {signal.Signals(-code).name}\n")
        return DEFECT


def _environment(ranks: int) -> Mapping[str, str]:
    """What all ranks share: where they meet, and an even share of this machine's cores."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = max(1, len(os.sched_getaffinity(0)) // ranks) if hasattr(os, "sched_getaffinity") else 1
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    counts = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    # Or every rank would tell at length that a failed one closed its connection.
    quiet = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL")}
    return {**quiet, **meeting, **counts, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}


def _wait_for_end(pipe: int) -> None:
    os.read(pipe, 1)  # returns when the parent's end closes; nothing is ever written
    os._exit(DEFECT)
