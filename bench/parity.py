"""Compares our engine with transformers on a device, number by number: python -m bench.parity --device cuda.

Under torchrun with --layout tp=2,dp=2 the model is cut over the ranks.

float32: worst error of log-probs, entropies, values and gradients. bfloat16: the mean and 99th percentile of our error
against the float32 reference, over the same of transformers' own bfloat16 result (docs/design.md, section 6: <= 1.2).
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

import dovetail as dt
from bench.engines import layout_of, name_of
from bench.given import device as device_here, run_main
from bench.harness import RESULTS, surroundings
from dovetail.factory.engine import make_engine, make_mesh
from dovetail.parallel.collectives import gather_objects, stack_over
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import as_index
from dovetail.parallel.process_group import pick_device
from dovetail.weights.hf_directory import Pretrained

LENGTHS = (5, 300, 1, 64, 129, 17, 256, 2)
VOCAB = 4099
BOUND = 1.2  # of bfloat16 errors, ours over transformers'
FP32_BOUND = 1e-5


def configs() -> Mapping[str, Callable[[], PreTrainedConfig]]:
    """A model of every family with heads as large as real ones, small enough for seconds."""
    size = {
        "vocab_size": VOCAB,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    }
    return {
        "llama": lambda: LlamaConfig(**size),
        "mistral, window 64": lambda: MistralConfig(**size, sliding_window=64),
        "qwen2, tied": lambda: Qwen2Config(**size, tie_word_embeddings=True),
        "qwen3, head dim 128": lambda: Qwen3Config(**size, head_dim=128),
    }


def main() -> int:
    """Print one table, write one JSON, exit 1 where a bound is broken."""
    parser = argparse.ArgumentParser(prog="python -m bench.parity", description=__doc__)
    parser.add_argument("--device", type=device_here, default="cpu")
    parser.add_argument("--layout", default="")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    device = pick_device(given.device)
    dt.ensure_process_group(device)
    layout = layout_of(given.layout)
    mesh, rows = make_mesh(layout, device), []
    shared = gather_objects(tempfile.mkdtemp(), mesh["world"], device)[0]
    for name, make in configs().items():
        folder = str(Path(shared) / name.partition(",")[0])
        if dist.get_rank() == 0:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(make())
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.02 * torch.randn_like(p))
            model.save_pretrained(folder)
        dist.barrier()
        rows.append({"family": name, **_float32(folder, mesh), **_bfloat16(folder, mesh)})
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank:
        return 0
    good = all(row["float32"] <= FP32_BOUND and row["float32 grad"] <= FP32_BOUND for row in rows)
    good = good and all(max(row["bf16 mean"], row["bf16 p99"]) <= BOUND for row in rows)
    keys = list(rows[0])[1:]
    print(f"{'family':22}" + "".join(f"{key:>16}" for key in keys))
    for row in rows:
        print(f"{row['family']:22}" + "".join(f"{row[key]:16.3g}" for key in keys))
    given.out.mkdir(parents=True, exist_ok=True)
    name = "_".join(["parity", device.type, *given.layout.replace("=", "").split(",")]).rstrip("_")
    target = given.out / f"{name}.json"
    target.write_text(
        json.dumps(
            {**surroundings(), "layout": name_of(layout), "within bounds": good, "rows": rows},
            indent=1,
        )
        + "\n"
    )
    print(f"{'all within bounds' if good else 'A BOUND IS BROKEN'}; {target}")
    shutil.rmtree(shared)
    return 0 if good else 1


def _sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in LENGTHS]


def _batch() -> dt.PackedBatch:
    batch = dt.PackedBatch.pack(_sequences())
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(2, len(batch), generator=generator)
    return batch.with_fields(of_logprob=weights[0], of_entropy=weights[1])


def _objective(stats: dt.TokenStats, batch: dt.PackedBatch) -> dt.Loss:
    total = (
        batch.fields["of_logprob"] * stats.logprob + batch.fields["of_entropy"] * stats.entropy
    ).sum()
    return dt.Loss(total, batch.mask.sum(), {})


def _reference(
    folder: str, device: torch.device, dtype: torch.dtype
) -> tuple[PreTrainedModel, dt.TokenStats]:
    """transformers' statistics, sequence by sequence; its logits are widened before the softmax."""
    model = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        .to(device)
        .eval()
    )
    found = []
    for row in _sequences():
        z = model(row[None].to(device)).logits[0].to(torch.float32).log_softmax(-1)
        p = z[:-1].gather(-1, row[1:, None].to(device))[:, 0]
        h = -(z[:-1].exp() * z[:-1]).sum(-1)
        found.append((torch.cat([p, p.new_zeros(1)]), torch.cat([h, h.new_zeros(1)])))
    return model, dt.TokenStats(*(torch.cat(column) for column in zip(*found, strict=True)))


def _float32(folder: str, mesh: Mesh) -> dict[str, float]:
    """Worst |a - b| / max(1, |b|) of the statistics, and the tensor error of all gradients."""
    device = mesh.device
    model, wanted = _reference(folder, device, torch.float32)
    batch = _batch()
    # With beta1 = 0 AdamW's first moment is the gradient of the mean itself; with lr = 0 the step changes nothing.
    options = dt.EngineOptions(optim=dt.OptimSettings(lr=0.0, betas=(0.0, 0.95), clip_norm=None))
    engine = make_engine(
        Pretrained.open(folder, options.engine), mesh, torch.float32, "lm", options
    )
    got = engine.score(batch)
    error = max(
        float(((a.to(device) - b.detach()).abs() / b.detach().abs().clamp(min=1.0)).max())
        for a, b in zip(got, wanted, strict=True)
    )
    on_device = batch.to(device)
    (_objective(wanted, on_device).total / on_device.mask.sum()).backward()
    engine.train_step(batch, _objective)
    state = engine.optimizer.rule.state
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    largest = max(float(grad.abs().max()) for grad in expected.values())
    worst = 0.0
    for shard in engine.optimizer.shards:
        for region in shard.regions:
            ours = state[shard.local]["exp_avg"][as_index(region.local_slice)]
            theirs = expected[region.checkpoint_name][as_index(region.checkpoint_slice)]
            scale = max(float(expected[region.checkpoint_name].abs().max()), 0.01 * largest)
            worst = max(worst, float((ours - theirs).abs().max()) / scale)
    everywhere = stack_over(
        torch.tensor(worst, dtype=torch.float64, device=device), engine.mesh["world"]
    )
    return {"float32": error, "float32 grad": float(everywhere.max())}


def _relative(ours: Tensor, theirs: Tensor) -> float:
    return float(((ours - theirs).abs() / theirs.abs().clamp(min=1.0)).max())


def _bfloat16(folder: str, mesh: Mesh) -> dict[str, float]:
    """Our error against float32 over transformers' own, mean and 99th percentile, the worse of the two statistics."""
    device = mesh.device
    with torch.no_grad():
        _, wanted = _reference(folder, device, torch.float32)
        _, peer = _reference(folder, device, torch.bfloat16)
    options = dt.EngineOptions(master_dtype=torch.bfloat16)
    got = make_engine(
        Pretrained.open(folder, options.engine), mesh, torch.bfloat16, "lm", options
    ).score(_batch())
    ratios: dict[str, float] = {"bf16 mean": 0.0, "bf16 p99": 0.0}
    for ours, theirs, truth in zip(got, peer, wanted, strict=True):
        a, b = (ours.to(device) - truth).abs(), (theirs - truth).abs()
        ratios["bf16 mean"] = max(ratios["bf16 mean"], float(a.mean() / b.mean()))
        ratios["bf16 p99"] = max(ratios["bf16 p99"], float(a.quantile(0.99) / b.quantile(0.99)))
    return {
        **ratios,
        "bf16 our mean error": float((got.logprob.to(device) - wanted.logprob).abs().mean()),
    }


if __name__ == "__main__":
    run_main(main)
