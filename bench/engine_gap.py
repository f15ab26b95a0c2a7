"""How far log-probs of samplers are from the trainer's: -m bench.engine_gap MODEL --url http://127.0.0.1:8000, or --offline

A vLLM server that serves MODEL in --dtype (with --enable-scale-out), or vLLM in this process, and the embedded sampler draw
at temperature 1 behind pieces of this project's docs. Their log-probs are compared with those of engine.score in --dtype
("score") and in float32 on the same tokens, and these with each other.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.engines import DTYPES
from bench.given import device as device_here, positive, run_main
from bench.harness import surroundings
from bench.models import one_rank
from dovetail.batch.packed import PackedBatch, Sequence as Row
from dovetail.factory.engine import EngineOptions, SamplingEngine, from_pretrained
from dovetail.factory.tokenizer import load_tokenizer
from dovetail.inference_servers.http import Client
from dovetail.inference_servers.vllm import GENERATE
from dovetail.weights.hf_directory import Pretrained

PROMPT = 64
SAMPLING: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "logprobs": 0,
    "ignore_eos": True,
}
OPTIONS = EngineOptions(tokens_per_batch=1 << 14)
FIGURES = ("mean", "p99", "max")
Drawn = tuple[Sequence[int], Sequence[float]]  # ids and log-probs behind a prompt


def main() -> None:
    """One table, and one JSON row."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine_gap", description=__doc__)
    parser.add_argument("model", help="a directory or a hub name")
    parser.add_argument("--url", help="of a vLLM server")
    parser.add_argument(
        "--offline", action="store_true", help="vLLM in this process, on 0.4 of the GPU's memory"
    )
    parser.add_argument(
        "--head",
        choices=["model", "float32"],
        default="model",
        help="dtype of the offline vLLM's logits",
    )
    parser.add_argument("--prompts", type=positive, default=32)
    parser.add_argument("--new", type=positive, default=128)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--device", type=device_here, default="auto")
    given = parser.parse_args()
    source, drawn = Pretrained.open(given.model), dict[str, list[Drawn]]()
    prompts = pieces(source, given.prompts)
    if given.offline:
        drawn["vLLM offline"] = offline(str(source.path), prompts, given)
    if given.url is not None:
        drawn["vLLM server"] = served(given.url, prompts, given.new)
    scores: dict[str, list[Tensor]] = {}
    with one_rank():
        for dtype in (DTYPES[given.dtype], torch.float32):
            engine = from_pretrained(source.path, dtype=dtype, device=given.device, options=OPTIONS)
            if "embedded" not in drawn:
                every = engine.generate(prompts, max_tokens=given.new, seed=1)
                drawn["embedded"] = [(each.ids, each.log_probs) for each in every]
            for name, each in drawn.items():
                scores.setdefault(name, []).append(scored(engine, prompts, each))
            del engine
    print(f"{'|log-prob difference|':<46}" + "".join(f"{name:>11}" for name in FIGURES))
    gaps: dict[str, dict[str, float]] = {}
    for name, each in drawn.items():
        theirs = torch.tensor([x for _, log_probs in each for x in log_probs], dtype=torch.float64)
        ours, exact = scores[name]
        pairs = {
            "score": (theirs, ours),
            "float32": (theirs, exact),
            "score to float32": (ours, exact),
        }
        for what, (a, b) in pairs.items():
            away = (a - b).abs()
            found = [float(x) for x in (away.mean(), away.quantile(0.99), away.max())]
            gaps[f"{name}: {what}"] = dict(zip(FIGURES, found, strict=True))
            print(f"{name + ': ' + what:<46}" + "".join(f"{x:>11.6f}" for x in found))
    print(
        json.dumps(
            {**surroundings(), **vars(given), "tokens": given.prompts * given.new, "gaps": gaps}
        )
    )


def pieces(source: Pretrained, count: int) -> list[list[int]]:
    text = "\n".join(
        file.read_text() for file in sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    )
    ids: list[int] = load_tokenizer(source)(text, add_special_tokens=False)["input_ids"]
    stride = (len(ids) - PROMPT) // count
    return [ids[i * stride : i * stride + PROMPT] for i in range(count)]


def served(url: str, prompts: Sequence[Sequence[int]], new: int) -> list[Drawn]:
    """All prompts at once, as a fleet sends them."""
    client, how = Client(url, timeout=600.0), {**SAMPLING, "max_tokens": new}

    def draw(ids: Sequence[int]) -> Drawn:
        (choice,) = client.post(GENERATE, {"token_ids": list(ids), "sampling_params": how})[
            "choices"
        ]
        return choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]

    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(draw, prompts))


def offline(path: str, prompts: Sequence[Sequence[int]], given: argparse.Namespace) -> list[Drawn]:
    vllm = import_module("vllm")
    llm = vllm.LLM(
        model=path, dtype=given.dtype, gpu_memory_utilization=0.4, max_model_len=PROMPT + given.new,
        skip_tokenizer_init=True, logprobs_mode="raw_logprobs", hf_overrides={"head_dtype": given.head},
    )  # fmt: skip
    how = vllm.SamplingParams(max_tokens=given.new, **SAMPLING)
    replies = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], how)
    every = [reply.outputs[0] for reply in replies]
    return [
        (x.token_ids, [at[i].logprob for i, at in zip(x.token_ids, x.logprobs, strict=True)])
        for x in every
    ]


def scored(
    engine: SamplingEngine, prompts: Sequence[Sequence[int]], drawn: Sequence[Drawn]
) -> Tensor:
    """The engine's log-probs of the drawn tokens, in their order."""
    pairs = zip(prompts, (ids for ids, _ in drawn), strict=True)
    batch = PackedBatch.pack([Row([*a, *b], [False] * len(a) + [True] * len(b)) for a, b in pairs])
    return engine.score(batch).logprob.double().cpu()[batch.mask.bool().cpu()]


if __name__ == "__main__":
    run_main(main)
