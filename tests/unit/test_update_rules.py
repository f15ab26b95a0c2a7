"""Every update rule against torch's class of that name, with decay, clipping, groups and frozen parameters."""

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.models import one_rank
from dovetail.errors import ConfigError, UserError
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.optim.groups import ParamGroup, freeze
from dovetail.optim.matrices import LocalShard, assign_owners, matrix_shards
from dovetail.optim.optimizer import Optimizer, OptimSettings
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import Region
from tests.helpers.parity_configs import save_tiny, tiny_configs
from tests.helpers.tolerances import EXACT, OP_FP32, OP_FP64, assert_all_close

STEPS, COUNT = 4, 3.0
KEYS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "clip_norm": 2.0, "frozen": ("embed.*",)}
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
CLASSES: Sequence[tuple[str, dict[str, Any]]] = (
    ("sgd", {}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5, "nesterov": False}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("adam", {}),
    ("torch.optim.Adam", {"amsgrad": True}),
    ("nadam", {"momentum_decay": 0.01}),
    ("radam", {}),
    ("adamax", {}),
    ("adadelta", {"rho": 0.8}),
    ("adagrad", {"initial_accumulator_value": 0.1}),
    ("asgd", {"t0": 2.0}),
    ("rmsprop", {"momentum": 0.5, "centered": True}),
)


class Toy(nn.Module):
    """An embedding, two blocks of matrices, norms and biases, and a head."""

    def __init__(self, dtype: torch.dtype = torch.float64, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, width)
        blocks = (
            {"up": nn.Linear(width, width + 4), "norm": nn.LayerNorm(width)} for _ in range(2)
        )
        self.layers = nn.ModuleList(map(nn.ModuleDict, blocks))
        self.head = nn.Linear(width, 7, bias=False)
        self.to(dtype)


def made(dtype: torch.dtype = torch.float64, width: int = 6, **keys: Any) -> tuple[Toy, Optimizer]:
    model, settings = Toy(dtype, width), OptimSettings(**keys)
    freeze(model, Mesh.solo(), settings.frozen)
    return model, Optimizer(model, Mesh.solo(), settings)


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(10 + step)
    return {
        n: torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p.dtype)
        for n, p in model.named_parameters()
    }


def train(model: nn.Module, optimizer: Optimizer, steps: Sequence[int] = range(STEPS)) -> None:
    for step in steps:
        for name, grad in gradients(model, step).items():
            parameter = model.get_parameter(name)
            parameter.grad = COUNT * grad if parameter.requires_grad else None
        assert not optimizer.step(COUNT).skipped


def reference(
    matrices: Make, others: Make | None = None, dtype: torch.dtype = torch.float64, width: int = 6
) -> dict[str, Tensor]:
    """Trained by torch's classes. matrices: of those of the blocks; others: of the rest; None: the same."""
    model = Toy(dtype, width)
    named = {n: p for n, p in model.named_parameters() if not n.startswith("embed")}
    first, second = {"lr": 0.02, "weight_decay": 0.3}, {"lr": 0.01, "weight_decay": 0.1}
    blocks = [
        {"params": [named["layers.0.up.weight"]], **first},
        {"params": [named["layers.1.up.weight"]], **second},
    ]
    plain = [p for n, p in named.items() if p.dim() == 1]
    rest = [
        {"params": [named["head.weight"]], **second},
        {"params": plain, "lr": 0.01, "weight_decay": 0.0},
    ]
    optimizers = (
        [matrices([*blocks, *rest])] if others is None else [matrices(blocks), others(rest)]
    )
    for step in range(STEPS):
        for name, grad in gradients(model, step).items():
            if name in named:
                named[name].grad = grad
        nn.utils.clip_grad_norm_(named.values(), KEYS["clip_norm"])
        for optimizer in optimizers:
            optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def trained(dtype: torch.dtype = torch.float64, width: int = 6, **keys: Any) -> dict[str, Tensor]:
    """After a step that is skipped and `STEPS` others."""
    group = ParamGroup("layers.0.up.weight", lr=0.02, weight_decay=0.3)
    model, optimizer = made(dtype, width, **{"groups": (group,), **KEYS, **keys})
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan) if parameter.requires_grad else None
    assert optimizer.step(COUNT).skipped
    train(model, optimizer)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("name", "options"), CLASSES)
def test_classes_of_torch(name: str, options: dict[str, Any]) -> None:
    cls = next(
        getattr(torch.optim, x)
        for x in torch.optim.__all__
        if x.lower() == name.lower().rpartition(".")[2]
    )
    assert_all_close(
        trained(name=name, options=options), reference(partial(cls, **options)), OP_FP64
    )


def test_a_class_without_decay_and_a_class_of_mine() -> None:
    class Signed(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.sign_()
            return super().step(closure)

    assert_all_close(
        trained(name=Signed, options={"momentum": 0.5}),
        reference(partial(Signed, momentum=0.5)),
        OP_FP64,
    )

    class Plain(torch.optim.SGD):
        def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
            super().__init__(params, lr, weight_decay=weight_decay)

    assert_all_close(trained(name=Plain), reference(torch.optim.SGD), OP_FP64)
    keys: dict[str, Any] = {"weight_decay": 0.0, "groups": (ParamGroup("layers.0.*", lr=0.02),)}
    one, other = trained(name="rprop", **keys), trained(name=torch.optim.Rprop, **keys)
    assert_all_close(one, other, EXACT)


def orthogonal(
    x: Tensor, steps: int = 5, abc: Sequence[float] = (3.4445, -4.7750, 2.0315)
) -> Tensor:
    """The polynomial of Muon on the singular values."""
    u, s, v = torch.linalg.svd(x / x.norm().clamp(min=1e-7), full_matrices=False)
    for _ in range(steps):
        s = abc[0] * s + abc[1] * s**3 + abc[2] * s**5
    return u * s @ v


class Transcribed(torch.optim.Optimizer):
    """Muon in float64, from its definition."""

    def __init__(
        self,
        params: Any,
        momentum: float = 0.95,
        nesterov: bool = True,
        match: bool = False,
        **keys: Any,
    ) -> None:
        super().__init__(params, {})
        self.momentum, self.nesterov, self.match, self.keys = momentum, nesterov, match, keys

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("b", torch.zeros_like(p))
                average.copy_(self.momentum * average + (1 - self.momentum) * p.grad)
                x = (
                    self.momentum * average + (1 - self.momentum) * p.grad
                    if self.nesterov
                    else average
                )
                rows, columns = p.shape
                factor = (
                    0.2 * max(rows, columns) ** 0.5 if self.match else max(1, rows / columns) ** 0.5
                )
                p -= group["lr"] * group["weight_decay"] * p + group["lr"] * factor * orthogonal(
                    x, **self.keys
                )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        (
            {"momentum": 0.8, "nesterov": False, "adjust_lr_fn": "original"},
            {"momentum": 0.8, "nesterov": False},
        ),
        ({"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}, {"match": True, "steps": 3}),
        ({"ns_coefficients": [2.0, -1.5, 0.5]}, {"abc": (2.0, -1.5, 0.5)}),
    ],
)
def test_muon_is_its_definition_and_adamw_has_the_rest(
    ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    expected = reference(partial(Transcribed, **theirs), torch.optim.AdamW)
    assert_all_close(trained(name="muon", options=ours), expected, OP_FP64)


def test_muon_is_that_of_torch() -> None:
    """Newton-Schulz in bfloat16, as there."""
    expected = reference(torch.optim.Muon, torch.optim.AdamW, torch.float32)
    assert_all_close(trained(torch.float32, name="muon"), expected, OP_FP32)


def test_adamw8bit_is_that_of_torchao() -> None:
    cls = pytest.importorskip("torchao.optim").AdamW8bit
    with torch.compiler.set_stance("force_eager"):
        expected = reference(cls, dtype=torch.float32, width=64)
    assert_all_close(trained(torch.float32, 64, name="adamw8bit"), expected, OP_FP32)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="has torchao")
def test_adamw8bit_without_torchao_is_one_message(tmp_path: Path) -> None:
    save_tiny(tiny_configs()["llama"], tmp_path)
    with (
        pytest.raises(
            UserError,
            match=r"needs torchao, which is not installed: pip install 'dovetail-rl\[torchao\]'",
        ),
        one_rank(),
    ):
        from_pretrained(
            tmp_path, device="cpu", options=EngineOptions(optim=OptimSettings(name="adamw8bit"))
        )


def test_patterns_choose_the_matrices_and_adamw_has_a_rate() -> None:
    model, optimizer = made(
        name="muon",
        options={"matrices": ["layers.1.up.weight", "head.*"], "adamw_lr": 0.02},
        lr=0.01,
    )
    train(model, optimizer, [0])
    has = {s.name for s in optimizer.shards if "momentum_buffer" in optimizer.rule.state[s.local]}
    assert has == {"layers.1.up.weight", "head.weight"}
    other, adamw = made(lr=0.02)
    train(other, adamw, [0])
    pairs = dict(other.named_parameters())
    same = {
        name for name, parameter in model.named_parameters() if torch.equal(parameter, pairs[name])
    }
    assert same == {name for name in pairs if name not in has}
    with pytest.raises(UserError, match=r"matrices: layers.1.norm.weight is no matrix"):
        made(name="muon", options={"matrices": ["layers.1.*.weight"]})


def test_a_rate_of_a_group_is_its_own_beside_adamw_lr() -> None:
    """Of AdamW's parameters: one of a group with a rate, and the others, whose rate is adamw_lr."""
    own = ParamGroup("head.*", lr=0.03)
    model, optimizer = made(name="muon", options={"adamw_lr": 0.02}, lr=0.01, groups=(own,))
    other, adamw = made(lr=0.02, groups=(own,))
    start = {name: x.detach().clone() for name, x in model.named_parameters()}
    for trained_one, rule in ((model, optimizer), (other, adamw)):
        train(trained_one, rule, [0, 1])
    pairs = dict(other.named_parameters())
    for name in ("head.weight", "embed.weight", "layers.0.norm.weight"):
        parameter = model.get_parameter(name)
        assert torch.equal(parameter, pairs[name]), name
        assert not torch.equal(parameter, start[name])


def test_experts_are_matrices_with_gate_and_up_apart() -> None:
    """Of experts 2 and 3 of four, [4, 10, 6], and columns 3 to 6."""
    local = nn.Parameter(torch.zeros(2, 10, 3))
    there, here = ((2, 4), (0, 10), (3, 6)), ((0, 2), (0, 10), (0, 3))
    region = Region("layers.0.mlp.experts.gate_up_proj", (4, 10, 6), there, here, owned=True)
    pieces = [*matrix_shards(LocalShard(region.checkpoint_name, local, (region,)))]
    assert [piece.matrix.removeprefix(f"{region.checkpoint_name}.") for piece in pieces] == [
        "2.0",
        "2.1",
        "3.0",
        "3.1",
    ]
    assert {(piece.shape, piece.slices) for piece in pieces} == {((5, 6), ((0, 5), (3, 6)))}
    for number, piece in enumerate(pieces):
        local.data[piece.local_index] += number + 1
    assert torch.equal(local[:, ::5, 0], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert local.count_nonzero() == local.numel()


def test_work_is_shared_out() -> None:
    """Experts of one rank stay there; the other rank gets the matrices that both hold."""
    whole, half = ((0, 8), (0, 8)), (((0, 4), (0, 8)), ((4, 8), (0, 8)))
    own = [(f"expert.{n}", (8, 8), whole, True) for n in range(3)]
    shared = [[(f"layer.{n}", (8, 8), half[rank], True) for n in range(3)] for rank in range(2)]
    owners = {job.matrix: job.owner for job in assign_owners([[*own, *shared[0]], shared[1]])}
    assert owners == {
        **dict.fromkeys((m for m, *_ in own), 0),
        **dict.fromkeys((m for m, *_ in shared[0]), 1),
    }


MISTAKES: Sequence[tuple[dict[str, Any], str]] = (
    ({"name": "LBFGS"}, r"optim.name: 'LBFGS'; expected one of adamw, muon, .*or a class of yours"),
    ({"name": "lion"}, r"'lion'; expected one of adamw, muon, adamw8bit, sgd"),
    (
        {"name": "sgd", "betas": (0.8, 0.9)},
        r"optim.betas is \(0.8, 0.9\), but sgd has no betas; leave it out",
    ),
    (
        {"name": "rprop", "weight_decay": 0.1},
        r"optim.weight_decay is 0.1, but rprop has no weight_decay",
    ),
    (
        {"name": "sgd", "options": {"momentun": 0.9}},
        r"optim.options has momentun, which sgd does not take; it takes momentum,",
    ),
    (
        {"name": "sgd", "options": {"momentum": -1.0}},
        r"optim.options: Invalid momentum value: -1.0",
    ),
    (
        {"name": "sgd", "options": {"lr": 0.1}},
        r"optim.options has lr; set optim.lr, which schedules",
    ),
    ({"options": {"amsgrad": True}}, r"amsgrad, which adamw does not take; it takes no options"),
    ({"name": "muon", "options": {"ns_steps": 100}}, r"ns_steps=100; expected 1 to 99"),
    (
        {"name": "muon", "options": {"adjust_lr_fn": "x"}},
        r"optim.options: Adjust learning rate function x is not supported",
    ),
    ({"name": "muon", "options": {"matrices": "*"}}, r"matrices='\*'; expected a list of patterns"),
    (
        {"name": "muon", "on_host": True},
        r"offload_optimizer moves the moments of adamw alone, not of muon",
    ),
)


@pytest.mark.parametrize(("keys", "message"), MISTAKES)
def test_mistakes_are_one_message(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        OptimSettings(**keys)
    assert "\n" not in str(raised.value)


class Mixing(torch.optim.SGD):
    """Divides by the norm of the whole gradient."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm()
        return super().step(closure)


class Odd(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["rows"] = torch.zeros(len(parameter))
        return super().step(closure)


class Refusing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ValueError("no")


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Mixing, "not that part of its update"),
        (Odd, "its state rows is neither"),
        (Refusing, r"ValueError: no \(line \d+ of .*test_update_rules.py\)"),
    ],
)
def test_a_class_is_tried_before_weights_are_read(cls: Any, message: str, tmp_path: Path) -> None:
    save_tiny(tiny_configs()["llama"], tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(
        UserError, match=rf"optim.name {cls.__name__} was tried on a small matrix: .*{message}"
    ):
        with one_rank():
            from_pretrained(
                tmp_path, device="cpu", options=EngineOptions(optim=OptimSettings(name=cls))
            )
