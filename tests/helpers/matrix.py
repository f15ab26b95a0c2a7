"""The proof harness: a case (model, layout, batch, loss, accumulation) computed on its layout is what one rank computes.

Compared in float64 are log-probs and entropies, or values; loss and metrics; the global gradient norm; every parameter's
gradient; and the parameters after the step. With beta1 = 0 AdamW's first moment is the clipped gradient itself, so one
real `train_step` shows all of it. The first rank's results stand in a file that the ranks of all layouts read.
"""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from dovetail.arch.spec import ArchSpec
from dovetail.batch.packed import PackedBatch
from dovetail.engine.expert_routing import BalanceSettings
from dovetail.engine.native import Engine
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.nn.activation_checkpoint import Recompute
from dovetail.optim.optimizer import OptimSettings
from dovetail.parallel.layout import Layout
from dovetail.rl.algorithms.ppo import ValueLoss
from dovetail.rl.algorithms.sft import SFTLoss
from dovetail.rl.correction import importance_weights
from dovetail.rl.losses import PolicyLoss, weight_fields
from tests.helpers.parity_configs import VOCAB, Configs, tiny_model
from tests.helpers.probe import gradients, parameters
from tests.helpers.tolerances import tensor_error, worst_error, worst_ratio

DEPTH = 9  # no pp divides it
SHALLOW = 5  # layers for up to four stages: every kind that a model has comes, windows come again, 2 and 4 divide it no more
FLAT = 2  # layers of a dense model for one stage: nobody deals them out, and either kind comes
STEP = OptimSettings(lr=1e-3, betas=(0.0, 0.95), eps=1e-4, weight_decay=0.1, clip_norm=0.05)
NO_CRITIC = "deepseek_v2"
BALANCE = BalanceSettings(
    aux_coef=0.3, z_coef=0.1, bias_rate=0.01
)  # of experts, where there are any

RECIPES = {
    "ragged": (7, 1, 19, 2, 1, 33, 5, 11, 1),
    "ones": (1, 1, 1, 1, 2),  # all but nothing to predict, and fewer counted tokens than ranks
    "giant": (61,),  # one sequence: all replicas but one are empty
    "few": (4, 13, 3),
}
ALIKE = (
    6,
    6,
    6,
    6,
    6,
    6,
)  # the recipe "alike", not of the matrix: no shape tells its micro-batches apart
LOSSES: dict[str, Any] = {
    "sft": SFTLoss(),
    "grpo": PolicyLoss(clip_high=0.28, kl_coef=0.05, kl_estimator="k3"),
    "ppo": PolicyLoss(dual_clip=3.0, entropy_coef=0.01, kl_coef=0.1, kl_estimator="k2"),
    "gspo": PolicyLoss(clip_low=0.03, clip_high=0.04, ratio="sequence"),
    "value": ValueLoss(clip=0.1),
}
AGGREGATIONS = {
    "sft": "token",
    "grpo": "sequence",
    "ppo": "token",
    "gspo": "sequence",
    "value": "token",
}


@dataclass(frozen=True)
class Case:
    """What is computed. `accumulation`: least number of micro-batches that a replica's tokens are cut into, about.
    `in_turns`: halves of them in turns; `recompute`: as in `EngineOptions`."""

    model: str
    recipe: str = "ragged"
    loss: str = "grpo"
    accumulation: int = 1
    in_turns: bool = False
    recompute: Recompute = "none"
    depth: int = DEPTH

    def __str__(self) -> str:
        return f"{self.model}-{self.recipe}-{self.loss}-{self.accumulation}"

    def on(self, layout: Layout) -> "Case":
        """The same with few layers, unless there are many stages, or a split of nine by hand."""
        stages = layout.pp * layout.virtual_stages
        if stages > 4 or layout.pp_split != "auto":
            return self
        return replace(self, depth=FLAT if stages == 1 and self.model in models() else SHALLOW)

    @property
    def alone(self) -> "Case":
        """The case whose result on one rank this one is compared with."""
        return replace(self, accumulation=1, in_turns=False, recompute="none")


@dataclass(frozen=True)
class Figures:
    """How far a case on a layout is from one rank: tensor errors as tests/helpers/tolerances.py defines them."""

    output: float
    loss: float
    norm: float
    grad: float
    ratio: float
    trained: float
    stray: float  # between ranks that hold the same piece

    @property
    def worst(self) -> float:
        return max(self.output, self.loss, self.norm, self.grad, self.trained)


def models(depth: int = DEPTH) -> Configs:
    """So many layers each: all families, biases, tied tables, windows, KV heads that are shared, copied and odd in number."""
    mixed = ["full_attention" if i % 3 else "sliding_attention" for i in range(depth)]
    tiny: Any = partial(partial, _tiny, depth)
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    return Configs(
        {
            "llama": tiny(LlamaConfig, attention_bias=True, mlp_bias=True),
            "llama_dynamic": tiny(
                LlamaConfig,
                max_position_embeddings=16,
                rope_parameters=dynamic,
                num_key_value_heads=8,
            ),
            "llama_odd": tiny(
                LlamaConfig,
                hidden_size=36,
                num_attention_heads=12,
                num_key_value_heads=6,
                head_dim=4,
            ),
            "mistral": tiny(MistralConfig, sliding_window=5, num_key_value_heads=1),
            "qwen2_tied": tiny(Qwen2Config, tie_word_embeddings=True),
            "qwen3": tiny(Qwen3Config, head_dim=8, num_key_value_heads=4),
            "qwen3_window": tiny(
                Qwen3Config,
                head_dim=8,
                use_sliding_window=True,
                sliding_window=5,
                layer_types=mixed,
                tie_word_embeddings=True,
            ),
        }
    )


def expert_models(depth: int = DEPTH) -> Configs:
    """So many layers each, all families with experts: dense layers between, tied tables, groups, biases of routing, windows."""
    tiny: Any = partial(partial, _tiny, depth)
    latent = {
        "num_key_value_heads": 8,
        "n_routed_experts": 16,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 8,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
        "n_group": 4,
        "topk_group": 2,
    }
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    dense = {
        "mlp_only_layers": [3],
        "decoder_sparse_step": 2,
        "shared_expert_intermediate_size": 16,
    }
    return Configs(
        {
            "qwen3_moe": tiny(
                Qwen3MoeConfig, **experts, head_dim=8, num_key_value_heads=4, norm_topk_prob=True
            ),
            "qwen2_moe": tiny(Qwen2MoeConfig, **experts, **dense, tie_word_embeddings=True),
            "mixtral": tiny(
                MixtralConfig, num_local_experts=4, num_experts_per_tok=2, sliding_window=5
            ),
            "deepseek_v2": tiny(
                DeepseekV2Config,
                **latent,
                q_lora_rank=10,
                first_k_dense_replace=0,
                topk_method="group_limited_greedy",
            ),
            "deepseek_v3": tiny(
                DeepseekV3Config,
                **latent,
                q_lora_rank=None,
                first_k_dense_replace=2,
                attention_bias=True,
            ),
        }
    )


def layouts(ranks: int, *, virtual: bool = True) -> list[Layout]:
    """All factorizations of a number of ranks over tp x pp x cp x dp, each pp also with two stages a rank and split."""
    found = []
    for tp, pp, cp, dp in product(*[[1, 2, 4, 8]] * 4):
        if tp * pp * cp * dp == ranks:
            plain = Layout(tp=tp, pp=pp, cp=cp, dp=dp)
            found.append(plain)
            if pp > 1 and virtual:
                found.append(replace(plain, schedule="zero_bubble"))
            if 1 < pp <= DEPTH // 2 and virtual:
                found.append(replace(plain, virtual_stages=2, schedule="interleaved"))
    return found


def name_of(layout: Layout) -> str:
    """A layout as a test's name."""
    extras = [layout.schedule] * (layout.schedule != "1f1b") + [layout.cp_mode] * (
        layout.cp_mode != "auto"
    )
    extras += [f"v={layout.virtual_stages}"] * (layout.virtual_stages > 1)
    extras += ["split=" + "+".join(map(str, layout.pp_split))] * (layout.pp_split != "auto")
    return ",".join([str(layout), *extras])


def write_models(folder: Path, names: Iterable[str], depth: int = DEPTH) -> None:
    """Random checkpoints; a critic's lies beside its policy's, where transformers has one of the family."""
    known = models(depth) | expert_models(depth)
    for name in names:
        for values in (False, True) if name != NO_CRITIC else (False,):
            tiny_model(known[name], values=values).save_pretrained(
                path_of(folder, name, depth, values=values)
            )


def path_of(folder: Path | str, name: str, depth: int, *, values: bool = False) -> Path:
    """Where `write_models` writes a policy, or a critic."""
    return (
        Path(folder)
        / (name if depth == DEPTH else f"{name}-{depth}")
        / ("value" if values else "lm")
    )


def write_alone(folder: str, cases: Iterable[Case]) -> None:
    """What one rank gives for each case, all tokens at once, as files."""
    for case in cases:
        torch.save(compute(folder, case, Layout())[0], _file(folder, case))


def compare(folder: str, layout: Layout, cases: Iterable[Case]) -> dict[Case, Figures]:
    """Each case on a layout against its file."""
    return {
        case: figures_of(
            *compute(folder, case, layout),
            torch.load(_file(folder, case.alone), weights_only=False),
        )
        for case in cases
    }


def compute(
    folder: str, case: Case, layout: Layout, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, Any], float]:
    """Everything that a case shows, and by how much ranks disagree on what several of them hold."""
    batch = make_batch(case, dtype)
    return measure(_engine(folder, case, layout, batch, dtype), batch, case.loss)


def measure(engine: Engine, batch: PackedBatch, loss_name: str) -> tuple[dict[str, Any], float]:
    """What an engine made with `STEP` shows of one step by one of `LOSSES`, and by how much its ranks disagree."""
    loss = LOSSES[loss_name]
    outputs = [engine.values(batch)] if loss_name == "value" else list(engine.score(batch))
    report = engine.train_step(batch, loss)
    grads, stray = gradients(engine)
    trained, drift = parameters(engine)
    numbers = {"loss": report.loss, **report.metrics}
    if (
        isinstance(engine.model.spec, ArchSpec) and engine.model.spec.moe is not None
    ):  # what no gradient moves
        trained |= {
            name: x
            for name, x in engine.weights(torch.float64)
            if name.endswith("e_score_correction_bias")
        }
    found = {
        "outputs": outputs,
        "numbers": numbers,
        "norm": report.grad_norm,
        "grads": grads,
        "trained": trained,
    }
    return found, max(stray, drift)


def step_error(folder: str, case: Case) -> float:
    """How far one rank's step is from AdamW's formula (Loshchilov & Hutter 2019, algorithm 2), given its own gradients.

    What all layouts could have wrong alike: vectors (norms, biases) are not decayed, matrices are.
    """
    found, _ = compute(folder, case, Layout())
    expected = {}
    for name, before in load_file(Path(folder) / case.model / "lm" / "model.safetensors").items():
        grad, weight = found["grads"][name], before.to(found["grads"][name].dtype)
        decay = STEP.lr * STEP.weight_decay * (weight.dim() > 1)
        expected[name] = weight * (1 - decay) - STEP.lr * grad / (
            grad.abs() + STEP.eps
        )  # at the first step v = g^2
    return worst_error(found["trained"], expected)[0]


def make_batch(case: Case, dtype: torch.dtype) -> PackedBatch:
    """The batch of a case."""
    return random_batch({**RECIPES, "alike": ALIKE}[case.recipe], case.loss, dtype)


def random_batch(
    lengths: Sequence[int], loss_name: str, dtype: torch.dtype, vocab: int = VOCAB
) -> PackedBatch:
    """Random sequences, with a mask that has holes and every field that the losses read."""
    draw = torch.Generator().manual_seed(3)
    batch = PackedBatch.pack([torch.randint(vocab, (n,), generator=draw) for n in lengths])
    mask = batch.mask & (torch.rand(len(batch), generator=draw) < 0.8)
    random = partial(torch.randn, len(batch), generator=draw, dtype=torch.float64)
    near = -4.9 + 0.02 * random()  # of log-probs over VOCAB: ratios on both sides of every clip
    fields = {
        "temperature": 0.5 + torch.rand(len(batch), generator=draw, dtype=torch.float64),
        "advantage": random(),
        "old_logprob": near,
        "reference_logprob": near + 0.1 * random(),
        "old_value": random(),
        "return": random(),
        "rollout_logprob": near + 0.1 * random(),
    }
    batch = batch.with_mask(mask).with_fields(**{name: x.to(dtype) for name, x in fields.items()})
    weights = importance_weights(batch, ratio="sequence", bounds=(0.6, 1.5))
    batch = batch.with_fields(rollout_weight=weights.token)
    aggregation: Any = AGGREGATIONS[loss_name]
    return batch.with_fields(**weight_fields(batch, aggregation))


def _engine(
    folder: str, case: Case, layout: Layout, batch: PackedBatch, dtype: torch.dtype
) -> Engine:
    budget = None
    if case.accumulation > 1:
        multiple = layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
        share = len(batch) // ((layout.dp or 1) * case.accumulation)
        budget = -(-max(share, *batch.lengths) // multiple) * multiple
    values = case.loss == "value"
    options = EngineOptions(
        optim=STEP,
        tokens_per_batch=budget,
        balance=BALANCE,
        dual_batch=case.in_turns,
        recompute=case.recompute,
    )
    path = path_of(folder, case.model, case.depth, values=values)
    head: Any = "value" if values else "lm"
    return from_pretrained(
        path, layout=layout, dtype=dtype, head=head, device="cpu", options=options
    )


def figures_of(found: dict[str, Any], stray: float, expected: dict[str, Any]) -> Figures:
    """How far what `measure` found is from what it found on one rank."""
    numbers = [
        abs(found["numbers"][key] - x) / max(1.0, abs(x))
        for key, x in expected["numbers"].items()
        if x == x
    ]
    outputs = [
        tensor_error(a, b) for a, b in zip(found["outputs"], expected["outputs"], strict=True)
    ]
    norm = expected["norm"]
    return Figures(
        output=max(outputs),
        loss=max(numbers, default=0.0),
        norm=abs(found["norm"] - norm) / norm if norm else abs(found["norm"]),
        grad=worst_error(found["grads"], expected["grads"])[0],
        ratio=worst_ratio(found["grads"], expected["grads"])[0],
        trained=worst_error(found["trained"], expected["trained"])[0],
        stray=stray,
    )


def _file(folder: str, case: Case) -> Path:
    return Path(folder) / f"{case}-{case.depth}.pt"


def written(folder: Path, case: Case) -> bool:
    """Whether one rank has computed the case."""
    return _file(str(folder), case).exists()


def _tiny(depth: int, kind: type[PreTrainedConfig], **options: Any) -> PreTrainedConfig:
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": depth,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return kind(**{**shape, **deepcopy(options)})
