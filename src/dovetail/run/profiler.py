"""Profiles of single steps: traces, summaries, and snapshots of GPU memory."""

import gzip
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dovetail.errors import Caught, one_line
from dovetail.launch.progress import Progress
from dovetail.parallel.consensus import of_all
from dovetail.parallel.mesh import Mesh
from dovetail.recipe.tracking import ProfileSection
from dovetail.records.traces import read_events, summarize

SNAPSHOT_ENTRIES = 100_000  # allocations and frees
GZIP_LEVEL = 5
MAX_CAUSE = 300  # characters


class Profiler:
    """Failures never stop a run."""

    def __init__(
        self,
        section: ProfileSection,
        folder: Path,
        mesh: Mesh,
        progress: Progress,
        say: Callable[[str], None],
    ) -> None:
        self.steps = section.steps
        self.memory = section.memory
        self.folder = folder
        self.mesh = mesh
        self.progress = progress
        self.say = say
        self.wanted = False  # by a signal, on all ranks

    def take_request(self) -> bool:
        asked = self.progress.profile_wanted
        self.progress.profile_wanted = False
        return asked

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Collective."""
        if not self.wanted and step not in self.steps:
            yield
            return
        self.wanted = False
        attempt = Caught()
        rank = self.mesh["world"].rank
        place = self.folder / f"step-{step}"
        recording = _Recording(
            self.mesh.device, self.progress, place / f"rank-{rank}", memory=self.memory
        )
        self.progress.phase("profile", step)
        with attempt:
            recording.start()
        self.progress.phase("wait")
        try:
            yield
        except BaseException:  # the phase stays the one that failed
            recording.end(attempt)
            raise
        with attempt:
            recording.synchronize()
        self.progress.mark = nullcontext
        self.progress.phase("profile")
        recording.end(attempt)
        with attempt:
            if not attempt.error:
                recording.write_trace(step, rank)
        errors = of_all(one_line(attempt.error)[:MAX_CAUSE], self.mesh)
        failed = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error]
        if failed:
            self.say(
                f"warning: {len(failed)} of {len(errors)} ranks wrote no profile of step {step}: "
                f"{failed[0]}"
            )
        if len(failed) < len(errors):
            self.say(
                f"profile of step {step}: {place}; dovetail report {self.folder.parent} shows it"
            )


class _Recording:
    """path: of its files, without suffix."""

    def __init__(
        self, device: torch.device, progress: Progress, path: Path, *, memory: bool
    ) -> None:
        gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        self.device = device
        self.progress = progress
        self.path = path
        self.profile = profile(activities=[ProfilerActivity.CPU, *gpu], profile_memory=memory)
        self.takes_snapshot = memory and device.type == "cuda"
        self.running = False

    def start(self) -> None:
        self.synchronize()
        self.profile.start()
        self.running = True
        if self.takes_snapshot:
            torch.cuda.memory._record_memory_history(
                max_entries=SNAPSHOT_ENTRIES, stacks="python", clear_history=True
            )
        self.progress.mark = record_function

    def end(self, attempt: Caught) -> None:
        """A failed step keeps its memory snapshot."""
        self.progress.mark = nullcontext
        if not self.running:
            return
        with attempt:
            self.profile.stop()
        if self.takes_snapshot:
            with attempt:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                torch.cuda.memory._dump_snapshot(f"{self.path}.memory.pickle")
            with attempt:
                torch.cuda.memory._record_memory_history(enabled=None)

    def write_trace(self, step: int, rank: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        packed = Path(f"{self.path}.trace.json.gz")
        part = Path(f"{self.path}.part")
        with (
            tempfile.TemporaryDirectory(prefix="dovetail-profile-") as folder,
            ExitStack() as at_end,
        ):
            trace = Path(folder) / "trace.json"
            self.profile.export_chrome_trace(str(trace))
            summary = summarize(read_events(trace), step, rank, self.device.type)
            at_end.callback(part.unlink, missing_ok=True)
            with trace.open("rb") as raw, gzip.open(part, "wb", GZIP_LEVEL) as file:
                shutil.copyfileobj(raw, file)
            part.rename(packed)
        Path(f"{self.path}.json").write_text(summary.model_dump_json(), encoding="utf-8")

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)
