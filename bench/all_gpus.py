"""All benchmarks that need several GPUs, most important first, within a time limit: python -m bench.all_gpus --minutes 9

Each runs in processes of its own with a limit of its own, so a crash or a hang costs one row; what it has measured by
then is on the disk. Logs and JSON go to --out, after each benchmark all of it to one archive --pack, and one table comes
last. --gpus 2 tries every path on two GPUs in small, --smoke on a CPU.
"""

import argparse
import json
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.given import check_visible, run_main
from bench.ranks import ROOT, run_ranks

CPU_RANKS = 2
SMALL = "--shape tiny --device cpu --dtype float32 --length 64 --sequences 4 --steps 1"
SMALL_HF = "--length 64 --sequences 4 --steps 1 --device cpu"
SMALL_RL = (
    "--shape tiny --device cpu --prompts 4 --samples 2 --prompt-length 16 --new-tokens 32 "
    "--tokens-per-batch 256 --length 128"
)
TWO_A_MICRO = "--tokens-per-batch 16384"  # two sequences, which are computed in turns
SMALL_TURNS = "--tokens-per-batch 128 --in-turns on"
PYTEST = "--maxfail=3 -q -p no:cacheprovider tests/gpu/test_layouts.py -k"
PACKED_BYTES = 15 << 20  # of an archive at most
PIPELINES = (
    "pp=4,dp=2 pp=4,dp=2,virtual_stages=2,schedule=interleaved pp=4,dp=2,schedule=zero_bubble"
)


@dataclass(frozen=True)
class Bench:
    """One program for that many GPUs: not begun when less than `least` seconds are left, given up after `seconds`.

    alone: one process, which starts others itself. smoke: what to try on a CPU instead, if anything.
    """

    name: str
    module: str
    arguments: str
    least: float
    seconds: float
    smoke: str = ""
    gpus: int = 8
    alone: bool = False


EIGHT = (
    Bench("dp8", "bench.layouts", "dp=8 --profile --ragged", 50, 210, f"dp=2 --ragged {SMALL}"),
    Bench(
        "dense",
        "bench.layouts",
        "dp=8 tp=2,dp=4 tp=4,pp=2 --profile",
        70,
        170,
        f"dp=2 tp=2 pp=2 {SMALL}",
    ),
    Bench(
        "tp2dp4",
        "bench.layouts",
        f"tp=2,dp=4 --profile {TWO_A_MICRO}",
        45,
        150,
        f"tp=2 {SMALL} {SMALL_TURNS}",
    ),
    Bench(
        "tp4pp2",
        "bench.layouts",
        f"tp=4,pp=2 --profile --bubbles {TWO_A_MICRO}",
        50,
        180,
        f"pp=2 --bubbles {SMALL}",
    ),
    Bench(
        "ep8",
        "bench.layouts",
        "ep=8,dp=8 --shape 30b-a3b --sequences 16 --steps 4 --profile",
        60,
        130,
        f"ep=2,dp=2 {SMALL} --shape tiny-moe",
    ),
    Bench(
        "128k",
        "bench.layouts",
        "cp=8,cp_mode=gather cp=8 --length 131072 --sequences 1 --steps 2 --profile",
        50,
        75,
        f"cp=2,cp_mode=gather cp=2 {SMALL}",
    ),
    Bench(
        "weights", "bench.weights_stream", "tp=2,dp=4", 40, 120, "tp=2 --shape tiny --device cpu"
    ),
    Bench("parity", "bench.parity", "--device cuda --layout tp=2,pp=2,cp=2", 40, 100),
    Bench("load", "bench.load", "tp=4,dp=2 dp=8", 60, 200, "tp=2 dp=2 --shape tiny --device cpu"),
    Bench(
        "rl",
        "bench.rl_step",
        "--shape 7b --layout dp=8 --prompts 64 --tokens-per-batch 8192",
        60,
        200,
        f"{SMALL_RL} --layout dp=2",
    ),
    Bench(
        "hf_ep8",
        "bench.hf_fsdp",
        "--shape 30b-a3b --sequences 16",
        60,
        110,
        f"--shape tiny-moe {SMALL_HF}",
    ),
    Bench("hf_7b", "bench.hf_fsdp", "--ragged", 60, 150, f"--shape tiny {SMALL_HF} --ragged"),
    Bench("nccl", "pytest", f"{PYTEST} test_every_plan_over_nccl", 60, 200, alone=True),
    Bench("models", "pytest", f"{PYTEST} test_layout_equals_one_gpu", 120, 420, alone=True),
    Bench(
        "pipelines",
        "bench.layouts",
        f"{PIPELINES} --bubbles --steps 2",
        90,
        240,
        f"pp=2,virtual_stages=2,schedule=interleaved pp=2,schedule=zero_bubble --bubbles {SMALL}",
    ),
    Bench(
        "8k",
        "bench.layouts",
        "cp=8,cp_mode=gather cp=8 --tokens-per-batch 65536 --steps 2",
        60,
        120,
    ),
    Bench(
        "32k",
        "bench.layouts",
        "dp=8 tp=2,dp=4 tp=4,pp=2 pp=4,dp=2 cp=8,cp_mode=gather cp=8 --length 32768 --sequences 8 --recompute selective "
        "--steps 2",
        120,
        300,
    ),
    Bench(
        "longest",
        "bench.long_context",
        "--ranks 8 --start 2621440 --seconds 130 --try-seconds 125",
        90,
        140,
        "--ranks 2 --start 256 --seconds 60 --shape tiny --device cpu --window 32",
        alone=True,
    ),
    Bench(
        "1m",
        "bench.layouts",
        "cp=8,cp_mode=gather --length 1048576 --sequences 1 --recompute selective --mlp-tile-tokens 16384 --steps 1 "
        "--warm-length 131072",
        240,
        600,
        f"cp=2,cp_mode=gather {SMALL} --warm-length 32 --mlp-tile-tokens 16",
    ),
)
ONE = (
    Bench(
        "one_dp1",
        "bench.layouts",
        "dp=1 --shape 1.5b --sequences 8 --profile --ragged",
        40,
        120,
        gpus=1,
    ),
    *(
        Bench(f"one_rl_{shape}", "bench.rl_step", f"--shape {shape}", 60, 200, gpus=1)
        for shape in ("1.5b", "0.5b", "3b")
    ),
    Bench(
        "one_longest",
        "bench.long_context",
        "--ranks 1 --shape 3b --start 327680 --seconds 200",
        90,
        220,
        gpus=1,
        alone=True,
    ),
    Bench(
        "one_longest_7b",
        "bench.long_context",
        "--ranks 1 --start 300032 --seconds 480 --try-seconds 240",  # pinning 120 GiB of the host is most of a try
        150,
        500,
        gpus=1,
        alone=True,
    ),
)
SMALL_GPU = "--shape 0.5b --length 4096 --sequences 8 --steps 2"
TWO = (
    Bench("two_nccl", "pytest", f"{PYTEST} test_every_plan_over_nccl", 40, 180, gpus=2, alone=True),
    Bench(
        "two_dense",
        "bench.layouts",
        f"dp=2 tp=2 cp=2 cp=2,cp_mode=gather {SMALL_GPU} --profile",
        40,
        150,
        gpus=2,
    ),
    Bench(
        "two_pipelines",
        "bench.layouts",
        f"pp=2 pp=2,virtual_stages=2,schedule=interleaved pp=2,schedule=zero_bubble {SMALL_GPU} --bubbles",
        40,
        120,
        gpus=2,
    ),
    Bench(
        "two_ep",
        "bench.layouts",
        "ep=2,dp=2 --shape 30b-a3b --depth 4 --sequences 4 --profile",
        40,
        120,
        gpus=2,
    ),
    Bench("two_weights", "bench.weights_stream", "tp=2 dp=2 --shape 1.5b", 30, 60, gpus=2),
    Bench("two_load", "bench.load", "tp=2 dp=2 --shape 1.5b", 30, 90, gpus=2),
    Bench(
        "two_rl",
        "bench.rl_step",
        "--shape 0.5b --layout tp=2 --prompts 8 --new-tokens 128",
        40,
        120,
        gpus=2,
    ),
    Bench(
        "two_models", "pytest", f"{PYTEST} test_layout_equals_one_gpu", 90, 400, gpus=2, alone=True
    ),
)
PROFILED = "{} --sequences 16 --profile"
FOUR = (
    Bench("four_dp4", "bench.layouts", PROFILED.format("dp=4"), 60, 130, gpus=4),
    Bench(
        "four_tp2dp2",
        "bench.layouts",
        f"{PROFILED.format('tp=2,dp=2')} {TWO_A_MICRO}",
        60,
        130,
        gpus=4,
    ),
    Bench("four_tp4", "bench.layouts", f"{PROFILED.format('tp=4')} {TWO_A_MICRO}", 60, 130, gpus=4),
    Bench("four_load", "bench.load", "tp=4 dp=4", 40, 90, gpus=4),
    Bench(
        "four_models",
        "pytest",
        f"{PYTEST} test_layout_equals_one_gpu",
        120,
        500,
        gpus=4,
        alone=True,
    ),
)
BENCHES = {1: ONE, 2: TWO, 4: FOUR, 8: EIGHT}


def main() -> None:
    """Run what fits, then print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.all_gpus", description=__doc__)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--gpus", type=int, choices=list(BENCHES), default=8)
    parser.add_argument("--only", default="", help="names, separated by commas, in this order")
    parser.add_argument("--skip", default="", help="names, separated by commas")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "all_gpus")
    parser.add_argument(
        "--pack", type=Path, help="an archive of all that is in --out so far, results first"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny models on two ranks of a CPU")
    given = parser.parse_args()
    known = {bench.name: bench for some in BENCHES.values() for bench in some}
    names = [name for text in (given.only, given.skip) for name in text.split(",") if name]
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"no benchmark {', '.join(unknown)}; known: {', '.join(known)}")
    if not given.smoke:
        check_visible("cuda", given.gpus)
    deadline = time.monotonic() + 60 * given.minutes
    chosen = (
        [known[name] for name in given.only.split(",")] if given.only else list(BENCHES[given.gpus])
    )
    told = []
    for bench in chosen:
        if bench.name in given.skip.split(",") or (given.smoke and not bench.smoke):
            continue
        left = deadline - time.monotonic()
        if left < bench.least:
            told.append(f"{bench.name}: left out, {left:.0f} s left")
            continue
        lines = list(_run(bench, min(bench.seconds, left - 5), given.out, smoke=given.smoke))
        print("\n".join(lines), flush=True)
        told += lines
        if given.pack is not None:
            pack(given.out, given.pack)
    print("\n".join(["", *told]))


def arguments_of(bench: Bench, seconds: float, out: Path, *, smoke: bool = False) -> list[str]:
    """What one program is given, which ends a row by itself before `seconds` are over."""
    arguments = (bench.smoke if smoke else bench.arguments).split()
    if bench.module == "bench.parity":
        arguments += ["--out", str(out)]
    elif bench.module != "pytest":
        arguments += [
            "--out",
            str(out),
            "--name",
            bench.name,
            "--row-seconds",
            str(max(10.0, seconds - 5)),
        ]
    return arguments


def pack(folder: Path, target: Path) -> None:
    """Write what is in `folder` as one file, results first, then logs, then traces, as far as they fit."""
    files = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
    files.sort(key=lambda path: (path.suffix != ".json", ".log" not in path.suffixes, path.name))
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh, left = target.with_name(f".{target.name}"), PACKED_BYTES
    with tarfile.open(fresh, "w:gz") as archive:
        for path in files:
            size = path.stat().st_size
            if size <= left and path != target:
                archive.add(path, path.name)
                left -= size
    fresh.replace(target)


def _run(bench: Bench, seconds: float, out: Path, *, smoke: bool) -> Iterator[str]:
    """The lines of the table that one program is worth."""
    begun, result, log = time.monotonic(), out / f"{bench.name}.json", out / f"{bench.name}.log"
    result.unlink(missing_ok=True)  # of an earlier call
    ranks = 1 if bench.alone else min(bench.gpus, CPU_RANKS) if smoke else bench.gpus
    arguments = arguments_of(bench, seconds, out, smoke=smoke)
    status = run_ranks(bench.module, arguments, ranks, seconds, log, sessions=True)
    took = f"{time.monotonic() - begun:.0f} s"
    ended = "too late" if status is None else f"exit status {status}" if status else "done"
    yield f"{bench.name}: {ended} after {took}"
    if result.exists():
        yield from (
            f"    {row['title']}: {row['figure']}" for row in json.loads(result.read_text())["rows"]
        )
    if status != 0 or not result.exists():
        yield from (f"    | {line[:160]}" for line in _telling(log).splitlines()[-8:])


def _telling(log: Path) -> str:
    """The log of the rank that fell first, as far as one says so; else the first rank's."""
    others = sorted(log.parent.glob(f"{log.name}.*"), key=lambda path: path.stat().st_mtime)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in (*others, log)]
    return next((text for text in texts if "Error" in text), texts[-1])


if __name__ == "__main__":
    run_main(main)
