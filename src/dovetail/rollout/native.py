"""The embedded sampler: our own decoder with a paged cache of keys and values, refilled from any engine's weights.

Each replica takes some of the prompts, by cost. Prompts are computed once, packed; their samples share the pages that
they fill, run together a token at a time, and make room for those that wait as soon as they end.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dovetail.arch.spec import BY_LENGTH, ArchSpec
from dovetail.batch.balancing import plan_microbatches
from dovetail.errors import CheckpointError, listing
from dovetail.kernels import cuda, reference
from dovetail.kernels.registry import KernelSet
from dovetail.nn.decoder import Decoder
from dovetail.parallel.collectives import stack_over
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import as_index, checkpoint_shapes
from dovetail.rollout.base import Completion, Prompt, SamplingParams, check_lengths, check_prompts
from dovetail.rollout.cuda_graph import GraphCapturer, cuda_capturer
from dovetail.rollout.kv_cache import entry_bytes
from dovetail.rollout.model_runner import ModelRunner, RunnerSize, pad_to_bucket
from dovetail.rollout.results import SampleBuffer, SampledRoutes
from dovetail.rollout.scheduler import GenerationLoop, PageBudget, PagePool, Schedule
from dovetail.weights.experts import form_of, stored
from dovetail.weights.hf_reader import TensorSource
from dovetail.weights.load import load

MAX_TOKENS = 1 << 16
FREE_SHARE = 0.5  # of a GPU's free memory that the cache may take; logits and prompts need some, too


@dataclass(frozen=True)
class SamplerOptions:
    """page: entries of a page. ahead: steps between two looks for rows that ended; None: 1 on a CPU, 8 elsewhere.

    most_rows: that run at a time. prefill_tokens: of prompts that are computed together. hold: keep the cache and what was
    recorded from one call of `sample` to the next, which saves recording it again.
    """

    page: int = 64
    ahead: int | None = None
    most_rows: int = 512
    prefill_tokens: int = 1 << 14
    hold: bool = False


class NativeSampler:
    """A decoder in the compute dtype under its own layout: tp, and replicas over dp x cp. Implements `Sampler`.

    Every call is collective.
    """

    def __init__(
        self,
        spec: ArchSpec,
        mesh: Mesh,
        kernels: KernelSet,
        dtype: torch.dtype,
        *,
        max_tokens: int | None = None,
        options: SamplerOptions | None = None,
        recorder: GraphCapturer | None = None,
    ) -> None:
        """max_tokens: most entries that one replica's cache holds, or what a single row needs if that is more.

        Default: 2^16; on a GPU half of what is free when `sample` is called. recorder: default that of the device.
        """
        assert mesh["pp"].size == 1, "build.sampling makes pipeline ranks tensor-parallel ones"
        self.spec, self.mesh, self.kernels, self.dtype, self.max_tokens = spec, mesh, kernels, dtype, max_tokens
        self.options = options or SamplerOptions()
        self.ahead = self.options.ahead or (1 if mesh.device.type == "cpu" else 8)
        self.recorder = recorder or capturer_for(spec, mesh, kernels, dtype)
        self.model = _empty_decoder(spec, mesh, kernels, dtype)
        self._deck: ModelRunner | None = None
        self._wanted = 0  # pages that the deck was made for, whatever the budget made of it
        self._filled = False

    @torch.no_grad()
    def refill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over (HF name, whole tensor) pairs, one at a time. What is missing, extra or mis-shaped raises together.

        The stream is read to its end even then: on other ranks it may be waiting for this one.
        """
        self._filled = False
        pieces, shapes = self._pieces()
        wrong, missing = [], set(shapes)
        for given, tensor in weights:
            # a checkpoint may list either name of a tied tensor
            is_head = self.spec.tie_embeddings and given == "lm_head.weight"
            name = "model.embed_tokens.weight" if is_head else given
            if is_head and name not in missing:
                pass  # the table has come
            elif name not in shapes:
                wrong.append(f"{name}: not a tensor of this {self.spec.family} model")
            elif tuple(tensor.shape) != shapes[name]:
                wrong.append(f"{name}: shape {list(tensor.shape)}, expected {list(shapes[name])}")
            else:
                for local, source in pieces[name]:
                    local.copy_(tensor[source])
            missing.discard(name)
            del tensor  # before the next one is made
        wrong += [f"{name}: missing" for name in sorted(missing)]
        if wrong:
            raise CheckpointError(
                "the weights given to the sampler are not those of its model; refill it from an engine of the same "
                f"config.json:\n{listing(wrong)}"
            )
        self._filled = True

    def load(self, source: TensorSource) -> None:
        """Take over a checkpoint, each rank its own slices. Collective."""
        self.name_as(source)
        load(self.model, source, self.mesh, ignore=self.spec.ignored)
        self._filled = True

    def name_as(self, source: TensorSource) -> None:
        """Expect experts under the names that a checkpoint has for them."""
        self.model.experts = form_of(self.model, source)

    @torch.no_grad()
    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """`params.samples` completions of every prompt, ordered by prompt, then sample."""
        self._check(prompts, params)
        replicas, new = self.mesh["fsdp"], params.max_new_tokens
        costs = [len(prompt.ids) + params.samples * new for prompt in prompts]
        dealt = plan_microbatches(costs, replicas.size, None, width=self.spec.width)[replicas.rank]
        mine = {i: len(prompts[i].ids) for batch in dealt for i in batch}
        rows, longest = len(prompts) * params.samples, max((len(prompt.ids) for prompt in prompts), default=0)
        moe, device = self.spec.moe, self.mesh.device
        routes = SampledRoutes(rows, longest + new, moe, device) if params.trace and moe is not None else None
        found = SampleBuffer(rows, new, torch.device("cpu"), routes)
        if mine:
            self._run(mine, prompts, params, found)
        return found.completions(prompts, params, self.mesh)

    def _run(
        self, mine: Mapping[int, int], prompts: Sequence[Prompt], params: SamplingParams, found: SampleBuffer
    ) -> None:
        """All samples of some prompts (number -> length)."""
        need = PageBudget(params.samples, params.max_new_tokens, self.options.page)
        deck, self._deck = self._deck_for(mine, need), None
        deck.begin(params)
        pool = PagePool(deck.size.pages - 1)
        limits = {"most_rows": self.options.most_rows, "prefill_tokens": self.options.prefill_tokens}
        schedule = Schedule(mine, need, pool, **limits)
        try:
            GenerationLoop(deck, schedule, prompts, params, found).run()
        finally:
            if not self.options.hold:
                deck.forget()
        self._deck = deck if self.options.hold else None

    def _deck_for(self, mine: Mapping[int, int], need: PageBudget) -> ModelRunner:
        """The one that is held, if it was made for as much; otherwise one for these prompts within the budget."""
        page, lengths = self.options.page, mine.values()
        rows = min(self.options.most_rows, len(mine) * need.samples)
        longest, least = max(map(need.row, lengths)), max(map(need.least, lengths))
        width = longest + -(-self.ahead // page)  # rows that ended run on into page 0
        wanted = min(sum(map(need.all_rows, lengths)), (rows + 1) * longest)
        if self._deck is not None:
            size = self._deck.size
            if size.width >= width and size.rows >= rows and size.pages > least and self._wanted >= wanted:
                return self._deck
            self._deck.forget()
            self._deck = None  # its memory is part of the new one's budget
        self._wanted = wanted
        pages = min(wanted, max(least, self._budget() // page))
        size = RunnerSize(rows=pad_to_bucket(rows), width=width, ahead=self.ahead, pages=1 + pages, page=page)
        return ModelRunner(self.model, self.dtype, size, self.recorder)

    def _budget(self) -> int:
        """Most entries that the cache may hold, the same on every rank of tp."""
        if self.max_tokens is not None:
            return self.max_tokens
        device = self.mesh.device
        if device.type != "cuda":
            return MAX_TOKENS
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.tensor([torch.cuda.mem_get_info(device)[0] + idle], device=device)
        least = int(stack_over(free, self.mesh["tp"]).min())
        return int(FREE_SHARE * least) // entry_bytes(self.spec, self.mesh, self.dtype)

    def _pieces(self) -> tuple[dict[str, list[tuple[Tensor, tuple[slice, ...]]]], dict[str, tuple[int, ...]]]:
        """By checkpoint name: the views of our parameters with their slices of the tensor, and the tensor's shape.

        All ranks know every name and shape, so that they judge alike: some may hold nothing but padding of a tensor.
        """
        pieces: dict[str, list[tuple[Tensor, tuple[slice, ...]]]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for param in stored(self.model, self.mesh):
            known = checkpoint_shapes(param.name, param.placement, param.shape)
            shapes |= known
            pieces |= {name: [] for name in known}
            for region in param.regions:
                view = param.local[as_index(region.local_slice)]
                pieces[region.checkpoint_name].append((view, as_index(region.checkpoint_slice)))
        return pieces, shapes

    def _check(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """Refuse what cannot be sampled. All ranks have the same prompts, so all refuse alike."""
        if not self._filled:
            raise CheckpointError("the sampler holds no weights; call refill(engine.weights()) before sample()")
        check_prompts(prompts, self.spec.vocab_size)
        rope = self.spec.rope
        if rope.kind in BY_LENGTH:
            check_lengths(prompts, params, rope.kind, rope.max_positions)


def capturer_for(spec: ArchSpec, mesh: Mesh, kernels: KernelSet, dtype: torch.dtype) -> GraphCapturer | None:
    """What records steps: on one GPU, where no operation of a step asks the device for anything; otherwise None.

    Those that may: reference attention to a cache, which float64 and long heads take, too, and grouped products of experts.
    """
    alone = mesh.device.type == "cuda" and mesh["tp"].size == mesh["ep"].size == 1
    plain = dtype == torch.float64 or spec.attention.head_dim > reference.MAX_PAGED_DIM
    asks = plain or kernels.decode_attention is reference.decode_attention
    if spec.moe is not None and alone:
        widths = (spec.width, spec.moe.ffn_width)
        asks |= kernels.grouped_mm is not cuda.grouped_mm or not cuda.grouped_mm_without_sync(
            mesh.device, dtype, *widths
        )
    return cuda_capturer() if alone and not asks else None


def _empty_decoder(spec: ArchSpec, mesh: Mesh, kernels: KernelSet, dtype: torch.dtype) -> Decoder:
    """A decoder of zeros, made in its dtype and on its device at once: padding is never filled, so it stays zero.

    Products that gate inside are for many tokens, and nobody has recorded theirs: a sampler's are plain.
    """
    with torch.device("meta"):
        model = Decoder(spec, mesh, replace(kernels, gated=None, mixture=None)).hold_in(dtype)
    model.to_empty(device=mesh.device)
    if spec.tie_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    for parameter in model.parameters():
        parameter.requires_grad_(False).zero_()
    return model.eval()
