"""The Ascend kernels over a stand-in of torch_npu: calls fit the wheel's signatures, values and gradients the reference."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dovetail.arch.registry import spec_from_config
from dovetail.arch.transformers_spec import transformers_spec
from dovetail.batch.loss import Loss
from dovetail.batch.micro import MicroBatch
from dovetail.hf.transformers_model import TransformersModel
from dovetail.kernels import npu, reference
from dovetail.kernels.reference import Spans
from dovetail.kernels.registry import KernelSet, npu_kernels
from dovetail.nn.decoder import Decoder
from dovetail.nn.model import StagedModel
from dovetail.parallel.mesh import Mesh
from tests.helpers.families import TEXT
from tests.helpers.npu_stand_in import SIGNATURES, StandIn
from tests.helpers.parity_configs import tiny_configs
from tests.helpers.parity_reference import make_batch, objective
from tests.helpers.tolerances import EXACT, MODEL_FP32, OP_FP32, assert_all_close, assert_close
from tools.npu_signatures import DOCUMENTS, FUNCTIONS, LIBRARY, OPERATIONS, read_wheel

Op = Callable[[KernelSet, Tensor, Tensor, Tensor], Tensor]
T, H, G, C = 12, 4, 2, 8
SPANS = Spans(torch.tensor([0, 5, 5, 6, T]), (5, 0, 1, 6))
LATER = Spans(
    torch.tensor([0, 5, 7, 9, 18]), (5, 2, 2, 9)
)  # keys of which the queries are the last ones
ENDS = torch.tensor([0, 7, 7, T], dtype=torch.int32)
EXPERTS = torch.tensor([[3, 1], [0, 3], [1, 0]]).repeat(T // 3, 1)
ENDS_OF_COPIES = [8, 16, 16, 24]


def _rope(kernels: KernelSet, q: Tensor, angles: Tensor, rotated: int) -> Tensor:
    angles = angles.detach()[:T, 0, : rotated // 2]
    return kernels.rope(q, angles.cos(), angles.sin())


def _moved(kernels: KernelSet, x: Tensor, weights: Tensor) -> Tensor:
    """Copied to the experts, changed there by what each has, and back."""
    copies, rows, ends = kernels.permute(x, EXPERTS, 4)
    assert ends.tolist() == ENDS_OF_COPIES
    gains = torch.linspace(1, 2, len(copies))[:, None]
    return kernels.unpermute(copies * gains, rows, weights)


CASES: dict[str, tuple[str, Op]] = {
    "rms_norm of tokens": (
        "npu_rms_norm",
        lambda k, q, _, w: k.rms_norm(q.flatten(1), w.flatten()[: H * C], 1e-5),
    ),
    "rms_norm of heads": ("npu_rms_norm", lambda k, q, _, w: k.rms_norm(q, w.flatten()[:C], 1e-6)),
    "rope": ("npu_rotary_mul", lambda k, q, _, w: _rope(k, q, w, C)),
    "rope of a part": ("npu_rotary_mul", lambda k, q, _, w: _rope(k, q, w, C // 2)),
    "swiglu": ("npu_swiglu", lambda k, q, _, w: k.swiglu(torch.cat((q, w[:T]), -1))),
    "attention": (
        "npu_fusion_attention",
        lambda k, q, kv, w: k.attention(q, kv[:T], w[:T, :G], SPANS, SPANS),
    ),
    "attention to more keys": (
        "npu_fusion_attention",
        lambda k, q, kv, w: k.attention(q, kv, w[:, :G], SPANS, LATER),
    ),
    "attention in a window": (
        "npu_fusion_attention",
        lambda k, q, kv, w: k.attention(q, kv[:T], w[:T, :G], SPANS, SPANS, 3),
    ),
    "attention to more keys in a window": (
        "npu_fusion_attention",
        lambda k, q, kv, w: k.attention(q, kv, w[:, :G], SPANS, LATER, 4),
    ),
    "grouped_mm": (
        "npu_grouped_matmul",
        lambda k, q, _, w: k.grouped_mm(q.flatten(1), w.flatten()[:512].view(4, 32, 4), ENDS),
    ),
    "permute": ("npu_moe_token_permute", lambda k, q, _, w: _moved(k, q.flatten(1), w[:T, 0, :2])),
    "unpermute": (
        "npu_moe_token_unpermute",
        lambda k, q, _, w: _moved(k, q.flatten(1), w[:T, 0, :2]),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_operation(case: str) -> None:
    name, op = CASES[case]
    ops = StandIn()
    draw = torch.Generator().manual_seed(0)
    shapes = ((T, H, C), (18, G, C), (18, H, C))  # of queries, keys and of what else there is
    inputs = [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]
    ours, theirs = (
        op(kernels, *inputs) for kernels in (npu_kernels(ops, torch.device("cpu")), KernelSet())
    )
    assert ops.calls[name] > 0
    assert_close(ours, theirs, OP_FP32)
    up = torch.randn(theirs.shape, generator=draw)
    grads = (torch.autograd.grad(y, inputs, up, allow_unused=True) for y in (ours, theirs))
    for a, b in zip(*grads, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert_close(a, b, OP_FP32)


def test_more_sequences_than_one_call_takes() -> None:
    ops = StandIn()
    lengths = (1, 2) * npu.MAX_SEQUENCES
    spans = Spans(torch.tensor([0, *lengths]).cumsum(0), lengths)
    q, k, v = torch.randn(3, sum(lengths), 1, 2)
    found = npu_kernels(ops, torch.device("cpu")).attention(q, k, v, spans, spans)
    assert ops.calls["npu_fusion_attention"] == 2
    assert_close(found, reference.attention(q, k, v, spans, spans), OP_FP32)


def test_what_the_operations_do_not_take_is_the_references() -> None:
    """Float64, no tokens at all, copies that go nowhere, and sums without weights."""
    ops = StandIn()
    kernels = npu_kernels(ops, torch.device("cpu"))
    x = torch.randn(5, 8, dtype=torch.float64)
    assert_close(kernels.rms_norm(x, x[0], 1e-6), reference.rms_norm(x, x[0], 1e-6), EXACT)
    assert kernels.swiglu(torch.empty(0, 8)).shape == (0, 4)
    assert kernels.grouped_mm(
        torch.empty(0, 4), torch.randn(2, 4, 3), torch.tensor([0, 0])
    ).shape == (0, 3)
    y, some = torch.randn(T, 8), EXPERTS.clamp(max=2)  # expert 3 is nowhere
    copies, rows, ends = kernels.permute(y, some, 2, 16)
    assert len(copies) == 16 and ends.tolist() == [8, 16]
    weights = torch.randn(T, 2)
    assert_close(
        kernels.unpermute(copies, rows, weights),
        y * (weights * (some < 2)).sum(1, keepdim=True),
        OP_FP32,
    )
    places = rows.view(T, 2)
    assert_close(
        kernels.unpermute(copies, places, None), y * (some < 2).sum(1, keepdim=True), OP_FP32
    )
    assert not ops.calls


def _native(name: str, kernels: KernelSet) -> StagedModel:
    return Decoder(spec_from_config(tiny_configs()[name].to_dict()), Mesh.solo(), kernels)


def _foreign(name: str, kernels: KernelSet) -> StagedModel:
    config = TEXT[name]().to_dict()
    model = TransformersModel(transformers_spec(config), config, Mesh.solo(), kernels)
    model.materialize(torch.device("cpu"))
    return model


def _step(model: StagedModel) -> dict[str, Tensor]:
    """The loss and every gradient, of weights that are drawn by name."""
    for i, (_, parameter) in enumerate(sorted(model.named_parameters())):
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(i))
    for name, buffer in model.named_buffers():
        if name.endswith(("act_fn.beta", "act_fn.eps")):
            buffer.fill_(0.5 if name.endswith("beta") else -1e-6)
    loss = model(MicroBatch.of(make_batch()), objective)
    assert isinstance(loss, Loss)
    loss.total.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.total.detach(), **grads}


@pytest.mark.parametrize(
    ("make", "name", "used"),
    [
        (
            _native,
            "qwen3_window",
            {"npu_fusion_attention", "npu_rms_norm", "npu_rotary_mul", "npu_swiglu"},
        ),
        (_native, "apertus", {"npu_fusion_attention", "npu_rms_norm", "npu_rotary_mul"}),
        (_foreign, "gemma3", {"npu_fusion_attention"}),
    ],
)
def test_whole_model(
    make: Callable[[str, KernelSet], StagedModel], name: str, used: set[str]
) -> None:
    ops = StandIn()
    ours = _step(make(name, npu_kernels(ops, torch.device("cpu"))))
    assert set(ops.calls) == used
    assert_all_close(ours, _step(make(name, KernelSet())), MODEL_FP32)


def test_describe_names_the_chosen() -> None:
    found = npu_kernels(StandIn(), torch.device("cpu")).describe()
    assert found["attention"] == found["grouped_mm"] == "npu"
    assert found["logits"] == "reference"


@pytest.mark.parametrize(
    "call",
    [
        lambda ops, x: ops.npu_rms_norm(x, x[0], eps=1e-6),  # the name is epsilon
        lambda ops, x: ops.npu_rms_norm(x, x[0].double()),
        lambda ops, x: ops.npu_swiglu(x, "last"),
        lambda ops, x: ops.npu_rotary_mul(x, x, x),  # three dims short
        lambda ops, x: ops.npu_fusion_attention(
            x[:, None], x[:, None], x[:, None], 1, "TND", window=3
        ),
        lambda ops, x: ops.npu_grouped_matmul(x, [x]),
        lambda ops, x: ops.npu_no_such_operation(x),
    ],
)
def test_the_stand_in_refuses_wrong_calls(call: Callable[[StandIn, Tensor], object]) -> None:
    with pytest.raises((RuntimeError, TypeError, AssertionError, AttributeError, ValueError)):
        call(StandIn(), torch.randn(4, 8))


def test_signatures_are_read_from_a_wheel(tmp_path: Path) -> None:
    """From a file laid out as the real one, schemas and backward nodes come back as committed."""
    wheel = tmp_path / "torch_npu-9.9.9-cp311-cp311-any.whl"
    schemas = [schema for found in SIGNATURES.values() for schema in found["schemas"]]
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(
            FUNCTIONS, "".join(f"- func: {schema}\n  impl_ns: op_api\n" for schema in schemas)
        )
        file.writestr(DOCUMENTS, json.dumps(OPERATIONS))
        nodes = [
            "FusionAttention",
            "MoeTokenPermute",
            "MoeTokenUnpermute",
            "RmsNorm",
            "RotaryMul",
            "Swiglu",
        ]
        file.writestr(LIBRARY, "\0".join(f"Npu{node}Backward0" for node in nodes))
    assert read_wheel(wheel) == {"torch_npu": "9.9.9", "operations": SIGNATURES}
    with zipfile.ZipFile(wheel, "a") as file, pytest.warns(UserWarning, match="Duplicate"):
        file.writestr(FUNCTIONS, "")
    with pytest.raises(KeyError, match="has no npu_fusion_attention"):
        read_wheel(wheel)
