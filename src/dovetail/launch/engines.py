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
from dovetail.errors import ConfigError
from dovetail.launch.process import complain, without_secrets

URLS, KEY = "DOVETAIL_ENGINES", "DOVETAIL_ENGINE_KEY"
LOOK_SECONDS, END_SECONDS, ASK_SECONDS = 0.5, 15.0, 5.0
LAST_LINES = 15  # of a failed server's log
HOST = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class EngineStart:
    """In commands the word PORT stands for a free port. logs: folder of engine-N.log."""

    commands: Sequence[Sequence[str]]
    gpus_each: int  # behind those of the ranks
    ranks_on_gpus: bool
    logs: Path
    timeout: float
    environment: Mapping[str, str] = field(default_factory=dict)


def engine_key() -> str | None:
    return os.environ.get(KEY)


def started_engines() -> tuple[str, ...]:
    return tuple(filter(None, os.environ.get(URLS, "").split(",")))


@contextmanager
def running(
    start: EngineStart, ranks: int, free_port: Callable[[], int], stopped: Callable[[], bool]
) -> Iterator[dict[str, str]]:
    """Yields variables for the ranks. ConfigError if a server ends or does not answer in time."""
    gpus = _gpus(start, ranks if start.ranks_on_gpus else 0)
    start.logs.mkdir(parents=True, exist_ok=True)
    processes, urls = list[subprocess.Popen[bytes]](), list[str]()
    try:
        for i, command in enumerate(start.commands):
            port = str(free_port())
            own = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus[i])}
            words = [port if word == "PORT" else word for word in command]
            processes.append(_started(words, {**os.environ, **start.environment, **own}, _log(start, i)))
            urls.append(f"http://{HOST}:{port}")
        complain(f"dovetail: waiting for {len(urls)} engine{'s' * (len(urls) > 1)}; their logs are in {start.logs}\n")
        _wait(start, processes, urls, stopped)
        yield {URLS: ",".join(urls)}
    finally:
        _end(processes)


def _started(words: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
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
    start: EngineStart, processes: Sequence[subprocess.Popen[bytes]], urls: Sequence[str], stopped: Callable[[], bool]
) -> None:
    deadline, waiting = time.monotonic() + start.timeout, dict(enumerate(urls))
    while waiting and not stopped():
        for i, url in list(waiting.items()):
            if (code := processes[i].poll()) is not None:
                raise ConfigError(f"rollout.start: engine {i} ended with code {code}; its log:\n{_tail(start, i)}")
            if _is_healthy(url):
                del waiting[i]
        if waiting and time.monotonic() > deadline:
            i = next(iter(waiting))
            limit = f"rollout.start.timeout={start.timeout:g} s; its last lines:\n{_tail(start, i)}"
            raise ConfigError(f"rollout.start: engine {i} did not answer within {limit}")
        time.sleep(LOOK_SECONDS if waiting else 0)


def _is_healthy(url: str) -> bool:
    with suppress(OSError, http.client.HTTPException):
        with closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=ASK_SECONDS)) as connection:
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


def _gpus(start: EngineStart, ranks: int) -> list[list[str]] | None:
    """Behind those of the ranks; None: not chosen."""
    if not start.gpus_each:
        return None
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    all_gpus = [str(i) for i in range(len(system.gpu_memory()))] if named is None else named.split(",")
    needed = ranks + start.gpus_each * len(start.commands)
    if needed > len(all_gpus):
        wants = f"{len(start.commands)} engines of {start.gpus_each} GPUs and {ranks} ranks need {needed} GPUs"
        edit = "start fewer, or set rollout.start.gpus_each=0 for CPUs"
        raise ConfigError(f"rollout.start: {wants}, there are {len(all_gpus)}; {edit}")
    free = all_gpus[ranks:]
    return [free[i * start.gpus_each : (i + 1) * start.gpus_each] for i in range(len(start.commands))]


def _log(start: EngineStart, number: int) -> Path:
    return start.logs / f"engine-{number}.log"


def _tail(start: EngineStart, number: int) -> str:
    lines = _log(start, number).read_text(errors="replace").splitlines()[-LAST_LINES:]
    return without_secrets("\n".join(f"  {line}" for line in lines))
