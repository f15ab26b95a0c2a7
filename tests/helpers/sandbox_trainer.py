"""A process with everything that a hostile program may be after, which runs such programs.

`python -m tests.helpers.sandbox_trainer`; JSON on standard input: {"isolation", "folder", "programs":
{name: source}}. Prints {name: what went wrong, or ""}, or {"refused": why}.
"""

import json
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from dovetail.rewards.code import find_isolation
from dovetail.rewards.sandbox import seccomp
from dovetail.rewards.sandbox.client import IsolationError, Sandbox
from dovetail.rewards.sandbox.isolation import Isolation
from dovetail.rewards.sandbox.limits import ProgramLimits
from dovetail.system import adopt_orphans, children_of
from tests.helpers.hostile import PRELUDE

LIMITS = ProgramLimits(seconds=3.0, memory_mib=256)
KEY = "sk-trainer-0123456789"


class Trainer:
    """Files, sockets and a process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.signals: list[int] = []
        self._sockets: list[socket.socket] = []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda received, _: self.signals.append(received))
        for name, mode in (("secret", 0o600), ("open", 0o644), ("victim", 0o666)):
            (folder / name).write_text(KEY)
            (folder / name).chmod(mode)
        self._opened = (folder / "victim").open("a")
        self.port = self._listen(socket.AF_INET6, ("::", 0))
        self._listen(socket.AF_UNIX, f"{folder}/socket")
        self._listen(socket.AF_UNIX, f"\0{folder}/abstract")
        datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        datagrams.bind(f"{folder}/socket.dgram")
        self._sockets.append(datagrams)
        for path in ("socket", "socket.dgram"):
            (folder / path).chmod(0o777)

    def _listen(self, family: int, address: tuple[str, int] | str) -> int:
        server = socket.socket(family)
        server.bind(address)
        server.listen()
        self._sockets.append(server)
        return server.getsockname()[1] if family == socket.AF_INET6 else 0

    def state(self) -> Mapping[str, object]:
        """What no program may change."""
        victim = self.folder / "victim"
        if not victim.exists():
            return {"files": []}
        return {
            "signals": list(self.signals),
            "files": sorted(path.name for path in self.folder.iterdir()),
            "text": victim.read_text(),
            "mode": victim.stat().st_mode,
            "time": victim.stat().st_mtime_ns,
            "host name": socket.gethostname(),
            "priority": os.getpriority(os.PRIO_PROCESS, 0),
            "processors": os.sched_getaffinity(0),
            "open files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "mounts": Path("/proc/mounts").read_text(),
        }

    def fill(self, source: str) -> str:
        values = {
            "TRAINER": os.getpid(),
            "OWNER": os.getuid(),
            "PORT": self.port,
            "SOCKET": f"{self.folder}/socket",
            "ABSTRACT": f"{self.folder}/abstract",
            "SECRET_FILE": f"{self.folder}/secret",
            "OPEN_FILE": f"{self.folder}/open",
            "VICTIM": f"{self.folder}/victim",
            "FOLDER": str(self.folder),
        }
        for name, value in values.items():
            source = source.replace(name, str(value))
        return re.sub(r"NR_(\w+)", lambda found: str(number_of(found[1])), source)


def number_of(name: str) -> int:
    """Of a system call on this machine."""
    machine = os.uname().machine
    if name == "clone":
        return seccomp.CLONE[machine]
    return seccomp.DENIED[machine][name]


def outcome(trainer: Trainer, sandbox: Sandbox, source: str) -> str:
    before = trainer.state()
    ended = sandbox.run_with_input(PRELUDE + trainer.fill(source), "")
    after = trainer.state()
    changed = [name for name, value in before.items() if value != after.get(name)]
    if "ESCAPED" in ended.output:
        return "got what it was after"
    return f"changed {', '.join(changed)}" if changed else ""


def run(request: Mapping[str, object], report: Callable[[object], None]) -> None:
    adopt_orphans()
    programs = request["programs"]
    assert isinstance(programs, dict)
    trainer = Trainer(Path(str(request["folder"])))
    try:
        isolation = find_isolation(str(request["isolation"]))
    except IsolationError as error:
        report({"refused": str(error)})
        return
    found = {"isolation": str(isolation)}
    if isolation == Isolation.NONE and os.geteuid() == 0:
        raise SystemExit("hostile programs never run as root without isolation")
    with Sandbox(isolation, LIMITS) as sandbox:
        for name, source in programs.items():
            found[name] = outcome(trainer, sandbox, source)
    left = children_of([os.getpid()])
    report({**found, "left": ", ".join(map(str, left))})


if __name__ == "__main__":
    run(json.load(sys.stdin), lambda value: json.dump(value, sys.stdout))
