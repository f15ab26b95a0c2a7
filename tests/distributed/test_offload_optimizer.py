"""Moments that wait on the host are those that stay on the device, bit for bit: after steps, skips, moves and resumes.

On a CPU both lie in the same kind of memory, but take the same ways: into a room of two buckets, through the same
kernel, and back.
"""

import gc
import weakref
from collections import deque
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dovetail.checkpoint.reader import ShardedReader
from dovetail.engine.native import Engine
from dovetail.errors import MachineError
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.nn.activation_checkpoint import PinnedPool
from dovetail.optim import adamw
from dovetail.optim.adamw import MOMENTS, CPUOffloadAdamW, SkippableAdamW
from dovetail.optim.replicas import hash_bits
from dovetail.parallel.layout import Layout
from dovetail.weights.hf_directory import EngineName
from tests.helpers.checkpoints import assert_same_tensors, digests
from tests.helpers.harness import run
from tests.helpers.layout_bodies import ADAMW, ragged, tokenwise
from tests.helpers.parity_configs import moe_configs, save_tiny, tiny_configs
from tests.helpers.parity_reference import make_batch, objective
from tests.helpers.program import here, make_model, read_rows, write_recipe, write_rows
from tests.helpers.resharding import ROLE, save

BUCKET = 1 << 13  # bytes, so that a tiny model has many, and parameters that are larger than one
SMALL = 1 << 13  # bytes: counts of steps, learning rates and the like
MODELS = ("llama_tied", "qwen3_moe")

Cut = tuple[str, str, EngineName]  # model, layout, whose layers run
CUTS: dict[int, tuple[Cut, ...]] = {
    2: (
        ("llama_tied", "tp=2", "native"),
        ("llama_tied", "dp=2", "native"),
        ("llama_tied", "pp=2", "native"),
        ("llama_tied", "cp=2", "transformers"),
        ("qwen3_moe", "dp=2,ep=2", "native"),
    ),
    4: (
        ("llama_tied", "tp=2,dp=2", "native"),
        ("llama_tied", "pp=2,tp=2", "native"),
        ("llama_tied", "dp=4", "transformers"),
        ("qwen3_moe", "tp=2,dp=2,ep=2", "native"),
        ("qwen3_moe", "pp=2,dp=2,ep=2", "native"),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS:
        save_tiny((tiny_configs() | moe_configs())[name], folder / name)
    return folder


def engine_of(
    source: Path, text: str = "", engine: EngineName = "native", *, hosted: bool, **more: Any
) -> Engine:
    """With clipping, a schedule and weight decay."""
    options = EngineOptions(
        optim=ADAMW, engine=engine, offload_optimizer=hosted, tokens_per_batch=96
    )
    found = from_pretrained(
        source, layout=Layout.parse(text) if text else None, device="cpu", options=options, **more
    )
    with mock.patch.object(adamw, "BUCKET_BYTES", BUCKET):
        assert isinstance(found.optimizer.rule, CPUOffloadAdamW) == hosted
    return found


def bits(engine: Engine) -> dict[str, int]:
    """A hash of every parameter and moment of this rank, and its count of steps."""
    optimizer = engine.optimizer
    found = {
        "updates": engine.updates,
        **{s.name: int(hash_bits(s.local)) for s in optimizer.shards if s.local.numel()},
    }
    for kind, tensors in optimizer.state_tensors().items():
        found |= {f"{kind} {name}": int(hash_bits(x)) for name, x in tensors.items() if x.numel()}
    steps = {float(state["step"]) for state in optimizer.rule.state.values()}
    assert steps == {float(engine.updates)}
    return found


def twins(folder: Path, cuts: tuple[Cut, ...]) -> None:
    for name, text, kind in cuts:
        resident, hosted = (
            engine_of(folder / name, text, kind, hosted=each) for each in (False, True)
        )
        assert len(hosted_of(hosted).buckets) > 4
        before = bits(resident)
        for step in range(3):
            reports = [engine.train_step(ragged(step), tokenwise) for engine in (resident, hosted)]
            assert reports[0] == reports[1] and not reports[0].skipped, (name, text)
            assert bits(resident) == bits(hosted), (name, text, step)
        after = bits(hosted)
        assert all(after[key] != before[key] for key in before if "exp_avg" in key), (
            "moments that stay at zero"
        )
        hosted.check_replicas()
        if text.startswith("tp=2"):
            if hosted.mesh["world"].rank == 0:
                hosted.optimizer.state_tensors()["exp_avg"]["model.norm.weight"][0].mul_(2)
            with pytest.raises(MachineError, match=r"model\.norm\.weight.*exp_avg"):
                hosted.check_replicas()


def hosted_of(engine: Engine) -> CPUOffloadAdamW:
    assert isinstance(engine.optimizer.rule, CPUOffloadAdamW)
    return engine.optimizer.rule


@pytest.mark.parametrize(
    ("world", "stride"), [(2, 2), *(pytest.param(n, 1, marks=pytest.mark.soak) for n in CUTS)]
)
def test_every_layout_learns_the_same_bits(world: int, stride: int, folder: Path) -> None:
    run(world, twins, folder, CUTS[world][::stride])


def moved(source: Path) -> None:
    """Skipped updates, first and later; stepping aside between updates; and bfloat16 beside float32 masters."""
    resident, hosted = (
        engine_of(source, hosted=each, dtype=torch.bfloat16) for each in (False, True)
    )
    batch = make_batch()
    poison = batch.with_fields(w0=torch.full_like(batch.fields["w0"], float("inf")))
    for number, given in enumerate((poison, batch, poison, batch)):
        before = bits(hosted) if number else {}
        reports = [engine.train_step(given, objective) for engine in (resident, hosted)]
        assert [report.skipped for report in reports] == [given is poison] * 2
        assert reports[0].grad_norm == reports[1].grad_norm or given is poison
        if not number:
            assert not hosted.optimizer.rule.state, "a skipped step left moments"
            continue
        assert bits(resident) == bits(hosted)
        assert (bits(hosted) == before) == (given is poison)
        waiting = [
            x for tensors in hosted.optimizer.state_tensors().values() for x in tensors.values()
        ]
        places = [x.data_ptr() for x in waiting]
        hosted.offload()
        assert {s.local.untyped_storage().size() for s in hosted.optimizer.shards} == {0}
        assert [x.data_ptr() for x in waiting] == places, "they are there already"
        hosted.onload()
        assert bits(resident) == bits(hosted)


def test_skips_and_moves(folder: Path) -> None:
    run(1, moved, folder / "llama_tied")


def crossed(source: Path, path: Path) -> None:
    """Each mode writes what the other one writes, and goes on from the other's checkpoint as from its own."""
    for mode in (False, True):
        first = engine_of(source, hosted=mode)
        for step in range(2):
            first.train_step(ragged(step), tokenwise)
        save(first, path / str(mode))
    readers = [ShardedReader(path / str(mode)) for mode in (False, True)]
    one, other = (
        {name: reader.read(name) for name in reader.manifest.tensors} for reader in readers
    )
    assert_same_tensors(one, other)
    first.train_step(ragged(2), tokenwise)
    for reader, mode in product(readers, (False, True)):
        again = engine_of(source, hosted=mode)
        again.load_training(ROLE, reader, 2)
        again.train_step(ragged(2), tokenwise)
        assert bits(again) == bits(first), (reader.path, mode)


def test_checkpoints_of_either_mode_go_on_in_either(folder: Path, tmp_path: Path) -> None:
    run(1, crossed, folder / "llama_tied", tmp_path)


class Peak(TorchDispatchMode):
    """The most bytes that tensors made meanwhile held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {
            x.untyped_storage().data_ptr()
            for x in tree_leaves((args, kwargs))
            if isinstance(x, Tensor)
        }
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                self._count(x.untyped_storage().nbytes())
                weakref.finalize(x, self._count, -x.untyped_storage().nbytes())
        return result

    def _count(self, num_bytes: int) -> None:
        self.live += num_bytes
        self.most = max(self.most, self.live)


def tensors() -> dict[int, int]:
    """Bytes of every stretch of memory that a tensor of this process holds, by its place."""
    gc.collect()
    found = [
        x
        for x in gc.get_objects()
        if issubclass(type(x), Tensor) and not issubclass(type(x), DTensor)
    ]
    storages = [x.untyped_storage() for x in found if x.device.type == "cpu"]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def measured(source: Path) -> None:
    held, peaks, parameters, largest = {}, {}, 0, 0
    for mode in (False, True):
        before = tensors().keys()
        engine = engine_of(source, hosted=mode)
        engine.train_step(ragged(0), tokenwise)
        parameters = sum(s.local.numel() for s in engine.optimizer.shards)
        on_host = (
            {chunk.untyped_storage().data_ptr() for chunk in hosted_of(engine).hosts}
            if mode
            else set()
        )
        held[mode] = sum(size for place, size in tensors().items() if place not in before | on_host)
        for shard in engine.optimizer.shards:
            shard.local.grad = torch.zeros_like(shard.local)
        with Peak() as peak:
            engine.optimizer.rule.step()
        peaks[mode] = peak.most
        if mode:
            largest = max(bucket.num_bytes for bucket in hosted_of(engine).buckets)
            assert (
                sum(bucket.num_bytes for bucket in hosted_of(engine).buckets)
                >= 8 * parameters
                > 4 * largest
            )
        del engine
    assert abs(held[False] - held[True] - 8 * parameters) < SMALL
    assert peaks[False] < SMALL
    assert 2 * largest <= peaks[True] < 2 * largest + SMALL


def test_the_device_holds_two_buckets_of_moments_and_only_during_a_step(folder: Path) -> None:
    run(1, measured, folder / "llama_tied")


def before_activations(source: Path) -> None:
    engine, taken = engine_of(source, hosted=True), list[int]()

    def room() -> None:
        taken.append(len(hosted_of(engine).hosts))

    text: Any = engine.model.text
    text.recompute, text.host = "full", PinnedPool(torch.device("cpu"), available=room)
    engine.score(ragged(0))
    assert not hosted_of(engine).hosts, "nothing is updated yet"
    engine.train_step(ragged(0), tokenwise)
    assert taken and min(taken) == len(hosted_of(engine).buckets)


def test_moments_take_their_memory_before_activations_do(folder: Path) -> None:
    """These make do with what is left; moments do not."""
    run(1, before_activations, folder / "llama_tied")


class SlowLink(PinnedPool):
    """Nothing is carried before somebody waits for it: the latest that a device's own queue of copies may be."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.asked: deque[tuple[Tensor, Tensor]] = deque()
        self.done = 0

    def copy(self, to: Tensor, source: Tensor) -> int:
        self.asked.append((to, source))
        return self.done + len(self.asked)

    def wait(self, copied: int | None) -> None:
        while self.done < (copied or 0):
            to, source = self.asked.popleft()
            to.copy_(source)
            self.done += 1


@pytest.mark.parametrize(
    "slow", [(), ("_to_device",), ("_to_host",), ("_to_device", "_to_host")], ids=str
)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_no_copy_is_taken_for_done(slow: tuple[str, ...], count: int) -> None:
    """Whatever of the copies is late, what is computed waits for it, and so does whoever takes its room."""
    draw = torch.Generator().manual_seed(count)
    given = [
        torch.randn(i % 4, 50, generator=draw) for i in range(count)
    ]  # of some a rank holds nothing
    grads = [[torch.randn(x.shape, generator=draw) for x in given] for _step in range(3)]
    found: list[list[Tensor]] = []
    for kind in (SkippableAdamW, CPUOffloadAdamW):
        params = [torch.nn.Parameter(x.clone()) for x in given]
        with mock.patch.object(adamw, "BUCKET_BYTES", 1):
            optimizer = kind([{"params": params, "weight_decay": 0.1}], lr=1e-2, fused=True)
        for name in slow if kind is CPUOffloadAdamW else ():
            setattr(optimizer, name, SlowLink())
        for step, each in enumerate(grads):
            optimizer.found_inf = torch.tensor(float(step == 1))
            for parameter, grad in zip(params, each, strict=True):
                parameter.grad = grad.clone()
            optimizer.step()
        found.append(
            [*params, *(optimizer.state[x][key] for x in params for key in ("step", *MOMENTS))]
        )
    assert all(map(torch.equal, *found))


def test_a_recipe_asks_for_it(tmp_path: Path) -> None:
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": "a b", "completion": f"c {i}"} for i in range(4)]
    )
    model, shown = make_model(tmp_path / "model"), []
    for mode in ("false", "true"):
        (tmp_path / mode).mkdir()
        recipe = write_recipe(tmp_path / mode / "recipe.yaml", model, rows, data={"shuffle": False})
        with mock.patch.object(
            CPUOffloadAdamW, "begin", autospec=True, side_effect=CPUOffloadAdamW.begin
        ) as begun:
            ended = here("train", recipe, "--device", "cpu", f"trainer.offload_optimizer={mode}")
        assert ended.code == 0, ended.err
        assert begun.called == (mode == "true")
        lines = [
            {key: row[key] for key in ("loss", "grad_norm")}
            for row in read_rows(tmp_path / mode / "run/metrics.jsonl")
        ]
        shown.append((lines, digests(tmp_path / mode / "run/hf")))
    assert shown[0] == shown[1]
