"""Values and gradients of TRL's preference losses on random logits: its trainers' own code. One JSON line.

Models are stand-ins that return fixed logits, or what TRL's fused head computes from them.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from tests.helpers.preference_numbers import (
    CHOSEN,
    KL,
    LABELS,
    PROMPTS,
    REJECTED,
    TRL_PREFERENCES,
    random_logits,
)

IGNORED = -100
ACCELERATOR = SimpleNamespace(
    device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x, num_processes=1
)


def padded(rows: list[list[int]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def columns(rows: tuple[list[int], ...]) -> dict[str, Tensor]:
    ids = padded([*rows])
    attention = padded([[1] * len(row) for row in rows])
    completion = padded(
        [[0] * n + [1] * (len(row) - n) for row, n in zip(rows, PROMPTS * 2, strict=False)]
    )
    return {"input_ids": ids, "attention_mask": attention, "completion_mask": completion}


def head(logits: Tensor, labels: Tensor) -> SimpleNamespace:
    """What TRL's models return with `fused_lm_head`: of the next labels, 0 where they are ignored."""
    shifted = labels[:, 1:]
    table = logits[:, :-1].log_softmax(-1)
    chosen = table.gather(-1, shifted.clamp(min=0)[..., None])[..., 0]
    kept = chosen * (shifted != IGNORED)
    zeros = torch.zeros_like(kept)
    return SimpleNamespace(log_probs=kept, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


def trainer(**keys: Any) -> SimpleNamespace:
    metrics: dict[str, Any] = defaultdict(lambda: defaultdict(list))
    return SimpleNamespace(
        accelerator=ACCELERATOR,
        _metrics=metrics,
        _total_train_tokens=0,
        _tp_size=1,
        aux_loss_enabled=False,
        **keys,
    )


def dpo(logits: Tensor, keys: Mapping[str, Any]) -> Tensor:
    reference = random_logits(4)
    own = trainer(
        model=SimpleNamespace(training=True), ld_alpha=None, f_divergence_type="reverse_kl", loss_weights=[1.0],
        beta=keys["beta"], label_smoothing=keys.get("label_smoothing", 0.0), use_weighting=False, precompute_ref_logps=True,
        loss_types=[keys.get("loss_type", "sigmoid")],
    )  # fmt: skip
    inputs = columns((*CHOSEN, *REJECTED))
    labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, IGNORED)
    chosen, rejected = head(reference, labels).log_probs.sum(1).chunk(2)
    inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    loss: Tensor = DPOTrainer._compute_loss(
        own, lambda labels, **_: head(logits, labels), inputs, False
    )
    return loss


def kto(logits: Tensor, keys: Mapping[str, Any]) -> Tensor:
    own = trainer(
        model=SimpleNamespace(training=True), precompute_ref_logps=True, calculate_KL=True, loss_type="kto",
        _compute_kl_logps=lambda *_: torch.full((2,), KL, dtype=torch.float64), **keys,
    )  # fmt: skip
    inputs = columns((*CHOSEN, *REJECTED))
    labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, IGNORED)
    reference = head(random_logits(4), labels).log_probs.sum(1)
    marks = torch.tensor(LABELS)
    inputs |= {
        "label": marks,
        "ref_logps": reference,
        "ref_KL_logps": torch.zeros(2, dtype=torch.float64),
    }
    loss: Tensor = KTOTrainer._compute_loss(
        own, lambda labels, **_: head(logits, labels), inputs, False
    )
    return loss


def without_reference(kind: Any, logits: Tensor, keys: Mapping[str, Any]) -> Tensor:
    def forward(model: Any, batch: Any) -> Any:
        return kind.concatenated_forward(own, model, batch)

    defaults = {
        "loss_type": "sigmoid",
        "cpo_alpha": 1.0,
        "label_smoothing": 0.0,
        "simpo_gamma": 0.5,
        "alpha": 0.0,
    }
    own = trainer(
        concatenated_inputs=kind.concatenated_inputs, get_batch_logps=kind.get_batch_logps, is_encoder_decoder=False,
        concatenated_forward=forward, pad_token_id=0, padding_value=0, **{**defaults, **keys},
    )  # fmt: skip
    for name in {"cpo_loss", "odds_ratio_loss"} & vars(kind).keys():
        setattr(own, name, partial(vars(kind)[name], own))
    batch: dict[str, Tensor] = {}
    for name, rows in (("chosen", CHOSEN), ("rejected", REJECTED)):
        inputs = columns(rows)
        batch |= {
            f"{name}_{key}": value for key, value in inputs.items() if key != "completion_mask"
        }
        batch[f"{name}_labels"] = inputs["input_ids"].masked_fill(
            inputs["completion_mask"] == 0, IGNORED
        )
    loss, _ = kind.get_batch_loss_metrics(
        own, lambda *_, **__: SimpleNamespace(logits=logits), batch
    )
    return torch.as_tensor(loss)


def reward(logits: Tensor, keys: Mapping[str, Any]) -> Tensor:
    own = trainer(model=SimpleNamespace(training=True), args=SimpleNamespace(**keys))
    scores = SimpleNamespace(logits=logits[:, 0, :1])
    inputs = {"attention_mask": torch.ones(1)}
    loss: Tensor = RewardTrainer.compute_loss(own, lambda **_: scores, inputs)
    return loss


LOSSES: Mapping[str, Callable[[Tensor, Mapping[str, Any]], Tensor]] = {
    "dpo": dpo,
    "kto": kto,
    "cpo": lambda logits, keys: without_reference(CPOTrainer, logits, keys),
    "orpo": lambda logits, keys: without_reference(ORPOTrainer, logits, keys),
    "reward": reward,
}


def value_and_gradient(name: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    logits = random_logits().requires_grad_()
    loss = LOSSES[name](logits, keys)
    (gradient,) = torch.autograd.grad(loss, logits)
    return {"loss": float(loss.detach()), "gradient": gradient.flatten().tolist()}


if __name__ == "__main__":
    found = {n: value_and_gradient(kind, keys) for n, (kind, keys, _) in TRL_PREFERENCES.items()}
    print(json.dumps(found))  # noqa: T201
