"""Numbers of transformers' models in our engine."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    PreTrainedModel,
)

from dovetail.batch.packed import PackedBatch
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.hf.names import Names
from dovetail.nn.activation_checkpoint import Recompute
from dovetail.parallel.layout import Layout
from tests.helpers.parity_reference import (
    GRAD,
    make_batch,
    objective,
    read_reference,
    value_objective,
)
from tests.helpers.probe import PROBE, gradients
from tests.helpers.tolerances import (
    GRAD_RATIO_FP32,
    MODEL_FP32,
    max_abs,
    worst_error,
    worst_ratio,
)

BUDGET = 80


def figures(
    folder: str,
    layout: Layout,
    recompute: Recompute = "none",
    make: Callable[[], PackedBatch] = make_batch,
    budget: int = BUDGET,
) -> dict[str, float]:
    """How far one model on one layout is from its reference."""
    outputs, grads = read_reference(Path(folder))
    values = "values" in outputs
    options = EngineOptions(
        optim=PROBE, tokens_per_batch=budget, engine="transformers", recompute=recompute
    )
    path = Path(folder) / "model"
    engine = from_pretrained(
        path, layout=layout, head="value" if values else "lm", device="cpu", options=options
    )
    batch = make()
    found = {"values": engine.values(batch)} if values else engine.score(batch)._asdict()
    output = max(
        max_abs((x - outputs[name]) / outputs[name].abs().clamp(min=1.0))
        for name, x in found.items()
    )
    engine.train_step(batch, value_objective if values else objective)
    mine, stray = gradients(engine)
    streamed, stored = dict(engine.weights()), load_file(path / "model.safetensors")
    equal = streamed.keys() == stored.keys() and all(
        torch.equal(streamed[name], x) for name, x in stored.items()
    )
    trained = {name: mine[name] for name in grads}
    return {
        "output": output,
        "grad": worst_error(trained, grads)[0],
        "ratio": worst_ratio(trained, grads)[0],
        "stray": stray,
        "bytes": 0.0 if equal else 1.0,
    }


def as_stored(model: PreTrainedModel, folder: Path) -> None:
    """Call gradients of the reference by the names that the checkpoint lists."""
    names, stored = Names(model), load_file(folder / "model/model.safetensors")
    listed = {names.in_module(name): name for name in stored}
    found = {}
    for name, tensor in load_file(folder / "expected.safetensors").items():
        own = name.removeprefix(GRAD)
        found[name if name == own else GRAD + listed.get(own, own)] = tensor
    save_file(found, folder / "expected.safetensors")


def check(found: dict[str, float]) -> None:
    assert found["output"] <= MODEL_FP32, found
    assert found["grad"] <= MODEL_FP32, found
    assert found["ratio"] <= GRAD_RATIO_FP32, found
    assert found["stray"] == found["bytes"] == 0.0, found
