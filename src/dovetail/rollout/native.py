"""The embedded sampler: our own decoder with a cache of keys and values, refilled from any engine's weights.

Each replica takes some of the prompts, by cost, and runs them in waves that fit a budget of cached tokens. A wave
computes each prompt once, packed, shares its cache among its samples, and then adds a token to every row at a time.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.arch.spec import ArchSpec
from dovetail.batch import cumulative, plan_microbatches
from dovetail.comm import all_gather, stack_over
from dovetail.errors import CheckpointError, DataError, ModelError, listing
from dovetail.kernels.reference import Spans
from dovetail.kernels.registry import KernelSet
from dovetail.mesh import Mesh
from dovetail.nn.attention import Context
from dovetail.nn.decoder import Decoder
from dovetail.nn.rope import rope_tables
from dovetail.placement import as_index, checkpoint_shapes
from dovetail.rollout.base import Completion, Prompt, SamplingParams
from dovetail.rollout.cache import DecodeContext, KVCache, PrefillContext
from dovetail.rollout.draw import draw
from dovetail.rollout.found import Found, FoundRoutes
from dovetail.rollout.noise import uniforms
from dovetail.rollout.waves import Wave, plan_waves
from dovetail.routing import Routes
from dovetail.weights.experts import form_of, stored
from dovetail.weights.load import load
from dovetail.weights.reader import TensorSource

MAX_TOKENS = 1 << 16
# Share of rows still alive: copying the cache of those costs about one step, a smaller batch saves every later one.
COMPACT_BELOW = 0.75


class NativeSampler:
    """A decoder in the compute dtype under its own layout: tp, and replicas over dp x cp. Implements `Sampler`.

    Every call is collective.
    """

    def __init__(
        self, spec: ArchSpec, mesh: Mesh, kernels: KernelSet, dtype: torch.dtype, *, max_tokens: int = MAX_TOKENS
    ) -> None:
        """max_tokens: most entries that one replica's cache holds at a time, rows times the longest of them.

        It bounds the prompts that are computed together, too. An entry takes 2 G C numbers a layer.
        """
        assert mesh["pp"].size == 1, "build.sampling makes pipeline ranks tensor-parallel ones"
        self.spec, self.mesh, self.kernels, self.dtype, self.max_tokens = spec, mesh, kernels, dtype, max_tokens
        self.model = _empty_decoder(spec, mesh, kernels, dtype)
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
            is_head = self.spec.tie_embeddings and given == "lm_head.weight"
            name = (
                "model.embed_tokens.weight" if is_head else given
            )  # a checkpoint may list either name of a tied tensor
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
            raise CheckpointError(f"the weights given to the sampler are not those of its model:\n{listing(wrong)}")
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
        routes = FoundRoutes(rows, longest + new, moe, device) if params.trace and moe is not None else None
        found = Found(rows, new, device, routes)
        for wave in plan_waves(mine, params.samples, new, self.max_tokens):
            self._run(wave, prompts, params, found)
        return found.completions(prompts, params, self.mesh)

    def _run(self, wave: Wave, prompts: Sequence[Prompt], params: SamplingParams, found: Found) -> None:
        """All tokens of a wave's rows. Rows that stopped stay until enough of them did, and are ignored."""
        cache, z, context = self._prefill(wave, prompts, params.max_new_tokens)
        device = self.mesh.device
        rows = np.array([prompts[wave.prompts[owner]].row for owner, _ in wave.rows], dtype=np.int64)
        samples = np.array([sample for _, sample in wave.rows], dtype=np.int64)
        slots = torch.tensor([wave.prompts[o] * params.samples + sample for o, sample in wave.rows], device=device)
        if found.routes is not None:
            positions = torch.arange(context.source.shape[1], device=device)
            found.routes.put(slots[:, None], positions, context.routes, context.source, self.mesh["tp"])
        stops = torch.tensor(params.stop_ids, dtype=torch.int64, device=device)
        alive = torch.ones(len(slots), dtype=torch.bool, device=device)
        for position in range(params.max_new_tokens):
            noise = torch.from_numpy(uniforms(params.seed, params.step, rows, samples, position)).to(device)
            ids, log_probs = self._agreed(*draw(z, noise, params))
            found.put(slots, position, ids, log_probs, alive)
            alive = alive & ~torch.isin(ids, stops)
            left = int(alive.sum())
            if left == 0 or position + 1 == params.max_new_tokens:
                return
            if left <= COMPACT_BELOW * len(alive):
                kept = alive.nonzero()[:, 0]
                cache.keep(kept)
                rows, samples = rows[kept.cpu().numpy()], samples[kept.cpu().numpy()]
                slots, alive, ids = slots[kept], alive[kept], ids[kept]
            at = cache.lengths
            z, routes = self._decode(ids, cache)
            if found.routes is not None:
                found.routes.put(slots, at, routes, torch.arange(len(ids), device=device), self.mesh["tp"])

    def _prefill(self, wave: Wave, prompts: Sequence[Prompt], new: int) -> tuple[KVCache, Tensor, PrefillContext]:
        """A cache that holds every row's prompt, the logits [B, V] of what follows, and how that was computed."""
        device = self.mesh.device
        lengths = [len(prompts[i].ids) for i in wave.prompts]
        owners = torch.tensor([owner for owner, _ in wave.rows], device=device)
        cache = KVCache(self.spec, self.mesh, self.dtype, [lengths[o] for o, _ in wave.rows], max(lengths) + new)
        tokens = self._padded(torch.tensor([token for i in wave.prompts for token in prompts[i].ids], device=device))
        padding = len(tokens) - sum(lengths)
        packed = (*lengths, padding) if padding else tuple(lengths)
        spans = Spans(cumulative(packed).to(device), packed)
        starts, ends = spans.cu_seqlens[:-1].long()[owners], spans.cu_seqlens[1:].long()[owners]
        source = torch.minimum(starts[:, None] + torch.arange(cache.longest, device=device), ends[:, None] - 1)
        positions = torch.cat([torch.arange(n, device=device) for n in packed])
        context = PrefillContext(*self._rope(positions), spans, self.kernels, cache, source, Routes())
        last = spans.cu_seqlens[1 : len(lengths) + 1].long() - 1
        return cache, self._logits(tokens, context, last)[owners], context

    def _decode(self, ids: Tensor, cache: KVCache) -> tuple[Tensor, Routes]:
        """Give every row its token; the logits [B, V] of what follows, and the experts that the tokens went to."""
        rows = torch.arange(len(ids), device=ids.device)
        context = DecodeContext(*self._rope(self._padded(cache.lengths)), self.kernels, cache, rows, Routes())
        z = self._logits(self._padded(ids), context, rows)
        cache.grow()
        return z, context.routes

    def _logits(self, tokens: Tensor, context: Context, index: Tensor) -> Tensor:
        """The logits [n, V] of the tokens at `index` [n], on every rank of tp. Padding of the vocabulary is gone."""
        tp, head = self.mesh["tp"], self.model.lm_head
        z = head.logits(all_gather(self.model.model(tokens, context), tp)[index])
        if tp.size == 1:
            return z
        shard = F.pad(z, (0, head.weight.shape[0] - head.columns)).T
        return all_gather(shard, tp)[: self.spec.vocab_size].T.contiguous()

    def _agreed(self, ids: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """The draw of tp rank 0, on every rank of tp: devices may round apart. Ids are exact in float64."""
        first = stack_over(torch.stack([ids.to(torch.float64), log_probs]), self.mesh["tp"])[0]
        return first[0].to(torch.int64), first[1]

    def _padded(self, x: Tensor) -> Tensor:
        """Zeros at the end, up to a multiple of what the mesh cuts tokens into."""
        missing = -len(x) % self.mesh.token_multiple
        return F.pad(x, (0, missing)) if missing else x

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Without lengths: kind `dynamic` is plain up to its trained positions, and `_check` lets nothing pass them."""
        return rope_tables(self.spec.rope, positions, (), self.dtype)

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
        rope, vocabulary = self.spec.rope, self.spec.vocab_size
        for prompt in prompts:
            if not len(prompt.ids):
                raise DataError(f"prompt of row {prompt.row} has no tokens; a prompt needs at least one")
            if min(prompt.ids) < 0 or max(prompt.ids) >= vocabulary:
                bad = next(token for token in prompt.ids if not 0 <= token < vocabulary)
                raise DataError(
                    f"prompt of row {prompt.row} has the id {bad}; this model has ids 0 to {vocabulary - 1}"
                )
            total = len(prompt.ids) + params.max_new_tokens
            if rope.kind == "dynamic" and total > rope.max_positions:
                raise ModelError(
                    f"prompt of row {prompt.row} has {len(prompt.ids)} tokens, {total} with max_new_tokens="
                    f"{params.max_new_tokens}; beyond {rope.max_positions} positions rope_type 'dynamic' changes the "
                    "keys that are cached; shorten the prompt or lower max_new_tokens"
                )


def _empty_decoder(spec: ArchSpec, mesh: Mesh, kernels: KernelSet, dtype: torch.dtype) -> Decoder:
    """A decoder of zeros, made in its dtype and on its device at once: padding is never filled, so it stays zero."""
    with torch.device("meta"):
        model = Decoder(spec, mesh, kernels).hold_in(dtype)
    model.to_empty(device=mesh.device)
    if spec.tie_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    for parameter in model.parameters():
        parameter.requires_grad_(False).zero_()
    return model.eval()
