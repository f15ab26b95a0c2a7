"""The native sampler: our decoder with a paged KV cache, continuous batching and CUDA graphs."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dovetail.arch.spec import BY_LENGTH, ArchSpec
from dovetail.kernels import cuda, reference
from dovetail.kernels.registry import KernelSet
from dovetail.nn.decoder import Decoder
from dovetail.parallel.collectives import stack_over
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import as_index, checkpoint_shapes
from dovetail.sampler.base import (
    SampleBuffer,
    Sampler,
    SamplingParams,
    TokenPrompt,
    check_request,
    check_weights,
)
from dovetail.sampler.kv_cache import PageBudget, PagedCache, PagePool, numbers_per_token
from dovetail.sampler.model_runner import Capture, ModelRunner, cuda_capture, pad_to_bucket
from dovetail.sampler.sampling import streams
from dovetail.sampler.scheduler import GenerationLoop, Group, Scheduler
from dovetail.sampler.turn import Turn
from dovetail.weights.hf_reader import TensorSource
from dovetail.weights.load import load
from dovetail.weights.shards import checkpoint_params, form_of

MAX_TOKENS = 1 << 16
FREE_SHARE = 0.5  # of a GPU's free memory
MAX_SHARE_OF_FREE = 0.9


@dataclass(frozen=True)
class SamplerOptions:
    """Options of the embedded sampler.

    decode_steps: steps between host syncs; default 1 on a CPU, 8 elsewhere. keep_cache: keeps the
    cache between calls, with its CUDA graphs.
    """

    page_size: int = 64
    decode_steps: int | None = None
    max_num_seqs: int = 512
    max_prefill_tokens: int = 1 << 14
    keep_cache: bool = False


class NativeSampler(Sampler):
    """The embedded sampler, in a layout of its own: tp, and replicas over dp x cp."""

    def __init__(
        self,
        spec: ArchSpec,
        mesh: Mesh,
        kernels: KernelSet,
        dtype: torch.dtype,
        *,
        max_tokens: int | None = None,
        options: SamplerOptions | None = None,
        capture: Capture | None = None,
    ) -> None:
        """max_tokens: those of a replica's cache; default 2^16, on a GPU half of the free memory."""
        assert mesh["pp"].size == 1, "factory.sampler makes pipeline ranks tensor-parallel ones"
        super().__init__()
        self.spec = spec
        self.mesh = mesh
        self.kernels = kernels
        self.dtype = dtype
        self.max_tokens = max_tokens
        self.options = options or SamplerOptions()
        self.decode_steps = self.options.decode_steps or (1 if mesh.device.type == "cpu" else 8)
        self.capture = capture or capture_for(spec, mesh, kernels, dtype)
        plain = kernels.attention is reference.attention or not cuda.takes_flash(
            dtype, spec.attention.head_dim
        )
        self.capture_prefill = self.capture is not None and not plain
        self.model = _empty_decoder(spec, mesh, kernels, dtype)
        self._runner: ModelRunner | None = None
        self._wanted_pages = 0  # before the memory budget
        self.filled = False

    @torch.no_grad()
    def refill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Takes weights, and reads them to the end even after a problem: other ranks may wait."""
        refilling = Refilling(self)
        for name, tensor in weights:
            refilling.put(name, tensor)
            del tensor  # before the next one is made
        refilling.finish()

    def load(self, source: TensorSource) -> None:
        """Loads a checkpoint, of which each rank reads its slices. Collective."""
        self.use_checkpoint_names(source)
        load(self.model, source, self.mesh, ignore=self.spec.ignored)
        self.filled = True

    def use_checkpoint_names(self, source: TensorSource) -> None:
        """Expects experts as a checkpoint has them."""
        self.model.experts = form_of(self.model, source)

    @torch.no_grad()
    def sample(self, prompts: Sequence[TokenPrompt], params: SamplingParams) -> list[Turn]:
        rope = self.spec.rope
        limit = (rope.kind, rope.max_positions) if rope.kind in BY_LENGTH else None
        check_request(prompts, params, self.spec.vocab_size, limit, filled=self.filled)
        buffer = SampleBuffer(
            prompts, params, self.mesh, torch.device("cpu"), self.spec.moe if params.trace else None
        )
        lengths = buffer.local_prompts(self.spec.width)
        if lengths:
            self._run(lengths, buffer)
        return buffer.turns()

    def _run(self, lengths: dict[int, int], buffer: SampleBuffer) -> None:
        options = self.options
        params = buffer.params
        budget = PageBudget(params.samples, params.max_new_tokens, options.page_size)
        runner = self._runner_for(lengths, budget)
        self._runner = None
        runner.set_params(params)
        pool = PagePool(runner.cache.pages - 1)
        scheduler = Scheduler(pool, options.max_num_seqs, options.max_prefill_tokens)
        experts = buffer.experts if runner.experts is not None else None
        loop = GenerationLoop(runner, scheduler, params.stop_ids, buffer.store, experts)
        order = sorted(lengths, key=lambda i: (-lengths[i], i))
        samples = np.arange(params.samples)
        rows = np.array([buffer.prompts[i].row for i in order]).repeat(params.samples)
        noise = streams(params.seed, params.step, rows, np.tile(samples, len(order)))
        for i, own in zip(order, noise.reshape(len(order), -1), strict=True):
            scheduler.add(Group(buffer.prompts[i].ids, budget, own, i * params.samples + samples))
        try:
            while loop.step():
                if self.watch is not None:
                    self.watch(loop.finished, len(noise), loop.tokens)
            assert scheduler.all_admitted, (
                "prompts wait, but nothing runs that could free pages for them"
            )
        finally:
            if not options.keep_cache:
                runner.drop_graphs()
        self._runner = runner if options.keep_cache else None

    def _runner_for(self, lengths: dict[int, int], budget: PageBudget) -> ModelRunner:
        """Returns a runner that is large enough, the kept one if it is."""
        page_size = self.options.page_size
        values = lengths.values()
        rows = min(self.options.max_num_seqs, len(lengths) * budget.samples)
        longest = max(map(budget.pages_for_sample, values))
        least = max(map(budget.pages_for_first, values))
        width = longest + -(-self.decode_steps // page_size)  # finished rows run on
        wanted = min(sum(map(budget.pages_for_all, values)), (rows + 1) * longest)
        if self._runner is not None:
            fits = (
                self._runner.table_width >= width
                and self._runner.rows >= rows
                and self._runner.cache.pages > least
            )
            if fits and self._wanted_pages >= wanted:
                return self._runner
            self._runner.drop_graphs()
            self._runner = None  # its memory is part of the new one's budget
        self._wanted_pages = wanted
        pages = 1 + min(wanted, max(least, self.max_entries() // page_size))
        return self.make_runner(
            PagedCache(self.spec, self.mesh, self.dtype, pages, page_size),
            pad_to_bucket(rows),
            width,
        )

    def make_runner(self, cache: PagedCache, rows: int, width: int) -> ModelRunner:
        return ModelRunner(
            self.model,
            cache,
            rows=rows,
            table_width=width,
            decode_steps=self.decode_steps,
            capture=self.capture,
            capture_prefill=self.capture_prefill,
        )

    def max_entries(self, share: float = FREE_SHARE, *, of_all: bool = False) -> int:
        """Tokens that a new cache may hold, the same on every tp rank.

        share: of a GPU's free memory; of_all: of its whole memory, less what this process holds, and at most 0.9 of the free.
        """
        device = self.mesh.device
        if self.max_tokens is not None or device.type != "cuda":
            return MAX_TOKENS if self.max_tokens is None else self.max_tokens
        memory = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_allocated(device)
        reserved = torch.cuda.memory_reserved(device)
        room = int(cache_bytes(share, *memory, held, reserved, of_all=of_all))
        least = int(stack_over(torch.tensor([room], device=device), self.mesh["tp"]).min())
        bytes_per_token = numbers_per_token(self.spec, self.mesh) * self.dtype.itemsize
        return max(0, least) // bytes_per_token


def cache_bytes(
    share: float, free: int, total: int, held: int, reserved: int, *, of_all: bool
) -> float:
    """Returns `NativeSampler.max_entries` in bytes. held: tensors of this process; reserved: with what its allocator keeps."""
    free += reserved - held
    return min(share * total - held, MAX_SHARE_OF_FREE * free) if of_all else share * free


class Refilling:
    """New weights for a sampler, which is not `filled` until all of them came."""

    def __init__(self, sampler: NativeSampler) -> None:
        sampler.filled = False
        self._sampler = sampler
        # Our views, with their slices.
        self._shards: dict[str, list[tuple[Tensor, tuple[slice, ...]]]] = defaultdict(list)
        self._shapes: dict[str, tuple[int, ...]] = {}  # of all ranks', which refuse alike
        for param in checkpoint_params(sampler.model, sampler.mesh):
            self._shapes |= checkpoint_shapes(param.name, param.placement, param.shape)
            for region in param.regions:
                view = param.local[as_index(region.local_slice)]
                self._shards[region.checkpoint_name].append(
                    (view, as_index(region.checkpoint_slice))
                )
        self._problems = list[str]()
        self._missing = set(self._shapes)

    def put(self, listed: str, tensor: Tensor) -> None:
        """Takes a whole tensor by its HF name. A problem waits for `finish`."""
        spec = self._sampler.spec
        shapes = self._shapes
        tied_head = spec.tie_embeddings and listed == "lm_head.weight"
        name = "model.embed_tokens.weight" if tied_head else listed
        if tied_head and name not in self._missing:
            pass  # a checkpoint may list either name, or both
        elif name not in shapes:
            self._problems.append(f"{name}: not a tensor of this {spec.family} model")
        elif tuple(tensor.shape) != shapes[name]:
            self._problems.append(
                f"{name}: shape {list(tensor.shape)}, expected {list(shapes[name])}"
            )
        else:
            for local, source in self._shards[name]:
                local.copy_(tensor[source])
        self._missing.discard(name)

    def finish(self) -> None:
        """Raises CheckpointError for tensors that are missing, unknown or of another shape."""
        check_weights(self._problems + [f"{name}: missing" for name in sorted(self._missing)])
        self._sampler.filled = True


def capture_for(
    spec: ArchSpec, mesh: Mesh, kernels: KernelSet, dtype: torch.dtype
) -> Capture | None:
    """Returns CUDA graphs on one GPU; None with attention or grouped products that synchronize."""
    alone = mesh.device.type == "cuda" and mesh["tp"].size == mesh["ep"].size == 1
    plain = dtype == torch.float64 or spec.attention.head_dim > reference.MAX_PAGED_DIM
    synchronizes = plain or kernels.decode_attention is reference.decode_attention
    if spec.moe is not None and alone:
        widths = (spec.width, spec.moe.ffn_width)
        known = kernels.grouped_mm is cuda.grouped_mm
        synchronizes |= not (known and cuda.grouped_mm_without_sync(mesh.device, dtype, *widths))
    return cuda_capture() if alone and not synchronizes else None


def _empty_decoder(spec: ArchSpec, mesh: Mesh, kernels: KernelSet, dtype: torch.dtype) -> Decoder:
    """Returns a model of zeros: padding is never filled. Fused gates are for many tokens."""
    with torch.device("meta"):
        model = Decoder(spec, mesh, replace(kernels, gated=None, mixture=None)).hold_in(dtype)
    model.to_empty(device=mesh.device)
    if spec.tie_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    for parameter in model.parameters():
        parameter.requires_grad_(False).zero_()
    return model.eval()
