"""Stacks of ranks, as Python's faulthandler writes them on a signal, whatever the rank is doing; and what they tell.

faulthandler runs in the signal handler itself, so it answers even where the main thread never returns from a collective.
"""

import faulthandler
import re
import signal
import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from dovetail.launch.progress import State

ASK = signal.SIGUSR2  # USR1 is what batch systems send before they end a job


# Where the newest frame of a rank lies that is in a collective.
WAITING_IN = ("/torch/distributed/", "/dovetail/parallel/collectives.py", "/dovetail/pipeline/executor.py")


_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)')


_THREADS_BEGIN_IN = "threading.py"


SHOWN = 4  # frames of the short form


class Frame(NamedTuple):
    file: str
    line: str
    name: str

    def __str__(self) -> str:
        return f"{'/'.join(Path(self.file).parts[-2:])}:{self.line} {self.name}"


class Stack(NamedTuple):
    """The frames of a rank's main thread, newest first; none where the rank gave no answer."""

    frames: tuple[Frame, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether the rank waits for others: it is in a collective, or in a transfer between pipeline stages."""
        return bool(self.frames) and any(part in self.frames[0].file for part in WAITING_IN)

    def __str__(self) -> str:
        """The newest frames outside of torch, newest first."""
        ours = [frame for frame in self.frames if "/torch/" not in frame.file] or list(self.frames)
        first = self.frames[:1] if self.waits and self.frames[0] not in ours else ()
        return " < ".join(map(str, [*first, *ours][:SHOWN]))


def answer_with_stacks(path: Path) -> IO[str]:
    """From now on this process writes its stacks to `path` when it is asked to, and when it crashes. Keep what returns."""
    file = path.open("w")
    faulthandler.register(ASK, file=file, all_threads=True)
    faulthandler.enable(file=file)
    return file


def main_stack(text: str) -> Stack:
    """The main thread's frames in what faulthandler wrote: the thread that was not begun by `threading`."""
    for block in re.split(r"\n(?=(?:Current thread|Thread) 0x)", "\n" + text)[::-1]:
        frames = [Frame(*match.group("file", "line", "name")) for match in _FRAME.finditer(block)]
        if frames and not frames[-1].file.endswith(_THREADS_BEGIN_IN):
            return Stack(tuple(frames))
    return Stack()


STOPPED_STATES = ("T", "t")


SILENT_SECONDS = 5.0  # without a beat, which comes twice a second


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One rank that died or hung: a line of events.jsonl. `rank` is None where no rank could be told from the others."""

    kind: str  # death or hang
    rank: int | None
    phase: str
    step: int | None
    cause: str
    host: str = socket.gethostname()

    def row(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for incidents that look like one and the same defect."""
        return (self.kind, self.phase, self.step, self.cause)


class Seen(NamedTuple):
    """One living rank at the moment when a hang is noticed."""

    rank: int
    pid: int
    state: State
    kernel: str  # the letter of `system.kernel_state`
    stack: Stack

    def describe(self, now: float) -> str:
        if self.kernel in STOPPED_STATES:
            does = "is stopped (SIGSTOP or a debugger)"
        elif not self.stack.frames:
            does = "gives no stack (it may wait inside the kernel or a driver)"
        else:
            does = ("waits for other ranks in " if self.stack.waits else "is in ") + str(self.stack)
        silence = now - self.state.beat
        beats = f"; it has run no other Python for {silence:.0f} s" if silence > SILENT_SECONDS else ""
        phase = f"{self.state.where()}, for {now - self.state.since:.0f} s"
        return f"rank {self.rank} (pid {self.pid}): {phase}; {does}{beats}"


def odd_ranks(seen: Sequence[Seen]) -> tuple[list[int], str]:
    """Which ranks the others wait for, and how that shows; no rank where nothing tells them apart.

    A stopped rank; else one that is at work while others wait in a collective; else, where all wait or none does, the
    smallest group of equal stacks and equally many phases. Of equally small groups the one that is ahead: it left a
    collective that others are still in.
    """
    stopped = [s.rank for s in seen if s.kernel in STOPPED_STATES]
    if stopped:
        return stopped, "stopped (SIGSTOP or a debugger)"
    silent = [s.rank for s in seen if not s.stack.frames]
    if silent and len(silent) < len(seen):
        return silent, "gives no sign while others do"
    busy = [s.rank for s in seen if not s.stack.waits]
    if busy and len(busy) < len(seen):
        return busy, "at work, while the others wait for it in a collective"
    groups: dict[tuple[int, Stack], list[int]] = defaultdict(list)
    for s in seen:
        groups[s.state.entries, s.stack].append(s.rank)
    if len(groups) == 1:
        return ([s.rank for s in seen], "alone") if len(seen) == 1 else ([], "all ranks are at the same place")
    smallest = min(map(len, groups.values()))
    ahead = max(key[0] for key, ranks in groups.items() if len(ranks) == smallest)
    odd = [ranks for key, ranks in groups.items() if len(ranks) == smallest and key[0] == ahead]
    if len(odd) > 1:
        return [], "the ranks wait at different places, and no place has fewer of them"
    return odd[0], "it waits elsewhere than the others"
