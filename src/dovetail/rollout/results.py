"""Where samplers leave what they draw, until every rank gets all of it."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from dovetail.arch.spec import MoeSpec
from dovetail.batch.routing import Routes, RoutingTrace, narrow_dtype
from dovetail.parallel.collectives import stack_over, sum_over
from dovetail.parallel.mesh import Axis, Mesh
from dovetail.rollout.base import Completion, Prompt, SamplingParams


class SampleBuffer:
    """What was drawn for all completions of a call; this replica fills its own, and the others' are zeros."""

    def __init__(self, rows: int, new: int, device: torch.device, routes: "SampledRoutes | None" = None) -> None:
        self.ids = torch.zeros(rows, new, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(rows, new, dtype=torch.float64, device=device)
        self.counts = torch.zeros(rows, dtype=torch.int64, device=device)
        self.routes = routes

    def put(self, slots: Tensor, position: int, ids: Tensor, log_probs: Tensor, alive: Tensor) -> None:
        """The tokens of one step; those of rows that had stopped do not count."""
        self.ids[slots, position] = ids
        self.log_probs[slots, position] = log_probs
        self.counts[slots] += alive.long()

    def completions(self, prompts: Sequence[Prompt], params: SamplingParams, mesh: Mesh) -> list[Completion]:
        """Everybody's completions, on every rank: sums over the replicas, no wider than the longest completion."""
        replicas = mesh["fsdp"]
        counts: list[int] = sum_over(self.counts.to(mesh.device), replicas).tolist()
        longest = max(counts, default=0)
        ids = sum_over(self.ids[:, :longest].to(mesh.device), replicas).tolist()
        log_probs = sum_over(self.log_probs[:, :longest].to(mesh.device), replicas).tolist()
        traces = None if self.routes is None else self.routes.traces(prompts, counts, params, replicas)
        done = []
        for slot, count in enumerate(counts):
            index, sample = divmod(slot, params.samples)
            drawn = tuple(ids[slot][:count])
            finish: Literal["stop", "length"] = "stop" if drawn[-1] in params.stop_ids else "length"
            trace = None if traces is None else traces[slot]
            done.append(Completion(prompts[index].row, sample, drawn, tuple(log_probs[slot][:count]), finish, trace))
        return done


class SampledRoutes:
    """The experts of every completion's tokens, prompt included, while they are drawn: [rows, longest, M, K]."""

    def __init__(self, rows: int, longest: int, moe: MoeSpec, device: torch.device) -> None:
        self.moe = moe
        shape = (rows, longest, len(moe.numbers), moe.top_k)
        self.indices = torch.zeros(shape, dtype=narrow_dtype(moe.num_experts), device=device)

    def put(self, slots: Tensor, positions: Tensor, chosen: Tensor) -> None:
        """The experts [..., M, K] of the tokens at `positions` of the rows `slots`, two tensors of one shape."""
        self.indices[slots, positions] = chosen.to(self.indices.dtype)

    def traces(
        self, prompts: Sequence[Prompt], counts: Sequence[int], params: SamplingParams, replicas: Axis
    ) -> list[RoutingTrace]:
        """Of every completion, on every rank. The last token was drawn, and never routed."""
        whole, done = sum_over(self.indices, replicas).cpu(), []
        for slot, count in enumerate(counts):
            length = len(prompts[slot // params.samples].ids) + count
            valid = torch.arange(length) < length - 1
            done.append(
                RoutingTrace(self.moe.numbers, whole[slot, :length].to(torch.int32) * valid[:, None, None], valid)
            )
        return done


def chosen_in(routes: Routes, moe: MoeSpec, tp: Axis) -> Tensor:
    """What a pass noted of its tokens, on every rank of tp: [T, M, K]."""
    chosen = torch.stack([routes.chosen[layer] for layer in moe.numbers], dim=1)
    return stack_over(chosen, tp).flatten(0, 1)
