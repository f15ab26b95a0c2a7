"""Inference servers as children of the supervisor. Imports no torch."""

import http.client
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dovetail import system
from dovetail.errors import ConfigError, MachineError
from dovetail.launch.process import complain, without_secrets

URLS = "DOVETAIL_ENGINES"
KEY = "DOVETAIL_ENGINE_KEY"
LOOK_SECONDS = 0.5
END_SECONDS = 15.0
ASK_SECONDS = 5.0
LAST_LINES = 15  # of a failed server's log
HOST = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class ServerStart:
    """Servers that a run starts. PORT in a command stands for a free port. logs: folder of engine-N.log."""

    commands: Sequence[Sequence[str]]
    gpus_each: int  # behind those of the ranks
    ranks_on_gpus: bool
    logs: Path
    timeout: float
    environment: Mapping[str, str] = field(default_factory=dict)


def server_key() -> str | None:
    return os.environ.get(KEY)


def started_servers() -> tuple[str, ...]:
    return tuple(filter(None, os.environ.get(URLS, "").split(",")))


class StartedServers:
    """The servers of a run. They outlive restarts of the ranks; those that have ended start again."""

    def __init__(
        self,
        start: ServerStart,
        ranks: int,
        free_port: Callable[[], int],
        stopped: Callable[[], bool],
    ) -> None:
        self.start = start
        self.free_port = free_port
        self.stopped = stopped
        self.gpus = _gpus(start, ranks if start.ranks_on_gpus else 0)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.urls: dict[int, str] = {}

    def start_ended(self) -> dict[str, str]:
        """Starts servers that do not run, and waits for them. Returns variables for the ranks.

        ConfigError if one ends or does not answer in time, MachineError if one is killed.
        """
        self.start.logs.mkdir(parents=True, exist_ok=True)
        numbers = [i for i in range(len(self.start.commands)) if not self._runs(i)]
        for number in numbers:
            self._start(number)
        if numbers:
            noun = "engine" if len(numbers) == 1 else "engines"
            logs = f"their logs are in {self.start.logs}"
            complain(f"dovetail: waiting for {len(numbers)} {noun}; {logs}\n")
        _wait(self.start, self.processes, self.urls, self.stopped)
        return {URLS: ",".join(self.urls[i] for i in sorted(self.urls))}

    def end(self) -> None:
        _end(list(self.processes.values()))

    def _runs(self, number: int) -> bool:
        return number in self.processes and self.processes[number].poll() is None

    def _start(self, number: int) -> None:
        if number in self.processes:
            _end([self.processes[number]])  # what it has left
        port = str(self.free_port())
        environment = {**os.environ, **self.start.environment}
        if self.gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[number])
        words = [port if word == "PORT" else word for word in self.start.commands[number]]
        self.processes[number] = _started(words, environment, _log(self.start, number))
        self.urls[number] = f"http://{HOST}:{port}"


@contextmanager
def running(
    start: ServerStart, ranks: int, free_port: Callable[[], int], stopped: Callable[[], bool]
) -> Iterator[StartedServers]:
    """Servers that are not yet started, and end with the block."""
    servers = StartedServers(start, ranks, free_port, stopped)
    try:
        yield servers
    finally:
        servers.end()


def _started(
    words: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    try:
        with open(log, "wb") as output:
            return subprocess.Popen(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=partial(system.die_with_parent, signal.SIGTERM),
            )  # fmt: skip
    except (FileNotFoundError, PermissionError) as error:  # a directory is the latter
        edit = "name the one of the engine's environment in rollout.start.command"
        raise ConfigError(f"rollout.start: {words[0]} is no program here; {edit}") from error


def _wait(
    start: ServerStart,
    processes: Mapping[int, subprocess.Popen[bytes]],
    urls: Mapping[int, str],
    stopped: Callable[[], bool],
) -> None:
    deadline = time.monotonic() + start.timeout
    waiting = dict(urls)
    kills_before = system.out_of_memory_kills()
    while waiting and not stopped():
        for i, url in list(waiting.items()):
            code = processes[i].poll()
            if code is not None and code < 0:
                killed = system.killed_by(-code, kills_before)
                raise MachineError(
                    f"rollout.start: engine {i} was {killed}; its log:\n{_tail(start, i)}"
                )
            if code is not None:
                raise ConfigError(
                    f"rollout.start: engine {i} ended with code {code}; its log:\n{_tail(start, i)}"
                )
            if _is_healthy(url):
                del waiting[i]
        if waiting and time.monotonic() > deadline:
            i = next(iter(waiting))
            limit = f"rollout.start.timeout={start.timeout:g} s; its last lines:\n{_tail(start, i)}"
            raise ConfigError(f"rollout.start: engine {i} did not answer within {limit}")
        time.sleep(LOOK_SECONDS if waiting else 0)


def _is_healthy(url: str) -> bool:
    with suppress(OSError, http.client.HTTPException):
        with closing(
            http.client.HTTPConnection(url.removeprefix("http://"), timeout=ASK_SECONDS)
        ) as connection:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
    return False


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    until = time.monotonic() + END_SECONDS
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(until - time.monotonic(), 0.0))
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _gpus(start: ServerStart, ranks: int) -> list[list[str]] | None:
    """Returns the GPUs behind those of the ranks; None: not chosen."""
    if not start.gpus_each:
        return None
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    all_gpus = (
        [str(i) for i in range(len(system.gpu_memory()))] if named is None else named.split(",")
    )
    needed = ranks + start.gpus_each * len(start.commands)
    if needed > len(all_gpus):
        wants = f"{len(start.commands)} engines of {start.gpus_each} GPUs and {ranks} ranks need {needed} GPUs"
        edit = "start fewer, or set rollout.start.gpus_each=0 for CPUs"
        raise ConfigError(f"rollout.start: {wants}, there are {len(all_gpus)}; {edit}")
    free = all_gpus[ranks:]
    return [
        free[i * start.gpus_each : (i + 1) * start.gpus_each] for i in range(len(start.commands))
    ]


def _log(start: ServerStart, number: int) -> Path:
    return start.logs / f"engine-{number}.log"


def _tail(start: ServerStart, number: int) -> str:
    lines = _log(start, number).read_text(errors="replace").splitlines()[-LAST_LINES:]
    return without_secrets("\n".join(f"  {line}" for line in lines))
