"""Where samplers leave what they draw, until every rank gets all of it."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from dovetail.comm import sum_over
from dovetail.mesh import Mesh
from dovetail.rollout.base import Completion, Prompt, SamplingParams


class Found:
    """What was drawn for all completions of a call; this replica fills its own, and the others' are zeros."""

    def __init__(self, rows: int, new: int, device: torch.device) -> None:
        self.ids = torch.zeros(rows, new, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(rows, new, dtype=torch.float64, device=device)
        self.counts = torch.zeros(rows, dtype=torch.int64, device=device)

    def put(self, slots: Tensor, position: int, ids: Tensor, log_probs: Tensor, alive: Tensor) -> None:
        """The tokens of one step; those of rows that had stopped do not count."""
        self.ids[slots, position] = ids
        self.log_probs[slots, position] = log_probs
        self.counts[slots] += alive.long()

    def completions(self, prompts: Sequence[Prompt], params: SamplingParams, mesh: Mesh) -> list[Completion]:
        """Everybody's completions, on every rank: three sums over the replicas, no wider than the longest completion."""
        replicas = mesh["fsdp"]
        counts: list[int] = sum_over(self.counts, replicas).tolist()
        longest = max(counts, default=0)
        ids = sum_over(self.ids[:, :longest], replicas).tolist()
        log_probs = sum_over(self.log_probs[:, :longest], replicas).tolist()
        done = []
        for slot, count in enumerate(counts):
            index, sample = divmod(slot, params.samples)
            drawn = tuple(ids[slot][:count])
            finish: Literal["stop", "length"] = "stop" if drawn[-1] in params.stop_ids else "length"
            done.append(Completion(prompts[index].row, sample, drawn, tuple(log_probs[slot][:count]), finish))
        return done
