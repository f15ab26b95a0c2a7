"""Runs benchmarks: python -m bench [cpu_score] [cpu_train] [--dtype bfloat16] [--rounds 5] [--tokens 2048] [--threads 2]
[--depth 30]."""

import argparse
import os

import torch

from bench import cpu_score, cpu_train
from bench.given import positive, run_main
from bench.harness import compare, table, write
from bench.models import one_rank


def main() -> None:
    """Print one table and write one JSON a benchmark."""
    known = {"cpu_score": cpu_score.cases, "cpu_train": cpu_train.cases}
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"any of {', '.join(known)}; default: all"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument(
        "--tokens", type=positive, default=2048, help="about how many tokens a case has"
    )
    parser.add_argument(
        "--depth",
        type=positive,
        default=30,
        help="layers; SmolLM2-135M has 30, fewer give a quick look",
    )
    parser.add_argument("--threads", type=positive, default=2)
    given = parser.parse_args()
    unknown = set(given.names) - set(known)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    torch.set_num_threads(given.threads)
    with one_rank():
        for name in given.names or known:
            load = os.getloadavg()
            dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[given.dtype]
            results = [
                compare(case, given.rounds)
                for case in known[name](dtype, given.tokens, given.depth)
            ]
            print(table(results))
            print(write(f"{name}_{given.dtype}", results, load), flush=True)


if __name__ == "__main__":
    run_main(main)
