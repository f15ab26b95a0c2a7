"""Distillation in the head on a CUDA device: row kernels against float64, memory, and no waiting for the host."""

import pytest
import torch

from bench.distillation_head import ALLOWED_MEMORY, GIB, Work, error_of, extra_gib, ours, plain_head
from dovetail.kernels.divergence import Kind
from tests.helpers.divergence_rows import measure
from tests.helpers.tolerances import OP_BF16, OP_FP32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOKENS, WIDTHS, VOCAB = 4096, (896, 1536), 151936


def work(beta: float) -> Work:
    made = Work.random(TOKENS, WIDTHS, VOCAB, 2048, torch.device("cuda"))
    return Work(made.x, made.weight, made.teacher, made.batch, made.kernels, beta)


def test_row_kernels_equal_the_reference() -> None:
    for case, errors in measure("cuda").items():
        for what, error in errors.items():
            assert error <= (OP_BF16 if "bfloat16" in what else OP_FP32), (case, what)


@pytest.mark.parametrize(("kind", "beta"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.3)])
def test_gradients_and_memory(kind: Kind, beta: float) -> None:
    given = work(beta)
    assert error_of(given, ours(given, kind, 0)[0]) <= 2 * OP_BF16
    chunk = 4 * 2048 * VOCAB / GIB
    assert (
        extra_gib(given, lambda: ours(given, kind, 0))
        <= ALLOWED_MEMORY * extra_gib(given, lambda: plain_head(given)) + chunk
    )


@pytest.mark.parametrize("top_k", [0, 64])
def test_the_host_does_not_wait(top_k: int) -> None:
    given = work(0.5)
    ours(given, "jsd", top_k)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours(given, "jsd", top_k)
    finally:
        torch.cuda.set_sync_debug_mode("default")
