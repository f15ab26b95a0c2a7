"""The block's kernels against the reference: errors by case, on a GPU or (TRITON_INTERPRET=1) a CPU.

As a process, `python -m tests.helpers.block_rows [DTYPE...]`, it writes them as one line of JSON, of each case in one dtype where
none is given: triton decides when it is first imported whether it interprets. An error of 0 stands for equal bits.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from triton.runtime import interpreter

from dovetail.kernels import moe_triton, norm_triton, reference, reference_experts, rope_triton
from tests.helpers.decode_rows import whole_range
from tests.helpers.tolerances import OP_FP16, OP_FP32, tensor_error

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FEW = 12  # tokens, about, that stand for many
IN_TURN = 248  # errors of all dtypes together
SEEN, FEWER = (
    260,
    209,
)  # errors of each dtype; of a half one by the interpreter, which takes a second for some of them
SLOW = (
    "rms_norm, strided, 2500",
    "rms_norm 3 x 2500",
    "add_norm of one, 3 x 2500",
    "permute, to",
    "unpermute of",
)
# Of 157 programs each, as the norm of 3 x 2500 has: those of `in_turn` have its width alone.
AS_WIDE = ("rms_norm, strided, 2500", "add_norm 3 x 2500", "add_norm of one, 3 x 2500")
Op = Callable[..., Any]
Case = tuple[
    str, Op, Op, list[Tensor], list[Any]
]  # name, ours, the reference, what is differentiated, the rest


def drawn(draw: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """Multiples of 1/64 that every dtype holds."""
    return (torch.randn(shape, generator=draw) * 32).round().div(64).to(dtype)


def norms(draw: torch.Generator, dtype: torch.dtype) -> Iterator[Case]:
    for rows, width in ((1, 4), (7, 5), (9, 128), (5, 300), (3, 2500)):
        x, y, w = (drawn(draw, dtype, *shape) for shape in ((rows, width), (rows, width), (width,)))
        ours, theirs = norm_triton, reference
        yield f"rms_norm {rows} x {width}", ours.rms_norm, theirs.rms_norm, [x, w], [1e-6]
        wide = drawn(draw, dtype, rows, width + 3)
        yield (
            f"rms_norm, strided, {width}",
            _cut(ours.rms_norm, width),
            _cut(theirs.rms_norm, width),
            [wide, w],
            [1e-6],
        )
        yield f"add_norm {rows} x {width}", ours.add_norm, theirs.add_norm, [x, y, w], [1e-5]
        yield (
            f"add_norm of one, {rows} x {width}",
            _alone(ours.add_norm),
            _alone(theirs.add_norm),
            [x, w],
            [1e-5],
        )
    heads = drawn(draw, dtype, 6, 3, 16)
    yield (
        "rms_norm of heads",
        norm_triton.rms_norm,
        reference.rms_norm,
        [heads, drawn(draw, dtype, 16)],
        [1e-6],
    )


def _cut(op: Op, width: int) -> Op:
    return lambda x, *rest: op(x[:, 1 : width + 1], *rest)


def _alone(op: Op) -> Op:
    return lambda x, *rest: op(x, None, *rest)


def joint(draw: torch.Generator, dtype: torch.dtype) -> Iterator[Case]:
    ours, theirs = rope_triton, reference
    for tokens, (queries, groups), channels, turned in (
        (1, (1, 1), 2, 2),
        (37, (3, 1), 16, 16),
        (5, (4, 2), 24, 10),
    ):
        width = (queries + 2 * groups) * channels
        angles = torch.rand(tokens, turned // 2, generator=draw) * 6
        tables = [angles.cos().to(dtype), angles.sin().to(dtype)]
        what, n = f"{tokens} x {queries}/{groups} x {channels}, {turned} turned", (queries, groups)
        qkv, wide = (drawn(draw, dtype, tokens, columns) for columns in (width, width + 5))
        yield f"heads {what}", _plain(ours.heads, n), _plain(theirs.heads, n), [qkv], tables
        cut = [_cut(_plain(op, n), width) for op in (ours.heads, theirs.heads)]
        yield f"heads, strided, {what}", cut[0], cut[1], [wide], tables
        gains = [drawn(draw, dtype, channels) for _ in range(2)]
        yield (
            f"heads, normed, {what}",
            _normed(ours.heads, n),
            _normed(theirs.heads, n),
            [qkv, *gains],
            tables,
        )
        some = drawn(draw, dtype, tokens, queries, channels + 1)
        yield f"rope, strided, {what}", _later(ours.rope), _later(theirs.rope), [some], tables


def _plain(op: Op, counts: tuple[int, int]) -> Op:
    return lambda x, *tables: op(x, counts, *tables)


def _normed(op: Op, counts: tuple[int, int]) -> Op:
    return lambda x, q, k, *tables: op(x, counts, *tables, (q, k), 1e-6)


def _later(op: Op) -> Op:
    return lambda x, *rest: op(x[..., 1:], *rest)


def gated(draw: torch.Generator, dtype: torch.dtype) -> Iterator[Case]:
    for rows, width in ((1, 1), (5, 24), (2, norm_triton.PIECE + 7)):
        x = 4 * drawn(draw, dtype, rows, 2 * width)
        yield f"swiglu {rows} x {width}", norm_triton.swiglu, reference.swiglu, [x], []


def sums(draw: torch.Generator, dtype: torch.dtype) -> Iterator[Case]:
    """Of parts so unlike each other that their order shows."""
    for shape in ((1, 3), (8, 1), (8, 5, 7), (3, 2, norm_triton.PIECE), (2, norm_triton.PIECE + 1)):
        parts = torch.randn(shape, generator=draw) * torch.randn(shape, generator=draw).mul(2).exp()
        what = " x ".join(map(str, shape))
        given = [parts.to(dtype)]
        yield (
            f"sum_deterministic {what}",
            _constant(norm_triton.sum_deterministic),
            _constant(reference.sum_deterministic),
            given,
            [],
        )
        turned = [given[0].mT.contiguous()]
        ours, theirs = (
            _constant(op, turn=True)
            for op in (norm_triton.sum_deterministic, reference.sum_deterministic)
        )
        yield f"sum_deterministic, strided, {what}", ours, theirs, turned, []
        ours, theirs = (
            _columns(op) for op in (norm_triton.sum_deterministic, reference.sum_deterministic)
        )
        yield f"sum_deterministic, of columns into memory, {what}", ours, theirs, given, []


def _columns(op: Op) -> Op:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        parts = x.detach().clone()[..., 1:]
        out = torch.full(parts.shape[1:], float("nan"), dtype=parts.dtype, device=parts.device)
        return x, op(parts, out=out)

    return run


def _constant(op: Op, *, turn: bool = False) -> Op:
    """Beside the argument, since it has no gradient of its own."""
    return lambda x: (x, op(x.detach().mT if turn else x.detach()))


def experts(draw: torch.Generator, dtype: torch.dtype) -> Iterator[Case]:
    """The sort with more copies than one of its programs takes; what has a program for every token, with some of them."""
    assert moe_triton.SORT_BLOCK < 50 * 4, "or nobody sees one block of the sort follow another"
    for tokens, copies, count, width in (
        (1, 1, 1, 3),
        (50, 4, 9, 16),
        (5, 3, 300, moe_triton.PIECE + 2),
    ):
        chosen = torch.rand(tokens, count, generator=draw).topk(copies).indices
        chosen[: tokens // 3] = torch.arange(
            copies
        )  # uneven: many to the first ones, which leaves some without any
        yield from sorts(draw, dtype, chosen, count, width)
        yield from moves(draw, dtype, chosen[:: max(1, tokens // FEW)], count, width)
    scores = torch.randn(33, 9, generator=draw)
    yield "top_k", _best(moe_triton.top_k), _best(reference_experts.top_k), [scores], [4]


def sorts(
    draw: torch.Generator, dtype: torch.dtype, chosen: Tensor, count: int, width: int
) -> Iterator[Case]:
    """Copies of all, and of some of them to as much room as they need or more."""
    x, copies = drawn(draw, dtype, len(chosen), width), chosen.numel()
    what, ours, theirs = (
        f"{len(chosen)} x {chosen.shape[1]} of {count}, {width}",
        moe_triton.permute,
        reference_experts.permute,
    )
    yield f"permute {what}", ours, theirs, [x], [chosen, count]
    few = partly(draw, chosen, count)
    total = int((few < count).sum())
    for room in sorted({total, (total + copies) // 2, copies}):
        yield (
            f"permute, to {room}, {what}",
            _read(ours, total),
            _read(theirs, total),
            [x],
            [few, count, room],
        )


def moves(
    draw: torch.Generator, dtype: torch.dtype, chosen: Tensor, count: int, width: int
) -> Iterator[Case]:
    """Rows to places and back, of all copies and of some."""
    ours, theirs = moe_triton, reference_experts
    (tokens, copies), few = chosen.shape, partly(draw, chosen, count)
    weights, moved = (
        torch.rand(tokens, copies, generator=draw),
        drawn(draw, dtype, chosen.numel(), width),
    )
    x, wide = drawn(draw, dtype, tokens, width), drawn(draw, dtype, tokens, width + 1)
    size = f"{tokens} x {copies} of {count}, {width}"
    rows = reference_experts.permute(x, chosen, count)[1]
    yield (
        f"spread {size}",
        _later(ours.permute_tokens),
        _later(theirs.permute_tokens),
        [wide],
        [rows, copies],
    )
    total = int((few < count).sum())
    for what, left, at in (
        (size, moved, rows),
        (f"of {total}, {size}", moved[:total], reference_experts.permute(x, few, count, total)[1]),
    ):
        yield (
            f"unpermute {what}",
            _weighed(ours.unpermute),
            _weighed(theirs.unpermute),
            [left, weights],
            [at],
        )
        places = at.view(chosen.shape)
        yield f"unpermute, plain, {what}", ours.unpermute, theirs.unpermute, [left], [places, None]


def partly(draw: torch.Generator, chosen: Tensor, count: int) -> Tensor:
    """The choice with most of it, and the last token's, beyond the experts that there are."""
    few = torch.where(torch.rand(chosen.shape, generator=draw) < 0.4, chosen, count + chosen % 3)
    few[-1] = count
    return few


def _weighed(op: Op) -> Op:
    return lambda x, weights, rows: op(x, rows, weights)


def _read(op: Op, total: int) -> Op:
    """Without the rows that nobody may read, and with a gradient of them that nobody wrote."""

    def read(*given: Any) -> tuple[Tensor, ...]:
        copies, *others = op(*given)
        copies.register_hook(
            lambda grad: torch.cat((grad[:total], torch.full_like(grad[total:], float("nan"))))
        )
        return copies[:total], *others

    return read


def _best(op: Op) -> Op:
    return lambda scores, k: (scores.gather(1, op(scores, k)), op(scores.detach(), k))


def measure(
    device: str, dtypes: Sequence[torch.dtype] = DTYPES, *, in_turn: bool = False
) -> dict[str, float]:
    """Case and what -> error. in_turn: a case in one dtype, the next one in another."""
    found = {}
    for dtype in dtypes:
        draw = torch.Generator().manual_seed(0)
        cases = chain.from_iterable(
            family(draw, dtype) for family in (norms, joint, gated, experts, sums)
        )
        for number, (name, ours, theirs, inputs, rest) in enumerate(cases):
            slow = device == "cpu" and name.startswith(
                SLOW
            )  # the other cases have what a dtype changes
            if in_turn and name in AS_WIDE:
                continue
            if in_turn:
                takes = (
                    torch.float32
                    if slow
                    else dtypes[(number + number // len(dtypes)) % len(dtypes)]
                )
            else:
                takes = torch.float32 if slow else dtype
            if takes != dtype:
                continue
            given = [x.to(device).requires_grad_() for x in inputs]
            rest = [x.to(device) if isinstance(x, Tensor) else x for x in rest]
            for what, error in differences(ours, theirs, given, rest).items():
                found[f"{name} {dtype}: {what}"] = error
    return found


def differences(ours: Op, theirs: Op, given: list[Tensor], rest: list[Any]) -> dict[str, float]:
    """Of values and gradients, under a gradient of each output that leaves no sum to chance."""
    made = [_outputs(op(*given, *rest)) for op in (ours, theirs)]
    errors = {f"value {i}": _error(a, b) for i, (a, b) in enumerate(zip(*made, strict=True))}
    grads = []
    for outputs in made:
        live = [x for x in outputs if x.requires_grad]
        draw = torch.Generator().manual_seed(1)
        up = [drawn(draw, torch.float32, *x.shape).to(x.device, x.dtype) for x in live]
        grads.append(torch.autograd.grad(live, given, up))
    return errors | {
        f"gradient {i}": _error(a, b) for i, (a, b) in enumerate(zip(*grads, strict=True))
    }


def check(found: dict[str, float], coarsest: float, *, rounds: bool, in_turn: bool = False) -> None:
    """Errors of all cases. What only copies has equal bits; so has, where bfloat16 is rounded (`rounds`), what turns without
    a norm or adds in order.

    coarsest: of bfloat16.
    """
    limits = {"torch.float32": OP_FP32, "torch.float16": OP_FP16, "torch.bfloat16": coarsest}
    seen: Counter[str] = Counter()
    for case, error in found.items():
        dtype = next(name for name in limits if f" {name}:" in case)
        assert error <= limits[dtype], (case, error)
        seen[dtype] += 1
        copied = case.startswith(("permute", "spread")) and "value" in case
        turned = case.startswith(("heads", "rope")) and "normed" not in case
        exact = turned or case.startswith("sum_deterministic")
        if copied or (exact and (rounds or dtype != "torch.bfloat16")):
            assert error == 0.0, (case, error)
    if in_turn:
        assert seen.keys() == limits.keys() and seen.total() == IN_TURN
    else:
        assert dict(seen) == {
            dtype: SEEN if rounds or dtype == "torch.float32" else FEWER for dtype in seen
        }


def _outputs(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else found


def _error(a: Tensor, b: Tensor) -> float:
    if not a.is_floating_point():
        return float(not torch.equal(a.to(b.dtype), b))
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    return tensor_error(a, b)


if __name__ == "__main__":
    vars(interpreter)["range"] = whole_range  # what it makes of `tl.range`
    named = [x for x in DTYPES if str(x) in sys.argv[1:]]
    sys.stdout.write(json.dumps(measure("cpu", named or DTYPES, in_turn=not named)) + "\n")
