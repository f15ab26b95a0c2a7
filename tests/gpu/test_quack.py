"""Products by quack on a CUDA device: dense and grouped ones against float64, and a gated MLP against plain products."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dovetail.arch.registry import spec_from_config
from dovetail.kernels import cuda, quack
from dovetail.kernels.reference import wide
from dovetail.kernels.registry import KernelSet, kernels_for
from dovetail.nn.activation_checkpoint import Recompute, options
from dovetail.nn.layers import GradAccumulator, Linear, WgradQueue
from dovetail.nn.mlp import GatedMLP
from dovetail.nn.products import Products
from dovetail.parallel.mesh import Mesh
from tests.helpers.gpu_blocks import poison
from tests.helpers.gpu_waits import no_waiting
from tests.helpers.held import Held
from tests.helpers.parity_configs import tiny_configs
from tests.helpers.tolerances import EXACT, HALF_SHARE, OP_BF16, OP_FP32, assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available()
        or not cuda.package_usable(quack.INTERFACE, torch.device("cuda")),
        reason="needs quack-kernels and Hopper",
    ),
]

SIZES = [
    (1003, 3584, 18944),
    (17, 128, 72),
    (1, 64, 96),
    (256, 512, 1024),
]  # tokens, D, F; the first of a 7B
LENGTHS = (0, 130, 1, 0, 77, 255, 0)  # rows of experts
ENOUGH = 256  # tokens, for the mean of their errors to be no matter of luck
TOKENS, WIDTH, FFN = 211, 512, 384  # of a mixture
WIDE_SUM = (
    100 * OP_FP32
)  # tensor cores sum a thousand products in float32; rounding to bfloat16 costs thirty times as much
CHAIN = 2 * OP_BF16  # two paths of several products, each rounding what lies between


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).mul_(scale).to(torch.bfloat16)


def exact(x: Tensor) -> Tensor:
    return x.to(torch.float64)


def in_pairs(x: Tensor) -> Tensor:
    """Columns, gates and then ups -> one beside the other."""
    return torch.stack(x.chunk(2, -1), -1).flatten(-2)


def gates_first(x: Tensor) -> Tensor:
    """Columns in pairs -> gates, then ups."""
    return torch.cat((x[..., ::2], x[..., 1::2]), -1)


def gated(both: Tensor) -> Tensor:
    return F.silu(both[:, ::2]) * both[:, 1::2]


def gate_gradient(d_gated: Tensor, both: Tensor) -> Tensor:
    """In float64, by autograd."""
    both = exact(both).requires_grad_()
    (found,) = torch.autograd.grad(gated(both), both, d_gated)
    return found


@pytest.fixture(autouse=True)
def _poisoned() -> None:
    poison()


def both_of(
    x: Tensor, joint: Tensor, starts: Tensor | None = None, source: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gates and ups in pairs, and silu(gate) up."""
    half = x.new_empty(len(x if source is None else source), joint.shape[-2] // 2)
    return quack.gated_product_into(x, joint, half, starts, source), half


@pytest.mark.parametrize(("n", "width", "ffn"), SIZES)
def test_dense_products(n: int, width: int, ffn: int) -> None:
    x, joint = drawn(n, width), drawn(2 * ffn, width, seed=1, scale=width**-0.5)
    want = in_pairs(exact(x) @ exact(joint).T)
    both, into = both_of(x, joint)
    assert_close(both, want, OP_BF16, "gates and ups")
    assert_close(into, gated(want), OP_BF16, "silu(gate) up")
    assert_close(quack.gated(x, joint), gated(want), OP_BF16, "silu(gate) up alone")
    assert quack.takes(x, joint, drawn(width, ffn))


@pytest.mark.parametrize(("n", "width", "ffn"), SIZES)
def test_scoring_computes_the_bits_of_training(n: int, width: int, ffn: int) -> None:
    x, joint = drawn(n, width), drawn(2 * ffn, width, seed=1, scale=width**-0.5)
    assert torch.equal(quack.gated(x, joint), both_of(x, joint)[1])


@pytest.mark.parametrize(("n", "width", "ffn"), SIZES)
def test_dense_gradients(n: int, width: int, ffn: int) -> None:
    dy, down, both = (
        drawn(n, width),
        drawn(width, ffn, seed=1, scale=width**-0.5),
        drawn(n, 2 * ffn, seed=2),
    )
    d_both, again, none = quack.gated_gradient(dy, down, both)
    assert none is None
    assert_close(d_both, gate_gradient(exact(dy) @ exact(down), both), OP_BF16, "of gates and ups")
    assert_close(again, gated(exact(both)), OP_BF16, "silu(gate) up")
    joint = drawn(2 * ffn, width, seed=3)
    assert_close(
        quack.input_gradient(both, joint), gates_first(exact(both)) @ exact(joint), OP_BF16, "of x"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "width", "ffn"), SIZES)
def test_a_joint_weight_s_gradient_is_added(
    n: int, width: int, ffn: int, dtype: torch.dtype
) -> None:
    total = torch.full((2 * ffn, width), float("nan"), device="cuda", dtype=dtype)
    plain, want = total.clone(), torch.zeros(2 * ffn, width, device="cuda", dtype=torch.float64)
    for turn in range(3):
        d_both, x = drawn(n, 2 * ffn, seed=2 * turn), drawn(n, width, seed=2 * turn + 1)
        quack.add_joint_grad_(total, d_both, x, first=turn == 0)
        quack.add_weight_grad_(plain, d_both, x, first=turn == 0)
        want += exact(d_both).T @ exact(x)
        bound = WIDE_SUM if dtype == torch.float32 else OP_BF16
        assert_close(total, gates_first(want.T).T, bound, f"turn {turn}")
        assert_close(plain, want, bound, f"turn {turn}, plain")


class Mixture:
    """Rows of a few tokens by expert."""

    def __init__(self) -> None:
        ends = torch.tensor(LENGTHS).cumsum(0)
        self.starts = F.pad(ends, (1, 0)).to("cuda", torch.int32)
        self.n, experts = sum(LENGTHS), len(LENGTHS)
        draw = torch.Generator().manual_seed(9)
        self.source = torch.randint(TOKENS, (self.n,), generator=draw).to("cuda", torch.int32)
        self.joint = drawn(experts, 2 * FFN, WIDTH, seed=5, scale=WIDTH**-0.5)
        self.down = drawn(experts, WIDTH, FFN, seed=6, scale=FFN**-0.5)

    def each(self, compute: Callable[[int, slice], Tensor]) -> list[Tensor]:
        """compute(expert, its rows), for every expert."""
        edges = pairwise(self.starts.tolist())
        return [compute(e, slice(start, end)) for e, (start, end) in enumerate(edges)]

    def sums(self, dz: Tensor, x: Tensor) -> Tensor:
        """dz.T x over each expert's rows."""
        return torch.stack(self.each(lambda _, rows: dz[rows].T @ exact(x[rows])))


@pytest.mark.parametrize("by_source", [True, False])
def test_grouped_products(by_source: bool) -> None:
    m = Mixture()
    x = drawn(TOKENS if by_source else m.n, WIDTH)
    moved = exact(x[m.source.long()] if by_source else x)
    want = torch.cat(m.each(lambda e, rows: in_pairs(moved[rows] @ exact(m.joint[e]).T)))
    both, half = both_of(x, m.joint, m.starts, m.source if by_source else None)
    assert_close(both, want, OP_BF16, "gates and ups")
    assert_close(half, gated(want), OP_BF16, "silu(gate) up")
    y = quack.grouped_product(half, m.down, m.starts)
    assert_close(
        y,
        torch.cat(m.each(lambda e, rows: exact(half[rows]) @ exact(m.down[e]).T)),
        OP_BF16,
        "down",
    )


@pytest.mark.parametrize("scaled", [True, False])
def test_grouped_gradients(scaled: bool) -> None:
    m = Mixture()
    dy, both = drawn(m.n, WIDTH), drawn(m.n, 2 * FFN, seed=1)
    scale = (
        torch.rand(m.n, device="cuda", generator=torch.Generator("cuda").manual_seed(2))
        if scaled
        else None
    )
    by = (
        torch.ones(m.n, 1, device="cuda", dtype=torch.float64)
        if scale is None
        else exact(scale)[:, None]
    )
    up = exact(dy)
    d_gated = torch.cat(m.each(lambda e, rows: up[rows] @ exact(m.down[e])))
    d_both, half, d_scale = quack.gated_gradient(dy, m.down, both, m.starts, scale)
    assert_close(d_both, gate_gradient(by * d_gated, both), OP_BF16, "of gates and ups")
    assert_close(half, by * gated(exact(both)), OP_BF16, "scaled silu(gate) up")
    assert (d_scale is None) == (scale is None)
    if d_scale is not None:
        assert d_scale.dtype == torch.float32
        assert_close(d_scale, (d_gated * gated(exact(both))).sum(-1), OP_BF16, "of the scale")
    dx = quack.input_gradient(d_both, m.joint, m.starts)
    assert_close(
        dx,
        torch.cat(m.each(lambda e, rows: gates_first(exact(d_both[rows])) @ exact(m.joint[e]))),
        OP_BF16,
        "of x",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_weight_gradients_are_added(dtype: torch.dtype) -> None:
    m = Mixture()
    found, joint = (
        torch.full((len(LENGTHS), *shape), float("nan"), device="cuda", dtype=dtype)
        for shape in ((WIDTH, FFN), (2 * FFN, WIDTH))
    )
    want, wanted = (
        torch.zeros_like(found, dtype=torch.float64),
        torch.zeros_like(joint, dtype=torch.float64),
    )
    bound = WIDE_SUM if dtype == torch.float32 else OP_BF16
    for turn in range(3):
        dy, half = drawn(m.n, WIDTH, seed=turn), drawn(m.n, FFN, seed=10 + turn)
        quack.add_grouped_grad_(found, dy, half, starts=m.starts, first=turn == 0)
        want += m.sums(exact(dy), half)
        assert_close(found, want, bound, f"turn {turn}, down")
        d_both, x = drawn(m.n, 2 * FFN, seed=20 + turn), drawn(m.n, WIDTH, seed=30 + turn)
        quack.add_grouped_joint_grad_(joint, d_both, x, starts=m.starts, first=turn == 0)
        wanted += m.sums(gates_first(exact(d_both)), x)
        assert_close(joint, wanted, bound, f"turn {turn}, gate and up")
    for e, length in enumerate(LENGTHS):
        assert length or not (found[e].any() or joint[e].any()), (
            "an expert without rows learns nothing"
        )


def made(kernels: KernelSet, width: int, ffn: int, dtype: torch.dtype = torch.bfloat16) -> GatedMLP:
    """An MLP that adds its gradients in float32, or in float64."""
    config = tiny_configs()["llama"].to_dict() | {"hidden_size": width, "intermediate_size": ffn}
    mlp = GatedMLP(spec_from_config(config), Mesh.solo(), kernels).to("cuda", dtype)
    with torch.no_grad():
        for i, weight in enumerate(mlp.parameters()):
            weight.copy_(drawn(*weight.shape, seed=20 + i, scale=weight.shape[1] ** -0.5))
    for part in mlp.modules():
        if isinstance(part, Linear):
            part.weight.grad_dtype = torch.promote_types(dtype, torch.float32)
            part.wgrad_queue = WgradQueue()
    return mlp


def micros(n: int, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs, and gradients of the outputs."""
    for i, tokens in enumerate((n, n + 5)):
        yield drawn(tokens, width, seed=30 + i).requires_grad_(), drawn(tokens, width, seed=40 + i)


def played(mlp: GatedMLP, n: int, recompute: Recompute = "none") -> dict[str, Tensor]:
    """Outputs, dx and the sums of the weights' gradients, after the first and after the second micro-batch."""
    found: dict[str, Tensor] = {}
    weights = dict(mlp.named_parameters())
    mlp.zero_grad()
    for i, (x, dy) in enumerate(micros(n, mlp.down_proj.weight.shape[0])):
        x, dy = (one.detach().to(mlp.down_proj.weight.dtype) for one in (x, dy))
        x.requires_grad_()
        y = mlp(x) if recompute == "none" else checkpoint(mlp, x, **options(recompute))
        y.backward(dy)
        assert x.grad is not None
        found |= {f"y{i}": y.detach(), f"dx{i}": x.grad}
        found |= {
            f"{name} {i}": w.grad.clone() for name, w in weights.items() if w.grad is not None
        }
    assert len(found) == 8
    return found


@pytest.mark.parametrize(("n", "width", "ffn"), SIZES)
def test_an_mlp_equals_the_one_of_plain_products(n: int, width: int, ffn: int) -> None:
    kernels = kernels_for(torch.device("cuda"))
    assert kernels.gated is not None and kernels.describe()["gated"] == "quack"
    plain_ones = KernelSet(swiglu=kernels.swiglu, add_weight_grad_=kernels.add_weight_grad_)
    gating = made(kernels, width, ffn)
    found, again = played(gating, n), played(gating, n)
    plain = played(made(plain_ones, width, ffn), n)
    wide = played(made(KernelSet(), width, ffn, torch.float64), n)
    for name in found:
        assert torch.equal(found[name], again[name]), f"{name} differs when it is repeated"
        assert found[name].dtype == (torch.float32 if "weight" in name else torch.bfloat16)
        assert_close(found[name], plain[name], CHAIN, name)
        if n < ENOUGH:
            continue
        ours, theirs = (
            float((exact(one[name]) - wide[name]).square().mean().sqrt()) for one in (found, plain)
        )
        assert ours <= HALF_SHARE * theirs, (
            f"{name}: {ours:.3e} from float64, plain products {theirs:.3e}"
        )


@pytest.mark.parametrize("recompute", ["light", "selective", "full"])
def test_an_mlp_that_is_repeated(recompute: Recompute) -> None:
    mlp = made(kernels_for(torch.device("cuda")), 512, 1024)
    expected = played(mlp, 77)
    poison()
    for name, found in played(mlp, 77, recompute).items():
        assert_close(found, expected[name], EXACT, name)


def test_nothing_waits_for_the_host() -> None:
    mlp = made(kernels_for(torch.device("cuda")), 512, 1024)
    assert all(isinstance(part, GradAccumulator) for part in mlp.children())

    def step(x: Tensor, dy: Tensor) -> None:
        mlp(x).backward(dy)
        with torch.no_grad():
            mlp(x)

    given = [*micros(77, 512), *micros(77, 512)]
    for one in given[:2]:
        step(*one)
    with no_waiting():
        for one in given[2:]:
            step(*one)


@pytest.mark.parametrize("tokens", [1, 777, 8192])
def test_a_mixture_equals_the_plain_one(tokens: int) -> None:
    """Qwen3-30B-A3B's widths, some entries nowhere, one expert without rows: values, all gradients, bits when repeated."""
    width, ffn, experts, top = 2048, 768, 16, 4
    x, gate_up = drawn(tokens, width), drawn(experts, 2 * ffn, width, seed=1, scale=width**-0.5)
    down, up = drawn(experts, width, ffn, seed=2, scale=ffn**-0.5), drawn(tokens, width, seed=4)
    draw = torch.Generator("cuda").manual_seed(3)
    chosen = (
        torch.rand(tokens, experts + 8, device="cuda", generator=draw)
        .topk(top)
        .indices.clamp(max=experts)
    )
    chosen[chosen == 5] = experts
    chosen[0, 0] = 1
    weights, copies = (
        torch.rand(tokens, top, device="cuda", generator=draw),
        int((chosen < experts).sum()),
    )
    plain = replace(kernels_for(torch.device("cuda")), mixture=None)
    fused = kernels_for(torch.device("cuda"))
    assert fused.mixture is not None
    found = []
    for kernels in (plain, fused, fused):
        poison()
        leaves = [each.detach().requires_grad_() for each in (x, weights, gate_up, down)]
        y = Products(kernels).mixture_of_experts(
            leaves[0], chosen, leaves[1], (leaves[2], leaves[3]), copies
        )
        found.append([y, *torch.autograd.grad(y, leaves, up)])
    with torch.no_grad():
        assert torch.equal(
            Products(fused).mixture_of_experts(x, chosen, weights, (gate_up, down), copies),
            found[1][0],
        )
    sums = []
    for kernels, dtype, handed in (
        (KernelSet(), torch.float64, True),
        (fused, x.dtype, False),
        (fused, x.dtype, True),
    ):
        held = Held(gate_up.to(dtype), down.to(dtype))
        for turn in range(2):
            scale, dy = (
                weights.to(x.dtype).to(wide(dtype)),
                drawn(tokens, width, seed=5 + turn).to(dtype),
            )
            add = held.defer_wgrad if handed else None
            y = Products(kernels).mixture_of_experts(
                x.to(dtype), chosen, scale, held.both(), copies, add
            )
            y.backward(dy)
        sums.append(held.sums())
    for name, want in sums[0].items():
        error, added = (float((found[name] - want).norm()) for found in (sums[2], sums[1]))
        assert error <= 2 * OP_BF16 * float(want.norm()) and error <= added, (
            f"sum of {name}: {error}, {added} by autograd"
        )
    for name, want, got, again in zip(
        ("y", "dx", "dw", "d gate up", "d down"), *found, strict=True
    ):
        assert torch.equal(got, again), name
        assert float((got - want).norm()) <= 2 * OP_BF16 * float(want.norm()), name
    assert not found[1][2][chosen == experts].any()
    assert not found[1][3][5].any() and not found[1][4][5].any()
