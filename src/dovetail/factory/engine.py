"""Engines from model directories."""

import warnings
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass, field, replace
from datetime import timedelta
from math import prod, sqrt
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from dovetail.arch.registry import FAMILIES, ulysses_degree
from dovetail.arch.spec import ArchSpec
from dovetail.batch.micro import DualBatch
from dovetail.checkpoint.reader import ShardedReader, open_checkpoint
from dovetail.engine.expert_routing import BalanceSettings
from dovetail.engine.fsdp import shard_over_data
from dovetail.engine.native import Engine
from dovetail.engine.nonfinite import StepWatch
from dovetail.errors import CheckpointError, ConfigError, LayoutError, ModelError
from dovetail.factory.layouts import Backend, check_layout
from dovetail.factory.sampler import backend_layout, make_sampler
from dovetail.hf.transformers_model import TransformersModel
from dovetail.kernels import fa4
from dovetail.kernels.reference import wide
from dovetail.kernels.registry import kernels_for
from dovetail.nn.activation_checkpoint import PinnedPool, Recompute
from dovetail.nn.adapter_options import AdapterOptions
from dovetail.nn.adapters import add_adapters
from dovetail.nn.decoder import Decoder, Head
from dovetail.nn.model import StagedModel, StageRange
from dovetail.nn.tiling import tile_mlps
from dovetail.optim.optimizer import OptimSettings, shards_of
from dovetail.optim.rules import check_rule
from dovetail.parallel.axes import TIMEOUT
from dovetail.parallel.consensus import agreed, of_all
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import as_index
from dovetail.parallel.process_group import (
    ensure_process_group,
    num_ranks,
    num_ranks_here,
    pick_device,
)
from dovetail.pipeline.partition import partition
from dovetail.sampler.base import Sampler, SamplingParams, TokenPrompt
from dovetail.sampler.turn import Turn
from dovetail.weights.adapters import init_adapters
from dovetail.weights.hf_directory import (
    LM_HEAD,
    CheckpointSource,
    EngineName,
    Pretrained,
    find_value_head,
    refuse_adapters,
    saved_auxiliary,
)
from dovetail.weights.hf_reader import TensorSource
from dovetail.weights.load import load
from dovetail.weights.merged import MergedSource
from dovetail.weights.peft import load_adapter
from dovetail.weights.shards import form_of


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine besides model, layout and compute dtype.

    master_dtype: of trained weights; default: float32, or wider. tokens_per_batch: of a replica's micro-batch, padded.
    recompute: activations: none, light (all but products and attention), selective (all but attention), full.
    offload_activations: inputs of recomputation, while host memory has room. offload_optimizer: adamw's moments.
    dual_batch: overlap halves of a micro-batch; default: on accelerators with tp, without ep, if large.
    mlp_tile_tokens: tokens of an MLP at a time; 0: all. fresh_head_seed: draw a missing value head.
    adapter: train adapters of the frozen model, held in the compute dtype, alone.
    head_bias: False for reward models. save_dtype: of saved and streamed tensors. resume: checkpoint, role, updates.
    """

    master_dtype: torch.dtype | None = None
    optim: OptimSettings | None = None
    tokens_per_batch: int | None = None
    recompute: Recompute = "none"
    offload_activations: bool = False
    offload_optimizer: bool = False
    dual_batch: bool | None = None
    mlp_tile_tokens: int = 0
    fresh_head_seed: int | None = None
    head_bias: bool = True
    save_dtype: torch.dtype | None = None
    balance: BalanceSettings | None = None
    watch: StepWatch = field(default_factory=StepWatch)
    engine: EngineName = "auto"
    adapter: AdapterOptions | None = None
    resume: tuple[ShardedReader, str, int] | None = None

    def __post_init__(self) -> None:
        for name, known in {
            "recompute": get_args(Recompute),
            "engine": get_args(EngineName),
        }.items():
            if vars(self)[name] not in known:
                raise ConfigError(
                    f"{name}={vars(self)[name]!r}; expected one of {', '.join(known)}"
                )
        for name in ("master_dtype", "save_dtype"):
            if not isinstance(vars(self)[name], (torch.dtype, type(None))):
                raise ConfigError(
                    f"{name}={vars(self)[name]!r}; expected one of torch's, such as torch.bfloat16"
                )
        if self.mlp_tile_tokens < 0:
            raise ConfigError(
                f"mlp_tile_tokens={self.mlp_tile_tokens}; expected 0 (all at once) or more"
            )


class SamplingEngine(Engine):
    source: Pretrained
    sampler: Sampler | None = None

    def generate(
        self,
        prompts: Iterable[Seq[int] | Tensor],
        *,
        n: int = 1,
        max_tokens: int = 64,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop_token_ids: Seq[int] = (),
        seed: int = 0,
    ) -> list[Turn]:
        """`n` completions of each prompt, a list of ids, in order: `row` is the prompt's number. Collective.

        Names are vLLM's. temperature 0: the likeliest token. top_k 0: all. Draws depend on `seed`, the number of
        updates, and the numbers of prompt and completion, not on layouts. The sampler keeps a second copy of the weights,
        in the engine's dtype, cut by tp alone.
        """
        params = SamplingParams(
            samples=n, max_new_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed,
            step=self.updates, stop_ids=tuple(stop_token_ids),
        )  # fmt: skip
        rows = [TokenPrompt(row, torch.as_tensor(ids).tolist()) for row, ids in enumerate(prompts)]
        with self._call(critic=False):
            if self.sampler is None:
                backend: Backend = self.source.spec.engine
                layout = backend_layout(self.source, self.mesh.layout, backend)
                mesh = (
                    self.mesh if layout == self.mesh.layout else make_mesh(layout, self.mesh.device)
                )
                self.sampler = make_sampler(self.source, mesh, self.dtype, backend)
            self.sampler.refill(self.weights(self.sampler.dtype))
            return self.sampler.sample(rows, params)


DEFAULTS = EngineOptions()
FAR_LARGER = 8
HEADS = ("lm", "value")
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@torch.inference_mode(mode=False)  # inference tensors could not be trained
def from_pretrained(
    path: str | Path,
    *,
    layout: Layout | None = None,
    dtype: torch.dtype | str = torch.float32,
    head: Literal["lm", "value"] = "lm",
    device: str = "auto",
    options: EngineOptions = DEFAULTS,
) -> SamplingEngine:
    """An engine from an HF directory, a sharded checkpoint or a pinned hub name. Collective.

    layout: an absent dp takes the remaining ranks. head: "lm" for log-probs and entropies, "value" for values. Raises
    ConfigError, ModelError, CheckpointError or LayoutError, on every rank.
    """
    if head not in HEADS:
        raise ConfigError(
            f"head={head!r}; expected one of {', '.join(HEADS)}: log-probs and entropies, or values"
        )
    if not isinstance(layout, (Layout, type(None))):
        raise ConfigError(f"layout={layout!r}; expected dt.Layout, as in dt.Layout(tp=2)")
    dtype = dtype_named(dtype)
    where = pick_device(device)
    ensure_process_group(where)
    source = Pretrained.open(path, options.engine)
    engine = make_engine(source, make_mesh(layout, where), dtype, head, options)
    if engine.mesh["world"].rank == 0:
        for note in source.notes:
            warnings.warn(note, stacklevel=3)  # the caller, behind the decorator
    return engine


def dtype_named(dtype: torch.dtype | str) -> torch.dtype:
    known = {str(kind).removeprefix("torch."): kind for kind in DTYPES}
    resolved = known.get(dtype) if isinstance(dtype, str) else dtype
    if resolved not in DTYPES:
        raise ConfigError(
            f"dtype={dtype!r}; expected one of {', '.join(known)}, or torch's object of that name"
        )
    return resolved


def make_mesh(layout: Layout | None, device: torch.device, *, timeout: timedelta = TIMEOUT) -> Mesh:
    """Builds the mesh of a layout. Collective. LayoutError where the ranks do not fit."""
    given = layout or Layout(dp=None)
    needed = given.num_ranks
    if num_ranks() == 1 and needed > 1:
        start = f"torchrun --nproc-per-node {needed} script.py"
        only = "but this is the only process"
        raise LayoutError(f"layout {given} needs {needed} ranks, {only}; start it by {start}")
    return Mesh.build(given.resolve(num_ranks()), device, timeout)


def make_engine(
    source: Pretrained,
    mesh: Mesh,
    dtype: torch.dtype,
    head: Literal["lm", "value"],
    options: EngineOptions,
) -> SamplingEngine:
    """Collective."""
    check_layout(source.spec, mesh.layout)
    optim = options.optim or OptimSettings()
    master = options.master_dtype or wide(dtype)
    if options.offload_optimizer:
        optim = replace(optim, on_host=True)
    with agreed(mesh):
        check_rule(optim.name, optim.options, mesh.device, master)
    reader = open_weights(source, mesh)
    fresh = options.fresh_head_seed is not None
    found = (
        find_value_head(reader, source.path, fresh=fresh, bias=options.head_bias)
        if head == "value"
        else LM_HEAD
    )
    held = master if options.adapter is None else dtype
    model = make_model(source, mesh, held, reader, found.kind, options.recompute)
    if options.adapter is not None:
        adapted = add_adapters(model, mesh, options.adapter, master)
        if not any(of_all(bool(adapted), mesh)):
            targets = ", ".join(options.adapter.targets)
            raise ConfigError(f"no layer of the model is adapted; its targets are {targets}")
    _spare_memory(model, mesh, options)
    shard_over_data(model, mesh, dtype)
    model.materialize(mesh.device)
    if options.resume is None or options.adapter is not None:
        ignore = (*found.ignore, *source.spec.ignored)
        load(model, reader, mesh, aliases=found.aliases, fresh=found.fresh, ignore=ignore)
        if found.fresh:
            fill_fresh(model, mesh, found.fresh, options.fresh_head_seed or 0)
    if options.adapter is not None:
        init_adapters(model, mesh)
        if options.adapter.path is not None:
            load_adapter(model, options.adapter.path, mesh)

    def saved_dtype(name: str) -> torch.dtype | None:
        stored = found.aliases.get(name, name)
        return options.save_dtype or reader.dtype(
            stored if stored in reader.names else next(iter(reader.names))
        )

    origin = CheckpointSource(
        saved_dtype,
        tuple(reader.names),
        saved_auxiliary(source, found.kind, options.save_dtype),
        str(source.path),
    )
    engine = SamplingEngine(
        model, mesh, origin, optim=optim, dtype=dtype, tokens_per_batch=options.tokens_per_batch,
        balance=options.balance, watch=options.watch,
    )  # fmt: skip
    engine.source = source
    engine.dual_batch = DualBatch.of(model.supports_dual_batch, mesh, options.dual_batch)
    if options.resume is not None:
        checkpoint, role, updates = options.resume
        engine.load_training(role, checkpoint, updates)
    return engine


def open_weights(source: Pretrained, mesh: Mesh) -> TensorSource:
    """Collective. Refuses adapters, and a config far larger than the weights before it is allocated."""
    reader = open_checkpoint(source.path, mesh)
    refuse_adapters(reader, source.path)
    held = sum(prod(reader.shape(name)) for name in reader.names)
    asked = sum(source.spec.layer_params) + source.spec.head_params
    if asked > FAR_LARGER * held:
        sizes = f"a model of {asked:.3g} weights or more, but the checkpoint has {held:.3g}"
        hint = "does its config.json belong to its weights?"
        raise CheckpointError(f"{source.path}: config.json describes {sizes}; {hint}")
    if source.adapter is None:
        return reader
    with agreed(mesh):
        return MergedSource(reader, source.adapter)


def _spare_memory(model: StagedModel, mesh: Mesh, options: EngineOptions) -> None:
    if options.mlp_tile_tokens:
        if options.recompute == "light":
            kept = "activation_checkpointing=light (in the library recompute) keeps"
            raise ConfigError(f"mlp_tile_tokens forgets what {kept}; set that to selective or full")
        spec = model.spec  # of all stages, so that every rank refuses
        dense = spec.native and not all(map(spec.is_moe, range(spec.depth)))
        tile_mlps(model.text, options.mlp_tile_tokens, elsewhere=dense)
    if options.offload_activations:
        if options.recompute == "none":
            edit = "set activation_checkpointing=selective or full (in the library recompute)"
            raise ConfigError(f"offload_activations moves what recomputation starts from; {edit}")
        model.offload_activations(PinnedPool(mesh.device, ranks=num_ranks_here(mesh.device)))


def make_model(
    source: Pretrained,
    mesh: Mesh,
    dtype: torch.dtype,
    reader: TensorSource,
    head: Head = "lm",
    recompute: Recompute = "none",
) -> StagedModel:
    if source.spec.native:
        decoder = make_decoder(source.spec, mesh, dtype, head, recompute)
        decoder.experts = form_of(decoder, reader)
        return decoder
    kernels = kernels_for(mesh.device)
    try:
        model = TransformersModel(
            source.spec, source.config, mesh, kernels, head, recompute, reader
        )
    except ModelError as error:
        known = f"config.json: model_type is {source.spec.family!r}; known families: {', '.join(FAMILIES)}"
        raise ModelError(
            f"{source.spec.missing_features or known}; the transformers engine cannot run it: "
            f"{error}"
        ) from error
    return model.hold_in(dtype)


def make_decoder(
    spec: ArchSpec, mesh: Mesh, dtype: torch.dtype, head: Head = "lm", recompute: Recompute = "none"
) -> Decoder:
    ranges = partition(spec, mesh.layout)
    pp = mesh["pp"]
    kernels = kernels_for(mesh.device)
    if pp.size > 1:  # transfers occupy SMs that gated products need
        kernels = replace(kernels, gated=None)
    cut = StageRange(ranges[pp.rank :: pp.size], first=pp.rank == 0, last=pp.rank == pp.size - 1)
    with torch.device("meta"):
        return Decoder(spec, mesh, kernels, head, recompute, cut).hold_in(dtype)


def fill_fresh(model: StagedModel, mesh: Mesh, names: tuple[str, ...], seed: int) -> None:
    """weight ~ N(0, 1 / (D + 1)), bias 0; the same numbers in every layout."""
    width = model.spec.width
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(1, width, generator=generator, dtype=torch.float64) / sqrt(width + 1)
    with torch.no_grad():
        for shard in shards_of(model, mesh):
            if shard.name in names:
                for region in shard.regions:
                    drawn = weight if shard.name.endswith("weight") else torch.zeros(1)
                    shard.local[as_index(region.local_slice)] = drawn[
                        as_index(region.checkpoint_slice)
                    ].to(shard.local)


def compile_kernels(engines: Iterable[Engine]) -> None:
    for engine in engines:
        spec = engine.model.spec
        layout = engine.mesh.layout
        if not spec.native or engine.model.kernels.attention is not fa4.attention:
            continue
        a = spec.attention
        shares = layout.tp * ulysses_degree(spec, layout)
        heads = (a.num_heads // shares, max(1, a.num_kv_heads // shares))
        dims = (a.latent.key_dim, a.latent.v_dim) if a.latent else (a.head_dim, a.head_dim)
        windowed = any(window is not None for window in spec.windows)
        fa4.compile_kernels(heads, dims, windowed, engine.dtype, engine.mesh.device)
