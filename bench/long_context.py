"""The longest sequence that one full training step takes, found by tries that may fail: python -m bench.long_context --ranks 8

Attention sees a window only, with which a step needs the same buffers and the same peak of memory as with all tokens but
not hours; the time with all of them is extrapolated, and says so. Each try is a job of its own, for a rank that runs out
of memory leaves the others waiting. From --start the length grows by a quarter while it fits, or shrinks until it does.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from bench.engines import OFFLOAD, RECORDED_GEMM, SHAPES, spec_of
from bench.given import check_shape, check_visible, positive, run_main
from bench.harness import RESULTS, surroundings
from bench.ranks import run_ranks
from dovetail.arch.spec import ArchSpec

FACTOR = 1.25
ATTENTION_SHARE = 0.8  # of the product's rate, which causal attention of long sequences reaches
LINK_RATE = 50e9  # bytes/s between a GPU and its host, each way, both at once


def main() -> int:
    """Write what was tried; exit 1 where nothing fitted."""
    parser = argparse.ArgumentParser(prog="python -m bench.long_context", description=__doc__)
    parser.add_argument("--ranks", type=positive, default=1)
    parser.add_argument("--layout", help="default: cp over all ranks, gathering keys and values")
    parser.add_argument("--shape", choices=list(SHAPES), default="7b")
    parser.add_argument("--start", type=positive, default=1 << 18, help="tokens of the first try")
    parser.add_argument("--window", type=positive, default=4096)
    parser.add_argument(
        "--options", default="--recompute full --mlp-tile-tokens 8192", help="of bench.layouts"
    )
    parser.add_argument(
        "--offload", nargs="*", choices=OFFLOAD, help="what waits on the host; one rank: all of it"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=500.0, help="for all tries")
    parser.add_argument("--try-seconds", type=float, default=150.0)
    parser.add_argument(
        "--row-seconds", type=float, default=0.0, help="not used: tries have limits of their own"
    )
    parser.add_argument("--name", default="long_context")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    check_visible(given.device, given.ranks)
    check_shape(given.shape, given.device)
    if given.offload is None:
        given.offload = OFFLOAD if given.ranks == 1 else ()
    deadline, length, fits, fails = time.monotonic() + given.seconds, given.start, 0, 0
    tries: list[dict[str, Any]] = []
    while deadline - time.monotonic() > 20 and length not in (fits, fails):
        row, why = attempt(given, length, min(given.try_seconds, deadline - time.monotonic()))
        if row is None and why == "no time":
            tries.append(
                {
                    "title": f"{length} tokens",
                    "figure": "no time left to tell",
                    "tokens": length,
                    "fits": None,
                }
            )
            break
        if row is None:
            fails = min(fails or length, length)
            tries.append(
                {
                    "title": f"{length} tokens",
                    "figure": f"does not fit: {why}",
                    "tokens": length,
                    "fits": False,
                }
            )
        else:
            fits = max(fits, length)
            tries.append({**_told(given, row, length), "tokens": length, "fits": True, "row": row})
        print(f"{tries[-1]['title']}: {tries[-1]['figure']}", flush=True)
        _write(given, tries)
        if fits and fails:
            if fails / fits < 1.1:
                break
            length = _rounded(given, (fits + fails) / 2)
        else:
            length = _rounded(given, length * FACTOR if fits else length / FACTOR)
    _write(given, tries)
    print(f"longest that fits: {fits} tokens; shortest that does not: {fails or 'unknown'}")
    return 0 if fits else 1


def attempt(
    given: argparse.Namespace, length: int, seconds: float
) -> tuple[dict[str, Any] | None, str]:
    """The row of one step of one sequence of that length; or None, and why."""
    layout = given.layout or (f"cp={given.ranks},cp_mode=gather" if given.ranks > 1 else "dp=1")
    name = f"{given.name}_{length}"
    arguments = [
        *(
            layout,
            "--shape",
            given.shape,
            "--length",
            str(length),
            "--sequences",
            "1",
            "--steps",
            "1",
        ),
        *(
            "--warm-length",
            str(max(256, length // 64)),
            "--window",
            str(given.window),
            "--device",
            given.device,
        ),
        *(
            "--out",
            str(given.out),
            "--name",
            name,
            "--row-seconds",
            str(max(10.0, seconds - 5)),
            *given.options.split(),
            *(["--offload", *given.offload] if given.offload else ()),
        ),
    ]
    log = given.out / f"{name}.log"
    status = run_ranks("bench.layouts", arguments, given.ranks, seconds, log)
    result = given.out / f"{name}.json"
    if status == 0:
        row: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))["rows"][0]
        return row, ""
    logs = [
        path.read_text(encoding="utf-8", errors="replace")
        for path in sorted(given.out.glob(f"{log.name}*"))
    ]
    if any("out of memory" in text.lower() for text in logs):
        return None, "out of memory"
    return None, "no time" if status is None else f"exit status {status}: see {log}"


def _told(given: argparse.Namespace, row: dict[str, Any], length: int) -> dict[str, Any]:
    """One try's line, with the time that attention to all tokens would add."""
    whole = spec_of(given.shape)
    seen = spec_of(
        given.shape, use_sliding_window=True, sliding_window=given.window, max_window_layers=0
    )
    missing = 3 * (whole.flops(length) - seen.flops(length)) / given.ranks
    extrapolated = row["seconds"] + missing / (ATTENTION_SHARE * RECORDED_GEMM)
    figure = (
        f"fits: {row['peak_memory_gib']:.1f} GiB, {row['seconds']:.1f} s a step with a window of {given.window}; "
        f"with all tokens {extrapolated:.0f} s (extrapolated)"
    )
    if "optimizer" in given.offload:
        figure += (
            f"; {moments_seconds(whole, given.ranks):.1f} s of it for copies of moments (predicted)"
        )
    title = f"{length} tokens of {given.shape} on {given.ranks} ranks"
    return {"title": title, "figure": figure, "extrapolated_full_attention_seconds": extrapolated}


def moments_seconds(spec: ArchSpec, ranks: int) -> float:
    """How long AdamW's moments take from the host while others take the way back: 8 bytes a parameter of a dense model."""
    table = 0 if spec.tie_embeddings else spec.head_params
    return 8 * (spec.linear_params + table) / ranks / LINK_RATE


def _rounded(given: argparse.Namespace, length: float) -> int:
    """A length that every layout of these ranks can cut."""
    multiple = 64 * given.ranks
    return int(length) // multiple * multiple


def _write(given: argparse.Namespace, tries: list[dict[str, Any]]) -> None:
    given.out.mkdir(parents=True, exist_ok=True)
    options = {key: str(value) for key, value in vars(given).items()}
    text = json.dumps({**surroundings(), "options": options, "rows": tries}, indent=1) + "\n"
    (given.out / f"{given.name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run_main(main)
