"""Detects lost hosts: monitor processes of all ranks exchange heartbeats with rank 0's. Imports no torch.

Not threads: a compiler may hold Python's lock for too long.
"""

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
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


class Store(Protocol):
    def set(self, key: str, value: str) -> object: ...

    def get(self, key: str) -> bytes: ...


class HostWatch:
    """master: where ranks meet. launcher: its end ends the rank."""

    def __init__(self, store: Store, rank: int, master: str, launcher: int | None = None) -> None:
        setup = {"rank": rank, "host": socket.gethostname(), "parent": os.getpid(), "launcher": launcher}
        setup |= {"beat": BEAT_SECONDS, "limit": SILENT_SECONDS, "gone": GONE_SECONDS}
        if rank == 0:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            with socket.create_server(("", 0), family=family, backlog=4096, dualstack_ipv6=dual) as listener:
                hub = {"address": _own_address(master), "port": listener.getsockname()[1], "host": setup["host"]}
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

    def wait(self, warn: Callable[[str], object]) -> str:
        """Why this rank must end; "": it need not."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, _, text = line.decode().rstrip("\n").partition(" ")
            if kind == "end":
                return text
            if kind == "lost":
                self._lost.append(text)
            else:
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
        self.limit, self.gone = limit, gone
        self.last: dict[int, Heartbeat] = {}

    def note(self, rank: int, host: str, now: float) -> None:
        self.last[rank] = Heartbeat(host, now, now + self.limit)

    def end(self, rank: int, now: float) -> None:
        if (last := self.last.get(rank)) is not None:
            self.last[rank] = last._replace(deadline=min(last.deadline, now + self.gone), ended=True)

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
            what = "the process ended" if ended else "the host is down, stopped or cut off from the network"
            parts.append(f"host {host} (rank {', '.join(map(str, ranks))}) gave no sign for {seconds:.0f} s: {what}")
        return "; ".join(parts)


class _Peer:
    """rank -1: before its hello."""

    def __init__(self, connection: socket.socket, rank: int = -1, host: str = "") -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self.rank, self.host = connection, rank, host
        self._rest = b""

    def lines(self) -> list[str] | None:
        """None: the connection has ended."""
        try:
            data = self.connection.recv(MAX_LINE)
        except BlockingIOError:
            return []
        except OSError:
            return None
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in whole] if data and len(self._rest) < MAX_LINE else None


class _Monitor:
    def __init__(self, setup: Mapping[str, Any]) -> None:
        self.setup = setup
        self.heartbeats = Heartbeats(setup["limit"], setup["gone"])
        self.peers: list[_Peer] = []
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ)
        self.listener = None
        if "hub" in setup:
            self._join(setup["hub"])
        else:
            self.listener = socket.socket(fileno=setup["listener"])
            self.selector.register(self.listener, selectors.EVENT_READ)

    def run(self) -> str:
        """Why the rank must end; "": it has ended by itself."""
        due, reason = time.monotonic(), ""
        while not reason:
            for key, _ in self.selector.select(max(due - time.monotonic(), 0.0)):
                if key.fileobj == 0:
                    if os.read(0, MAX_LINE):  # it ends well
                        self._send("bye")
                    return ""
                if key.data is not None:
                    reason = reason or self._receive(key.data)
                elif self.listener is not None:
                    with contextlib.suppress(OSError):
                        self._add(_Peer(self.listener.accept()[0]))
            if not reason and time.monotonic() >= due:
                if os.getppid() != self.setup["parent"]:
                    return ""
                due = time.monotonic() + self.setup["beat"]
                reason = self._beat()
        self._send(f"end {reason}")
        return reason

    def _beat(self) -> str:
        parent, launcher = self.setup["parent"], self.setup["launcher"]
        if system.kernel_state(parent) not in STOPPED_STATES:
            self._send("beat")
        reason = self.heartbeats.verdict(time.monotonic())
        if not reason and launcher is not None and system.parent_of(parent) not in (launcher, None):
            reason = f"host {self.setup['host']} (rank {self.setup['rank']}): its launcher, process {launcher}, ended"
        return reason

    def _join(self, hub: Mapping[str, Any]) -> None:
        rank, deadline, problem = self.setup["rank"], time.monotonic() + self.setup["limit"], ""
        while time.monotonic() < deadline and os.getppid() == self.setup["parent"]:
            try:
                connection = socket.create_connection((hub["address"], hub["port"]), timeout=self.setup["limit"])
            except OSError as error:
                problem = f"{hub['address']}, port {hub['port']} ({error})"
                time.sleep(1.0)
                continue
            self._add(_Peer(connection, 0, hub["host"]))
            self.heartbeats.note(0, hub["host"], time.monotonic())
            self._send(f"hello {hub['token']} {rank} {self.setup['host']}")
            return
        tell(f"warn rank {rank} cannot reach {problem}: the loss of a host will be noticed late\n")

    def _receive(self, peer: _Peer) -> str:
        lines, now = peer.lines(), time.monotonic()
        if lines is None:
            self.heartbeats.end(peer.rank, now)
            self._drop(peer)
            if peer.rank >= 0:
                lost = f"lost host {peer.host} (rank {peer.rank}): the process ended"
                tell(f"{lost}\n")
                if self.listener is not None:
                    self._send(lost)
            return ""
        for line in lines:
            word, _, text = line.partition(" ")
            if word == "bye" or (peer.rank < 0 and not self._greets(peer, line)):
                self.heartbeats.last.pop(peer.rank, None)
                self._drop(peer)
                return ""
            if word == "end":
                return text
            if word == "lost":
                tell(f"{line}\n")
            self.heartbeats.note(peer.rank, peer.host, now)
        return ""

    def _greets(self, peer: _Peer, line: str) -> bool:
        """Anybody on the network can connect."""
        words, token = line.split(" ", 3), self.setup["token"]
        if len(words) != 4 or words[0] != "hello" or not secrets.compare_digest(words[1].encode(), token.encode()):
            return False
        peer.rank, peer.host = int(words[2]), words[3]
        return True

    def _add(self, peer: _Peer) -> None:
        self.peers.append(peer)
        self.selector.register(peer.connection, selectors.EVENT_READ, peer)

    def _drop(self, peer: _Peer) -> None:
        self.selector.unregister(peer.connection)
        peer.connection.close()
        self.peers.remove(peer)

    def _send(self, line: str) -> None:
        for peer in self.peers:
            if peer.rank >= 0:
                with contextlib.suppress(OSError):
                    peer.connection.send(f"{line}\n".encode())


def main() -> None:
    """Kills a rank that must end and does not."""
    system.die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):  # for the rank: it may have a checkpoint to write
        signal.signal(number, signal.SIG_IGN)
    line = b""
    while not line.endswith(b"\n"):  # `select` would not see buffered bytes
        line += os.read(0, 1) or sys.exit()
    setup = json.loads(line)
    if reason := _Monitor(setup).run():
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
