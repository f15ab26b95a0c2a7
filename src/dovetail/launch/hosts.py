"""Notices that a host of a job is gone: its machine, its network, or all of its processes.

Each rank has a small watch process. Those of the other ranks send a line to that of rank 0 every `BEAT_SECONDS`, and get
one from it. When lines stay away, the watch process of rank 0 tells all others why the job ends, and each ends its rank. It
is a process and not a thread: a compiler or a parser may hold Python's lock for longer than a host may be silent. A rank
that is stopped (SIGSTOP) is not vouched for. Imports no torch.
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

BEAT_SECONDS = 2.0
SILENT_SECONDS = 35.0  # without a line from a rank, after which the job ends
GONE_SECONDS = 20.0  # after the end of a rank's process that did not end well: its job may be ending with a message
LOST_SECONDS = 1.0  # for the end of a process to be known on all hosts
KILL_SECONDS = 3.0  # for a rank to end by itself
KEY = "dovetail/hosts"  # in the store of the ranks: where the watch process of rank 0 listens
LONGEST_LINE = 1 << 12
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from dovetail.launch import hosts; hosts.main()"


class Store(Protocol):
    """What the ranks share before they have a process group, such as torch's."""

    def set(self, key: str, value: str) -> object: ...

    def get(self, key: str) -> bytes:
        """The value, which it waits for."""
        ...


class HostWatch:
    """A rank's side: starts its watch process, and gets from it why the rank has to end."""

    def __init__(self, store: Store, rank: int, master: str, launcher: int | None = None) -> None:
        """master: the address at which the ranks have met. launcher: a process without which the rank is to end."""
        setup = {"rank": rank, "host": socket.gethostname(), "parent": os.getpid(), "launcher": launcher}
        setup |= {"beat": BEAT_SECONDS, "limit": SILENT_SECONDS, "gone": GONE_SECONDS}
        with contextlib.ExitStack() as after:
            files = []
            if rank == 0:
                listener = after.enter_context(_listener())
                files.append(listener.fileno())
                setup |= {"token": secrets.token_hex(16), "listener": listener.fileno()}
                where = {"address": _own_address(master), "port": listener.getsockname()[1]}
                store.set(KEY, json.dumps({**where, "host": setup["host"], "token": setup["token"]}))
            else:
                hub = json.loads(store.get(KEY))
                setup["hub"] = {**hub, "address": hub["address"] or master}
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                pass_fds=files,
                start_new_session=True,  # a Ctrl-C is for the rank
            )
        self._lost: list[str] = []
        self._send(json.dumps(setup))

    def wait(self, warn: Callable[[str], object]) -> str:
        """Why this rank has to end; empty when nothing is watched any more. `warn` gets what is worth a line until then."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, _, text = line.rstrip("\n").partition(" ")
            if kind == "end":
                return text
            if kind == "lost":
                self._lost.append(text)
            else:
                warn(text)
        return ""

    def lost(self) -> str:
        """Which rank's process has ended and did not end well, where one has; it waits a moment for the news."""
        deadline = time.monotonic() + LOST_SECONDS
        while not self._lost and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._lost[0] if self._lost else ""

    def leave(self) -> None:
        """This rank ends well: nobody needs to wait for signs of it."""
        self._send("bye")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_SECONDS)

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()


class Sign(NamedTuple):
    """The last sign of a rank. `ended`: its process is gone, and did not say that all was well."""

    host: str
    seen: float
    deadline: float
    ended: bool = False


class Signs:
    """When other ranks last gave a sign of life. Times are those of a monotonic clock."""

    def __init__(self, limit: float, gone: float) -> None:
        self.limit, self.gone = limit, gone
        self.last: dict[int, Sign] = {}

    def note(self, rank: int, host: str, now: float) -> None:
        self.last[rank] = Sign(host, now, now + self.limit)

    def end(self, rank: int, now: float) -> None:
        """The process of a rank is gone."""
        if rank in self.last:
            sign = self.last[rank]
            self.last[rank] = sign._replace(deadline=min(sign.deadline, now + self.gone), ended=True)

    def forget(self, rank: int) -> None:
        """A rank ends well."""
        self.last.pop(rank, None)

    def verdict(self, now: float) -> str:
        """Which hosts have been silent for too long, and with which ranks; empty where none has."""
        if not any(now > sign.deadline for sign in self.last.values()):
            return ""
        near = 3 * BEAT_SECONDS  # ranks of one host fall silent one shortly after the other
        silent: dict[tuple[str, bool], list[int]] = {}
        for rank, sign in sorted(self.last.items()):
            if now > sign.deadline - min(near, self.limit / 2):
                silent.setdefault((sign.host, sign.ended), []).append(rank)
        told = []
        for (host, ended), ranks in silent.items():
            seconds = now - min(self.last[rank].seen for rank in ranks)
            what = "the process ended" if ended else "the host is down, stopped or cut off from the network"
            told.append(f"host {host} (rank {', '.join(map(str, ranks))}) gave no sign for {seconds:.0f} s: {what}")
        return "; ".join(told)


class _Peer:
    """The watch process of another rank. It speaks in lines."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.rank, self.host = -1, ""  # not known until it has said so
        self._rest = b""

    def lines(self) -> list[str] | None:
        """What has come since; None at its end."""
        try:
            data = self.connection.recv(LONGEST_LINE)
        except BlockingIOError:
            return []
        except OSError:
            return None
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in whole] if data and len(self._rest) < LONGEST_LINE else None

    def send(self, line: str) -> None:
        with contextlib.suppress(OSError):  # it is gone, or its host is: its silence will tell
            self.connection.send(f"{line}\n".encode())


class _Neighbor:
    """The watch process of a rank."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self.setup = setup
        self.signs = Signs(setup["limit"], setup["gone"])
        self.peers: list[_Peer] = []
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ)
        self.token, self.listener = "", None
        if "hub" in setup:
            self._join(setup["hub"])
        else:
            self.token, self.listener = setup["token"], socket.socket(fileno=setup["listener"])
            self.selector.register(self.listener, selectors.EVENT_READ)

    def run(self) -> str:
        """Until the rank ends; why it has to, where it has to."""
        due = time.monotonic()
        while True:
            for key, _ in self.selector.select(max(due - time.monotonic(), 0.0)):
                if key.fileobj == 0:
                    if os.read(0, LONGEST_LINE):  # it ends well
                        self._tell("bye")
                    return ""
                reason = self._accept() if key.data is None else self._hear(key.data)
                if reason:
                    return reason
            if time.monotonic() >= due:
                if os.getppid() != self.setup["parent"]:
                    return ""
                reason = self._look()
                if reason:
                    return reason
                due = time.monotonic() + self.setup["beat"]

    def _look(self) -> str:
        """Tell the others of this rank; why it has to end, where it has to."""
        parent, launcher = self.setup["parent"], self.setup["launcher"]
        if system.kernel_state(parent) not in STOPPED_STATES:
            self._tell("beat")
        reason = self.signs.verdict(time.monotonic())
        if not reason and launcher is not None and system.parent_of(parent) not in (launcher, None):
            reason = f"host {self.setup['host']} (rank {self.setup['rank']}): its launcher, process {launcher}, ended"
        if reason:
            self._tell(f"end {reason}")
        return reason

    def _join(self, hub: Mapping[str, Any]) -> None:
        """Connect to the watch process of rank 0, which may need some time to accept. Without it nothing is watched."""
        deadline, problem = time.monotonic() + self.setup["limit"], ""
        while not self.peers and time.monotonic() < deadline and os.getppid() == self.setup["parent"]:
            try:
                peer = _Peer(socket.create_connection((hub["address"], hub["port"]), timeout=self.setup["limit"]))
            except OSError as error:
                problem = str(error)
                time.sleep(1.0)
                continue
            peer.rank, peer.host = 0, hub["host"]
            self._add(peer)
            self.signs.note(0, peer.host, time.monotonic())
            peer.send(f"hello {hub['token']} {self.setup['rank']} {self.setup['host']}")
        if not self.peers:
            where = f"{hub['address']}, port {hub['port']} ({problem})"
            _say(f"warn rank {self.setup['rank']} cannot reach {where}: the loss of a host will be noticed late")

    def _accept(self) -> str:
        assert self.listener is not None
        with contextlib.suppress(OSError):
            self._add(_Peer(self.listener.accept()[0]))
        return ""

    def _add(self, peer: _Peer) -> None:
        self.peers.append(peer)
        self.selector.register(peer.connection, selectors.EVENT_READ, peer)

    def _hear(self, peer: _Peer) -> str:
        """Take in what a peer says; why this rank has to end, where that is what it says."""
        lines, now = peer.lines(), time.monotonic()
        if lines is None:
            self.signs.end(peer.rank, now)
            self._drop(peer)
            if peer.rank >= 0:
                self._lose(f"lost host {peer.host} (rank {peer.rank}): the process ended")
            return ""
        for line in lines:
            word, _, text = line.partition(" ")
            if peer.rank < 0:
                if not self._greets(peer, line):
                    self._drop(peer)
                    return ""
            elif word == "end":
                self._tell(line)
                return text
            elif word == "lost":
                self._lose(line)
            if word == "bye":
                self.signs.forget(peer.rank)
                self._drop(peer)
                return ""
            self.signs.note(peer.rank, peer.host, now)
        return ""

    def _greets(self, peer: _Peer, line: str) -> bool:
        """Whether a connection is that of a rank of this job; anybody on the network may have made it."""
        words = line.split(" ", 3)
        if len(words) != 4 or words[0] != "hello" or not secrets.compare_digest(words[1].encode(), self.token.encode()):
            return False
        peer.rank, peer.host = int(words[2]), words[3]
        return True

    def _drop(self, peer: _Peer) -> None:
        self.selector.unregister(peer.connection)
        peer.connection.close()
        self.peers.remove(peer)

    def _lose(self, line: str) -> None:
        """Have this rank know of the end of another one, and all others where this is rank 0."""
        _say(line)
        if self.listener is not None:
            self._tell(line)

    def _tell(self, line: str) -> None:
        for peer in self.peers:
            if peer.rank >= 0:
                peer.send(line)


def main() -> None:
    """The watch process of a rank: as long as the rank lives, which it ends where that does not end by itself."""
    system.die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # for the rank, which may have a checkpoint to write
        signal.signal(number, signal.SIG_IGN)
    line = b""
    while not line.endswith(b"\n"):  # and no byte of the next line, which `select` would not see
        line += os.read(0, 1) or sys.exit()
    setup = json.loads(line)
    reason = _Neighbor(setup).run()
    if reason:
        _say(f"end {reason}")
        time.sleep(KILL_SECONDS)
        if os.getppid() == setup["parent"]:
            os.kill(setup["parent"], signal.SIGKILL)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=4096)


def _own_address(master: str) -> str:
    """Where other hosts reach this one; empty: where they have met, at `master`, which is this host's address."""
    try:
        family, _, _, _, place = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing: it asks for the way
            own: str = probe.getsockname()[0]
    except OSError:
        return ""
    return "" if own == place[0] or own == "::1" or own.startswith("127.") else own
