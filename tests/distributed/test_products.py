"""Every product of a layer with its weights goes through that layer's `Products`."""

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from dovetail.engine.native import Engine
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.nn.heads import LMHead
from dovetail.nn.layers import Linear
from dovetail.nn.moe import Experts
from dovetail.nn.products import Products
from dovetail.parallel.layout import Layout
from tests.helpers.harness import run
from tests.helpers.parity_configs import moe_configs, tiny_configs, tiny_model
from tests.helpers.parity_reference import make_batch, objective
from tests.helpers.probe import PROBE, gradients, parameters
from tests.helpers.quack_stand_in import everywhere, installed
from tests.helpers.tolerances import SUM_ORDER, worst_error

# Parameters that no product has: norms, the table of embeddings, routers, biases, an activation's.
OTHERS = ("norm.weight", "embed_tokens.weight", "mlp.gate.weight", "bias", "alpha_n", "alpha_p")
CONFIGS = {**tiny_configs(), **moe_configs()}
KINDS = ("llama_biases", "apertus", "qwen2_moe", "deepseek_v3")


class Doubled(Products):
    """Products with twice the weights, and the gradients of that."""

    fused: ClassVar[bool] = False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().linear(x, 2 * weight, bias)

    def input_grad(self, dy: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        return super().input_grad(dy, 2 * weight, out)

    def add_weight_grad_(self, total: Tensor, dy: Tensor, x: Tensor, *, first: bool) -> None:
        super().add_weight_grad_(total, 2 * dy, x, first=first)

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        return super().logits(x, 2 * weight)

    def grouped(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return super().grouped(x, 2 * weight, ends)


def engine_of(folder: Path, layout: Layout) -> Engine:
    options = EngineOptions(optim=PROBE, tokens_per_batch=80)
    engine = from_pretrained(
        folder, layout=layout, dtype=torch.float64, device="cpu", options=options
    )
    assert isinstance(engine, Engine)
    return engine


def multiplied_weights(engine: Engine) -> set[str]:
    """Names of the weights that layers with `products` hold."""
    names = set()
    for layer, module in engine.model.named_modules():
        if isinstance(module, (Linear, Experts, LMHead)):
            weights = (name for name, _ in module.named_parameters(recurse=False))
            names |= {f"{layer}.{name}" for name in weights if name != "bias"}
    return names


def step(engine: Engine) -> dict[str, Tensor]:
    """The gradients of a training step, and the log-probs before it."""
    batch = make_batch(torch.float64)
    found = {"logprob": engine.score(batch).logprob}
    engine.train_step(batch, objective)
    return found | gradients(engine)[0]


def compared(folder: Path, layout: Layout) -> tuple[float, str, int, set[str]]:
    """The error of doubled products against doubled weights, its name; calls of fused kernels;
    and the parameters that were not doubled."""
    with installed() as package:
        doubled = engine_of(folder, layout)
        for module in doubled.model.modules():
            if isinstance(module, (Linear, Experts, LMHead)):
                module.products = Doubled(everywhere())
        found = step(doubled)
        calls = package.calls.total()
    plain = engine_of(folder, layout)
    before = parameters(plain)[0]
    names = multiplied_weights(plain)
    for shard in plain.optimizer.shards:
        if shard.name in names:
            shard.local.detach().mul_(2)
    after = parameters(plain)[0]
    expected = step(plain)
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    for name in before.keys() - unchanged:
        expected[name] *= 2  # of 2 W in W
    return *worst_error(found, expected), calls, unchanged


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_each_product_of_a_layer_goes_through_its_products(
    kind: str, layout: Layout, tmp_path: Path
) -> None:
    """Layers whose products are doubled equal layers with twice the weights: forward, input
    gradients (those of the embedding) and weight gradients."""
    tiny_model(CONFIGS[kind]).save_pretrained(tmp_path)
    for error, name, calls, others in run(layout.num_ranks, compared, tmp_path, layout):
        assert error <= SUM_ORDER, f"{name}: {error:.3e}"
        assert calls == 0, "kernels that fuse a product were used in place of the layer's own"
        assert all(name.endswith(OTHERS) for name in others), others
