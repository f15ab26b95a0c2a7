"""How close is close enough: every tolerance of the tests by name, and the measure that they bound (docs/design.md, section 6).

Never loosen one: a deviation has a cause.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

EXACT = 0.0  # round trips, copies, refactors
SUM_ORDER = 1e-12  # float64: the same sums in another order (sharded against one rank)
OP_FP64 = 1e-10  # float64: one operation against an independent formula
OP_FP32 = 1.3e-6  # float32: one operation, relative (torch's default)
OP_FP16 = 2**-9  # float16: one operation, its operands and its result rounded
OP_BF16 = 2**-7  # bfloat16: one operation, its operands and its result rounded
HEAD_LOGPROB = 3e-5  # bfloat16 inputs, logits of deviation 1.2 kept in float32: log-probs and entropies against float64
HALF_SHARE = 1.2  # bfloat16: our error against float32, as a multiple of transformers' own
P99 = 0.99  # the quantile that HALF_SHARE also holds at
MODEL_FP32 = 1e-5  # float32: a whole model against another implementation
GRAD_RATIO_FP32 = 1e-2  # no gradient tensor is off by a factor beyond 1 +- this
CURVE_FP32 = 1e-4  # float32: loss and gradient norm over the first training steps, relative
RL_LOSS_FP32 = 1e-5  # float32: an RL step's loss over layouts, |a - b| / (1 + |b|)
SAME_POLICY_FP32 = (
    1e-5  # float32: ratios and KL of a policy to itself, scored twice in other micro-batches
)
GOLDEN_FP32 = 1e-3  # float32: committed curves against any processor's, |a - b| / (|b| + 0.01)
GOLDEN_BUG = 0.1  # by how much at least a planted defect of the algorithm moves such a curve
GRADCHECK = 1e-6  # finite differences in float64
RESHARDED_FP32 = 1e-6  # float32: losses and norms after a change of layout against none, relative
STEP_BF16 = (
    2**-7
)  # bfloat16: a training step's loss (over 1 + it) and gradient norm against float32's
ENGINE_LOGPROB = 1e-4  # float32: log-probs of vLLM against ours on the same tokens, mean of the absolute differences
ENGINE_LOGPROB_BF16 = 0.011  # the same in bfloat16
BUBBLE = 0.1  # the time of a pipeline's step beyond the simulated one, as a share of it

SMALL_SHARE = 0.01  # a tensor's error is measured against at least this share of the largest tensor
RATIO_SHARE = 1e-6  # tensors below this share of the largest are too small for the ratio test


def max_abs(x: Tensor) -> float:
    """Largest magnitude in x; 0 for an empty tensor."""
    return float(x.detach().abs().max()) if x.numel() else 0.0


def _difference(a: Tensor, b: Tensor) -> float:
    """max|a - b|, in the wider of their dtypes and at least in float32."""
    assert a.shape == b.shape, f"shapes {tuple(a.shape)} and {tuple(b.shape)} differ"
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return max_abs(a.detach().to(wide) - b.detach().to(wide))


def _ratio(difference: float, scale: float) -> float:
    if difference == 0.0:
        return 0.0
    return difference / scale if scale else float("inf")


def tensor_error(a: Tensor, b: Tensor, largest: float | None = None) -> float:
    """max|a - b| / max(max|b|, 0.01 largest). `largest`: max|b| over all tensors compared; default: b's own."""
    scale = max(max_abs(b), SMALL_SHARE * (max_abs(b) if largest is None else largest))
    return _ratio(_difference(a, b), scale)


def sum_error(a: Tensor, b: Tensor, terms: Iterable[Tensor]) -> float:
    """max|a - b| / max sum|t|, where b is the sum of the `terms` t, which have either sign and b's shape.

    It measures differences and signed sums, for this reason. A term with a relative error e is off by
    e|t| at most. Adding n of them, in any order, rounds by (n - 1) u sum|t| at most (u: the unit
    roundoff; Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). Hence
    |a - b| <= (e + (n - 1) u) sum|t|: the errors of the operations determine |a - b| / sum|t|.
    |a - b| / |b| is larger by the condition number sum|t| / |sum t|, which depends on the inputs
    alone: where terms cancel it exceeds any bound, and which processor exceeds it is luck.
    Where all terms have one sign, sum|t| = |b| and this is `tensor_error`.
    """
    sizes = torch.stack([t.detach().abs() for t in terms])
    assert sizes.shape[1:] == b.shape, (
        f"terms of {tuple(sizes.shape[1:])}, a sum of {tuple(b.shape)}"
    )
    return _ratio(_difference(a, b), max_abs(sizes.sum(0)))


def worst_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest `tensor_error` of tensors with the same names, and whose it is. The names must be equal."""
    assert set(actual) == set(expected), f"names differ: {sorted(set(actual) ^ set(expected))}"
    largest = max(map(max_abs, expected.values()), default=0.0)
    errors = {name: tensor_error(actual[name], expected[name], largest) for name in expected}
    worst = max(errors, key=lambda name: errors[name], default="")
    return errors.get(worst, 0.0), worst


def worst_ratio(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """How far |<a, b> / <b, b> - 1| strays, and whose: finds a tensor that is summed twice, or never."""
    largest = max(map(max_abs, expected.values()), default=0.0)
    worst, whose = 0.0, ""
    for name, b in expected.items():
        if max_abs(b) <= RATIO_SHARE * largest:
            continue
        wide, narrow = b.detach().to(torch.float64), actual[name].detach().to(torch.float64)
        stray = abs(float((narrow * wide).sum() / (wide * wide).sum()) - 1.0)
        if stray > worst:
            worst, whose = stray, name
    return worst, whose


def assert_close(a: Tensor, b: Tensor, tolerance: float, what: str = "tensor") -> None:
    """Fail unless `tensor_error(a, b) <= tolerance`."""
    error = tensor_error(a, b)
    assert error <= tolerance, f"{what}: error {error:.3e} > {tolerance:.0e}"


def assert_sum_close(
    a: Tensor, b: Tensor, terms: Iterable[Tensor], tolerance: float, what: str = "sum"
) -> None:
    """Fail unless `sum_error(a, b, terms) <= tolerance`."""
    error = sum_error(a, b, terms)
    assert error <= tolerance, f"{what}: error {error:.3e} of its terms > {tolerance:.0e}"


def assert_all_close(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float
) -> None:
    """Fail unless all tensors agree by name: error within `tolerance`, and none off by a factor."""
    error, name = worst_error(actual, expected)
    assert error <= tolerance, f"{name}: error {error:.3e} > {tolerance:.0e}"
    ratio, name = worst_ratio(actual, expected)
    assert ratio <= GRAD_RATIO_FP32, f"{name}: off by a factor of 1 +- {ratio:.3e}"
