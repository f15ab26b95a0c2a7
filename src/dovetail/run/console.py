"""Terminal output of a run, and logs/rank-N.log of its directory."""

import io
import math
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO, cast

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dovetail.jsonl import ODD_LETTERS
from dovetail.launch.wrap import wrapped

BARS = " " + "".join(chr(0x2581 + i) for i in range(8))  # Unicode's lower eighths of a block
WIDTH = 70
FEWEST = 3  # values of a chart
SHOWN = (  # key of a row, its label, its format
    ("loss", "loss", ".4f"), ("critic_loss", "critic", ".4f"), ("reward_mean", "reward", ".3f"),
    ("eval_reward_mean", "eval", ".3f"), ("eval_loss", "eval", ".4f"), ("grad_norm", "grad", ".3g"),
    ("entropy_mean", "entropy", ".3f"), ("kl_mean", "kl", ".4f"), ("response_length_mean", "length", ".1f"),
    ("lr", "lr", ".2e"), ("tokens_per_second", "tok/s", ",.0f"), ("step_seconds", "s", ".1f"),
    ("trainer_idle", "idle", ".0%"),
)  # fmt: skip
LOGS = "logs"
QUIET_SECONDS = 60.0  # between lines on a phase, without a terminal
UPDATED = ("loss", "grad_norm", "lr", "entropy_mean", "kl_mean", "tokens_per_second")


DISPENSABLE = ("lr", "tok/s", "kl", "grad", "length", "entropy")  # left out of a narrow terminal


class _Steady(RichConsole):
    def on_broken_pipe(self) -> None:  # does not end a run
        self.quiet = True


class Console:
    """Silent except on rank 0. steps: of a run; 0: of another command."""

    def __init__(self, *, speaks: bool, steps: int = 0, stderr: bool = False) -> None:
        self._console = _Steady(quiet=not speaks, highlight=False, soft_wrap=True, stderr=stderr)
        self.is_live = speaks and self._console.is_terminal
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        rate = TextColumn("{task.fields[rate]}")
        self._progress = Progress(
            *columns, rate, console=self._console, transient=True, disable=not self.is_live
        )
        self._bar = self._progress.add_task("training", total=steps, rate="", visible=steps > 0)
        self._phase_bar = self._progress.add_task("", total=None, rate="", visible=False)
        self._phase: tuple[str, float] = ("", 0.0)  # and when it began
        self._steps = steps
        self.start = self._progress.start
        self.stop = self._progress.stop
        self._speaks = speaks
        self._early = list[str]()
        self._logs: tuple[Path, ...] = ()
        self._spoke = time.monotonic()

    def plan(self, steps: int) -> None:
        self._steps = steps
        self._progress.update(self._bar, total=steps)

    def phase(self, name: str, done: int, total: int, tokens: int) -> None:
        """A bar on a terminal, else a line a minute."""
        now = time.monotonic()
        if self._phase[0] != name or (done == total == 0):
            self._phase = (name, now)
        if not self.is_live and (not done or now - self._spoke < QUIET_SECONDS):
            return
        spent = now - self._phase[1]
        rate = f"{tokens / max(spent, 1e-9):,.0f} tokens/s" if tokens else ""
        if not self.is_live:
            self.say(
                "  ".join(
                    filter(None, (f"{name} {done} of {total or '?'} after {spent:.0f} s", rate))
                )
            )
            return
        bar = self._phase_bar
        visible = name != "exit"
        self._progress.update(
            bar, completed=done, total=total or None, description=name, rate=rate, visible=visible
        )

    def say(self, text: str, shown: str | None = None) -> None:
        """Show and log a text. shown: what a terminal shows of it."""
        self._spoke = time.monotonic()
        if self.is_live:
            lines = (text if shown is None else shown).split("\n")
            on_screen = "\n".join(wrapped(line, self._console.width) for line in lines)
        else:
            on_screen = text
        with suppress(OSError):  # the disk of a log may be full
            self._console.print(on_screen, markup=False)
        self._write(f"{text}\n")

    def prepend(self, text: str) -> None:
        self._early.insert(0, text)

    def log_to(self, *paths: Path) -> None:
        self._logs = paths if self._speaks else ()
        self._write("".join(self._early))

    def _write(self, text: str) -> None:
        if not self._logs:
            self._early += [text] * self._speaks
        for path in self._logs:
            with suppress(OSError), path.open("a", encoding="utf-8", errors=ODD_LETTERS) as log:
                log.write(text)

    def step(self, row: Mapping[str, Any]) -> None:
        known = {key: row[key] for key, _, _ in SHOWN if row.get(key) is not None}
        if math.isnan(known.get("kl_mean", 0.0)):  # of an own loss
            del known["kl_mean"]
        notes = [f"UPDATE SKIPPED: {row['fault']}"] if row.get("skipped") else []
        nothing = row["tokens"] == 0  # was learned
        if nothing:
            known = {
                key: value
                for key, value in known.items()
                if key not in UPDATED and not math.isnan(value)
            }
        elif "critic_loss" in known and "loss" not in known and not notes:
            known = {
                key: value
                for key, value in known.items()
                if key not in UPDATED or key == "tokens_per_second"
            }
            notes.append("the critic alone")
        if row.get("equal_groups") == 1.0:
            notes.append("no update: " * nothing + "all samples of every prompt have equal rewards")
        elif nothing:
            notes.append("no update: no sample has a reward, it returned None for all of them")
        elif row.get("rewards_none"):
            notes.append(f"{row['rewards_none']} samples dropped: the reward returned None")
        if "reward_error" in row:
            failed = f"{row['reward_errors']} rewards failed, the first: {row['reward_error']}"
            notes.append(" ".join(failed.split()))
        numbers = {label: f"{known[key]:{form}}" for key, label, form in SHOWN if key in known}
        own = [n for n in row if n.startswith("eval/") and not n.endswith("_before")]
        numbers |= {name: f"{row[name]:.3f}" for name in own}
        first = [f"step {row['step']}/{self._steps}", *notes]
        whole = step_line(first, numbers)
        for name in DISPENSABLE:
            if len(step_line(first, numbers)) > self._console.width:
                numbers.pop(name, None)
        self.say(whole, shown=step_line(first, numbers))
        self._progress.update(self._bar, completed=row["step"])


def step_line(first: Sequence[str], numbers: Mapping[str, str]) -> str:
    return "  ".join([*first, *(f"{name} {value}" for name, value in numbers.items())])


def curve(values: Sequence[float], height: int = 6) -> str:
    """Block characters; "" for fewer than three finite values or equal ones."""
    values = [v for v in values if math.isfinite(v)]
    if len(values) < FEWEST or min(values) == max(values):
        return ""
    width = min(WIDTH, len(values))
    columns = [
        fmean(values[i * len(values) // width : (i + 1) * len(values) // width])
        for i in range(width)
    ]
    low = min(columns)
    high = max(columns)
    levels = [
        max(1, round((v - low) / ((high - low) or 1.0) * height * 8)) for v in columns
    ]  # the lowest shows, too
    lines = []
    for row in range(height - 1, -1, -1):
        label = " " * 8
        if row == height - 1:
            label = f"{high:8.3f}"
        elif row == 0:
            label = f"{low:8.3f}"
        lines.append(
            f"{label} |" + "".join(BARS[max(0, min(8, level - 8 * row))] for level in levels)
        )
    return "\n".join(lines)


def log_path(run: Path, rank: int) -> Path:
    return run / LOGS / f"rank-{rank}.log"


@contextmanager
def rank_log(path: Path, ranks: str, *, quiet: bool) -> Iterator[None]:
    """Copies stderr to a file. quiet: stdout and stderr go only there."""
    with ExitStack() as stack:
        with suppress(OSError):  # a run goes on without it
            path.parent.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(
                path.open("a", buffering=1, encoding="utf-8", errors=ODD_LETTERS)
            )
            begun = datetime.now(UTC).isoformat(timespec="seconds")
            log.write(f"{begun}: {ranks} on {socket.gethostname()}, pid {os.getpid()}\n")
            output = cast("TextIO", _Output(log) if quiet else _Output(sys.stderr, log))
            stack.enter_context(redirect_stderr(output))
            if quiet:
                stack.enter_context(redirect_stdout(output))
        yield


def note_failure(path: Path, error: BaseException | None) -> None:
    if isinstance(error, Exception):
        with suppress(OSError), path.open("a", encoding="utf-8", errors=ODD_LETTERS) as log:
            traceback.print_exception(error, file=log)


class _Output(io.TextIOBase):
    """Writes to all streams; ignores full disks and closed pipes."""

    def __init__(self, *streams: TextIO) -> None:
        self.streams = streams

    def write(self, text: str) -> int:
        for stream in self.streams:
            with suppress(OSError):
                stream.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in self.streams:
            with suppress(OSError):
                stream.flush()

    def fileno(self) -> int:
        return self.streams[0].fileno()

    def isatty(self) -> bool:
        return self.streams[0].isatty()
