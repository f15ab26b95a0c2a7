"""Starts the ranks of a command on this machine, watches them, and outlives none of them: all end when one fails.

Every rank is the same command with `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT` set, in a session
of its own, so a Ctrl-C reaches this process only and is passed on in order. A rank that dies or hangs is named with its
phase, step and cause; then, where that was asked for, all ranks start again. Imports no torch.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from dovetail import system
from dovetail.errors import LayoutError, MachineError
from dovetail.jsonl import append
from dovetail.launch.hang import ASK, STOPPED_STATES, Incident, Seen, main_stack, odd_ranks
from dovetail.launch.limits import narrow_limits
from dovetail.launch.progress import LIMITS, Phase, State, read_state
from dovetail.launch.rank import DEFECT, FOLDER, INTERRUPTED, PIPE, STOPPED, USER_ERROR, RankFiles
from dovetail.launch.streams import complain
from dovetail.parallel.layout import Layout

GRACE_SECONDS = 3.0  # after the first failure, for the others to notice
STOP_SECONDS = 10.0  # after a rank has ended as it was told to, for the others to end, too
POLL_SECONDS = 0.02
LOOK_SECONDS = 0.5  # between two looks at where the ranks are
KILLED_SECONDS = 60.0  # for what is killed to be gone; its memory may have to be unpinned first
STACK_SECONDS = 5.0  # for the ranks to write their stacks, at most; a stopped one is not waited for
WRITING_SECONDS = 0.5  # from a stack's first frames to its last
PAUSE_SECONDS, LONGEST_PAUSE = 1.0, 30.0  # before the first restart, doubled before each further one
SAME_DEATHS = 3  # in a row at the same place with the same cause: starting again would not help
FEWEST_RANKS, RANKS_PER_CORE = 8, 4  # what a machine starts at most: that many, or that many for each core
PORTS = range(20000, 32768)  # for the ranks to meet at
ASKED = (STOPPED, INTERRUPTED, -signal.SIGTERM, -signal.SIGINT)  # how a rank ends that was told to


@dataclass(frozen=True, kw_only=True)
class Watch:
    """How ranks are watched: the longest time in each phase, where incidents are written, how often to start again.

    again: what the command gets in addition from then on, when the work had begun.
    """

    limits: Mapping[Phase, float] = field(default_factory=lambda: LIMITS)
    run_dir: Path | None = None
    restarts: int = 0
    again: tuple[str, ...] = ()


class ExitReport(NamedTuple):
    """How one start of all ranks ended. `told`: for the user; `incident`: where that was no mistake and no stop."""

    code: int
    told: str = ""
    incident: Incident | None = None


def refuse_too_many(layout: Layout) -> None:
    """Raise LayoutError for a layout, whose dp is known, of more ranks than this machine can run."""
    cores = _cores()
    most = max(FEWEST_RANKS, RANKS_PER_CORE * cores)
    if layout.num_ranks > most:
        raise LayoutError(
            f"layout {layout} needs {layout.num_ranks} ranks, but at most {most} start on this machine, which has {cores} "
            "CPU cores; lower the degrees, or start the ranks on several machines with torchrun"
        )


def run_ranks(command: Sequence[str], ranks: int, watch: Watch | None = None) -> int:
    """Run `command` as that many local ranks; returns the exit code of the whole."""
    watch = watch or Watch()
    system.adopt_orphans()
    stop = _Stop()
    before = {number: signal.signal(number, stop.note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return _run(command, ranks, watch, stop)
    finally:
        for number, action in before.items():
            signal.signal(number, action)


def _run(command: Sequence[str], ranks: int, watch: Watch, stop: "_Stop") -> int:
    """Start the ranks, and again after an incident, as often as was asked for and as it may help."""
    incidents: list[Incident] = []
    while True:
        ending = _start_once(command, ranks, watch, stop)
        complain(ending.told)
        if ending.incident is None:
            return ending.code
        _record(watch, ending.incident.kind, ending.incident)
        incidents.append(ending.incident)
        number, latest = len(incidents), incidents[-SAME_DEATHS:]
        if number > watch.restarts or stop.signal is not None:
            return ending.code
        if len(latest) == SAME_DEATHS and len({incident.signature for incident in latest}) == 1:
            _record(watch, "crash loop", ending.incident)
            sys.stderr.write(
                f"dovetail: {SAME_DEATHS} times in a row the same failure at the same place: not started again; look at "
                "the step's data and at the cause above\n"
            )
            return ending.code
        pause = min(PAUSE_SECONDS * 2 ** (number - 1), LONGEST_PAUSE)
        sys.stderr.write(f"dovetail: starting all ranks again in {pause:g} s (restart {number} of {watch.restarts})\n")
        if stop.wait(pause):
            return INTERRUPTED if stop.signal == signal.SIGINT else STOPPED
        if ending.incident.phase not in ("init", "load"):
            command = [*command, *watch.again]
        _record(watch, "restart", ending.incident)


def _start_once(command: Sequence[str], ranks: int, watch: Watch, stop: "_Stop") -> ExitReport:
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory(prefix="dovetail-watch-") as folder:
        local = _Ranks(Path(folder), watch.limits, stop)
        try:
            shared = {**os.environ, **_environment(ranks), PIPE: str(reader), FOLDER: folder}
            for rank in range(ranks):
                mine = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                local.add(subprocess.Popen(command, env=mine, pass_fds=(reader,), start_new_session=True))
            return local.wait()
        finally:
            local.kill()
            stop.ranks = None
            os.close(writer)
            os.close(reader)


def _record(watch: Watch, kind: str, incident: Incident) -> None:
    """Append a line to events.jsonl, once there is a run: before, run_dir is still to be claimed."""
    if watch.run_dir is not None and (watch.run_dir / "config.yaml").exists():
        row = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **incident.row(), "kind": kind}
        with contextlib.suppress(OSError):  # a full disk keeps nobody from starting again
            append(watch.run_dir / "events.jsonl", row)


class _Stop:
    """The first signal, which goes on to the ranks; the second one ends everything."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.at_once = False
        self.ranks: _Ranks | None = None

    def note(self, number: int, _: FrameType | None = None) -> None:
        self.at_once = self.signal is not None
        self.signal = self.signal or number
        if self.ranks is not None:
            self.ranks.send(signal.SIGKILL if self.at_once else number)

    def wait(self, seconds: float) -> bool:
        """Whether a signal came within that time, or before."""
        deadline = time.monotonic() + seconds
        while self.signal is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return self.signal is not None


class _Ranks:
    """The ranks of one start, in order, and which of them have ended so far."""

    def __init__(self, folder: Path, limits: Mapping[Phase, float], stop: _Stop) -> None:
        self.folder, self.limits, self.stop = folder, limits, stop
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ended: dict[int, int] = {}  # exit codes, in the order in which they were seen
        self.first: list[int] = []  # the ranks that were seen failing first, together
        self.left: set[int] = set()  # what was killed and is still there
        self.spared = system.children_of([os.getpid()])  # what runs below this process is not ours to end
        self.begun = time.monotonic()
        self.kills_before = system.out_of_memory_kills()
        stop.ranks = self

    def add(self, process: subprocess.Popen[bytes]) -> None:
        self.processes.append(process)
        if self.stop.signal is not None:
            process.send_signal(self.stop.signal)

    def send(self, number: int) -> None:
        """Send a signal to every rank. It may come from a signal handler, so it waits for nobody."""
        for process in self.processes:
            process.send_signal(number)

    def wait(self) -> ExitReport:
        """Wait for all ranks. After a failure the others have a moment to end, then they are killed."""
        deadline = look = None
        while len(self.ended) < len(self.processes) and (deadline is None or time.monotonic() < deadline):
            self._collect()
            if self.ended and deadline is None:
                deadline = self._deadline()
            if deadline is None and (look is None or time.monotonic() > look):
                look = time.monotonic() + LOOK_SECONDS
                hung = self._hung()
                if hung is not None:
                    return hung
            time.sleep(POLL_SECONDS)
        self.kill()
        return self._ending()

    def _deadline(self) -> float | None:
        """Until when the others may go on, after this one ended: without end where it did what it was there for."""
        if self.first:
            return time.monotonic() + GRACE_SECONDS
        return time.monotonic() + STOP_SECONDS if any(code in ASKED for code in self.ended.values()) else None

    def kill(self) -> None:
        """End every rank that still runs, with all that they started. Who cannot be killed is told, once, and left."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        until = time.monotonic() + KILLED_SECONDS * (not self.left)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(until - time.monotonic(), 0.0))
        left = system.end_children(self.spared, max(until - time.monotonic(), 1.0)) - self.left
        if left:
            self.left |= left
            sys.stderr.write(
                f"dovetail: killed, but not gone after {KILLED_SECONDS:g} s: pid {', '.join(map(str, sorted(left)))}; such a "
                "process waits inside the kernel, for a driver or a file system, and keeps its device until that lets it go\n"
            )

    def _collect(self) -> None:
        """Note who has ended. A rank that was told to stop stops the others; a failure is what starts the grace."""
        fresh = {rank: code for rank, p in enumerate(self.processes) if (code := p.poll()) is not None}
        fresh = {rank: code for rank, code in fresh.items() if rank not in self.ended}
        self.ended |= fresh
        if self.stop.signal is None and any(code in ASKED for code in fresh.values()):
            interrupted = all(code in (INTERRUPTED, -signal.SIGINT) for code in fresh.values() if code in ASKED)
            self.stop.note(signal.SIGINT if interrupted else signal.SIGTERM)
        if not self.first:
            self.first = [rank for rank, code in fresh.items() if code not in (0, *ASKED)]

    def _ending(self) -> ExitReport:
        codes = list(self.ended.values())
        if len(self.ended) == len(self.processes) and not any(codes):
            return ExitReport(0)
        if self.stop.signal is not None and (self.stop.at_once or not self.first or any(c in ASKED for c in codes)):
            interrupted = self.stop.signal == signal.SIGINT and STOPPED not in codes
            return ExitReport(INTERRUPTED if interrupted else STOPPED)
        rank = self._culprit()
        report = self._report(rank)
        if self.ended[rank] == USER_ERROR:
            return ExitReport(USER_ERROR, report)
        state, cause = self._state(rank), self._cause(rank, report)
        incident = Incident(kind="death", rank=rank, phase=state.phase, step=state.step, cause=cause)
        name = f"rank {rank} ({incident.host}, pid {self.processes[rank].pid})"
        ended = f"dovetail: {name} ended in {state.where()}: {cause}\n"
        return ExitReport(DEFECT, report + self._crash(rank) + ended, incident)

    def _culprit(self) -> int:
        """The rank that failed first. Of those seen together: one that was killed, else one that says why."""
        killed = [rank for rank in self.first if self.ended[rank] < 0]
        failed = [rank for rank, code in self.ended.items() if code not in (0, *ASKED)]
        return next(iter([*killed, *(rank for rank in failed if self._report(rank)), *self.first]))

    def _cause(self, rank: int, report: str) -> str:
        code = self.ended[rank]
        if code >= 0:
            told = report.strip().splitlines()
            return told[-1].removeprefix("dovetail: ") if told else f"exit code {code}"
        name = f"killed by {signal.Signals(-code).name}"
        if -code != signal.SIGKILL:
            return name + narrow_limits()
        if system.out_of_memory_kills() > self.kills_before:
            return f"{name}: the kernel ended it because memory ran out; use more ranks or lower tokens per batch"
        return f"{name}: by somebody or a batch system (the kernel has counted no kill for want of memory)"

    def _crash(self, rank: int) -> str:
        """The stacks that a rank left when it crashed inside a library."""
        return self._stacks(rank) if self.ended[rank] < 0 else ""

    def _stacks(self, rank: int) -> str:
        path = RankFiles.of(self.folder, rank).stacks
        return path.read_text(errors="replace") if path.exists() else ""

    def _report(self, rank: int) -> str:
        path = RankFiles.of(self.folder, rank).report
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def _hung(self) -> ExitReport | None:
        """Where a rank has been in its phase for too long: who is to blame, and where everybody is. All are killed."""
        now = time.monotonic()
        alive = {rank: self._state(rank) for rank in range(len(self.processes)) if rank not in self.ended}
        late = [rank for rank, state in alive.items() if now - state.since > self.limits[state.phase]]
        if not late:
            return None
        seen, stacks = self._look_closely(alive)
        odd, why = odd_ranks(seen)
        shown = alive[odd[0] if odd else late[0]]
        name = f"rank {', '.join(map(str, odd))}" if odd else "no rank stands out"
        where = next((f": {s.stack}" for s in seen if odd and s.rank == odd[0] and s.stack.frames), "")
        incident = Incident(
            kind="hang", rank=odd[0] if odd else None, phase=shown.phase, step=shown.step, cause=f"{why}{where}"
        )
        seconds = now - min(alive[rank].since for rank in late)
        told = [
            f"dovetail: hang: no progress for {seconds:.0f} s in phase {alive[late[0]].phase} "
            f"(limit {self.limits[alive[late[0]].phase]:g} s)",
            *(f"  {each.describe(now)}" for each in seen),
            *(f"  rank {rank}: ended with code {code}" for rank, code in self.ended.items()),
            *stacks,
            f"dovetail: {name} ({incident.host}) in {shown.where()}: {incident.cause}",
        ]
        self.kill()
        return ExitReport(DEFECT, "\n".join(told) + "\n", incident)

    def _state(self, rank: int) -> State:
        """What a rank last told. One that has told nothing is at its beginning since it was started."""
        told = read_state(RankFiles.of(self.folder, rank).state)
        return told or State(0, "init", None, self.begun, self.begun)

    def _look_closely(self, alive: Mapping[int, State]) -> tuple[list[Seen], list[str]]:
        """Every living rank with its stack; and the whole stacks, equal ones once."""
        kernel = {rank: system.kernel_state(self.processes[rank].pid) for rank in alive}
        for rank in alive:
            self.processes[rank].send_signal(ASK)
        answer = {rank for rank in alive if kernel[rank] not in STOPPED_STATES}
        deadline = time.monotonic() + STACK_SECONDS
        while time.monotonic() < deadline and not all(main_stack(self._stacks(rank)).frames for rank in answer):
            time.sleep(POLL_SECONDS)
        time.sleep(WRITING_SECONDS)
        seen, texts = [], dict[str, list[int]]()
        for rank, state in alive.items():
            seen.append(Seen(rank, self.processes[rank].pid, state, kernel[rank], main_stack(self._stacks(rank))))
            frames = "\n".join(f"    {f.file}:{f.line} {f.name}" for f in seen[-1].stack.frames)
            texts.setdefault(frames, []).append(rank)
        whole = [
            f"  stack of rank {', '.join(map(str, r))}, newest first:\n{text}" for text, r in texts.items() if text
        ]
        return seen, whole


def _environment(ranks: int) -> Mapping[str, str]:
    """What all ranks share: where they meet, and an even share of this machine's cores."""
    threads = max(1, _cores() // ranks)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    counts = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    # Or every rank would tell at length that a failed one closed its connection.
    quiet = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL")}
    return {**quiet, **meeting, **counts, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}


def _cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _free_port() -> int:
    """A port for the ranks to meet at, seconds later: below those that a system gives to whoever asks for any."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("", port))
            return port
    raise MachineError(f"no port from {PORTS[0]} to {PORTS[-1]} is free on this machine; end what listens there")
