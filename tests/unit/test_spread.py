"""Of what several ranks hold, each writes about as much as the others, and every piece is written once."""

import random
from pathlib import Path

import pytest
import torch

from dovetail.memory import aligned
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.weights.experts import stored
from dovetail.weights.safetensors import TensorSpec
from dovetail.weights.shards import own_dtype, param_shards
from dovetail.weights.stream import Export, Named, _buckets, spread
from tests.checkpoints import decoder_on, write_tiny


def _loads(chosen: dict[Named, int], num_bytes: dict[Named, int], world: int) -> list[int]:
    return [sum(num_bytes[piece] for piece, rank in chosen.items() if rank == me) for me in range(world)]


def test_a_holder_writes_and_none_much_more_than_others() -> None:
    rng = random.Random(0)
    for _ in range(200):
        world = rng.randint(1, 8)
        holders: dict[Named, list[int]] = {}
        num_bytes: dict[Named, int] = {}
        for i in range(rng.randint(1, 40)):
            piece: Named = (f"t{i}", ((0, rng.randint(1, 9)),))
            holders[piece] = sorted(rng.sample(range(world), rng.randint(1, world)))
            num_bytes[piece] = rng.choice([0, 4, 64, 1000])
        chosen = spread(holders, num_bytes, world)
        assert list(chosen) == list(holders)
        assert all(chosen[piece] in ranks for piece, ranks in holders.items())
        if all(len(ranks) == world for ranks in holders.values()):
            loads = _loads(chosen, num_bytes, world)
            assert max(loads) - min(loads) <= max(num_bytes.values())
    everywhere: dict[Named, list[int]] = {(f"t{i}", ((0, 8),)): [0, 1, 2, 3] for i in range(40)}
    assert _loads(spread(everywhere, dict.fromkeys(everywhere, 32), 4), dict.fromkeys(everywhere, 32), 4) == [320] * 4


# Ranks that hold the same norms, and the same KV heads: two of them, for four ranks.
LAYOUTS = [Layout(tp=4, dp=1), Layout(tp=2, dp=2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_of_a_model_write_alike(layout: Layout, tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", "llama", tied=True, dtype=torch.float32)
    holders: dict[Named, list[int]] = {}
    num_bytes: dict[Named, int] = {}
    first: dict[Named, int] = {}
    for rank in range(layout.num_ranks):
        mesh = Mesh.abstract(layout, rank)
        for name, piece in param_shards(stored(decoder_on(source, mesh), mesh, as_wrapped=True), own_dtype):
            key = name, piece.region.checkpoint_slice
            holders.setdefault(key, []).append(rank)
            num_bytes[key] = piece.region.num_elements * 4
            if piece.region.owned:
                assert first.setdefault(key, rank) == rank, "two ranks own the same piece"
    assert first.keys() == holders.keys()
    now = _loads(spread(holders, num_bytes, layout.num_ranks), num_bytes, layout.num_ranks)
    before = _loads(first, num_bytes, layout.num_ranks)
    assert sum(now) == sum(before)
    assert max(now) / min(now) < 1.02 < max(before) / min(before), (now, before)


@pytest.mark.parametrize("bound", [1, 1000, 4096, 1 << 20])
def test_buckets_stay_within_the_bound(bound: int) -> None:
    """What all ranks gather together, rows as long as the longest; a larger tensor comes by itself."""
    rng, world = random.Random(bound), 4
    specs, owners = dict[str, TensorSpec](), dict[str, list[tuple[int, tuple[tuple[int, int], ...]]]]()
    for i in range(60):
        ends = sorted(rng.choices(range(200), k=world))
        specs[f"t{i}"] = TensorSpec(f"t{i}", torch.float32, (ends[-1],))
        owners[f"t{i}"] = [(rank, ((a, b),)) for rank, (a, b) in enumerate(zip([0, *ends], ends, strict=False))]
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
