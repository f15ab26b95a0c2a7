"""Buckets of an export."""

import random

import pytest
import torch

from dovetail.memory import aligned
from dovetail.weights.safetensors import TensorSpec
from dovetail.weights.stream import Export, _buckets


@pytest.mark.parametrize("bound", [1, 1000, 4096, 1 << 20])
def test_buckets_stay_within_the_bound(bound: int) -> None:
    """What all ranks gather together, rows as long as the longest; a larger tensor comes by itself."""
    rng, world = random.Random(bound), 4
    specs, owners = (
        dict[str, TensorSpec](),
        dict[str, list[tuple[int, tuple[tuple[int, int], ...]]]](),
    )
    for i in range(60):
        ends = sorted(rng.choices(range(200), k=world))
        specs[f"t{i}"] = TensorSpec(f"t{i}", torch.float32, (ends[-1],))
        owners[f"t{i}"] = [
            (rank, ((a, b),)) for rank, (a, b) in enumerate(zip([0, *ends], ends, strict=False))
        ]
    buckets = list(_buckets(Export(specs, owners, {}), list(specs), world, bound))
    assert [name for bucket in buckets for name in bucket.names] == list(specs)
    for bucket in buckets:
        assert len(bucket.names) == 1 or world * bucket.length <= bound
        ends = [0] * world
        for name in bucket.names:
            for rank, slices in owners[name]:
                assert bucket.starts[name, slices] == ends[rank], "one behind the other"
                ends[rank] += aligned(4 * (slices[0][1] - slices[0][0]))
        assert bucket.length == max(ends)
    assert len(buckets) < 60 or bound < 4096
