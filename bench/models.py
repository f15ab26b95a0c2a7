"""The same SmolLM2-135M twice: in transformers, and in our engine on one rank; and batches of token ids for both."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dovetail.arch.registry import spec_from_config
from dovetail.engine.native import NativeEngine
from dovetail.engine.sharding import shard_over_data
from dovetail.kernels.registry import kernels_for
from dovetail.layout import Layout
from dovetail.mesh import Mesh
from dovetail.nn.decoder import Decoder
from dovetail.optim.assembly import shards_of
from dovetail.optim.optimizer import OptimSettings
from dovetail.placement import as_index

LR = 1e-5


@dataclass(frozen=True)
class Pair:
    """Two models with equal weights. `hf` computes in `dtype`; so does our engine."""

    hf: LlamaForCausalLM
    engine: NativeEngine
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
        dist.init_process_group("gloo", store=dist.FileStore(str(Path(folder) / "store"), 1), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def smollm2_pair(dtype: torch.dtype, master: torch.dtype, depth: int = 30) -> Pair:
    """SmolLM2-135M's shapes with random weights: speed does not ask what the weights say.

    `master` is the type in which our weights are held: `dtype` for scoring, float32 for training.
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
    engine = _engine(hf, dtype, master)
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


def _engine(hf: LlamaForCausalLM, dtype: torch.dtype, master: torch.dtype) -> NativeEngine:
    mesh = Mesh.build(Layout())
    with torch.device("meta"):
        spec = spec_from_config(hf.config.to_dict())
        model = Decoder(spec, mesh, kernels_for(torch.device("cpu"))).to(master)
    shard_over_data(model, mesh, dtype)
    model.to_empty(device="cpu")
    state = hf.state_dict()
    with torch.no_grad():
        for shard in shards_of(model, mesh):
            for region in shard.regions:
                source = state[region.checkpoint_name][as_index(region.checkpoint_slice)]
                shard.local[as_index(region.local_slice)] = source.to(master)
    return NativeEngine(model, mesh, optim=OptimSettings(lr=LR), tokens_per_batch=_budget())


def _budget() -> int:
    return int(os.environ.get("BENCH_TOKENS_PER_BATCH", "4096"))
