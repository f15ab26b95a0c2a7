"""The same SmolLM2-135M twice: in transformers, and in our engine on one rank; and batches of token ids for both."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import dovetail as dt
from dovetail.parallel.process_group import BACKENDS

LR = 1e-5
TOKENS_PER_BATCH = 4096


@dataclass(frozen=True)
class Pair:
    """Two models with equal weights. `hf` computes in `dtype`; so does our engine."""

    hf: LlamaForCausalLM
    engine: dt.Engine
    dtype: torch.dtype


@dataclass(frozen=True)
class Padded:
    """Sequences as transformers takes them: right-padded [S, L], and where the padding is not."""

    ids: Tensor
    mask: Tensor


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of one rank, which the engine needs."""
    with tempfile.TemporaryDirectory() as folder:
        backend = BACKENDS["cuda" if torch.cuda.is_available() else "cpu"]
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def smollm2_pair(
    dtype: torch.dtype, master: torch.dtype, depth: int = 30, device: str = "cpu"
) -> Pair:
    """SmolLM2-135M's shapes with random weights: speed does not ask what the weights say.

    `master` is the type in which our weights are held: `dtype` for scoring, float32 for training. `device` is our engine's;
    transformers' model stays on the CPU.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=depth,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        attn_implementation="sdpa",
        use_cache=False,
    )
    hf = LlamaForCausalLM(config).eval()
    options = dt.EngineOptions(
        master_dtype=master, optim=dt.OptimSettings(lr=LR), tokens_per_batch=TOKENS_PER_BATCH
    )
    with tempfile.TemporaryDirectory() as folder:
        hf.save_pretrained(folder)
        engine = dt.from_pretrained(folder, dtype=dtype, device=device, options=options)
    return Pair(hf.to(master), engine, dtype)


def sequences(lengths: Sequence[int], seed: int = 1) -> list[Tensor]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 49152, (n,), generator=generator) for n in lengths]


def ragged_lengths(total: int, low: int = 32, high: int = 1024, seed: int = 2) -> list[int]:
    """Uniform lengths of [low, high] until they hold about `total` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(int(torch.randint(low, high + 1, (1,), generator=generator)))
    return lengths


def pad(rows: Sequence[Tensor]) -> Padded:
    """Right-padded with zeros."""
    ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return Padded(ids, torch.arange(ids.shape[1])[None] < lengths[:, None])
