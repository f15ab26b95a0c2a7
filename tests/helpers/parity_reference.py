"""What transformers computes for the tiny models, once, in files that every rank reads: outputs and every gradient.

Sequences are ragged: single tokens side by side, one longer than every window and than the dynamic limit, and masks
with holes; every token has its own temperature. The objective depends on both statistics, and on their values:
mean of w0 logprob + w1 entropy + logprob^2 / 20 over the counted tokens (a critic's: of (value - w0)^2 / 2).
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from dovetail.batch.loss import Loss, TokenStats
from dovetail.batch.packed import PackedBatch
from tests.helpers.parity_configs import MAX_POSITIONS, VOCAB, moe_configs, tiny_configs, tiny_model

LENGTHS = (9, 1, 1, MAX_POSITIONS + 6, 3, 12, 1)
HOLES = (4, 5, 20)  # packed positions that are attended to and predicted, but not counted
GRAD = "grad."


def write_reference(
    name: str, folder: Path, *, values: bool = False, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a tiny model and, beside it, what transformers makes of it in `dtype`: `model/`, `expected.safetensors`."""
    model = tiny_model((tiny_configs() | moe_configs())[name], values=values)
    model.save_pretrained(folder / "model")
    model.to(dtype)
    return write_outputs(model, folder, dtype)


def write_outputs(model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write what transformers makes of the batch beside a model that is there already."""
    batch = make_batch(dtype)
    found = outputs_of(
        model, torch.cat([model(row[None]).logits[0] for row in rows_of(batch)]), batch
    )
    save_file(
        {key: tensor.detach().contiguous() for key, tensor in found.items()},
        folder / "expected.safetensors",
    )
    return folder


def read_reference(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(outputs, gradients by name) that `write_reference` wrote."""
    found = load_file(folder / "expected.safetensors")
    grads = {
        name.removeprefix(GRAD): tensor for name, tensor in found.items() if name.startswith(GRAD)
    }
    return {name: tensor for name, tensor in found.items() if not name.startswith(GRAD)}, grads


def make_batch(dtype: torch.dtype = torch.float32) -> PackedBatch:
    """The batch of all references, with temperatures and the weights of the objective as fields w0 and w1."""
    draw = torch.Generator().manual_seed(1)
    batch = PackedBatch.pack([torch.randint(VOCAB, (n,), generator=draw) for n in LENGTHS])
    mask = batch.mask.clone()
    mask[list(HOLES)] = False
    w0, w1 = torch.randn(2, len(batch), generator=draw).to(dtype)
    temperature = (0.5 + torch.rand(len(batch), generator=draw)).to(dtype)
    return batch.with_mask(mask).with_fields(w0=w0, w1=w1, temperature=temperature)


def rows_of(batch: PackedBatch) -> list[Tensor]:
    """The tokens of each sequence."""
    return list(batch.tokens.split(list(batch.lengths)))


def objective(stats: TokenStats, batch: PackedBatch) -> Loss:
    """The objective of the counted tokens. Sequences are whole, unless it is called through `Separable`."""
    w0, w1 = batch.fields["w0"], batch.fields["w1"]
    return Loss(
        (w0 * stats.logprob + w1 * stats.entropy + stats.logprob**2 / 20).sum(), batch.mask.sum()
    )


def value_objective(values: Tensor, batch: PackedBatch) -> Loss:
    """The critic's objective of the counted tokens."""
    return Loss(((values - batch.fields["w0"]) ** 2 / 2).sum(), batch.mask.sum())


class Separable:
    """`objective`, declared to be a sum over tokens."""

    separable = True

    def __call__(self, stats: TokenStats, batch: PackedBatch) -> Loss:
        return objective(stats, batch)


def outputs_of(model: nn.Module, logits: Tensor, batch: PackedBatch) -> dict[str, Tensor]:
    """Statistics, loss and gradients of the logits [T, V] that transformers made, each sequence by itself."""
    keep = batch.mask
    if logits.shape[-1] == 1:
        outputs = {"values": logits[:, 0]}
        loss = value_objective(logits[keep, 0], batch.compact(keep.nonzero()[:, 0]))
    else:
        logprobs = (logits / batch.fields["temperature"][:, None]).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        stats = TokenStats(logprobs.gather(-1, batch.targets[:, None])[:, 0] * keep, entropy * keep)
        outputs = stats._asdict()
        loss = objective(
            TokenStats(stats.logprob[keep], stats.entropy[keep]),
            batch.compact(keep.nonzero()[:, 0]),
        )
    (loss.total / loss.count).backward()
    grads = {GRAD + name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**outputs, "loss": (loss.total / loss.count).reshape(1), **grads}
