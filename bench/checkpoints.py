"""Training state against the machine: saving against a raw write, loading against a raw read, offload against a copy.

python -m bench.checkpoints [--device cpu|cuda] [--depth 30] [--rounds 5] [--folder DIR]

The peer does nothing but move the same bytes: written with a checksum and fsync, read without one, or copied. Files are
dropped from the page cache before they are read. The stall of a background save is told as a share of a training step.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from bench.cpu_train import NegativeLogLikelihood
from bench.given import device as device_here, positive, run_main
from bench.harness import RESULTS, Case, compare, surroundings
from bench.models import one_rank, sequences, smollm2_pair
from dovetail.batch.packed import PackedBatch
from dovetail.checkpoint.reader import ShardedReader
from dovetail.checkpoint.retention import Retention
from dovetail.checkpoint.writer import Saver
from dovetail.engine.native import Engine
from dovetail.memory import wait_for
from dovetail.weights.parallel_read import JOB_BYTES, READERS
from dovetail.weights.safetensors import memory_of

ROLE, CHUNK = "policy", 1 << 26
STEPS_A_SAVE = 10
WRITER = """
import os, sys, zlib
path, size, chunk = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
data = memoryview(os.urandom(1 << 20) * (chunk >> 20))
print("ready", flush=True)
sys.stdin.read()
with open(path, "wb", buffering=0) as out:
    for start in range(0, size, chunk):
        zlib.crc32(data)
        out.write(data[: size - start])
    os.fsync(out.fileno())
os.unlink(path)
"""


def main() -> None:
    """Print one line a comparison and write one JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.checkpoints", description=__doc__)
    parser.add_argument("--depth", type=positive, default=30, help="layers; SmolLM2-135M has 30")
    parser.add_argument("--device", type=device_here, default="cpu")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--tokens", type=positive, default=2048, help="of a training step")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write; default: the system's"
    )
    given = parser.parse_args()
    with one_rank(), tempfile.TemporaryDirectory(dir=given.folder) as folder:
        dtype = torch.float32 if given.device == "cpu" else torch.bfloat16
        engine = smollm2_pair(
            dtype, master=torch.float32, depth=given.depth, device=given.device
        ).engine
        assert isinstance(engine, Engine)
        bench = Bench(engine, Path(folder), given.tokens)
        results = [compare(case, given.rounds) for case in bench.cases()]
        stall = bench.stall(given.rounds)
    for result in results:
        gb = result.tokens / 1e9
        print(
            f"{result.name:36} {gb / result.ours_seconds:6.2f} GB/s, {1 / result.ratio:5.2f} x the raw time"
        )
    print(
        f"{'background save, one in ten steps':36} {stall['call_share']:.2%} of the steps' time for the call itself,"
    )
    print(f"{'':36} {stall['share']:.2%} with what writing takes from the steps beside it,")
    print(f"{'':36} {stall['beside_share']:.2%} where another process writes as much beside them")
    found = {
        "bench": "checkpoints",
        **surroundings(),
        "results": [asdict(r) for r in results],
        "stall": stall,
    }
    kind = engine.mesh.device.type
    (RESULTS / f"checkpoints_{kind}.json").write_text(
        json.dumps(found, indent=1) + "\n", encoding="utf-8"
    )


class Bench:
    """One engine that has trained a step, its checkpoint on the disk, and as many raw bytes beside it."""

    def __init__(self, engine: Engine, folder: Path, tokens: int) -> None:
        self.engine, self.folder = engine, folder
        self.batch = PackedBatch.pack(sequences([256] * (tokens // 256)))
        engine.train_step(self.batch, NegativeLogLikelihood())
        self.whole = self._save("kept", background=False)
        self.files = sorted(self.whole.glob("*.safetensors"))
        self.num_bytes = sum(path.stat().st_size for path in self.files)
        self.raw = torch.empty(self.num_bytes, dtype=torch.uint8).random_()
        self.room = torch.empty_like(self.raw)
        self.resident = sum(t.untyped_storage().nbytes() for t in engine._device_state())
        self.away = torch.empty(self.resident, dtype=torch.uint8, device=engine.mesh.device)
        self.host = torch.empty(self.resident, dtype=torch.uint8, pin_memory=self.away.is_cuda)

    def cases(self) -> list[Case]:
        n = self.num_bytes
        return [
            Case(
                "save, with its checksums",
                n,
                lambda: self._removed(self._save("new", background=False)),
                self._write,
            ),
            Case("load, checked", n, self._load, self._read),
            Case("offload and onload", 2 * self.resident, self._step_aside, self._copy_twice),
        ]

    def stall(self, rounds: int) -> dict[str, object]:
        """How long ten steps take with one background save among them, and without.

        And with another process beside them that sums and writes as many bytes: what of the difference is the machine's.
        """
        found: dict[str, list[float]] = {"plain": [], "saving": [], "beside": [], "call": []}
        saver = self._saver("background", background=True)
        for i in range(rounds + 1):  # the first takes the memory for the snapshots
            found["plain"].append(_seconds(self._steps))
            start = time.perf_counter()
            self._begin(saver, i)
            found["call"].append(time.perf_counter() - start)
            self._steps()
            found["saving"].append(time.perf_counter() - start)
            saver.finish()
            with self._other_process():
                found["beside"].append(_seconds(self._steps))
        found = {name: seconds[1:] for name, seconds in found.items()}
        plain = found["plain"]

        def share(name: str) -> float:
            return statistics.median(
                with_it / without - 1 for with_it, without in zip(found[name], plain, strict=True)
            )

        call_share = statistics.median(found["call"]) / statistics.median(plain)
        return {
            "share": share("saving"),
            "call_share": call_share,
            "beside_share": share("beside"),
            "seconds": found,
        }

    @contextmanager
    def _other_process(self) -> Iterator[None]:
        """A process that sums and writes as many bytes as a save has; it begins with the block."""
        argv = [
            sys.executable,
            "-c",
            WRITER,
            str(self.folder / "other"),
            str(self.num_bytes),
            str(CHUNK),
        ]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdout.readline()
            process.stdin.close()
            yield
        assert process.returncode == 0

    def _steps(self) -> None:
        for _ in range(STEPS_A_SAVE):
            self.engine.train_step(self.batch, NegativeLogLikelihood())

    def _saver(self, name: str, *, background: bool) -> Saver:
        return Saver(self.folder / name, self.engine.mesh, Retention(1), background=background)

    def _begin(self, saver: Saver, order: int) -> None:
        saver.save(order, self.engine.export_training(ROLE, with_model=True), {}, {"order": order})

    def _save(self, name: str, *, background: bool) -> Path:
        saver = self._saver(name, background=background)
        self._begin(saver, 0)
        saver.finish()
        return (saver.folder / "step_000000").resolve()

    def _removed(self, path: Path) -> None:
        shutil.rmtree(path.parent)

    def _write(self) -> None:
        """The same bytes, their checksum, and fsync."""
        path, view = self.folder / "raw", memory_of(self.raw)
        with open(path, "wb", buffering=0) as out:
            for start in range(0, self.num_bytes, CHUNK):
                zlib.crc32(view[start : start + CHUNK])
                out.write(view[start : start + CHUNK])
            os.fsync(out.fileno())
        path.unlink()

    def _load(self) -> None:
        self._forget()
        reader = ShardedReader(self.whole)
        self.engine.load_training(ROLE, reader, 1)
        reader.verify_checksums(self.engine.mesh, training=True)

    def _read(self) -> None:
        """As many threads as ours, no checksum, into memory that is there."""
        self._forget()
        view, at, jobs = memory_of(self.room), 0, []
        for path in self.files:
            size = path.stat().st_size
            spans = [(start, min(size, start + JOB_BYTES)) for start in range(0, size, JOB_BYTES)]
            jobs += [
                partial(_read_part, path, start, view[at + start : at + stop])
                for start, stop in spans
            ]
            at += size
        with ThreadPoolExecutor(READERS) as threads:
            for done in [threads.submit(job) for job in jobs]:
                done.result()

    def _forget(self) -> None:
        """Drop the files from the page cache."""
        for path in self.files:
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _step_aside(self) -> None:
        self.engine.offload()
        self.engine.onload()

    def _copy_twice(self) -> None:
        self.host.copy_(self.away, non_blocking=True)
        self.away.copy_(self.host, non_blocking=True)
        wait_for(self.away.device)


def _read_part(path: Path, start: int, view: memoryview) -> None:
    with open(path, "rb", buffering=0) as file:
        while view:
            got = os.preadv(file.fileno(), [view], start)
            view, start = view[got:], start + got


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    run_main(main)
