"""Stacks of hung ranks by faulthandler, and which rank is at fault."""

import faulthandler
import re
import signal
import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from dovetail.launch.progress import State

DUMP_SIGNAL = signal.SIGURG  # ignored by a rank that does not write stacks yet
PROFILE_SIGNAL = signal.SIGUSR2  # batch systems use USR1
WAITING_IN = ("/torch/distributed/", "/dovetail/parallel/", "/dovetail/pipeline/executor.py")
STOPPED_STATES = ("T", "t")
SILENT_SECONDS = 5.0  # without a heartbeat
MAX_FRAMES = 4  # in the short form of a stack
_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)')


class Frame(NamedTuple):
    file: str
    line: str
    name: str

    def __str__(self) -> str:
        return f"{'/'.join(Path(self.file).parts[-2:])}:{self.line} {self.name}"


class Stack(NamedTuple):
    """Frames of the main thread, newest first; empty: no answer."""

    frames: tuple[Frame, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether the rank is in a collective or pipeline transfer."""
        return bool(self.frames) and any(part in self.frames[0].file for part in WAITING_IN)

    def __str__(self) -> str:
        ours = [frame for frame in self.frames if "/torch/" not in frame.file] or list(self.frames)
        first = self.frames[:1] if self.waits and self.frames[0] not in ours else ()
        return " < ".join(map(str, [*first, *ours][:MAX_FRAMES]))


def dump_stacks_to(path: Path) -> IO[str]:
    """Writes all stacks on `DUMP_SIGNAL` and in a crash. Keep the file open."""
    file = path.open("w")
    faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)
    faulthandler.enable(file=file)
    return file


def main_stack(text: str) -> Stack:
    """The thread that `threading` did not start."""
    for block in re.split(r"\n(?=(?:Current thread|Thread) 0x)", "\n" + text)[::-1]:
        frames = [Frame(*match.group("file", "line", "name")) for match in _FRAME.finditer(block)]
        if frames and not frames[-1].file.endswith("threading.py"):
            return Stack(tuple(frames))
    return Stack()


@dataclass(frozen=True, kw_only=True)
class Incident:
    kind: str
    rank: int | None  # None: no rank stands out
    phase: str
    step: int | None
    cause: str
    host: str = socket.gethostname()


class RankStatus(NamedTuple):
    rank: int
    pid: int
    state: State
    kernel: str
    stack: Stack

    def describe(self, now: float) -> str:
        if self.kernel in STOPPED_STATES:
            does = "is stopped (SIGSTOP or a debugger)"
        elif not self.stack.frames:
            does = "gives no stack (it may wait inside the kernel or a driver)"
        else:
            does = ("waits for other ranks in " if self.stack.waits else "is in ") + str(self.stack)
        silence = now - self.state.beat
        phase = f"{self.state.where()}, for {now - self.state.since:.0f} s"
        beats = (
            f"; it has run no other Python for {silence:.0f} s" if silence > SILENT_SECONDS else ""
        )
        return f"rank {self.rank} (pid {self.pid}): {phase}; {does}{beats}"


def suspects(ranks: Sequence[RankStatus]) -> tuple[list[int], str]:
    """Ranks at fault, if any, and why. Last case: the smallest group of equal stacks; of two, the one ahead."""
    if stopped := [r.rank for r in ranks if r.kernel in STOPPED_STATES]:
        return stopped, "stopped (SIGSTOP or a debugger)"
    silent = [r.rank for r in ranks if not r.stack.frames]
    if 0 < len(silent) < len(ranks):
        return silent, "gives no sign while others do"
    busy = [r.rank for r in ranks if not r.stack.waits]
    if 0 < len(busy) < len(ranks):
        return busy, "at work, while the others wait for it in a collective"
    groups: dict[tuple[int, Stack], list[int]] = defaultdict(list)
    for r in ranks:
        groups[r.state.entries, r.stack].append(r.rank)
    if len(groups) == 1:
        return (
            ([ranks[0].rank], "alone")
            if len(ranks) == 1
            else ([], "all ranks are at the same place")
        )
    order = [(len(members), -entries) for (entries, _), members in groups.items()]
    if order.count(min(order)) > 1:
        return [], "the ranks wait at different places, and no place has fewer of them"
    return list(groups.values())[order.index(min(order))], "it waits elsewhere than the others"
