"""Gradients of the head at large logits: the error of its row kernels against torch's log_softmax in float64."""

from collections.abc import Callable

import torch
from torch import Tensor

from dovetail.nn.heads import combine
from tests.helpers.tolerances import tensor_error

DEVIATIONS, TEMPERATURES = (1.0, 30.0, 100.0, 300.0), (0.1, 0.7, 1.0, 5.0)
ROWS, COLUMNS, CUTS = 4, 1501, (500, 1001)


def gradient_errors(
    vocab_stats: Callable[..., Tensor],
    vocab_grad_: Callable[..., Tensor],
    device: str = "cpu",
    stride: int = 1,
) -> dict[str, float]:
    """Case -> the gradient's error. The vocabulary is cut in three, as by tp=3. stride: between temperatures of a deviation."""
    result = {}
    for number, deviation in enumerate(DEVIATIONS):
        for temperature in TEMPERATURES[number % stride :: stride]:
            z, targets = _logits(deviation, temperature, device)
            tau = torch.full((ROWS,), temperature, device=device)
            g = torch.linspace(-1.0, 2.0, ROWS, device=device)
            for h in (None, torch.linspace(0.5, -0.5, ROWS, device=device)):
                exact = _by_torch(z.double(), targets, tau.double(), g, h)
                ends = list(zip((0, *CUTS), (*CUTS, COLUMNS), strict=True))
                shards = [vocab_stats(z[:, a:b].contiguous(), targets - a, tau) for a, b in ends]
                _, normalizer = combine(torch.stack(shards), tau)
                parts = [
                    vocab_grad_(z[:, a:b].clone(), targets - a, normalizer, g, h, tau)
                    for a, b in ends
                ]
                name = f"deviation {deviation}, temperature {temperature}{'' if h is None else ', entropy'}"
                result[name] = tensor_error(torch.cat(parts, 1), exact)
    return result


def _logits(deviation: float, temperature: float, device: str) -> tuple[Tensor, Tensor]:
    """Rows whose three largest logits share the probability: elsewhere all gradients at large logits would be 0."""
    draw = torch.Generator().manual_seed(int(deviation))
    z = deviation * torch.randn(ROWS, COLUMNS, generator=draw)
    best, *others = z.topk(3).indices.unbind(1)
    rows = torch.arange(ROWS)
    for each, below in zip(others, (0.3, 0.9), strict=True):
        z[rows, each] = z[rows, best] - below * temperature
    targets = torch.where(rows % 2 == 0, best, others[0])
    return z.to(device), targets.to(device)


def _by_torch(z: Tensor, targets: Tensor, tau: Tensor, g: Tensor, h: Tensor | None) -> Tensor:
    z = z.clone().requires_grad_()
    logprobs = (z / tau[:, None]).log_softmax(-1)
    total = (logprobs.gather(1, targets[:, None])[:, 0] * g).sum()
    if h is not None:
        total = total - ((logprobs.exp() * logprobs).sum(-1) * h).sum()
    (grad,) = torch.autograd.grad(total, z)
    return grad
