"""What samplers have in common: token ids in, token ids out."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.arch.spec import MoeSpec
from dovetail.batch.balancing import plan_microbatches
from dovetail.batch.packed import Media
from dovetail.batch.routing import RoutingTrace, narrow_dtype
from dovetail.errors import CheckpointError, DataError, ModelError, listing
from dovetail.parallel.collectives import sum_over
from dovetail.parallel.mesh import Mesh
from dovetail.sampler.params import SamplingParams as SamplingParams
from dovetail.sampler.turn import GenerationRequest, RequestBatch, RolloutId, Turn, generate_all

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class TokenPrompt:
    row: int  # a key of the noise
    ids: Sequence[int]
    media: Media | None = None


Watch = Callable[[int, int, int], None]  # samples done, all samples, tokens


class Sampler(ABC):
    """Samples for all ranks, which make the same requests in the same order and get all turns.

    dtype: of the weights that it takes.
    """

    dtype: torch.dtype

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self._batch = RequestBatch(self._sample_requests)

    @abstractmethod
    def refill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Takes weights as pairs of an HF name and a whole tensor."""

    @abstractmethod
    def sample(self, prompts: Sequence[TokenPrompt], params: SamplingParams) -> list[Turn]:
        """Returns `params.samples` turns for each prompt, by prompt."""

    async def generate(self, request: GenerationRequest) -> Turn:
        """Returns the turn of a request, sampled with those that are made together with it.

        All samples of a prompt are asked for together.
        """
        return await self._batch.ask(request)

    def generate_step(self, requests: Sequence[GenerationRequest]) -> list[Turn]:
        """Returns the turns of a training step."""
        return generate_all(self, requests)

    def _sample_requests(self, requests: Sequence[GenerationRequest]) -> list[Turn]:
        prompts: dict[SamplingParams, dict[int, TokenPrompt]] = {}
        for request in requests:
            row = request.id.row
            prompt = TokenPrompt(row, request.prompt_ids, request.media)
            prompts.setdefault(request.params, {}).setdefault(row, prompt)
        turns = {}
        for params, by_row in prompts.items():
            for turn in self.sample([*by_row.values()], params):
                turns[params, turn.id] = turn
        return [turns[request.params, request.id] for request in requests]


def requests_of(prompts: Iterable[TokenPrompt], params: SamplingParams) -> list[GenerationRequest]:
    """Returns `params.samples` requests for each prompt, by prompt."""
    return [
        GenerationRequest(
            id=RolloutId(params.step, prompt.row, sample),
            prompt_ids=prompt.ids,
            params=params,
            media=prompt.media,
        )
        for prompt in prompts
        for sample in range(params.samples)
    ]


class SampleBuffer:
    """The turns of a call by slot; those of other replicas are zeros. moe: of traced experts."""

    def __init__(
        self,
        prompts: Sequence[TokenPrompt],
        params: SamplingParams,
        mesh: Mesh,
        device: torch.device,
        moe: MoeSpec | None = None,
    ) -> None:
        self.prompts = prompts
        self.params = params
        self.mesh = mesh
        self.moe = moe
        rows = len(prompts) * params.samples
        new = params.max_new_tokens
        self.ids = torch.zeros(rows, new, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(rows, new, dtype=torch.float64, device=device)
        self.counts = torch.zeros(rows, dtype=torch.int64, device=device)
        if moe is not None:
            longest = max((len(prompt.ids) for prompt in prompts), default=0) + new
            shape = (rows, longest, len(moe.numbers), moe.top_k)
            self.experts = torch.zeros(
                shape, dtype=narrow_dtype(moe.num_experts), device=mesh.device
            )

    def local_prompts(self, width: int = 1 << 20) -> dict[int, int]:
        """Returns the lengths of this replica's prompts, by their place."""
        costs = [
            len(prompt.ids) + self.params.samples * self.params.max_new_tokens
            for prompt in self.prompts
        ]
        replicas = self.mesh["data"]
        plan = plan_microbatches(costs, replicas.size, None, width=width)[replicas.rank]
        return {i: len(self.prompts[i].ids) for batch in plan for i in batch}

    def store(
        self,
        slots: Numbers,
        drawn: Numbers,
        taken: Numbers,
        outputs: NDArray[np.float64],
        _: object,
    ) -> None:
        """Appends `taken` [n] of ids and log-probs [steps, 2, n] to those drawn [n], on the host."""
        step, row = np.nonzero(np.arange(len(outputs))[:, None] < taken)
        self.ids.numpy()[slots[row], drawn[row] + step] = outputs[step, 0, row]
        self.log_probs.numpy()[slots[row], drawn[row] + step] = outputs[step, 1, row]
        self.counts.numpy()[slots] += taken

    def turns(self) -> list[Turn]:
        """Returns those of all replicas. Collective."""
        replicas = self.mesh["data"]
        device = self.mesh.device
        counts: list[int] = sum_over(self.counts.to(device), replicas).tolist()
        longest = max(counts, default=0)
        ids = sum_over(self.ids[:, :longest].to(device), replicas).tolist()
        log_probs = sum_over(self.log_probs[:, :longest].to(device), replicas).tolist()
        experts = None if self.moe is None else sum_over(self.experts, replicas).cpu()
        turns = []
        for slot, count in enumerate(counts):
            index, sample = divmod(slot, self.params.samples)
            prompt = self.prompts[index]
            drawn = tuple(ids[slot][:count])
            trace = None
            if experts is not None:
                trace = self._trace(experts[slot], len(prompt.ids) + count)
            turns.append(
                Turn(
                    RolloutId(self.params.step, prompt.row, sample),
                    drawn,
                    tuple(log_probs[slot][:count]),
                    "stop" if drawn[-1] in self.params.stop_ids else "length",
                    trace,
                )
            )
        return turns

    def _trace(self, experts: Tensor, length: int) -> RoutingTrace:
        assert self.moe is not None
        valid = torch.arange(length) < length - 1  # the last token was not routed
        routed = experts[:length].to(torch.int32) * valid[:, None, None]
        return RoutingTrace(self.moe.numbers, routed, valid)


def check_weights(problems: list[str]) -> None:
    if problems:
        raise CheckpointError(
            "the weights given to the sampler are not those of its model; refill it from an "
            f"engine of the same config.json:\n{listing(problems)}"
        )


def check_request(
    prompts: Sequence[TokenPrompt],
    params: SamplingParams,
    vocab_size: int,
    rope_limit: tuple[str, int] | None,
    *,
    filled: bool,
) -> None:
    """Raises for what the model cannot be asked.

    rope_limit: a rope_type, and the length at which it changes earlier keys.
    """
    if not filled:
        raise CheckpointError(
            "the sampler holds no weights; call refill(engine.weights()) before sample()"
        )
    for prompt in prompts:
        if not len(prompt.ids):
            raise DataError(
                f"prompt of row {prompt.row} has no tokens; a prompt needs at least one"
            )
        if min(prompt.ids) < 0 or max(prompt.ids) >= vocab_size:
            bad = next(token for token in prompt.ids if not 0 <= token < vocab_size)
            raise DataError(
                f"prompt of row {prompt.row} has the id {bad}; this model has ids 0 to "
                f"{vocab_size - 1}"
            )
        total = len(prompt.ids) + params.max_new_tokens
        if rope_limit is not None and total > rope_limit[1]:
            raise ModelError(
                f"prompt of row {prompt.row} has {len(prompt.ids)} tokens, {total} with "
                f"max_new_tokens={params.max_new_tokens}; beyond {rope_limit[1]} positions "
                f"rope_type {rope_limit[0]!r} changes the keys that are cached; shorten the "
                "prompt or lower max_new_tokens"
            )
