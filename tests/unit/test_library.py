"""What scripts get wrong, in one process: steps that raise, losses and batches of a wrong form, steps that count nothing."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import dovetail as dt
from bench.models import one_rank
from dovetail.engine import validation
from dovetail.engine.expert_routing import BalanceSettings
from dovetail.errors import ConfigError, DataError, LayoutError, ModelError
from dovetail.optim.optimizer import shards_of
from dovetail.parallel.axes import Axis
from dovetail.parallel.mesh import Mesh
from examples import grpo_loss
from tests.helpers.parity_configs import VOCAB, moe_configs, save_tiny, tiny_configs
from tests.helpers.tolerances import MODEL_FP32

LOSS: Any = dt.Loss  # that wrong ones may be made
SUM: Any = dt.Sum
ROWS = [[1, 5, 7, 2, 9, 4], [3, 8, 2, 6], [4, 4, 1], [9, 2, 5, 5, 3]]
OPTIONS = dt.EngineOptions(
    optim=dt.OptimSettings(lr=1e-2, weight_decay=0.1), tokens_per_batch=8, fresh_head_seed=0
)
OFFLOADED = dt.EngineOptions(
    optim=dt.OptimSettings(lr=1e-2),
    tokens_per_batch=8,
    recompute="selective",
    offload_activations=True,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(tiny_configs()["llama_tied"], folder)
    with one_rank():
        yield folder


def made(
    folder: Path, options: dt.EngineOptions = OPTIONS, head: Any = "lm", dtype: Any = torch.float32
) -> Any:
    return dt.from_pretrained(folder, device="cpu", head=head, dtype=dtype, options=options)


def likelihood(stats: dt.TokenStats, batch: dt.PackedBatch) -> dt.Loss:
    return LOSS(
        -stats.logprob.sum(), batch.mask.sum(), {"entropy": SUM(stats.entropy.sum(), len(batch))}
    )


def times_first(stats: dt.TokenStats, batch: dt.PackedBatch) -> dt.Loss:
    return LOSS((stats.logprob * batch.fields["first"]).sum(), batch.mask.sum(), {})


def values_times_first(values: Tensor, batch: dt.PackedBatch) -> dt.Loss:
    return LOSS((values * batch.fields["first"]).sum(), batch.mask.sum(), {})


TIMES: Mapping[str, Any] = {"lm": times_first, "value": values_times_first}


class Broken(torch.autograd.Function):
    """forward: x. backward: raises."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *_grads: Tensor) -> None:
        raise ArithmeticError("in backward")


class Second:
    """Raises at its second call, or in the backward pass that follows it."""

    def __init__(self, *, backward: bool) -> None:
        self.calls, self.backward = 0, backward

    def __call__(self, stats: dt.TokenStats, batch: dt.PackedBatch) -> dt.Loss:
        self.calls += 1
        if self.calls == 2 and not self.backward:
            raise ArithmeticError("in the loss")
        return likelihood(stats, batch)


def weights(engine: dt.Engine) -> list[Tensor]:
    return [x.clone() for _, x in engine.weights()]


@pytest.mark.parametrize("options", [OPTIONS, OFFLOADED], ids=["plain", "offloaded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_raised_leaves_nothing_to_the_next(
    folder: Path, options: dt.EngineOptions, dtype: torch.dtype
) -> None:
    """In a loss, and in a backward pass, at the second of several micro-batches."""
    batch = dt.PackedBatch.pack(ROWS)
    engine = made(folder, options, dtype=dtype)
    scores = engine.score(batch).logprob
    expected = engine.train_step(batch, likelihood)
    after = weights(engine)
    engine = made(folder, options, dtype=dtype)
    with pytest.raises(ArithmeticError, match="in the loss"):
        engine.train_step(batch, Second(backward=False))
    norm = engine.model.get_submodule("model.norm")
    for where in ("forward", "backward"):
        hits: list[int] = []

        def spoil(
            _module: Any, _inputs: Any, y: Tensor, where: str = where, hits: list[int] = hits
        ) -> Tensor:
            hits.append(1)
            if len(hits) == 2 and where == "forward":
                raise ArithmeticError("in forward")
            return Broken.apply(y) if len(hits) == 2 else y

        with norm.register_forward_hook(spoil), pytest.raises(ArithmeticError, match=f"in {where}"):
            engine.train_step(batch, likelihood)
    assert torch.equal(engine.score(batch).logprob, scores)
    found = engine.train_step(batch, likelihood)
    assert (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm)
    assert all(map(torch.equal, weights(engine), after))


NOTHING: Mapping[str, Callable[[dt.PackedBatch], tuple[dt.PackedBatch, Any]]] = {
    "masks": lambda batch: (batch.with_mask(torch.zeros_like(batch.mask)), likelihood),
    "count": lambda batch: (batch, lambda stats, _: LOSS(-stats.logprob.sum(), 0)),
    "plain zeros": lambda batch: (batch, lambda _stats, _batch: LOSS(torch.zeros(()), 0)),
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_step_that_counts_nothing_updates_nothing(folder: Path, name: str) -> None:
    engine, batch = made(folder), dt.PackedBatch.pack(ROWS)
    engine.train_step(batch, likelihood)
    before, moments = weights(engine), [x.clone() for x in _moments(engine)]
    report = engine.train_step(*NOTHING[name](batch))
    assert (report.skipped, report.faults, engine.updates) == (True, {}, 1)
    assert math.isnan(report.loss)
    assert report.describe_faults() == "the loss counted nothing"
    assert all(map(torch.equal, weights(engine), before))
    assert all(map(torch.equal, _moments(engine), moments))


def _moments(engine: Any) -> list[Tensor]:
    return [x for tensors in engine.optimizer.state_tensors().values() for x in tensors.values()]


def test_a_count_below_one_divides_gradients_as_it_divides_the_loss(folder: Path) -> None:
    batch = dt.PackedBatch.pack(ROWS)
    reports = [
        made(folder).train_step(
            batch, lambda s, b, c=c: LOSS(-c * s.logprob.sum(), c * b.mask.sum())
        )
        for c in (1.0, 2.0**-10)
    ]
    assert [r.loss for r in reports] == [reports[0].loss] * 2
    assert [r.grad_norm for r in reports] == pytest.approx([reports[0].grad_norm] * 2)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda s, _: -s.logprob.sum(),
            r"returned a Tensor; return dt\.Loss\(total, count, metrics\)",
        ),
        (lambda s, b: LOSS(-s.logprob, b.mask.sum()), r"total is a tensor \[\d+\]; take its sum"),
        (lambda s, _: LOSS(-s.logprob.sum(), None), "count is a NoneType"),
        (
            lambda s, _: LOSS(-s.logprob.sum(), 1, {"x": 0.5}),
            r"metric 'x' is a float; give dt\.Sum\(total, count\)",
        ),
        (
            lambda s, _: LOSS(-s.logprob.sum(), 1, {"x": s.entropy.mean()}),
            "metric 'x' is a Tensor; give dt",
        ),
        (
            lambda s, _: LOSS(-s.logprob.sum(), 1, {"": SUM(1, 1)}),
            "names a metric ''; give it a name",
        ),
        (
            lambda s, _: LOSS(-s.logprob.sum(), 1, {3: SUM(1, 1)}),
            "names a metric 3; give it a name",
        ),
        (
            lambda s, b: LOSS(-s.logprob.detach().sum(), b.mask.sum()),
            "has no gradient: compute it from the stats",
        ),
    ],
)
def test_losses_of_a_wrong_form_are_named(folder: Path, loss: Any, message: str) -> None:
    engine = made(folder)
    with pytest.raises(ConfigError, match=message):
        engine.train_step(dt.PackedBatch.pack(ROWS), loss)


def test_a_micro_batch_may_have_nothing_to_train(folder: Path) -> None:
    """A loss that returns plain zeros for it, and plain numbers for counts and metrics, as a value engine's loss, too."""

    def loss(x: Any, batch: dt.PackedBatch) -> dt.Loss:
        if len(batch) < 6:
            return LOSS(torch.zeros(()), 0, {"m": SUM(0, 0)})
        x = x if isinstance(x, Tensor) else x.logprob
        return LOSS(-x.sum(), len(batch), {"m": SUM(1.5, 1)})

    for head in ("lm", "value"):
        report = made(folder, head=head).train_step(dt.PackedBatch.pack(ROWS), loss)
        assert not report.skipped
        assert report.metrics == {"m": 1.5}
        assert report.grad_norm > 0


def test_engines_say_which_head_they_have(folder: Path) -> None:
    batch = dt.PackedBatch.pack(ROWS)
    with pytest.raises(ConfigError, match="head='critic'; expected one of lm, value"):
        made(folder, head="critic")
    with pytest.raises(
        ConfigError, match=r"layout='tp=2'; expected dt.Layout, as in dt.Layout\(tp=2\)"
    ):
        dt.from_pretrained(folder, layout=cast("Any", "tp=2"))
    with pytest.raises(
        ModelError, match=r"language model's head, so it has score\(batch\) and no values"
    ):
        made(folder).values(batch)
    for call in ("score", "score_and_trace"):
        with pytest.raises(
            ModelError, match=r"value head, so it has values\(batch\) and no log-probs"
        ):
            getattr(made(folder, head="value"), call)(batch)


@pytest.mark.parametrize(
    ("master", "dtype"), [(torch.float64, torch.float32), (torch.float32, torch.float64)]
)
@pytest.mark.parametrize("head", ["lm", "value"])
def test_results_have_the_wide_dtype_of_the_computation(
    folder: Path, head: str, master: torch.dtype, dtype: torch.dtype
) -> None:
    """Whatever the weights are held in, and whether they are gathered."""
    batch, options = (
        dt.PackedBatch.pack(ROWS),
        dt.EngineOptions(master_dtype=master, fresh_head_seed=0),
    )
    engine = made(folder, options, head, dtype)
    for _ in range(2):
        found = engine.values(batch) if head == "value" else engine.score(batch).logprob
        assert found.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fields_may_be_wider_than_the_computation(folder: Path, dtype: torch.dtype) -> None:
    """A temperature, too, which divides logits before any loss sees them."""
    given = [dt.Sequence(row, fields={"temperature": 0.5, "first": 2.0}) for row in ROWS]
    batches = [dt.PackedBatch.pack(given, dtype=each) for each in (torch.float32, torch.float64)]
    narrow, wider = (made(folder, dtype=dtype).score(batch).logprob for batch in batches)
    assert wider.dtype == torch.float32 and torch.equal(narrow, wider)
    losses = [made(folder, dtype=dtype).train_step(batch, times_first).loss for batch in batches]
    assert losses[0] == pytest.approx(losses[1], rel=MODEL_FP32)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("head", ["lm", "value"])
def test_a_loss_that_weighs_what_experts_cost_sees_statistics_of_that_dtype(
    tmp_path: Path, head: str
) -> None:
    """Before a step the loss is asked how much it will count."""
    save_tiny(moe_configs()["qwen3_moe"], tmp_path)
    options = dt.EngineOptions(balance=BalanceSettings(aux_coef=0.1), fresh_head_seed=0)
    seen: list[torch.dtype] = []

    def loss(stats: Any, batch: dt.PackedBatch) -> dt.Loss:
        found = stats if head == "value" else stats.logprob
        seen.append(found.dtype)
        return LOSS(found.sum(), len(batch))

    made(tmp_path, options, head, torch.float64).train_step(dt.PackedBatch.pack(ROWS), loss)
    assert seen == [torch.float64] * 2


MODES: Mapping[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", MODES)
def test_a_scripts_modes_change_nothing(folder: Path, name: str) -> None:
    """Neither what engines compute in them, nor what they compute after that."""
    batch = dt.PackedBatch.pack(ROWS)

    def numbers(head: str, mode: Callable[[], Any]) -> list[float]:
        with mode():
            engine, own = made(folder, head=head), dt.PackedBatch.pack(ROWS)
            first = engine.values(own) if head == "value" else engine.score(own).logprob
            reports = [engine.train_step(own.with_fields(first=first), TIMES[head])]
        reports.append(engine.train_step(batch.with_fields(first=first), TIMES[head]))
        return [float(first.sum()), *(number for r in reports for number in (r.loss, r.grad_norm))]

    for head in TIMES:
        assert numbers(head, MODES[name]) == numbers(head, contextlib.nullcontext)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"recompute": "selectiv"},
            "recompute='selectiv'; expected one of none, light, selective, full",
        ),
        ({"engine": "nativ"}, "engine='nativ'; expected one of auto, native, transformers"),
        (
            {"save_dtype": "bfloat16"},
            "save_dtype='bfloat16'; expected one of torch's, such as torch.bfloat16",
        ),
        ({"mlp_tile_tokens": -1}, "mlp_tile_tokens=-1; expected 0"),
    ],
)
def test_options_of_a_wrong_value_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dt.EngineOptions(**options)


def test_a_schedule_that_nobody_knows_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="schedule='cosin'; expected one of constant, linear, cosine, wsd"
    ):
        dt.OptimSettings(schedule=cast("Any", "cosin"))


def test_norms_and_biases_of_two_dims_are_not_decayed() -> None:
    """Cohere's norms of queries have a vector for each head."""

    def module(**shapes: tuple[int, ...]) -> nn.Module:
        found = nn.Module()
        for name, shape in shapes.items():
            found.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        return found

    model = module(gate_up_proj_bias=(2, 3), gate_up_proj=(2, 3, 4))
    model.q_norm, model.proj = module(weight=(2, 4)), module(weight=(2, 4), bias=(2,))
    decayed = [shard.name for shard in shards_of(model, Mesh.solo()) if shard.is_decayed]
    assert decayed == ["gate_up_proj", "proj.weight"]


@pytest.mark.parametrize("name", ["lr", "weight_decay", "clip_norm", "min_lr_ratio"])
def test_a_step_uphill_is_refused(name: str) -> None:
    for value in (-1e-6, math.nan):
        with pytest.raises(ConfigError, match=f"{name}={value!r}; expected"):
            dt.OptimSettings(**cast("Any", {name: value}))


def test_updates_are_counted_in_float32(folder: Path) -> None:
    """Whatever a script's default dtype is: bfloat16 knows no 257."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        optimizer = made(folder).optimizer
        optimizer.resume(256)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {state["step"].dtype for state in optimizer.rule.state.values()} == {torch.float32}


def test_dtypes_may_be_named(folder: Path) -> None:
    assert made(folder, dtype="bfloat16").dtype == torch.bfloat16
    for wrong in ("half", torch.float16, torch.int64):
        with pytest.raises(ConfigError, match="expected one of float32, bfloat16, float64"):
            made(folder, dtype=wrong)


@pytest.mark.parametrize("ids", [VOCAB, -1, -100])
def test_ids_outside_the_vocabulary_are_refused(folder: Path, ids: int) -> None:
    engine = made(folder)
    with pytest.raises(DataError, match=r"the batch has ids .* model has ids 0 to"):
        engine.score(dt.PackedBatch.pack([[1, ids, 2]]))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (lambda: [torch.ones(2, 3, dtype=torch.int64)], r"sequence 0 is a tensor \[2, 3\]"),
        (lambda: [[1, 2], 5], "sequence 1 is a int; give a list"),
        (lambda: [[1.5, 2.0]], "sequence 0 is a list; give a list or a 1-D tensor of whole ids"),
        (lambda: [dt.Sequence([[1, 2], [3, 4]])], "sequence 0 is a list"),  # type: ignore[list-item]
        (lambda: ["abc"], "sequence 0 is a str"),
        (lambda: [[]], "sequence 0 has no tokens"),
    ],
)
def test_pack_refuses_what_is_no_list_of_sequences(rows: Callable[[], Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        dt.PackedBatch.pack(rows())


def test_sequences_that_are_not_packed_are_no_batch(folder: Path) -> None:
    for call in (made(folder).score, made(folder, head="value").values):
        with pytest.raises(
            DataError, match=r"the batch is a list; pack the sequences: dt\.PackedBatch\.pack"
        ):
            call(ROWS)


def test_columns_have_an_entry_for_every_token() -> None:
    batch = dt.PackedBatch.pack(ROWS)
    with pytest.raises(
        DataError,
        match=r"field 'a' is a tensor \[3\] of torch.float32 on cpu; expected a tensor \[18\] on cpu",
    ):
        batch.with_fields(a=torch.zeros(3))
    with pytest.raises(DataError, match="field 'a' is a list"):
        batch.with_fields(a=[0.0] * 18)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"the mask is a tensor \[18\] of torch.bool on meta"):
        batch.with_mask(batch.mask.to("meta"))
    with pytest.raises(DataError, match=r"of torch.int64 on cpu; give torch.bool, as in mask > 0"):
        batch.with_mask(batch.tokens)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (dt.PackedBatch.pack([*ROWS[:3], [9, 2, 5, 5, 8]]), "tokens, targets"),
        (dt.PackedBatch.pack(ROWS[:3]), "lengths, tokens, targets, mask"),
        (
            dt.PackedBatch.pack([dt.Sequence(row, fields={"a": 1.0}) for row in ROWS]),
            "names of fields",
        ),
        (ROWS, "lengths, groups, names of fields, tokens, targets, mask"),
    ],
)
def test_ranks_with_different_batches_are_told_so(other: Any, named: str) -> None:
    mine = dt.PackedBatch.pack(ROWS)
    mesh = Mesh(dt.Layout(dp=2), torch.device("cpu"), {"world": Axis("world", 2, 0)}, {})
    with mock.patch.object(
        validation, "stack_numbers", lambda x, *_: [x, validation.fingerprint(mine)]
    ):
        validation.check_same(mine, mesh)
        with pytest.raises(
            DataError,
            match=f"rank 1 differs from rank 0 in {named}; every rank takes the same whole",
        ):
            validation.check_same(other, mesh)


def test_the_example_learns_what_was_rewarded(folder: Path, tmp_path: Path) -> None:
    """examples/grpo_loss.py, on one rank: the rewarded answer gains on the others, and the result can be loaded."""
    reports = grpo_loss.main(str(folder), str(tmp_path / "new"), dt.Layout())
    assert reports[-1].loss < reports[0].loss
    assert not any(report.skipped for report in reports)
    batch = dt.PackedBatch.pack([[*grpo_loss.PROMPT, *answer] for answer in grpo_loss.ANSWERS])
    before, after = (
        torch.stack([row.sum() for row in made(path).score(batch).logprob.split(batch.lengths)])
        for path in (folder, tmp_path / "new")
    )
    assert int((after - before).argmax()) == 0


def test_two_ranks_in_one_process_lead_to_torchrun(folder: Path) -> None:
    words = "layout tp=2,pp=2 needs 4 ranks, but this is the only process; start it by"
    with pytest.raises(LayoutError, match=rf"{words} torchrun --nproc-per-node 4 script\.py$"):
        dt.from_pretrained(folder, layout=dt.Layout(tp=2, pp=2), device="cpu")
