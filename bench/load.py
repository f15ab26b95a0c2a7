"""How long a Hugging Face directory takes to become an engine, part by part, against reading its bytes: -m bench.load tp=8 dp=8

The files are random, of the shape's size, written here by all ranks, so they are in the page cache. The raw read: every
rank reads an equal part of all files into memory that is there, and nothing else; beside it the same with a copy to the
device from pinned memory.
"""

import argparse
import gc
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

import dovetail as dt
from bench.engines import SHAPES, Session, add_options, layout_of, name_of, spec_of, timed, wait
from bench.given import run_main
from dovetail.checkpoint.reader import open_checkpoint
from dovetail.engine.fsdp import shard_over_data
from dovetail.factory.engine import make_decoder, make_mesh, make_model
from dovetail.parallel.axes import Axis
from dovetail.parallel.collectives import gather_objects
from dovetail.parallel.mesh import Mesh
from dovetail.weights.hf_directory import Pretrained
from dovetail.weights.load import load
from dovetail.weights.safetensors import TensorFileWriter, TensorSpec, memory_of
from dovetail.weights.shards import checkpoint_params, export_specs

ROUNDS, SHARDS_A_RANK, CHUNK = 3, 2, 1 << 24
MEMORY = Path("/dev/shm")  # files that are page cache and nothing else


def main() -> int:
    """Write the files, then one row a layout."""
    parser = argparse.ArgumentParser(prog="python -m bench.load", description=__doc__)
    parser.add_argument("layouts", nargs="+", metavar="LAYOUT")
    parser.add_argument("--shape", choices=list(SHAPES), default="7b")
    parser.add_argument(
        "--folder", type=Path, help="default: memory, where it is large enough, or the system's"
    )
    add_options(parser, "load")
    given = parser.parse_args()
    session = Session.start(given)
    world = Axis("world", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    here = given.folder or _roomy(given.shape)
    folder = Path(
        gather_objects(str(here / f"bench_load_{time.time_ns()}"), world, session.device)[0]
    )
    try:
        write(folder, given.shape, world)
        raw, copied = raw_read(folder, session, world)
        broadcast = timed(session.device, lambda: read_and_tell(folder, session.device))
        session.say(f"one rank reads and tells the others: {broadcast:.2f} s")
        for text in given.layouts:
            measure(folder, text, session, (raw, copied, broadcast))
        dist.barrier()
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    session.finish()
    return 0


def _roomy(shape: str) -> Path:
    needed = 1.3 * 2 * spec_of(shape).linear_params
    return MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > needed else Path("/tmp")


def write(folder: Path, shape: str, world: Axis) -> None:
    """A Hugging Face directory of bfloat16 tensors, each rank its shards."""
    solo = Mesh.solo("meta")
    specs = export_specs(
        checkpoint_params(make_decoder(spec_of(shape), solo, torch.bfloat16), solo),
        dtype_of=lambda _: torch.bfloat16,
    )
    total, shards = sum(spec.num_bytes for spec in specs), SHARDS_A_RANK * world.size
    parts: list[list[TensorSpec]] = [[] for _ in range(shards)]
    reached = 0
    for spec in specs:
        parts[min(shards - 1, reached * shards // total)].append(spec)
        reached += spec.num_bytes
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    folder.mkdir(parents=True, exist_ok=True)
    noise = torch.empty(max(spec.num_bytes for spec in specs) // 2, dtype=torch.bfloat16)
    noise[: CHUNK // 2].normal_()
    for start in range(CHUNK // 2, len(noise), CHUNK // 2):
        part = noise[start : start + CHUNK // 2]
        part.copy_(noise[: len(part)])
    for name, part in zip(
        names[world.rank :: world.size], parts[world.rank :: world.size], strict=True
    ):
        writer = TensorFileWriter(folder / name, part)
        for spec in part:
            writer.write(spec.name, noise[: spec.num_bytes // 2].view(spec.shape))
        writer.close()
    if world.rank == 0:
        where = {spec.name: name for name, part in zip(names, parts, strict=True) for spec in part}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "config.json").write_text(json.dumps({**SHAPES[shape], "dtype": "bfloat16"}))
    dist.barrier()


def raw_read(folder: Path, session: Session, world: Axis) -> tuple[float, float]:
    """Seconds of reading an equal part of all files on every rank; and with a copy to the device."""
    files = sorted(folder.glob("*.safetensors"))
    sizes = [path.stat().st_size for path in files]
    spans = [
        (size * world.rank // world.size, size * (world.rank + 1) // world.size) for size in sizes
    ]
    pinned = session.device.type == "cuda"
    room = torch.zeros(sum(b - a for a, b in spans), dtype=torch.uint8, pin_memory=pinned)
    there = torch.empty_like(room, device=session.device)

    def read(*, copy: bool) -> None:
        view, at = memory_of(room), 0
        for path, (first, last) in zip(files, spans, strict=True):
            with open(path, "rb", buffering=0) as file:
                file.seek(first)
                while first < last:
                    got = file.readinto(view[at : at + min(CHUNK, last - first)])
                    assert got
                    if copy:
                        there[at : at + got].copy_(room[at : at + got], non_blocking=True)
                    at, first = at + got, first + got

    found = [
        median([timed(session.device, lambda c=c: read(copy=c)) for _ in range(ROUNDS)])
        for c in (False, True)
    ]
    return found[0], found[1]


def read_and_tell(folder: Path, device: torch.device) -> None:
    """What a script around transformers does: the first rank reads each tensor, all get it whole. Nothing is kept."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a mapping
                if dist.get_rank() == 0:
                    tensor = file.get_tensor(name).to(device)
                else:
                    tensor = torch.empty(
                        file.get_slice(name).get_shape(), dtype=torch.bfloat16, device=device
                    )
                dist.broadcast(tensor, 0)


def measure(folder: Path, text: str, session: Session, peers: tuple[float, float, float]) -> None:
    """An engine's making, part by part, the longest of all ranks each; the mesh is there before."""
    session.begin(f"{session.given.shape} {text}")
    raw, copied, broadcast = peers
    mesh = make_mesh(layout_of(text), session.device)
    rounds = [_parts(folder, mesh) for _ in range(ROUNDS)]
    names = list(rounds[0])
    table = torch.tensor(
        [[parts[name] for name in names] for parts in rounds], device=session.device
    )
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    middle = dict(zip(names, table.cpu().median(0).values.tolist(), strict=True))
    total = sum(middle.values())
    shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in middle.items())
    row: dict[str, Any] = {
        "title": f"load of {session.given.shape}, {name_of(mesh.layout)}",
        "figure": f"{total:.2f} s ({shown}); raw read {raw:.2f} s, with copies to the device {copied:.2f} s: "
        f"{total / raw:.2f} x raw, goal 1.3; read by one and broadcast {broadcast:.2f} s",
        "seconds": total,
        "parts": middle,
        "raw_seconds": raw,
        "raw_copied_seconds": copied,
        "broadcast_seconds": broadcast,
        "ratio": total / raw,
    }
    session.keep(row)
    session.say(f"{row['title']}: {row['figure']}")


def _parts(folder: Path, mesh: Mesh) -> dict[str, float]:
    """What `build.engine.make_engine` does, with a clock."""
    found: dict[str, float] = {}

    @contextmanager
    def clock(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        wait(mesh.device)
        found[name] = time.perf_counter() - start

    gc.collect()  # the engine of the round before, whose modules know each other
    dist.barrier()
    with clock("open"):
        source = Pretrained.open(folder, dt.EngineOptions().engine)
        reader = open_checkpoint(source.path, mesh)
    with clock("model"):
        model = make_model(source, mesh, torch.float32, reader)
        shard_over_data(model, mesh, torch.bfloat16)
    with clock("memory"):
        model.materialize(mesh.device)
    with clock("load"):
        load(model, reader, mesh, ignore=source.spec.ignored)
    return found


if __name__ == "__main__":
    run_main(main)
