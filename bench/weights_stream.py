"""How fast `engine.weights()` hands a whole model to a consumer on every GPU: -m bench.weights_stream tp=2,dp=4

The consumer copies each tensor into memory of its own, as a sampler on that GPU does. GB/s are the model's bytes over
the time until the last GPU has all of them; the limit is what all-gathers of the same bytes take alone.
"""

import argparse
from statistics import median

import torch
from torch import Tensor

from bench.engines import (
    SHAPES,
    Session,
    add_options,
    layout_of,
    name_of,
    random_engine,
    spec_of,
    timed,
)
from bench.given import run_main
from dovetail.parallel.collectives import stack_over

ROUNDS = 3
BUCKET = 1 << 28


def main() -> int:
    """One row a layout."""
    parser = argparse.ArgumentParser(prog="python -m bench.weights_stream", description=__doc__)
    parser.add_argument("layouts", nargs="+", metavar="LAYOUT")
    parser.add_argument("--shape", choices=list(SHAPES), default="7b")
    add_options(parser, "weights_stream")
    given = parser.parse_args()
    session = Session.start(given)
    for text in given.layouts:
        measure(text, session)
    session.finish()
    return 0


def measure(text: str, session: Session) -> None:
    session.begin(f"{session.given.shape} {text}")
    spec, device = spec_of(session.given.shape), session.device
    engine = random_engine(spec, layout_of(text), device)
    world = engine.mesh["world"]
    held: dict[str, Tensor] = {}
    for name, tensor in engine.weights(
        torch.bfloat16
    ):  # what communicates and allocates, does so once before
        held[name] = torch.empty_like(tensor)
    total = sum(tensor.nbytes for tensor in held.values())

    def consume() -> None:
        for name, tensor in engine.weights(torch.bfloat16):
            held[name].copy_(tensor)

    def gather() -> None:
        for _ in range(max(1, total // BUCKET)):
            stack_over(share, world)

    share = torch.empty(min(BUCKET, total) // world.size, dtype=torch.uint8, device=device)
    timed(device, gather)
    seconds = median([timed(device, consume) for _ in range(ROUNDS)])
    alone = median([timed(device, gather) for _ in range(ROUNDS)])
    rate = total / seconds / 1e9
    row = {
        "title": f"weights() of {session.given.shape}, {name_of(engine.mesh.layout)}, to one consumer a rank",
        "figure": f"{rate:.1f} GB/s ({seconds:.3f} s for {total / 1e9:.1f} GB); all-gathers alone {alone:.3f} s; goal 100 GB/s",
        "bytes": total,
        "seconds": seconds,
        "gather_seconds": alone,
        "gb_per_second": rate,
    }
    session.keep(row)
    session.say(f"{row['title']}: {row['figure']}")


if __name__ == "__main__":
    run_main(main)
