"""Stacks of ranks, as Python's faulthandler writes them on a signal, whatever the rank is doing; and what they tell.

faulthandler runs in the signal handler itself, so it answers even where the main thread never returns from a collective.
"""

import faulthandler
import re
import signal
from pathlib import Path
from typing import IO, NamedTuple

ASK = signal.SIGUSR2  # USR1 is what batch systems send before they end a job
# Where the newest frame of a rank lies that is in a collective.
WAITING_IN = ("/torch/distributed/", "/dovetail/comm.py", "/dovetail/pipeline/executor.py")
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
