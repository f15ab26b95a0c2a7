"""Prefill and decode of the running batch.

Decode steps use fixed memory, and may be captured as CUDA graphs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dovetail.batch.packed import cumulative
from dovetail.batch.routing import Routes
from dovetail.kernels.reference import Spans
from dovetail.nn.attention import Context, rope_tables
from dovetail.nn.decoder import Decoder
from dovetail.parallel.collectives import all_gather, stack_over
from dovetail.sampler.base import Numbers, SamplingParams
from dovetail.sampler.kv_cache import DecodeContext, PagedCache, PrefillContext
from dovetail.sampler.sampling import banned_of, bits_at, draw, mask_of

Step = Callable[[], Any]
Capture = Callable[[Step], Step]
STATE = ("token", "length", "drawn", "stream", "active")  # active: 0 in padding
SMALLEST_BUCKET = 8
NEXT_BUCKET = 32
PREFILL_STEP = 128
LARGEST_PREFILL = 2048
MAX_PROMPTS = 64  # of graphs: tokens, and prompts with the padding


def pad_to_bucket(n: int, *, fine: bool = False) -> int:
    """Returns the rows of the graph for n rows; a capture costs ten to twenty steps.

    fine: multiples of NEXT_BUCKET, for graphs that are kept.
    """
    if n <= SMALLEST_BUCKET:
        return SMALLEST_BUCKET
    if fine:
        return -(-n // NEXT_BUCKET) * NEXT_BUCKET
    return max(NEXT_BUCKET, 1 << (n - 1).bit_length())


class ModelRunner:
    """Runs the model for the rows of a batch.

    capture: rows are padded to buckets, and each bucket's step is captured. decode_steps: steps
    between host syncs. joining: requests join what runs. Buckets are finer then, and with
    `capture_prefill` short prefills are captured too: their many small kernels take longer to
    launch than to run. It wants attention that reads lengths on the device.
    """

    def __init__(
        self,
        model: Decoder,
        cache: PagedCache,
        *,
        rows: int,
        table_width: int,
        decode_steps: int,
        capture: Capture | None,
        capture_prefill: bool = False,
    ) -> None:
        self.model = model
        self.cache = cache
        self.capture = capture
        self.rows = rows
        self.table_width = table_width
        self.decode_steps = decode_steps
        self.spec = model.spec
        self.mesh = model.mesh
        self.kernels = model.kernels
        device = model.mesh.device
        positions = torch.arange(table_width * cache.page_size, device=device)
        self.cos, self.sin = rope_tables(self.spec.rope, positions, (), cache.dtype)
        self.state = torch.zeros(len(STATE), rows, dtype=torch.int64, device=device)
        self.page_table = torch.zeros(rows, table_width, dtype=torch.int64, device=device)
        self.step_index = torch.zeros(1, dtype=torch.int64, device=device)
        self.outputs = torch.zeros(decode_steps, 2, rows, dtype=torch.float64, device=device)
        self.experts: Tensor | None = None
        self.params: SamplingParams | None = None
        self.capture_prefill = capture_prefill
        self.joining = False
        self._steps: dict[int, Step] = {}
        self._prefills: dict[int, tuple[Tensor, Tensor, Step]] = {}  # inputs, cu_seqlens, step

    def set_params(self, params: SamplingParams) -> None:
        """Takes sampling parameters. Graphs stay valid if only noise or stop ids differ."""
        params = replace(params, samples=1, max_new_tokens=1, seed=0, step=0, stop_ids=())
        if params == self.params:
            return
        self.params = params
        self._steps = {}
        self.experts = None
        self.banned = banned_of(params, self.mesh.device)
        self.banned_mask = None
        if params.banned_ids:
            self.banned_mask = mask_of(self.banned, self.spec.vocab_size)
        moe = self.spec.moe if params.trace else None
        if moe is not None:
            shape = (self.decode_steps, self.rows, len(moe.numbers), moe.top_k)
            self.experts = torch.zeros(shape, dtype=torch.int32, device=self.mesh.device)

    def drop_graphs(self) -> None:
        """Frees graphs: they and the runner refer to each other, so their memory would stay."""
        self._steps = {}
        self._prefills = {}

    def prefill(
        self, prompts: Sequence[tuple[Sequence[int], list[int]]]
    ) -> tuple[Tensor, Tensor | None]:
        """Writes prompts (ids, pages) into the cache.

        Returns their last hidden states [n, D], and all tokens' experts [T, M, K].
        """
        page_size = self.cache.page_size
        lengths = [len(ids) for ids, _ in prompts]
        bucket = self._prefill_bucket(lengths)
        tokens = sum(lengths)
        missing = bucket - tokens if bucket else -tokens % self.mesh.token_multiple
        packed = (*lengths, missing) if missing else tuple(lengths)
        # tokens, positions, pages, offsets; padding goes to page 0
        inputs = np.zeros((4, sum(packed)), np.int64)
        start = 0
        for ids, pages in prompts:
            end = start + len(ids)
            positions = np.arange(len(ids))
            inputs[0, start:end] = ids
            inputs[1, start:end] = positions
            inputs[2, start:end] = np.array(pages)[positions // page_size]
            inputs[3, start:end] = positions % page_size
            start = end
        ends = cumulative(packed)
        routes = Routes()
        if bucket:
            hidden = self._captured_prefill(bucket, torch.from_numpy(inputs), ends)
        else:
            device = self.mesh.device
            spans = Spans(ends.to(device), packed)
            hidden = self._prefill(torch.from_numpy(inputs).to(device), spans, routes)
        last = ends[1 : len(lengths) + 1].to(hidden.device).long() - 1
        experts = None if self.experts is None else self._experts(routes)
        return hidden[last], experts

    def _prefill_bucket(self, lengths: Sequence[int]) -> int:
        """Returns the tokens of a captured prefill; 0: none is captured."""
        total = sum(lengths)
        wanted = self.capture is not None and self.capture_prefill and self.joining
        fits = total <= LARGEST_PREFILL and len(lengths) < MAX_PROMPTS
        if not (wanted and fits) or self.experts is not None:
            return 0
        step = PREFILL_STEP if total <= 2 * PREFILL_STEP else 2 * PREFILL_STEP
        return -(-total // step) * step

    def _captured_prefill(self, bucket: int, inputs: Tensor, ends: Tensor) -> Tensor:
        """Returns hidden states [bucket, D], until the next call. ends: as `cu_seqlens`."""
        if bucket not in self._prefills:
            assert self.capture is not None
            own = torch.zeros(4, bucket, dtype=torch.int64, device=self.mesh.device)
            cu_seqlens = torch.zeros(MAX_PROMPTS + 1, dtype=torch.int32, device=self.mesh.device)
            spans = Spans(cu_seqlens, (bucket, 0))  # the longest, and no form for equal lengths
            step = self.capture(partial(self._prefill, own, spans, Routes()))
            self._prefills[bucket] = (own, cu_seqlens, step)
        own, cu_seqlens, step = self._prefills[bucket]
        own.copy_(inputs)
        missing = len(cu_seqlens) - len(ends)
        cu_seqlens.copy_(F.pad(ends, (0, missing), value=bucket))
        hidden: Tensor = step()
        return hidden

    def _prefill(self, inputs: Tensor, spans: Spans, routes: Routes) -> Tensor:
        tokens, at, pages, offsets = inputs
        cos = self.cos[at]
        sin = self.sin[at]
        entries = (self.cache, pages, offsets)
        context = PrefillContext(cos, sin, self.kernels, *entries, routes, spans)
        return self._hidden(tokens, context)

    def sample_first(
        self, hidden: Tensor, owners: Sequence[int], noise: Numbers
    ) -> NDArray[np.float64]:
        """Returns ids and log-probs [1, 2, rows]; row i continues the hidden state of `owners[i]`.

        noise: streams and positions [2, rows].
        """
        of_rows = torch.tensor(owners, device=hidden.device)
        z = self.logits(hidden)[of_rows]
        streams, positions = torch.from_numpy(noise).to(hidden.device)
        drawn = self._draw(z, streams, positions)
        outputs: NDArray[np.float64] = drawn[None].cpu().numpy()
        return outputs

    def set_rows(self, state: Numbers, page_table: Numbers) -> None:
        """Sets the running rows.

        state [4, rows]: next token, length in the cache, tokens drawn, noise stream.
        page_table: [rows, table_width].
        """
        n = state.shape[1]
        padded = self._padded(n)
        both = np.zeros((len(STATE), padded), np.int64)
        both[:-1, :n] = state
        both[-1, :n] = 1
        self.state[:, :padded] = torch.from_numpy(both)
        self.page_table[:n] = torch.from_numpy(page_table)
        self.page_table[n:padded] = 0

    def decode(self, n: int, steps: int) -> NDArray[np.float64]:
        """Returns ids and log-probs [steps, 2, n]."""
        self.step_index.zero_()
        step = self._step(self._padded(n))
        for _ in range(steps):
            step()
        outputs: NDArray[np.float64] = self.outputs[:steps, :, :n].cpu().numpy()
        return outputs

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns [n, V] on every tp rank, without the vocabulary's padding."""
        tp = self.mesh["tp"]
        head = self.model.lm_head
        z = head.logits(hidden)
        if tp.size == 1:
            return z
        missing = head.weight.shape[0] - head.columns
        shard = F.pad(z, (0, missing)).T
        whole = all_gather(shard, tp)[: self.spec.vocab_size]
        return whole.T.contiguous()

    def _padded(self, n: int) -> int:
        return n if self.capture is None else pad_to_bucket(n, fine=self.joining)

    def _hidden(self, tokens: Tensor, context: Context) -> Tensor:
        return all_gather(self.model.model(tokens, context), self.mesh["tp"])

    def _experts(self, routes: Routes) -> Tensor:
        """Returns all tokens' experts [T, M, K]."""
        assert self.spec.moe is not None
        experts = torch.stack([routes.chosen[layer] for layer in self.spec.moe.numbers], dim=1)
        return stack_over(experts, self.mesh["tp"]).flatten(0, 1)

    def _step(self, n: int) -> Step:
        if n not in self._steps:
            assert self.params is not None
            synchronizes = self.params.cuts and self.params.top_p < 1
            forward: Step = partial(self._forward, n)
            if self.capture is not None and synchronizes:
                forward = self.capture(forward)
            step: Step = partial(self._decode_step, forward, n)
            self._steps[n] = step if self.capture is None or synchronizes else self.capture(step)
        return self._steps[n]

    def _forward(self, n: int) -> Tensor:
        tokens, lengths = self.state[:2, :n]
        page_size = self.cache.page_size
        page_table = self.page_table[:n]
        pages = page_table.gather(1, (lengths // page_size)[:, None])[:, 0]
        missing = -n % self.mesh.token_multiple
        positions = lengths
        if missing:
            positions = F.pad(lengths, (0, missing))
            tokens = F.pad(tokens, (0, missing))
        cos = self.cos[positions]
        sin = self.sin[positions]
        entries = (pages, lengths % page_size, Routes(), page_table, lengths + 1)
        context = DecodeContext(cos, sin, self.kernels, self.cache, *entries)
        hidden = self._hidden(tokens, context)[:n]
        if self.experts is not None:
            experts = self._experts(context.routes)[None, :n]
            rows = self.experts[:, :n]
            rows.index_copy_(0, self.step_index, experts.to(rows.dtype))
        return self.logits(hidden)

    def _decode_step(self, forward: Step, n: int) -> None:
        z = forward()
        token, length, drawn, stream, active = self.state[:, :n]
        output = self._draw(z, stream, drawn)
        self.outputs[:, :, :n].index_copy_(0, self.step_index, output[None])
        token.copy_(output[0])
        length.add_(active)
        drawn.add_(active)
        self.step_index.add_(1)

    def _draw(self, z: Tensor, streams: Tensor, positions: Tensor) -> Tensor:
        """Returns ids and log-probs [2, n], tp rank 0's on every rank: devices may round apart."""
        assert self.params is not None
        fits_kernel = not self.params.cuts and z.dtype != torch.float64
        if self.kernels.draw is not None and fits_kernel:
            temperature = self.params.temperature
            drawn = self.kernels.draw(z, streams, positions, temperature, self.banned_mask)
        else:
            uniforms = bits_at(streams, positions).to(torch.float64) * 2.0**-53
            ids, log_probs = draw(z, uniforms, self.params, self.banned)
            drawn = torch.stack([ids.to(torch.float64), log_probs])
        return stack_over(drawn, self.mesh["tp"])[0]


class GraphPool:
    """A memory pool of graphs. Torch captures into no pool whose graphs are all gone."""

    def __init__(self, new_handle: Callable[[], Any]) -> None:
        self._new_handle = new_handle
        self._handle = None
        self._graphs: WeakSet[Any] = WeakSet()

    def acquire(self, graph: object) -> Any:
        """Returns the pool to capture `graph` into."""
        if not self._graphs:
            self._handle = self._new_handle()
        self._graphs.add(graph)
        return self._handle


class CapturedStep:
    """A function that is run once, which compiles kernels, then captured, and replayed from then on.

    Results hold until a function of the pool runs again.
    """

    def __init__(self, fn: Step, pool: GraphPool) -> None:
        self._fn = fn
        self._pool = pool
        self._warm = False
        self._captured: tuple[torch.cuda.CUDAGraph, Any] | None = None

    def __call__(self) -> Any:
        if not self._warm:
            self._warm = True
            return self._fn()
        if self._captured is None:
            graph = torch.cuda.CUDAGraph()
            # thread_local: a checkpoint's writer may use the device meanwhile
            pool = self._pool.acquire(self)
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                result = self._fn()
            self._captured = (graph, result)
        graph, result = self._captured
        graph.replay()
        return result


def cuda_capture() -> Capture:
    """Returns a capture whose graphs share one pool: they never run at once."""
    return partial(CapturedStep, pool=GraphPool(torch.cuda.graph_pool_handle))
