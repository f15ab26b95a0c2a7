"""A trainer that pushes wrong weights until it is killed: `python -m tests.helpers.pushing URL`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from dovetail.inference_servers.http import Client
from dovetail.inference_servers.push import Pusher
from dovetail.recipe.rollout import PushSection

MODEL = Path.home() / ".cache/dovetail/smollm2-135m-instruct/model.safetensors"


def weights(tell: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """tell: a line of output once the push is under way."""
    with safe_open(MODEL, "pt") as file:
        for i, name in enumerate(file.keys()):
            if tell and i == 60:
                sys.stdout.write("pushing\n")
                sys.stdout.flush()
            yield name, (file.get_tensor(name) * 0.9).to(torch.bfloat16)


if __name__ == "__main__":
    pusher = Pusher(
        [Client(sys.argv[1], timeout=300.0)], PushSection(timeout=300.0, bucket_mb=16), kind="vllm"
    )
    for version in range(900, 1000):
        pusher.push(weights(version == 900), version)
