"""forward_backward, optim_step and zero_grad on one rank: against plain transformers and torch's AdamW, and what raises."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail as dt
from bench.models import one_rank
from dovetail.errors import CheckpointError, ConfigError, ModelError
from examples import own_loop
from tests.golden.job import MODEL, write_inputs
from tests.helpers.parity_configs import moe_configs, save_tiny, tiny_configs
from tests.helpers.tolerances import SUM_ORDER, assert_all_close

ROOT = Path(__file__).parents[2]
ROWS = [[1, 5, 7, 2, 9, 4], [3, 8, 2, 6], [4, 4, 1], [9, 2, 5, 5, 3], [7, 7, 2, 6, 1, 1, 3]]
GROUPS = (
    dt.ParamGroup("*.layers.0.*", lr=3e-3, weight_decay=0.0),
    dt.ParamGroup("*norm.weight", weight_decay=0.3),
)
FROZEN = ("model.layers.1.mlp.*", "*.layers.1.self_attn.o_proj.weight")
OPTIM: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "clip_norm": 0.5,
    "groups": GROUPS,
    "frozen": FROZEN,
}


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(tiny_configs()["llama_tied"], folder)
    return folder


def made(folder: Path, **options: Any) -> Any:
    optim = dt.OptimSettings(**{**OPTIM, **options.pop("optim", {})})
    options = {"tokens_per_batch": 12, **options, "optim": optim}
    return dt.from_pretrained(
        folder, device="cpu", dtype=torch.float64, options=dt.EngineOptions(**options)
    )


def likelihood(stats: dt.TokenStats, batch: dt.PackedBatch) -> dt.Loss:
    entropy = dt.Sum(stats.entropy.sum(), batch.mask.sum())
    return dt.Loss(-stats.logprob.sum(), batch.mask.sum(), {"entropy": entropy})


def halves() -> list[dt.PackedBatch]:
    return [dt.PackedBatch.pack(ROWS[:2]), dt.PackedBatch.pack(ROWS[2:])]


def weights(engine: Any) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in engine.weights(torch.float64)}


class Norm(nn.Module):
    """transformers' in the dtype of its input: its own computes in float32."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Rotary(nn.Module):
    """Likewise."""

    def __init__(self, theta: float, dim: int) -> None:
        super().__init__()
        self.inv_freq = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = (position_ids[..., None] * self.inv_freq).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


def in_float64(model: Any) -> Any:
    model.to(torch.float64)
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if name.endswith("norm"):
                setattr(module, name, Norm(child.weight, child.variance_epsilon))
    model.set_attn_implementation("sdpa")  # the eager one computes in float32
    config = model.config
    model.model.rotary_emb = Rotary(config.rope_parameters["rope_theta"], config.head_dim)
    return model


def plain(
    model: Any, denominator: float | None, steps: int
) -> tuple[list[float], dict[str, Tensor]]:
    """The same steps by transformers and torch: losses, norms, weights."""
    kinds: dict[tuple[float, float], list[Any]] = {}
    for name, parameter in model.named_parameters():
        if ".layers.1.mlp." in name or name.endswith("layers.1.self_attn.o_proj.weight"):
            parameter.requires_grad_(False)
        elif ".layers.0." in name:
            kinds.setdefault((3e-3, 0.0), []).append(parameter)
        else:
            kinds.setdefault((1e-3, 0.3 if "norm" in name else 0.1), []).append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": p, "lr": lr, "weight_decay": wd} for (lr, wd), p in kinds.items()]
    )
    trained, numbers = [p for p in model.parameters() if p.requires_grad], []
    count = sum(len(row) - 1 for row in ROWS)
    for step in range(steps):
        if step == 1:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
                group["weight_decay"] = (
                    0.2 if group["weight_decay"] == 0.1 else group["weight_decay"]
                )
        optimizer.zero_grad()
        total = 0.0
        for row in ROWS:
            ids = torch.tensor([row])
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
            loss = -logprobs.sum() / (denominator or count)
            loss.backward()
            total += loss.item()
        numbers += [total, float(torch.nn.utils.clip_grad_norm_(trained, 0.5))]
        optimizer.step()
    return numbers, dict(model.named_parameters())


@pytest.mark.parametrize("denominator", [None, 7.0])
@pytest.mark.parametrize("on_host", [False, True])
def test_groups_frozen_parameters_and_accumulation_are_torchs(
    tmp_path: Path, denominator: float | None, on_host: bool
) -> None:
    model = in_float64(save_tiny(tiny_configs()["llama_tied"], tmp_path))
    engine = made(tmp_path, optim={"on_host": on_host}, recompute="full" if on_host else "none")
    start, numbers = weights(engine), []
    for step in range(3):
        if step == 1:
            for group in engine.param_groups:
                group.lr = None if group.lr is None else group.lr * 0.5
            engine.param_groups[0].weight_decay = 0.2
        for half in halves():
            engine.forward_backward(half, likelihood)
            engine.score(half)  # does not touch the gradients
        report = engine.optim_step(denominator=denominator)
        assert not report.skipped and report.lr == (0.5e-3 if step else 1e-3)
        numbers += [report.loss, report.grad_norm]
    expected, trained = plain(model, denominator, 3)
    assert numbers == pytest.approx(expected, rel=SUM_ORDER)
    found = weights(engine)
    assert_all_close(found, {name: trained[name].detach() for name in found}, SUM_ORDER)
    frozen = [name for name in found if torch.equal(found[name], start[name])]
    assert len(frozen) == 4 and all(".layers.1." in name for name in frozen)


def test_a_train_step_is_the_calls_in_a_row(folder: Path) -> None:
    engines, batch = [made(folder) for _ in range(2)], dt.PackedBatch.pack(ROWS)
    for _ in range(2):
        expected = engines[0].train_step(batch, likelihood)
        engines[1].forward_backward(halves()[0], likelihood)
        engines[1].zero_grad()
        first = engines[1].forward_backward(batch, likelihood)
        assert engines[1].optim_step() == expected
        assert (first.loss, first.metrics, first.tokens) == (
            expected.loss,
            expected.metrics,
            expected.tokens,
        )
        assert first.count == sum(len(row) - 1 for row in ROWS)
    one, other = map(weights, engines)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_metrics_and_loss_of_a_step_are_those_of_all_its_batches(folder: Path) -> None:
    engine = made(folder)
    parts = [engine.forward_backward(half, likelihood) for half in halves()]
    report = engine.optim_step()
    counts = [part.count for part in parts]
    assert (report.tokens, counts) == (25, [8.0, 12.0])
    assert report.loss == pytest.approx(sum(p.loss * p.count for p in parts) / sum(counts))
    entropies = [part.metrics["entropy"] * part.count for part in parts]
    assert report.metrics == {"entropy": pytest.approx(sum(entropies) / sum(counts))}


def raising(stats: dt.TokenStats, batch: dt.PackedBatch) -> dt.Loss:
    if len(batch) < 6:
        raise KeyboardInterrupt
    return likelihood(stats, batch)


def test_what_raises_between_the_calls_leaves_nothing_behind(folder: Path) -> None:
    """In a loss after an accumulated batch, in a score, and in the optimizer: the next step is as without."""
    first, second = halves()
    engine, expected = made(folder), made(folder)
    wanted = [expected.train_step(each, likelihood) for each in (first, second, first)]
    engine.forward_backward(second, likelihood)
    with pytest.raises(KeyboardInterrupt):
        engine.forward_backward(second, raising)
    with pytest.raises(
        ModelError, match=r"optim_step\(\) without gradients; call forward_backward"
    ):
        engine.optim_step()
    engine.forward_backward(first, likelihood)
    with pytest.raises(Exception, match="ids"):
        engine.score(dt.PackedBatch.pack([[10**6, 1]]))  # leaves the gradients
    assert engine.optim_step() == wanted[0]
    with (
        engine.model.get_submodule("model.norm").register_forward_hook(interrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        engine.forward_backward(second, likelihood)
    engine.forward_backward(second, likelihood)
    rule = engine.optimizer.rule
    engine.optimizer.rule = None
    with pytest.raises(AttributeError):
        engine.optim_step()
    engine.optimizer.rule = rule
    assert engine.train_step(second, likelihood) == wanted[1]
    assert engine.train_step(first, likelihood) == wanted[2]
    one, other = weights(engine), weights(expected)
    assert all(torch.equal(one[name], other[name]) for name in one)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_batch_that_is_not_finite_skips_the_step_and_is_named(folder: Path) -> None:
    def spoilt(stats: dt.TokenStats, batch: dt.PackedBatch) -> dt.Loss:
        return dt.Loss(-stats.logprob.sum() * math.nan, batch.mask.sum())

    engine = made(folder)
    before = weights(engine)
    engine.forward_backward(halves()[0], likelihood)
    engine.forward_backward(halves()[1], spoilt)
    report = engine.optim_step()
    assert report.skipped and engine.updates == 0
    assert report.faults[0][0] == "loss of micro-batch 0 (sequences 2, 1) of batch 1"
    assert all(torch.equal(x, before[name]) for name, x in weights(engine).items())
    assert not engine.train_step(halves()[0], likelihood).skipped


@pytest.mark.parametrize(
    ("optim", "message"),
    [
        (
            {"frozen": ("*.layer.0.*",)},
            r"frozen: give patterns .*\n  - '\*\.layer\.0\.\*' matches no parameter",
        ),
        (
            {"frozen": ("*.q_proj.weight",)},
            "leaves out model.layers.0.self_attn.k_proj.weight, which is one parameter",
        ),
        ({"frozen": ("*",)}, r"frozen=\['\*'\] leaves nothing to train"),
        (
            {"groups": (dt.ParamGroup("*.layers.9.*"),)},
            r"groups: give patterns .*\n  - '\*\.layers\.9\.\*' matches no",
        ),
    ],
)
def test_patterns_that_do_not_fit_the_model_are_refused(
    folder: Path, optim: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        made(folder, optim={"groups": (), "frozen": (), **optim}).optimizer  # noqa: B018  # groups are made with it


def test_rates_of_groups_are_checked_where_they_are_set(folder: Path) -> None:
    group = made(folder).param_groups[0]
    for name in ("lr", "weight_decay"):
        with pytest.raises(ConfigError, match=f"{name}=-1; expected 0 or more"):
            setattr(group, name, -1)
    with pytest.raises(AttributeError):
        group.learning_rate = 1e-3
    for wrong in ({"frozen": "lm_head.*"}, {"groups": ({"pattern": "*"},)}):
        with pytest.raises(ConfigError, match=r"expected groups=\(dt.ParamGroup"):
            dt.OptimSettings(**wrong)
    with pytest.raises(ConfigError, match="denominator=0; expected more than 0"):
        made(folder).optim_step(denominator=0)


def test_experts_can_be_frozen_by_the_names_of_their_checkpoint(tmp_path: Path) -> None:
    save_tiny(moe_configs()["qwen3_moe"], tmp_path)
    engine = made(
        tmp_path, optim={"groups": (), "frozen": ("*.mlp.experts.*", "model.embed_tokens.weight")}
    )
    before = weights(engine)
    engine.train_step(halves()[0], likelihood)
    frozen = {name for name, x in weights(engine).items() if torch.equal(x, before[name])}
    assert frozen == {name for name in before if ".experts." in name or "embed_tokens" in name}


def test_a_saved_state_goes_on_as_if_nothing_had_happened(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"schedule": "cosine", "warmup_steps": 2, "total_steps": 9}
    first, second = halves()
    engine = made(folder, optim=options)
    for each in (first, second):
        engine.train_step(each, likelihood)
    engine.param_groups[1].lr = 5e-4
    assert engine.save_state(tmp_path / "state", {"step": 2}) == tmp_path / "state"
    again = made(tmp_path / "state", optim=options)
    again.forward_backward(second, likelihood)  # is dropped
    assert again.load_state(tmp_path / "state") == {"step": 2}
    assert again.updates == 2 and again.param_groups == engine.param_groups
    for each in (second, first):
        assert again.train_step(each, likelihood) == engine.train_step(each, likelihood)
    one, other = weights(engine), weights(again)
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(TypeError, match="not JSON serializable"):
        engine.save_state(tmp_path / "other", {"step": torch.ones(1)})
    with pytest.raises(CheckpointError, match="state: it has no"):
        again.load_state(folder)
    with pytest.raises(
        CheckpointError,
        match=r"has no training/policy/exp_avg/ of what is trained here[\s\S]*o_proj",
    ):
        made(folder, optim={**options, "frozen": ()}).load_state(tmp_path / "state")


def test_the_example_learns_and_goes_on_from_its_state(tmp_path: Path) -> None:
    model = str(write_inputs(tmp_path) / MODEL)
    whole = own_loop.main(model, str(tmp_path / "whole"), steps=14)
    assert (
        sum(whole[-3:]) > sum(whole[:3]) + 0.3
        and len((ROOT / "examples/own_loop.py").read_text().splitlines()) < 70
    )
    own_loop.main(model, str(tmp_path / "parts"), steps=10, save_every=5)
    assert own_loop.main(model, str(tmp_path / "parts"), steps=14) == whole[10:]
