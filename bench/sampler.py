"""Speed of sampling: python -m bench.sampler [--shape 7b] [--device cuda] [--prompts 64] [--new 256]

The embedded sampler against transformers with the same random weights in the same process: `generate`, and continuous
batching (`generate_batch`). No sequence ends early. Ours draws at temperature 1 and tells every log-prob; the peers take the
likeliest token, which is less work, and neither time includes what they prepare once.
"""

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.given import check_shape, device as device_here, positive, run_main
from bench.harness import RESULTS, Case, compare, surroundings
from dovetail.arch.registry import spec_from_config
from dovetail.device import peak_memory_gib
from dovetail.kernels.registry import kernels_for
from dovetail.parallel.mesh import Mesh
from dovetail.sampler.base import SamplingParams, TokenPrompt
from dovetail.sampler.native import NativeSampler, SamplerOptions

SHAPES: dict[str, dict[str, int | bool]] = {
    "7b": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "30b-a3b, 12 layers": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
PEERS = ("generate", "generate, static cache", "continuous batching")
PEER_MEMORY = 0.4  # of what is free, for the continuous batching's cache: ours needs some, too


@dataclass(frozen=True)
class Row:
    """One comparison: new tokens a second over all prompts, medians of runs that alternate. ratio: ours over the peer's.

    attention: the implementation that the peer took; it takes flash attention for continuous batching where that is
    installed.
    """

    peer: str
    attention: str
    ours_tokens_per_second: float
    peer_tokens_per_second: float
    ratio: float
    ratios: list[float]


@dataclass(frozen=True)
class Parts:
    """Where our time goes. prompts: computing them, and the first draw. step: one token for every row, as it runs and
    without CUDA graphs, every kernel launched by the host. weight_tb_per_second: at which a step reads the model's weights."""

    prompts_ms: float
    step_ms: float
    step_uncaptured_ms: float
    weight_tb_per_second: float


class Contest:
    """The two models and the work that all do."""

    def __init__(
        self, shape: str, device: torch.device, dtype: torch.dtype, prompts: int, length: int
    ) -> None:
        family = (
            transformers.Qwen3MoeConfig
            if "num_experts" in SHAPES[shape]
            else transformers.Qwen2Config
        )
        config = family(**SHAPES[shape], max_position_embeddings=8192, tie_word_embeddings=False)
        torch.manual_seed(0)
        with device:
            self.hf = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        spec, mesh = spec_from_config(config.to_dict()), Mesh.solo(device)
        kernels, options = kernels_for(device), SamplerOptions(keep_cache=True)
        self.sampler = NativeSampler(spec, mesh, kernels, dtype, options=options)
        self.plain = NativeSampler(
            spec, mesh, kernels, dtype, options=options, capture=lambda fn: fn
        )
        for sampler in (self.sampler, self.plain):
            sampler.refill(self.hf.state_dict().items())
        self.device, vocabulary = device, config.vocab_size
        self.attention = ""
        self.ids = torch.randint(
            vocabulary, (prompts, length), generator=torch.Generator().manual_seed(1)
        )
        self.prompts = [TokenPrompt(i, row) for i, row in enumerate(self.ids.tolist())]
        self.weight_bytes = sum(
            p.numel() * p.element_size() for p in self.sampler.model.parameters()
        )

    def ours(self, new: int, *, captured: bool = True) -> None:
        """All of it, to the host."""
        done = (self.sampler if captured else self.plain).sample(
            self.prompts, SamplingParams(max_new_tokens=new)
        )
        assert all(len(c.ids) == new for c in done)

    def generate(self, new: int, cache: str | None = None) -> None:
        """transformers' `generate`. cache: None, its default one, or "static", with which it compiles its step on a GPU."""
        ids = self.ids.to(self.device)
        config = self._greedy(new, cache_implementation=cache)
        self._note(self.hf)
        with torch.no_grad():
            done = self.hf.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config
            )
        assert done.cpu().shape[1] == ids.shape[1] + new

    def continuous(self, new: int) -> None:
        """transformers' continuous batching; its manager, cache and graphs stay from one call to the next. Without flash
        attention it would not record graphs unless asked to, and take twice as long.
        """
        config = transformers.ContinuousBatchingConfig(
            max_memory_percent=PEER_MEMORY, use_cuda_graph=self.device.type == "cuda"
        )
        noting = self.hf.model.register_forward_pre_hook(self._note)
        done = self.hf.generate_batch(
            self.ids.tolist(),
            generation_config=self._greedy(new),
            continuous_batching_config=config,
            persistent_manager=True,
        )
        noting.remove()
        assert len(done) == len(self.ids)
        assert all(len(one.generated_tokens) == new for one in done.values())

    def _note(self, model: torch.nn.Module, _: object = None) -> None:
        self.attention = str(model.config._attn_implementation)

    def _greedy(self, new: int, **more: object) -> Any:
        return transformers.GenerationConfig(
            max_new_tokens=new,
            min_new_tokens=None,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **more,
        )


def parts_of(contest: Contest, new: int, rounds: int) -> Parts:
    """Ours in pieces, by the times of shorter runs."""
    few = min(new, 33)
    prompts = _median(lambda: contest.ours(1), rounds)
    step = (_median(lambda: contest.ours(new), rounds) - prompts) / (new - 1)
    uncaptured = (_median(lambda: contest.ours(few, captured=False), rounds) - prompts) / (few - 1)
    rate = contest.weight_bytes / step / 1e12
    return Parts(
        round(prompts * 1e3, 2), round(step * 1e3, 3), round(uncaptured * 1e3, 3), round(rate, 3)
    )


def _median(run: Callable[[], None], rounds: int) -> float:
    run(), run()
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def rows_of(contest: Contest, new: int, rounds: int, peers: Sequence[str]) -> list[Row]:
    """Ours against each peer."""
    known: dict[str, Callable[[int], None]] = {
        "generate": contest.generate,
        "generate, static cache": lambda new: contest.generate(new, "static"),
        "continuous batching": contest.continuous,
    }
    found = []
    for name in peers:
        run = known[name]
        one = compare(
            Case(name, len(contest.ids) * new, lambda: contest.ours(new), lambda r=run: r(new)),
            rounds,
        )  # type: ignore[misc]
        ours, peer = one.tokens / one.ours_seconds, one.tokens / one.peer_seconds
        found.append(
            Row(
                name,
                contest.attention,
                round(ours, 1),
                round(peer, 1),
                round(one.ratio, 3),
                one.ratios,
            )
        )
        print(found[-1], flush=True)
    return found


def main() -> None:
    """Print the figures and write one JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.sampler", description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="7b")
    parser.add_argument("--device", type=device_here, default="cuda")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--prompts", type=positive, default=64)
    parser.add_argument("--prompt-tokens", type=positive, default=128)
    parser.add_argument(
        "--new", type=positive, default=256, help="tokens of every completion, 2 or more"
    )
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--out", type=Path, default=RESULTS / "sampler_h200.json")
    given = parser.parse_args()
    check_shape(given.shape, given.device)
    if given.new < 2:
        parser.error("--new: 2 or more, since the time of a token is that between two")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[given.dtype]
    contest = Contest(
        given.shape, torch.device(given.device), dtype, given.prompts, given.prompt_tokens
    )
    parts = parts_of(contest, given.new, given.rounds)
    print(parts, flush=True)
    rows = rows_of(contest, given.new, given.rounds, given.peers)
    result = {
        "bench": "sampler",
        **surroundings(),
        "arguments": {name: str(value) for name, value in vars(given).items() if name != "out"},
        "peak_memory_gib": round(peak_memory_gib(contest.device), 2),
        "parts": asdict(parts),
        "results": [asdict(row) for row in rows],
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_main(main)
