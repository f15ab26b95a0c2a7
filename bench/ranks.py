"""Runs one benchmark module on some ranks of this machine, each a process of its own, within a time limit."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[1]
GRACE_SECONDS = 5.0  # for the others, once a rank has failed or the limit is reached; over NCCL they notice nothing
POLL_SECONDS = 0.2
LOOPBACK = "lo"  # where gloo need not ask the network for this machine's name, once for every group


def run_ranks(
    module: str,
    arguments: Sequence[str],
    ranks: int,
    seconds: float,
    log: Path,
    *,
    sessions: bool = False,
) -> int | None:
    """The first exit status that is not 0, or 0; None where the limit came first. Rank r > 0 writes to LOG.r.

    Only the processes started here are ended; with `sessions` each has one of its own, which ends with all that is in it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    shared = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        ).rstrip(os.pathsep),
        "PYTHONUNBUFFERED": "1",
        "PYTORCH_CUDA_ALLOC_CONF": os.environ.get(
            "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
        ),
        "OMP_NUM_THREADS": os.environ.get(
            "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks))
        ),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    shared.setdefault("NCCL_DEBUG", "WARN")
    if LOOPBACK in (name for _, name in socket.if_nameindex()):
        shared.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    command = [sys.executable, "-m", module, *arguments]
    with ExitStack() as stack:
        started = []
        for rank in range(ranks):
            out = stack.enter_context(
                open(log if rank == 0 else f"{log}.{rank}", "w", encoding="utf-8")
            )
            mine = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=mine,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=sessions,
                )
            )
        deadline, statuses = time.monotonic() + seconds, [process.poll() for process in started]
        while None in statuses and time.monotonic() < deadline and not any(statuses):
            time.sleep(POLL_SECONDS)
            statuses = [process.poll() for process in started]
        late = None in statuses and not any(statuses)
        _end(started, 0.0 if late else GRACE_SECONDS, sessions=sessions)
    return None if late else next((status for status in statuses if status), 0)


def _end(started: Sequence[subprocess.Popen[bytes]], patience: float, *, sessions: bool) -> None:
    """Have all of them gone: those that do not end by themselves are asked, then killed, and what they left behind."""
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        for process in started:
            if number is not None and sessions:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            elif number is not None and process.poll() is None:
                process.send_signal(number)
        deadline = time.monotonic() + (patience if number is None else GRACE_SECONDS)
        while any(process.poll() is None for process in started) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port
