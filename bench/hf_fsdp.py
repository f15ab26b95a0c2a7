"""What a user would train today: transformers' own layers under FSDP2, in the same shapes: -m bench.hf_fsdp --shape 30b-a3b

bfloat16 compute over float32 weights, every block checkpointed, experts by grouped products, one sequence a micro-batch,
padded, fused AdamW. Tokens are real ones: with --ragged padding is computed, but not counted.
"""

import argparse
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from bench.engines import (
    SHAPES,
    Session,
    add_options,
    dense_batch,
    flops_of,
    ragged_batch,
    spec_of,
    timed,
)
from bench.given import positive, run_main
from dovetail.device import peak_flops, peak_memory_gib


def main() -> int:
    """One row, or two."""
    parser = argparse.ArgumentParser(prog="python -m bench.hf_fsdp", description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="7b")
    parser.add_argument("--length", type=positive, default=8192)
    parser.add_argument("--sequences", type=positive, default=16, help="of the global batch")
    parser.add_argument("--steps", type=positive, default=2)
    parser.add_argument(
        "--ragged", action="store_true", help="also lengths as RL has them, padded to the longest"
    )
    add_options(parser, "hf_fsdp")
    given = parser.parse_args()
    session = Session.start(given)
    session.begin(given.shape)
    spec, device, world = spec_of(given.shape), session.device, dist.get_world_size()
    model = sharded(given.shape, device, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    batches = {
        f"{given.sequences} x {given.length}": dense_batch(spec, given.length, given.sequences)
    }
    if given.ragged:
        batches["ragged, padded"] = ragged_batch(spec, given.length, given.length * given.sequences)
    for name, batch in batches.items():
        session.limit.at(name)
        rows = list(batch.tokens.split(list(batch.lengths)))
        mine, most = rows[dist.get_rank() :: world], -(-len(rows) // world)
        mine += rows[: most - len(mine)]  # equally many everywhere, or FSDP2 would wait
        seconds = [
            timed(device, lambda mine=mine: step(model, optimizer, mine, given.length, device))
            for _ in range(1 + given.steps)
        ]
        middle, peak = median(seconds[1:]), peak_flops(device)
        rate, mfu = (
            len(batch) / middle / world,
            flops_of(spec, batch) / middle / world / (peak or 1.0),
        )
        row: dict[str, Any] = {
            "title": f"transformers + FSDP2, {given.shape}, {name}, {world} ranks",
            "figure": f"{middle:.3f} s a step, {rate:.0f} tokens/s a rank, MFU {100 * mfu * bool(peak):.1f}%, "
            f"{peak_memory_gib(device):.1f} GiB",
            "seconds": middle,
            "tokens_per_second_per_rank": rate,
            "mfu": mfu if peak else None,
        }
        session.keep(row)
        session.say(f"{row['title']}: {row['figure']}")
    session.finish()
    return 0


def sharded(shape: str, device: torch.device, world: int) -> nn.Module:
    """Random weights, drawn where they lie."""
    config = AutoConfig.for_model(**SHAPES[shape])
    how = {"attn_implementation": "sdpa"}
    if "num_experts" in SHAPES[shape]:
        how["experts_implementation"] = "grouped_mm" if device.type == "cuda" else "eager"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **how)
    model.config.use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": False})
    mesh = init_device_mesh(device.type, (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in (*model.model.layers, model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if name.endswith("norm.weight") else parameter.normal_(std=0.02)
    model.train()
    return model


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: list[Tensor],
    length: int,
    device: torch.device,
) -> None:
    """Every row a micro-batch, padded to the same length, as is usual; one update."""
    for row in rows:
        ids = nn.functional.pad(row, (0, length - len(row)))[None].to(device)
        mask = torch.arange(length, device=device)[None] < len(row)
        logits = model(input_ids=ids, attention_mask=None if len(row) == length else mask).logits[
            0, :-1
        ]
        labels = torch.where(mask, ids, -100)[0, 1:]
        nn.functional.cross_entropy(logits.to(torch.float32), labels).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    run_main(main)
