"""Values and gradients of TRL's GRPO losses on random numbers: its trainer's own `_compute_loss`. One JSON line.

Its weights for vLLM's log-probs are the lines of its `_generate_and_score_completions` that compute them.
"""

import inspect
import json
import math
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from tests.helpers.loss_numbers import LENGTHS, LONGEST, TRL_LOSSES, random_numbers


def padded(columns: Tensor) -> Tensor:
    """[rows, LONGEST] of packed numbers."""
    return torch.nn.utils.rnn.pad_sequence(list(columns.split(LENGTHS)), batch_first=True)


def weights_for_vllm(
    trainer: SimpleNamespace, old: Tensor, sampling: Tensor, mask: Tensor
) -> Tensor:
    source = textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions))
    start = source.index(
        "if self.use_vllm and self.vllm_importance_sampling_correction:\n            mask ="
    )
    lines = source[start:].splitlines()
    inside = lines[1 : next(i for i, line in enumerate(lines) if "reference model" in line)]
    names = {
        "self": trainer, "old_per_token_logps": old, "sampling_per_token_logps": sampling, "completion_mask": mask,
        "tool_mask": None, "torch": torch, "math": math,
    }  # fmt: skip
    exec(textwrap.dedent("\n".join(inside)), names)
    weights = names["vllm_importance_sampling_ratio"]
    assert isinstance(weights, Tensor)
    return weights


def value_and_gradient(settings: Mapping[str, Any]) -> dict[str, Any]:
    numbers = random_numbers()
    logprob = padded(numbers["logprob"]).requires_grad_()
    mask = padded(torch.ones(sum(LENGTHS)))
    keys = {"delta": None, "beta": 0.0, "epsilon": 0.2, "epsilon_high": 0.2, **settings}
    args = SimpleNamespace(
        delta=keys["delta"], use_bias_correction_kl=False, steps_per_generation=1,
        sapo_temperature_pos=keys.get("sapo_temperature_pos", 1.0), sapo_temperature_neg=keys.get("sapo_temperature_neg", 1.05),
    )  # fmt: skip
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, **_: x
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprob, padded(numbers["entropy"]), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, args=args, accelerator=accelerator,
        importance_sampling_level=keys.get("importance_sampling_level", "token"), beta=keys["beta"],
        loss_type=keys["loss_type"], epsilon_low=keys["epsilon"], epsilon_high=keys["epsilon_high"], use_vllm="mode" in keys,
        vllm_importance_sampling_correction=True, vllm_importance_sampling_mode=keys.get("mode"),
        vllm_importance_sampling_clip_min=keys.get("clip_min"), vllm_importance_sampling_clip_max=keys.get("clip_max"),
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1, max_completion_length=LONGEST,
        _entropy_bonus_enabled=False, _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip
    ids = torch.zeros(len(LENGTHS), LONGEST, dtype=torch.int64)
    firsts = torch.tensor([sum(LENGTHS[:i]) for i in range(len(LENGTHS))])
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask,
        "advantages": numbers["advantage"][firsts], "old_per_token_logps": padded(numbers["old_logprob"]),
        "ref_per_token_logps": padded(numbers["reference_logprob"]), "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    if "mode" in keys:
        sampling = padded(numbers["rollout_logprob"])
        inputs["importance_sampling_ratio"] = weights_for_vllm(
            trainer, inputs["old_per_token_logps"], sampling, mask
        )
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    (gradient,) = torch.autograd.grad(loss, logprob)
    return {"loss": float(loss.detach()), "gradient": gradient[mask.bool()].tolist()}


if __name__ == "__main__":
    found = {name: value_and_gradient(theirs) for name, (theirs, _) in TRL_LOSSES.items()}
    print(json.dumps(found))  # noqa: T201
