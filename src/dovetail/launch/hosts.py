"""Detects lost hosts: monitor processes of all ranks exchange heartbeats with rank 0's. Imports no torch.

Not threads: a compiler may hold Python's lock for too long.
"""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple, Protocol

from dovetail import system
from dovetail.launch.hang import STOPPED_STATES
from dovetail.launch.process import start_worker, tell

BEAT_SECONDS = 2.0
SILENT_SECONDS = 35.0
GONE_SECONDS = 20.0  # after a process ended: its job may be ending
LOST_SECONDS = 1.0  # until all hosts know that a process ended
KILL_SECONDS = 3.0
KEY = "dovetail/hosts"  # in the store
MAX_LINE = 1 << 12
MAX_WAITING = 4096  # characters; connections that are not accepted yet


class Store(Protocol):
    def set(self, key: str, value: str) -> object: ...

    def get(self, key: str) -> bytes: ...


class HostWatch:
    """master: where ranks meet."""

    def __init__(self, store: Store, rank: int, master: str) -> None:
        setup: dict[str, Any] = {"rank": rank, "host": socket.gethostname(), "parent": os.getpid()}
        setup |= {"beat": BEAT_SECONDS, "limit": SILENT_SECONDS, "gone": GONE_SECONDS}
        if rank == 0:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            with socket.create_server(
                ("", 0), family=family, backlog=MAX_WAITING, dualstack_ipv6=dual
            ) as listener:
                hub = {
                    "address": _own_address(master),
                    "port": listener.getsockname()[1],
                    "host": setup["host"],
                }
                hub["token"] = secrets.token_hex(16)
                store.set(KEY, json.dumps(hub))
                setup |= {"token": hub["token"], "listener": listener.fileno()}
                self._process = start_worker(__name__, files=[listener.fileno()])
        else:
            hub = json.loads(store.get(KEY))
            setup["hub"] = {**hub, "address": hub["address"] or master}
            self._process = start_worker(__name__)
        self._lost: list[str] = []
        self._send(json.dumps(setup))
        assert self._process.stdout is not None
        # Wait until rank 0's process knows this rank, or a warning that it cannot.
        self._first_line = b"" if rank == 0 else self._process.stdout.readline()

    def wait(self, warn: Callable[[str], object]) -> str:
        """Why this rank must end; "": it need not."""
        assert self._process.stdout is not None
        for line in chain([self._first_line], self._process.stdout):
            kind, _, text = line.decode().rstrip("\n").partition(" ")
            if kind == "end":
                return text
            if kind == "lost":
                self._lost.append(text)
            elif kind == "warn":
                warn(text)
        return ""

    def lost(self) -> str:
        """A rank whose process has just ended, or ""."""
        deadline = time.monotonic() + LOST_SECONDS
        while not self._lost and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._lost[0] if self._lost else ""

    def leave(self) -> None:
        self._send("bye")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_SECONDS)

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()


class Heartbeat(NamedTuple):
    host: str
    seen: float
    deadline: float
    ended: bool = False


class Heartbeats:
    """limit, gone: seconds of silence, and after the end of a process."""

    def __init__(self, limit: float, gone: float) -> None:
        self.limit = limit
        self.gone = gone
        self.last: dict[int, Heartbeat] = {}

    def note(self, rank: int, host: str, now: float) -> None:
        self.last[rank] = Heartbeat(host, now, now + self.limit)

    def end(self, rank: int, now: float) -> None:
        if (last := self.last.get(rank)) is not None:
            self.last[rank] = last._replace(
                deadline=min(last.deadline, now + self.gone), ended=True
            )

    def verdict(self, now: float) -> str:
        """Hosts that are lost, or ""."""
        silent: dict[tuple[str, bool], list[int]] = {}
        if any(now > last.deadline for last in self.last.values()):
            near = min(3 * BEAT_SECONDS, self.limit / 2)  # ranks of a host fall silent one by one
            for rank, last in sorted(self.last.items()):
                if now > last.deadline - near:
                    silent.setdefault((last.host, last.ended), []).append(rank)
        parts = []
        for (host, ended), ranks in silent.items():
            seconds = now - min(self.last[rank].seen for rank in ranks)
            what = (
                "the process ended"
                if ended
                else "the host is down, stopped or cut off from the network"
            )
            parts.append(
                f"host {host} (rank {', '.join(map(str, ranks))}) gave no sign for {seconds:.0f} "
                f"s: {what}"
            )
        return "; ".join(parts)


class _Monitor:
    """peers: connections by rank, after their hello."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self.setup = setup
        self.heartbeats = Heartbeats(setup["limit"], setup["gone"])
        self.peers: dict[int, asyncio.StreamWriter] = {}
        self.joining: set[asyncio.Task[None]] = set()

    async def run(self) -> str:
        """Why the rank must end; "": it has ended by itself."""
        loop = asyncio.get_running_loop()
        self.end: asyncio.Future[str] = loop.create_future()
        loop.add_reader(0, self._leave)
        if "hub" in self.setup:
            self.joining.add(asyncio.create_task(self._join(self.setup["hub"])))
        else:
            listener = socket.socket(fileno=self.setup["listener"])
            await asyncio.start_server(
                self._welcome, sock=listener, limit=MAX_LINE, backlog=MAX_WAITING
            )
        done, _ = await asyncio.wait(
            [self.end, asyncio.create_task(self._beat())], return_when="FIRST_COMPLETED"
        )
        reason = done.pop().result()
        if reason:
            self._send(f"end {reason}")
        return reason

    def _leave(self) -> None:
        asyncio.get_running_loop().remove_reader(0)
        if os.read(0, MAX_LINE):  # the rank ends well
            self._send("bye")
        self._stop("")

    def _stop(self, reason: str) -> None:
        if not self.end.done():
            self.end.set_result(reason)

    async def _beat(self) -> str:
        parent = self.setup["parent"]
        while os.getppid() == parent:
            if system.kernel_state(parent) not in STOPPED_STATES:
                self._send("beat")
            if reason := self.heartbeats.verdict(time.monotonic()):
                return reason
            await asyncio.sleep(self.setup["beat"])
        return ""

    async def _join(self, hub: Mapping[str, Any]) -> None:
        rank = self.setup["rank"]
        deadline = time.monotonic() + self.setup["limit"]
        problem = ""
        # A wait_for that is cancelled may raise the OSError of the connection all the same.
        while not self.end.done() and time.monotonic() < deadline:
            try:
                connecting = asyncio.open_connection(hub["address"], hub["port"], limit=MAX_LINE)
                reader, writer = await asyncio.wait_for(connecting, self.setup["limit"])
            except OSError as error:
                problem = f"{hub['address']}, port {hub['port']} ({error})"
                await asyncio.sleep(1.0)
                continue
            writer.write(f"hello {hub['token']} {rank} {self.setup['host']}\n".encode())
            tell("joined\n")
            await self._follow(reader, writer, 0, hub["host"])
            writer.close()
            return
        if not self.end.done():
            late = "the loss of a host will be noticed late"
            tell(f"warn rank {rank} cannot reach {problem}: {late}\n")

    def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Creates the task here: if asyncio creates it, Python 3.11 prints a traceback when it is cancelled."""
        task = asyncio.create_task(self._greet(reader, writer))
        self.joining.add(task)
        task.add_done_callback(self.joining.discard)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Anybody on the network can connect."""
        with contextlib.suppress(OSError, ValueError):
            line = (await reader.readline()).decode(errors="replace").rstrip("\n")
            hello, token, rank, host = line.split(" ", 3)
            if hello == "hello" and secrets.compare_digest(
                token.encode(), self.setup["token"].encode()
            ):
                await self._follow(reader, writer, int(rank), host)
        writer.close()

    async def _follow(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rank: int, host: str
    ) -> None:
        """A peer until it leaves or its connection ends."""
        word = "hello"
        self.peers[rank] = writer
        with contextlib.suppress(OSError, ValueError):  # ValueError: a line longer than MAX_LINE
            while word not in ("bye", ""):
                self.heartbeats.note(rank, host, time.monotonic())
                line = (await reader.readline()).decode(errors="replace").rstrip("\n")
                word, _, text = line.partition(" ")
                if word == "end":
                    self._stop(text)
                elif word == "lost":
                    tell(f"{line}\n")
        del self.peers[rank]
        if word == "bye":
            del self.heartbeats.last[rank]
            return
        self.heartbeats.end(rank, time.monotonic())
        lost = f"lost host {host} (rank {rank}): the process ended"
        tell(f"{lost}\n")
        if "listener" in self.setup:
            self._send(lost)

    def _send(self, line: str) -> None:
        for writer in self.peers.values():
            writer.write(f"{line}\n".encode())


def main() -> None:
    """Kills a rank that must end and does not."""
    system.die_with_parent()
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGUSR2,
    ):  # for the rank: it may have a checkpoint to write
        signal.signal(number, signal.SIG_IGN)
    line = b""
    while not line.endswith(b"\n"):  # the rest stays in the pipe
        line += os.read(0, 1) or sys.exit()
    setup = json.loads(line)
    if reason := asyncio.run(_Monitor(setup).run()):
        tell(f"end {reason}\n")
        time.sleep(KILL_SECONDS)
        if os.getppid() == setup["parent"]:
            os.kill(setup["parent"], signal.SIGKILL)


def _own_address(master: str) -> str:
    """As other hosts reach it; "": `master`."""
    try:
        family, _, _, _, place = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing: it asks for the route
            own: str = probe.getsockname()[0]
    except OSError:
        return ""
    return "" if own == place[0] or own == "::1" or own.startswith("127.") else own
