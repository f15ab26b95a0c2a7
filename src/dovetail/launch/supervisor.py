"""Starts local ranks with torchrun's environment; all end when one dies or hangs. Imports no torch."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from dovetail import system
from dovetail.errors import MachineError
from dovetail.jsonl import append
from dovetail.launch.hang import (
    DUMP_SIGNAL,
    PROFILE_SIGNAL,
    STOPPED_STATES,
    Incident,
    RankStatus,
    main_stack,
    suspects,
)
from dovetail.launch.inference_servers import ServerStart, StartedServers, running
from dovetail.launch.process import complain, narrow_limits
from dovetail.launch.progress import LIMITS, Phase, State, read_state
from dovetail.launch.rank import (
    DEFECT,
    FOLDER,
    INTERRUPTED,
    PIPE,
    STOP_CODES,
    STOPPED,
    USER_ERROR,
    RankFiles,
)

GRACE_SECONDS = 3.0
STOP_SECONDS = 10.0  # for other ranks to end after a failure, a signal
POLL_SECONDS = 0.02
LOOK_SECONDS = 0.5  # between checks for ends, and for hangs
KILLED_SECONDS = 60.0  # memory may have to be unpinned first
STACK_SECONDS = 5.0
WRITING_SECONDS = 0.5  # for all stacks to begin, and to end
PAUSE_SECONDS = 1.0
MAX_PAUSE = 30.0  # before a restart
SAME_FAILURES = 3  # in a row: a crash loop
PORTS = range(20000, 32768)  # below those that a system hands out
STOP_ENDS = (STOPPED, INTERRUPTED, -signal.SIGTERM, -signal.SIGINT)


@dataclass(frozen=True, kw_only=True)
class Supervision:
    limits: Mapping[Phase, float] = field(default_factory=lambda: LIMITS)
    run_dir: Path | None = None  # of events.jsonl
    restarts: int = 0
    resume: tuple[str, ...] = ()  # arguments after a restart
    servers: ServerStart | None = None  # outlive restarts


class ExitReport(NamedTuple):
    code: int
    text: str = ""
    incident: Incident | None = None  # of a death or a hang


def run_ranks(command: Sequence[str], ranks: int, supervision: Supervision) -> int:
    """Returns one exit code."""
    system.adopt_orphans()
    stop = _Stop()
    for number in STOP_CODES:
        signal.signal(number, stop.receive)
    signal.signal(PROFILE_SIGNAL, stop.pass_on)
    if supervision.servers is None:
        return _start_all(command, ranks, supervision, stop, None)
    with running(supervision.servers, ranks, _free_port, lambda: stop.signal != 0) as servers:
        return _start_all(command, ranks, supervision, stop, servers)


def _start_all(
    command: Sequence[str],
    ranks: int,
    supervision: Supervision,
    stop: "_Stop",
    servers: StartedServers | None,
) -> int:
    incidents = list[Incident]()
    while True:
        end = _start_with(servers, command, ranks, supervision, stop)
        complain(end.text)
        if end.incident is None:
            return end.code
        _record(supervision, end.incident.kind, end.incident)
        incidents.append(end.incident)
        restart = len(incidents)
        latest = incidents[-SAME_FAILURES:]
        if restart > supervision.restarts or stop.signal:
            return end.code
        if (
            len(latest) == SAME_FAILURES
            and len({(i.kind, i.phase, i.step, i.cause) for i in latest}) == 1
        ):
            _record(supervision, "crash loop", end.incident)
            again = f"{SAME_FAILURES} times in a row the same failure at the same place: not started again"
            complain(f"dovetail: {again}; look at the step's data and at the cause above\n")
            return end.code
        pause = min(PAUSE_SECONDS * 2 ** (restart - 1), MAX_PAUSE)
        complain(
            f"dovetail: starting all ranks again in {pause:g} s (restart {restart} of "
            f"{supervision.restarts})\n"
        )
        if stop.wait(pause):
            return STOP_CODES[stop.signal]
        if end.incident.phase not in ("init", "load"):
            command = [*command, *supervision.resume]
        _record(supervision, "restart", end.incident)


def _start_with(
    servers: StartedServers | None,
    command: Sequence[str],
    ranks: int,
    supervision: Supervision,
    stop: "_Stop",
) -> ExitReport:
    """Starts engines that do not run, then the ranks."""
    variables: dict[str, str] = {}
    if servers is not None:
        try:
            variables = servers.start_ended()
        except MachineError as error:
            incident = Incident(kind="death", rank=None, phase="init", step=None, cause=str(error))
            return ExitReport(DEFECT, f"dovetail: {error}\n", incident)
    return _start_once(command, ranks, supervision, stop, variables)


def _start_once(
    command: Sequence[str],
    ranks: int,
    supervision: Supervision,
    stop: "_Stop",
    variables: Mapping[str, str],
) -> ExitReport:
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory(prefix="dovetail-watch-") as folder:
        job = stop.job = _Job(Path(folder), supervision.limits, stop)
        try:
            shared = {
                **os.environ,
                **variables,
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
            }
            shared |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(_free_port()),
                PIPE: str(reader),
                FOLDER: folder,
            }
            shared.setdefault("OMP_NUM_THREADS", str(max(1, system.cores() // ranks)))
            shared.setdefault(
                "TORCH_CPP_LOG_LEVEL", "FATAL"
            )  # else every rank reports a disconnect
            for rank in map(str, range(ranks)):
                env = {**shared, "RANK": rank, "LOCAL_RANK": rank}
                job.add(
                    subprocess.Popen(command, env=env, pass_fds=(reader,), start_new_session=True)
                )
            return job.wait()
        finally:
            stop.job = None
            job.kill()
            os.close(writer)
            os.close(reader)


def _record(supervision: Supervision, kind: str, incident: Incident) -> None:
    if supervision.run_dir is not None and (supervision.run_dir / "config.yaml").exists():
        row = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            **asdict(incident),
            "kind": kind,
        }
        with contextlib.suppress(OSError):  # a full disk prevents no restart
            append(supervision.run_dir / "events.jsonl", row)


class _Stop:
    """Passes the first stop signal to the ranks; the second kills them."""

    signal: int = 0
    second: bool = False
    job: "_Job | None" = None

    def receive(self, number: int, _: FrameType | None = None) -> None:
        self.second = self.signal != 0
        self.signal = self.signal or number
        for process in self.job.processes if self.job is not None else ():
            process.send_signal(signal.SIGKILL if self.second else number)

    def pass_on(self, number: int, _: FrameType | None) -> None:
        if self.job is not None and self.job.files and self.job.state(0).phase != "init":
            self.job.processes[0].send_signal(number)

    def wait(self, seconds: float) -> bool:
        """Whether a signal comes."""
        deadline = time.monotonic() + seconds
        while not self.signal and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return self.signal != 0


class _Job:
    def __init__(self, folder: Path, limits: Mapping[Phase, float], stop: _Stop) -> None:
        self.folder = folder
        self.limits = limits
        self.stop = stop
        self.processes: list[subprocess.Popen[bytes]] = []
        self.files: list[RankFiles] = []
        self.ended: dict[int, int] = {}  # exit codes, in the order of the ends
        self.first: list[int] = []  # ranks that failed first
        self.spared = system.children_of([os.getpid()])  # not of this job
        self.begun = time.monotonic()
        self.kills_before = system.out_of_memory_kills()

    def add(self, process: subprocess.Popen[bytes]) -> None:
        self.files.append(RankFiles(self.folder, len(self.processes)))
        self.processes.append(process)
        if self.stop.signal:
            process.send_signal(self.stop.signal)

    def wait(self) -> ExitReport:
        """Until all ranks end, one hangs, or soon after a failure or stop."""
        deadline = float("inf")
        look = 0.0
        while len(self.ended) < len(self.processes) and time.monotonic() < deadline:
            self._collect()
            if deadline == float("inf"):
                stopped = any(code in STOP_ENDS for code in self.ended.values())
                if self.first or stopped:
                    deadline = time.monotonic() + (GRACE_SECONDS if self.first else STOP_SECONDS)
                elif time.monotonic() > look:
                    look = time.monotonic() + LOOK_SECONDS
                    if (hung := self._hung()) is not None:
                        return hung
            time.sleep(POLL_SECONDS)
        return self._report()

    def kill(self) -> None:
        """Kills the ranks with all their descendants."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        until = time.monotonic() + KILLED_SECONDS
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(until - time.monotonic(), 0.0))
        if left := system.end_children(self.spared, max(until - time.monotonic(), 1.0)):
            pids = ", ".join(map(str, sorted(left)))
            why = "they wait inside the kernel, and keep their devices"
            complain(
                f"dovetail: killed, but not gone after {KILLED_SECONDS:g} s: pid {pids}; {why}\n"
            )

    def _collect(self) -> None:
        codes = {rank: p.poll() for rank, p in enumerate(self.processes) if rank not in self.ended}
        fresh = {rank: code for rank, code in codes.items() if code is not None}
        self.ended |= fresh
        stops = [code for code in fresh.values() if code in STOP_ENDS]
        if stops and not self.stop.signal:
            interrupted = all(code in (INTERRUPTED, -signal.SIGINT) for code in stops)
            self.stop.receive(signal.SIGINT if interrupted else signal.SIGTERM)
        if not self.first:
            self.first = [rank for rank, code in fresh.items() if code not in (0, *STOP_ENDS)]

    def _report(self) -> ExitReport:
        codes = list(self.ended.values())
        if len(self.ended) == len(self.processes) and not any(codes):
            return ExitReport(0)
        if self.stop.signal and (
            self.stop.second or not self.first or any(code in STOP_ENDS for code in codes)
        ):
            return ExitReport(STOPPED if STOPPED in codes else STOP_CODES[self.stop.signal])
        # first a killed rank, then one with a report
        killed = [rank for rank in self.first if self.ended[rank] < 0]
        failed = [rank for rank, code in self.ended.items() if code not in (0, *STOP_ENDS)]
        rank = [*killed, *(rank for rank in failed if _read(self.files[rank].report)), *self.first][
            0
        ]
        text = _read(self.files[rank].report)
        if self.ended[rank] == USER_ERROR:
            return ExitReport(USER_ERROR, text)
        state = self.state(rank)
        cause = self._cause(rank, text)
        incident = Incident(
            kind="death", rank=rank, phase=state.phase, step=state.step, cause=cause
        )
        stacks = (
            _read(self.files[rank].stacks) if self.ended[rank] < 0 else ""
        )  # of a crash inside a library
        name = f"rank {rank} ({incident.host}, pid {self.processes[rank].pid})"
        return ExitReport(
            DEFECT, f"{text}{stacks}dovetail: {name} ended in {state.where()}: {cause}\n", incident
        )

    def _cause(self, rank: int, report: str) -> str:
        code = self.ended[rank]
        if code >= 0:
            return (
                report.strip().rpartition("\n")[2].removeprefix("dovetail: ") or f"exit code {code}"
            )
        name = f"killed by {signal.Signals(-code).name}"
        if -code != signal.SIGKILL:
            return name + narrow_limits()
        if system.out_of_memory_kills() > self.kills_before:
            return f"{name}: the kernel ended it because memory ran out; use more ranks or lower tokens per batch"
        return f"{name}: by a user or a batch system (the kernel has counted no kill for want of memory)"

    def state(self, rank: int) -> State:
        return read_state(self.files[rank].state) or State(0, "init", None, self.begun, self.begun)

    def _hung(self) -> ExitReport | None:
        now = time.monotonic()
        alive = {
            rank: self.state(rank) for rank in range(len(self.processes)) if rank not in self.ended
        }
        late = [state for state in alive.values() if now - state.since > self.limits[state.phase]]
        if not late:
            return None
        ranks = self._look_closely(alive)
        blamed, why = suspects(ranks)
        first = next((r for r in ranks if r.rank in blamed), None)
        state = late[0] if first is None else first.state
        cause = f"{why}: {first.stack}" if first is not None and first.stack.frames else why
        rank = None if first is None else first.rank
        incident = Incident(kind="hang", rank=rank, phase=state.phase, step=state.step, cause=cause)
        stacks: dict[str, list[int]] = defaultdict(list)
        for r in ranks:
            stacks["".join(f"    {f.file}:{f.line} {f.name}\n" for f in r.stack.frames)].append(
                r.rank
            )
        name = f"rank {', '.join(map(str, blamed))}" if blamed else "no rank stands out"
        seconds = now - min(state.since for state in late)
        phase = late[0].phase
        lines = [
            f"dovetail: hang: no progress for {seconds:.0f} s in phase {phase} (limit "
            f"{self.limits[phase]:g} s)\n",
            *(f"  {r.describe(now)}\n" for r in ranks),
            *(f"  rank {rank}: ended with code {code}\n" for rank, code in self.ended.items()),
            *(
                f"  stack of rank {', '.join(map(str, r))}, newest first:\n{text}"
                for text, r in stacks.items()
                if text
            ),
            f"dovetail: {name} ({incident.host}) in {state.where()}: {cause}\n",
        ]
        return ExitReport(DEFECT, "".join(lines), incident)

    def _look_closely(self, alive: Mapping[int, State]) -> list[RankStatus]:
        pids = {rank: self.processes[rank].pid for rank in alive}
        kernel = {rank: system.kernel_state(pids[rank]) for rank in alive}
        for rank in alive:
            self.processes[rank].send_signal(DUMP_SIGNAL)
        files = {rank: self.files[rank].stacks for rank in alive}
        awaited = [files[rank] for rank in alive if kernel[rank] not in STOPPED_STATES]
        deadline = time.monotonic() + STACK_SECONDS
        while time.monotonic() < deadline and not all(
            main_stack(_read(file)).frames for file in awaited
        ):
            time.sleep(POLL_SECONDS)
        time.sleep(WRITING_SECONDS)
        return [
            RankStatus(r, pids[r], alive[r], kernel[r], main_stack(_read(files[r]))) for r in alive
        ]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _free_port() -> int:
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("", port))
            return port
    raise MachineError(
        f"no port from {PORTS[0]} to {PORTS[-1]} is free on this machine; end what listens there"
    )
