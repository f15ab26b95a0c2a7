"""The model at work: computes prompts into the cache, and gives every running row its next token, many steps in a row.

All that a step reads and writes stays where it is, so that a step can be recorded once and replayed. Between two
looks of the host nothing is asked of the device: a row that has ended goes on until then, and what it gets is dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dovetail.arch.spec import ArchSpec
from dovetail.batch.packed import cumulative
from dovetail.batch.routing import Routes
from dovetail.kernels.reference import Spans
from dovetail.nn.attention import Context
from dovetail.nn.decoder import Decoder
from dovetail.nn.rope import rope_tables
from dovetail.parallel.collectives import all_gather, stack_over
from dovetail.rollout.base import SamplingParams
from dovetail.rollout.cuda_graph import GraphCapturer
from dovetail.rollout.kv_cache import DecodeContext, PagedCache, PrefillContext
from dovetail.rollout.noise import bits_at
from dovetail.rollout.results import chosen_in
from dovetail.rollout.sampling import banned_of, draw, mask_of

Numbers = NDArray[np.int64]
# Of a row: what `ModelRunner.put` is given, and 1 where there is one.
NUMBERS = ("token", "length", "drawn", "stream", "going")
Step = Callable[[], object]
FEWEST, FEW = 8, 32  # rows of the smallest record, and of the next


def pad_to_bucket(n: int) -> int:
    """The rows of a record by which n of them run: 8, 32, 64, 128, 256 and so on.

    A record takes as long to make as ten or twenty of its steps, and of few rows one more costs next to nothing.
    """
    return FEWEST if n <= FEWEST else max(FEW, 1 << (n - 1).bit_length())


@dataclass(frozen=True)
class RunnerSize:
    """rows that run at a time, pages of a row's table, steps between two looks of the host; pages and their entries."""

    rows: int
    width: int
    ahead: int
    pages: int
    page: int


class ModelRunner:
    """A decoder, its cache, and the rows that run.

    With a recorder, rows are filled up to one of few numbers with ones that write to page 0, and the step of each such
    number is recorded.
    """

    def __init__(self, model: Decoder, dtype: torch.dtype, size: RunnerSize, recorder: GraphCapturer | None) -> None:
        self.model, self.size, self.recorder = model, size, recorder
        assert isinstance(model.spec, ArchSpec), "our decoder, whose family is known"
        self.spec, self.mesh, self.kernels = model.spec, model.mesh, model.kernels
        device = model.mesh.device
        self.cache = PagedCache(self.spec, self.mesh, dtype, size.pages, size.page)
        positions = torch.arange(size.width * size.page, device=device)
        # without lengths: those of short sequences, and where longer ones have others, no prompt is let grow so long
        self.cos, self.sin = rope_tables(self.spec.rope, positions, (), dtype)
        self.numbers = torch.zeros(len(NUMBERS), size.rows, dtype=torch.int64, device=device)
        self.table = torch.zeros(size.rows, size.width, dtype=torch.int64, device=device)
        self.tick = torch.zeros(1, dtype=torch.int64, device=device)
        self.drawn = torch.zeros(size.ahead, 2, size.rows, dtype=torch.float64, device=device)
        self.chosen: Tensor | None = None
        self.params: SamplingParams | None = None
        self._steps: dict[int, Step] = {}

    def begin(self, params: SamplingParams) -> None:
        """Draw like this from now on. What was recorded stays where nothing but the noise is another."""
        how = replace(params, samples=1, max_new_tokens=1, seed=0, step=0, stop_ids=())
        if how == self.params:
            return
        self.params, self._steps, self.chosen = how, {}, None
        self.banned = banned_of(how, self.mesh.device)
        self.refused = None if not how.banned_ids else mask_of(self.banned, self.spec.vocab_size)
        moe = self.spec.moe if how.trace else None
        if moe is not None:
            shape = (self.size.ahead, self.size.rows, len(moe.numbers), moe.top_k)
            self.chosen = torch.zeros(shape, dtype=torch.int32, device=self.mesh.device)

    def forget(self) -> None:
        """Drop what was recorded: records and deck hold each other, and with them all their memory."""
        self._steps = {}

    def fill(self, prompts: Sequence[tuple[Sequence[int], list[int]]]) -> tuple[Tensor, Tensor | None]:
        """Compute prompts, (ids, pages), into the cache: their last hidden states [n, D], and all tokens' experts [T, M, K]."""
        device, page = self.mesh.device, self.size.page
        lengths = [len(ids) for ids, _ in prompts]
        missing = -sum(lengths) % self.mesh.token_multiple
        packed = (*lengths, missing) if missing else tuple(lengths)
        found = np.zeros((4, sum(packed)), np.int64)  # tokens, positions, pages, offsets; padding goes to page 0
        at = 0
        for ids, pages in prompts:
            here, positions = slice(at, at + len(ids)), np.arange(len(ids))
            found[:, here] = ids, positions, np.array(pages)[positions // page], positions % page
            at += len(ids)
        tokens, positions, pages, offsets = torch.from_numpy(found).to(device)
        spans = Spans(cumulative(packed).to(device), packed)
        cos, sin = self.cos[positions], self.sin[positions]
        context = PrefillContext(cos, sin, spans, self.kernels, self.cache, pages, offsets, Routes())
        hidden = self._hidden(tokens, context)
        last = spans.cu_seqlens[1 : len(lengths) + 1].long() - 1
        moe = self.spec.moe if self.chosen is not None else None
        return hidden[last], None if moe is None else chosen_in(context.routes, moe, self.mesh["tp"])

    def first(self, hidden: Tensor, owners: Sequence[int], streams: Numbers) -> NDArray[np.float64]:
        """The first draw of rows by hidden states [n, D], `owners` naming each row's: ids and log-probs [1, 2, rows]."""
        z = self.logits(hidden)[torch.tensor(owners, device=hidden.device)]
        noise = torch.from_numpy(streams).to(hidden.device)
        found: NDArray[np.float64] = self._draw(z, noise, torch.zeros_like(noise))[None].cpu().numpy()
        return found

    def put(self, numbers: Numbers, table: Numbers) -> None:
        """These rows run from now on, as they stand.

        numbers [4, rows]: each row's next token, how many entries it has, how many tokens were drawn, its stream of noise.
        table [rows, width]: its pages, then zeros.
        """
        n = numbers.shape[1]
        filled = self._filled(n)
        padded = np.zeros((len(NUMBERS), filled), np.int64)
        padded[:-1, :n], padded[-1, :n] = numbers, 1
        self.numbers[:, :filled] = torch.from_numpy(padded)
        self.table[:n] = torch.from_numpy(table)
        self.table[n:filled] = 0

    def run(self, n: int, steps: int) -> NDArray[np.float64]:
        """`steps` tokens for each of the n rows that were put: ids and log-probs [steps, 2, rows]."""
        filled = self._filled(n)
        self.tick.zero_()
        step = self._step(filled)
        for _ in range(steps):
            step()
        found: NDArray[np.float64] = self.drawn[:steps, :, :n].cpu().numpy()
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [n, V] of hidden states [n, D], on every rank of tp. Padding of the vocabulary is gone."""
        tp, head = self.mesh["tp"], self.model.lm_head
        z = head.logits(hidden)
        if tp.size == 1:
            return z
        shard = F.pad(z, (0, head.weight.shape[0] - head.columns)).T
        return all_gather(shard, tp)[: self.spec.vocab_size].T.contiguous()

    def _filled(self, n: int) -> int:
        """How many rows are computed where n run."""
        return n if self.recorder is None else pad_to_bucket(n)

    def _hidden(self, tokens: Tensor, context: Context) -> Tensor:
        """The hidden states of all tokens, on every rank of tp."""
        return all_gather(self.model.model(tokens, context), self.mesh["tp"])

    def _step(self, n: int) -> Step:
        """One step of n rows, recorded as far as it can be: the search for a nucleus asks the device how far to look."""
        if n not in self._steps:
            assert self.params is not None
            forward: Callable[[], Tensor] = partial(self._forward, n)
            asks = self.params.cuts and self.params.top_p < 1
            if self.recorder is not None and asks:
                forward = self.recorder(forward)
            step: Step = partial(self._take_from, forward, n)
            if self.recorder is not None and not asks:
                step = self.recorder(step)
            self._steps[n] = step
        return self._steps[n]

    def _forward(self, n: int) -> Tensor:
        """Give the first n rows their tokens: the logits [n, V] of what follows."""
        tokens, lengths = self.numbers[:2, :n]
        page, table = self.size.page, self.table[:n]
        pages = table.gather(1, (lengths // page)[:, None])[:, 0]
        missing = -n % self.mesh.token_multiple
        positions, tokens = (F.pad(x, (0, missing)) if missing else x for x in (lengths, tokens))
        cos, sin = self.cos[positions], self.sin[positions]
        places = (table, lengths + 1, pages, lengths % page)
        context = DecodeContext(cos, sin, self.kernels, self.cache, *places, Routes())
        hidden = self._hidden(tokens, context)[:n]
        if self.chosen is not None and self.spec.moe is not None:
            chosen = chosen_in(context.routes, self.spec.moe, self.mesh["tp"])[:n]
            self.chosen[:, :n].index_copy_(0, self.tick, chosen[None].to(self.chosen.dtype))
        return self.logits(hidden)

    def _take_from(self, forward: Callable[[], Tensor], n: int) -> None:
        """Draw the next token of the first n rows from what the model says, and note it."""
        z = forward()
        token, length, drawn, stream, going = self.numbers[:, :n]
        found = self._draw(z, stream, drawn)
        self.drawn[:, :, :n].index_copy_(0, self.tick, found[None])
        token.copy_(found[0])
        length.add_(going)
        drawn.add_(going)
        self.tick.add_(1)

    def _draw(self, z: Tensor, streams: Tensor, positions: Tensor) -> Tensor:
        """Ids and log-probs [2, n], those of tp rank 0 on every rank: devices may round apart. Ids are exact in float64."""
        assert self.params is not None
        if self.kernels.draw is not None and not self.params.cuts and z.dtype != torch.float64:
            drawn = self.kernels.draw(z, streams, positions, self.params.temperature, self.refused)
        else:
            uniforms = bits_at(streams, positions).to(torch.float64) * 2.0**-53
            ids, log_probs = draw(z, uniforms, self.params, self.banned)
            drawn = torch.stack([ids.to(torch.float64), log_probs])
        return stack_over(drawn, self.mesh["tp"])[0]
