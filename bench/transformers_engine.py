"""Models by their own layers on a GPU: our packed engine against plain transformers with FSDP2 and padding.

python -m bench.transformers_engine [qwen3 qwen2_5_vl] [--layers N] [--sequences 64] [--longest 2048] [--device cuda]

Random weights in real shapes, the same ragged rows for both, bfloat16 compute over float32 weights, one AdamW step on the
mean token loss. First the numbers: bfloat16 log-probs of ours against float32 ones, over transformers' own error.
"""

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen2_5_VLConfig,
    Qwen3Config,
)

import dovetail as dt
from bench.cpu_train import NegativeLogLikelihood
from bench.given import device as device_here, natural, positive, run_main
from bench.harness import RESULTS, surroundings
from bench.models import one_rank
from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.factory.engine import EngineOptions
from dovetail.optim.optimizer import OptimSettings

WORDS, IMAGE, VISION_START, VISION_END = 1000, 2000, 2001, 2002
GRID = (1, 16, 16)  # of an image in patches: 224 x 224 pixels, 64 features
FEATURES = GRID[1] * GRID[2] // 4
MICRO = 8192  # tokens of a micro-batch, padding included
LR = 1e-6
COMPARED = 8  # sequences whose log-probs are compared


def text_config(layers: int) -> Qwen3Config:
    """Qwen3-1.7B's shapes."""
    return Qwen3Config(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=layers or 28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=32768, tie_word_embeddings=True,
    )  # fmt: skip


def sighted_config(layers: int) -> Qwen2_5_VLConfig:
    """Qwen2.5-VL-3B's shapes."""
    text = {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": layers or 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 32768, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    }  # fmt: skip
    tower = {
        "depth": layers or 32,
        "out_hidden_size": 2048,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }
    ids = {
        "image_token_id": IMAGE,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
    }
    return Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=True, **ids)


@dataclass(frozen=True)
class Family:
    """What a benchmark needs to know of a model."""

    config: Callable[[int], Any]
    auto: Any
    images: bool


FAMILIES: Mapping[str, Family] = {
    "qwen3": Family(text_config, AutoModelForCausalLM, False),
    "qwen2_5_vl": Family(sighted_config, AutoModelForImageTextToText, True),
}


def main() -> None:
    """Print one line a family and write one JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.transformers_engine", description=__doc__
    )
    parser.add_argument("names", nargs="*", help=f"any of {', '.join(FAMILIES)}; default: all")
    parser.add_argument(
        "--layers", type=natural, default=0, help="of text and tower; 0: the real model's"
    )
    parser.add_argument("--sequences", type=positive, default=64)
    parser.add_argument("--longest", type=positive, default=2048)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--device", type=device_here, default="cuda")
    given = parser.parse_args()
    if unknown := sorted(set(given.names) - set(FAMILIES)):
        parser.error(f"no family {', '.join(unknown)}; known: {', '.join(FAMILIES)}")
    if given.device == "cpu" and not given.layers:
        parser.error("on a CPU name fewer layers than the real model has: --layers 1")
    results = []
    with one_rank():
        for name in given.names or FAMILIES:
            results.append({"family": name, **measure(FAMILIES[name], given)})
            print(json.dumps(results[-1]), flush=True)
    result = {"bench": "transformers_engine", **surroundings(), "results": results}
    (RESULTS / f"transformers_engine_{given.device}.json").write_text(
        json.dumps(result, indent=1) + "\n", encoding="utf-8"
    )


def measure(family: Family, given: argparse.Namespace) -> dict[str, Any]:
    """Errors of log-probs, then tokens a second of both, interleaved."""
    rows = ragged(given.sequences, given.longest, images=family.images)
    batch = PackedBatch.pack(rows)
    with tempfile.TemporaryDirectory() as folder:
        with torch.device(given.device):
            torch.manual_seed(0)
            family.auto.from_config(
                family.config(given.layers), dtype=torch.bfloat16
            ).save_pretrained(folder)
        peer = family.auto.from_pretrained(folder, dtype=torch.float32).to(given.device)
        options = EngineOptions(
            engine="transformers", tokens_per_batch=MICRO, optim=OptimSettings(lr=LR)
        )
        engine = dt.from_pretrained(
            folder, dtype=torch.bfloat16, device=given.device, options=options
        )
    found = errors(peer, engine, rows[:COMPARED], given.device)
    step = peer_step(peer, rows, given.device)
    ours: list[float] = []
    theirs: list[float] = []
    for i in range(given.rounds + 1):
        pair = [(ours, lambda: engine.train_step(batch, NegativeLogLikelihood())), (theirs, step)]
        for times, run in pair if i % 2 == 0 else pair[::-1]:
            times.append(seconds(run, given.device))
    ratio = statistics.median(b / a for a, b in zip(ours[1:], theirs[1:], strict=True))
    return {
        **found,
        "tokens": len(batch),
        "padded": given.sequences * given.longest,
        "ours tok/s": len(batch) / statistics.median(ours[1:]),
        "peer tok/s": len(batch) / statistics.median(theirs[1:]),
        "ratio": ratio,
    }


def ragged(count: int, longest: int, *, images: bool) -> list[Sequence]:
    """Lengths as in RL, exponential with a mean of a quarter of the longest; with an image each where asked for."""
    draw = torch.Generator().manual_seed(3)
    shares = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    lengths = -(1 - shares).log()
    for _ in range(20):  # what is cut off at the longest goes to the others
        lengths = (lengths * (longest / 4 / lengths.mean())).clamp(16, longest)
    order = torch.randperm(count, generator=draw)
    rows = []
    for length in lengths[order].round().int().tolist():
        media = None
        ids = torch.randint(WORDS, (length,), generator=draw).tolist()
        if images:
            ids = [VISION_START, *[IMAGE] * FEATURES, VISION_END, *ids][
                : max(longest, FEATURES + 2)
            ]
            pixels = torch.randn(GRID[1] * GRID[2], 3 * 2 * 14 * 14, generator=draw)
            media = {"pixel_values": pixels, "image_grid_thw": torch.tensor([GRID])}
        rows.append(Sequence(ids, media=media))
    return rows


def inputs_of(rows: list[Sequence], device: str, length: int) -> tuple[dict[str, Tensor], Tensor]:
    """What transformers takes, padded on the right to `length`; and which targets count [S, length - 1]."""
    ids, mask = (
        torch.zeros(len(rows), length, dtype=torch.int64),
        torch.zeros(len(rows), length, dtype=torch.int64),
    )
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)], mask[i, : len(row.ids)] = torch.tensor(list(row.ids)), 1
    found = {"input_ids": ids, "attention_mask": mask}
    media = [row.media for row in rows if isinstance(row.media, Mapping)]
    if media:
        found |= {key: torch.cat([each[key] for each in media]) for key in media[0]}
        found["mm_token_type_ids"] = (ids == IMAGE).long()
    return {key: value.to(device) for key, value in found.items()}, mask[:, 1:].to(device)


def log_probs(model: nn.Module, rows: list[Sequence], device: str) -> Tensor:
    """Of every next token, sequence after sequence."""
    found = []
    with torch.no_grad():
        for row in rows:
            inputs, _ = inputs_of([row], device, len(row.ids))
            logits = model(**inputs).logits[0, :-1].to(torch.float32)
            found.append(logits.log_softmax(-1).gather(1, inputs["input_ids"][0, 1:, None])[:, 0])
    return torch.cat(found)


def errors(
    peer: nn.Module, engine: dt.Engine, rows: list[Sequence], device: str
) -> dict[str, float]:
    """Mean and 99th percentile of |log-prob - float32's|: ours over transformers' own in bfloat16."""
    truth = log_probs(peer, rows, device)
    half = copy.deepcopy(peer).to(torch.bfloat16)
    theirs = (log_probs(half, rows, device) - truth).abs()
    batch = PackedBatch.pack(rows)
    ours = (engine.score(batch).logprob[batch.mask].to(device) - truth).abs()
    return {
        "bf16 mean": float(ours.mean() / theirs.mean()),
        "bf16 p99": float(ours.quantile(0.99) / theirs.quantile(0.99)),
        "bf16 our mean error": float(ours.mean()),
    }


def peer_step(model: nn.Module, rows: list[Sequence], device: str) -> Callable[[], None]:
    """One step of plain transformers: FSDP2 with bfloat16 compute, padded micro-batches of as many tokens as ours."""
    model.train()
    mesh = init_device_mesh(device, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    for block in (layer for layers in blocks for layer in layers):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    longest = max(len(row.ids) for row in rows)
    each = max(1, MICRO // longest)
    parts = [inputs_of(rows[i : i + each], device, longest) for i in range(0, len(rows), each)]
    count = sum(int(mask.sum()) for _, mask in parts)

    def step() -> None:
        for inputs, mask in parts:
            logits = model(**inputs).logits[:, :-1]
            labels = torch.where(mask.bool(), inputs["input_ids"][:, 1:], -100)
            loss = nn.functional.cross_entropy(
                logits.to(torch.float32).flatten(0, 1), labels.flatten(), reduction="sum"
            )
            (loss / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(run: Callable[[], object], device: str) -> float:
    """Wall time of one run, with everything that it asked the device for."""
    start = time.perf_counter()
    run()
    if device != "cpu":
        torch.get_device_module(device).synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    run_main(main)
