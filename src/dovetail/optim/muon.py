"""Muon: Newton-Schulz on whole matrices, each gathered to one holder; AdamW for the rest.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/), as in torch.optim.Muon.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dovetail.errors import ConfigError
from dovetail.nn.model import StagedModel
from dovetail.optim.adamw import MOMENTS, Groups, SkippableAdamW, UpdateRule
from dovetail.optim.groups import match
from dovetail.optim.matrices import (
    Assignment,
    LocalShard,
    MatrixShard,
    Shape,
    assign_owners,
    matrix_shards,
    num_elements,
    split_rounds,
)
from dovetail.parallel.collectives import Handle, begin_all_to_all
from dovetail.parallel.consensus import agreed, of_all
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import Slices, as_index
from dovetail.weights.shards import STACKED

MOMENTUM = "momentum_buffer"
IN_A_BLOCK = re.compile(r"\.\d+\.")  # no embedding, head or last norm


class Move(NamedTuple):
    sender: int
    receiver: int
    matrix: str
    slices: Slices


def muon_names(
    model: nn.Module, mesh: Mesh, shards: Sequence[LocalShard], patterns: Sequence[str]
) -> set[str]:
    """Return the names of the matrices that `patterns` match, or of all matrices of the blocks.

    shards: all but norms and biases. Collective.
    """
    has_experts = isinstance(model, StagedModel) and model.moe is not None
    names = set()
    for shard in shards:
        is_matrix = shard.local.dim() == 2
        is_stacked = has_experts and shard.name.endswith(STACKED)
        if is_matrix or is_stacked:
            names.add(shard.name)
    if not patterns:
        return {name for name in names if IN_A_BLOCK.search(name)}
    chosen = match(model, mesh, patterns, "optim.options.matrices")
    with agreed(mesh):
        for name in chosen:
            if name not in names:
                raise ConfigError(
                    f"optim.options.matrices: {name} is no matrix; give patterns of matrices alone"
                )
    return {*chosen}


def newton_schulz(x: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Return matrices near the orthogonal factors of x [B, m <= n, n]."""
    a, b, c = coefficients
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


@dataclass(frozen=True, kw_only=True)
class MuonOptions:
    """Options of torch.optim.Muon.

    matrices: patterns of names; default: all matrices of the blocks.
    adamw_lr: the peak of all other parameters; default: lr.
    """

    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str | None = None
    matrices: Sequence[str] = ()
    adamw_lr: float | None = None

    def check(self) -> None:
        options = dict(vars(self))
        del options["matrices"], options["adamw_lr"]
        parameter = nn.Parameter(torch.zeros(1, 1))
        torch.optim.Muon([parameter], **options)
        if len(self.ns_coefficients) != 3:
            raise ValueError(f"ns_coefficients={self.ns_coefficients!r}; expected three numbers")
        if not 1 <= self.ns_steps < 100:
            raise ValueError(f"ns_steps={self.ns_steps!r}; expected 1 to 99")
        if isinstance(self.matrices, str):
            raise ValueError(f"matrices={self.matrices!r}; expected a list of patterns")
        if self.adamw_lr is not None and not 0 < self.adamw_lr < math.inf:
            raise ValueError(f"adamw_lr={self.adamw_lr!r}; expected more than 0")

    def rate(self, lr: float, shape: tuple[int, int]) -> float:
        rows, columns = shape
        if self.adjust_lr_fn == "match_rms_adamw":
            return lr * 0.2 * math.sqrt(max(rows, columns))
        return lr * math.sqrt(max(1, rows / columns))


class Muon(UpdateRule):
    """Muon for the groups that say so, AdamW for the others. lr: the peak. Collective."""

    state_names = (MOMENTUM, *MOMENTS)

    def __init__(
        self,
        groups: Groups,
        shards: Sequence[LocalShard],
        mesh: Mesh,
        options: MuonOptions,
        lr: float,
        **adamw: Any,
    ) -> None:
        self.adamw_factor = 1.0 if options.adamw_lr is None else options.adamw_lr / lr
        self.options = options
        self.world = mesh["world"]
        self.device = mesh.device
        self.groups = [group for group in groups if group["muon"]]
        others = [group for group in groups if not group["muon"]]
        at_least_one = others or [{"params": []}]  # torch refuses none
        self.adamw = SkippableAdamW(at_least_one, **adamw, fused=True)
        self.adamw_groups = self.adamw.param_groups[: len(others)]
        self.param_groups = self.groups + self.adamw_groups
        self.state = self.adamw.state
        params = {parameter for group in self.groups for parameter in group["params"]}
        held: list[MatrixShard] = []
        for shard in shards:
            if shard.local in params:
                held += matrix_shards(shard)
        self.shards = {(each.matrix, each.slices): each for each in held}
        is_wide = any(each.parameter.dtype == torch.float64 for each in held)
        described = [each[:4] for each in held]
        by_rank = of_all([is_wide, described], mesh)
        # torch.optim.Muon iterates in bfloat16 for float64, too; tests in float64 need more digits
        self.dtype = torch.bfloat16
        if any(is_wide for is_wide, _ in by_rank):
            self.dtype = torch.float64
        assignments = assign_owners([held for _, held in by_rank])
        self.rounds = split_rounds(assignments, self.world)

    def begin(self, steps: int = 0) -> None:
        for group in self.groups:
            for parameter in group["params"]:
                if self.state.get(parameter):
                    continue
                zeros = torch.zeros_like(parameter)
                self.state[parameter] = {MOMENTUM: zeros}
        self.adamw.begin(steps)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters. The host waits. Collective."""
        if bool(self.found_inf):
            return
        self.begin()
        self.adamw.found_inf = self.found_inf
        for group in self.adamw_groups:
            if not group["own_lr"]:
                group["lr"] *= self.adamw_factor
        self.adamw.step()
        momentum = self.options.momentum
        rates: dict[nn.Parameter, float] = {}
        for group in self.groups:
            params = group["params"]
            if not params:
                continue
            grads = [p.grad for p in params]
            buffers = [self.state[p][MOMENTUM] for p in params]
            torch._foreach_lerp_(buffers, grads, 1 - momentum)
            if self.options.nesterov:
                torch._foreach_lerp_(grads, buffers, momentum)  # they are freed after
            lr = group["lr"]
            decay = lr * group["weight_decay"]
            torch._foreach_mul_(params, 1 - decay)
            rates |= dict.fromkeys(params, lr)
        self._update(rates)

    def _update(self, rates: Mapping[nn.Parameter, float]) -> None:
        """Orthogonalize each round while the next is gathered and the last is scattered."""
        if not self.rounds:
            return
        prefetch = self._gather(self.rounds[0])
        last: tuple[list[Assignment], Handle] | None = None
        for number, jobs in enumerate(self.rounds, 1):
            gathered = prefetch.wait()
            if number < len(self.rounds):
                prefetch = self._gather(self.rounds[number])
            updates = self._orthogonalize(jobs, gathered)
            scattered = self._scatter(jobs, updates)
            if last:
                self._apply(*last, rates)
            last = (jobs, scattered)
        if last:
            self._apply(*last, rates)

    def _gather(self, jobs: Sequence[Assignment]) -> Handle:
        """Send the gradients of each matrix to its owner, without copies."""
        moves = []
        for job in jobs:
            matrix = job.matrix
            moves += [Move(h.rank, job.owner, matrix, h.slices) for h in job.owned]
        return self._exchange(moves, self._direction)

    def _direction(self, move: Move) -> Tensor:
        shard = self.shards[move.matrix, move.slices]
        parameter = shard.parameter
        if self.options.nesterov:
            x = parameter.grad
            assert x is not None
        else:
            x = self.state[parameter][MOMENTUM]
        return x[shard.local_index]

    def _orthogonalize(self, jobs: Sequence[Assignment], gathered: Tensor) -> dict[str, Tensor]:
        """Return the updates [out, in] of this rank's matrices. Equal shapes are one batch."""
        rank = self.world.rank
        own = [job for job in jobs if job.owner == rank]
        parts = _split(own, gathered)
        batches: dict[torch.Size, list[tuple[Assignment, Tensor]]] = defaultdict(list)
        for job in own:
            matrix = _assemble(job.shape, parts[job.matrix])
            wide = matrix.mT if job.is_tall else matrix
            batches[wide.shape].append((job, wide))
        options = self.options
        updates = {}
        for batch in batches.values():
            x = torch.stack([matrix for _, matrix in batch])
            x = newton_schulz(x, options.ns_coefficients, options.ns_steps, options.eps)
            for i, (job, _) in enumerate(batch):
                update = x[i]
                updates[job.matrix] = update.mT if job.is_tall else update
        return updates

    def _scatter(self, jobs: Sequence[Assignment], updates: Mapping[str, Tensor]) -> Handle:
        """Send the updates of each matrix to all its holders."""
        moves = []
        for job in jobs:
            matrix = job.matrix
            moves += [Move(job.owner, h.rank, matrix, h.slices) for h in job.holders]

        def part(move: Move) -> Tensor:
            update = updates[move.matrix]
            return update[as_index(move.slices)]

        return self._exchange(moves, part)

    def _exchange(self, moves: Sequence[Move], source: Callable[[Move], Tensor]) -> Handle:
        """Start to send `source(move)` of all moves. A receiver gets them in order of senders."""
        rank = self.world.rank
        send_sizes = [0] * self.world.size
        receive_sizes = [0] * self.world.size
        outgoing = []
        for move in moves:
            size = num_elements(move.slices)
            if move.sender == rank:
                send_sizes[move.receiver] += size
                outgoing.append(move)
            if move.receiver == rank:
                receive_sizes[move.sender] += size
        outgoing.sort(key=lambda move: move.receiver)
        tensors = [source(move) for move in outgoing]
        total = sum(send_sizes)
        flat = torch.empty(total, dtype=self.dtype, device=self.device)
        chunks = flat.split([x.numel() for x in tensors])
        pairs = zip(chunks, tensors, strict=True)
        views = [chunk.view(x.shape) for chunk, x in pairs]
        if tensors:
            torch._foreach_copy_(views, tensors)
        if self.world.size == 1:
            return Handle(flat)
        return begin_all_to_all(flat, send_sizes, receive_sizes, self.world)

    def _apply(
        self, jobs: Sequence[Assignment], scattered: Handle, rates: Mapping[nn.Parameter, float]
    ) -> None:
        """Subtract the updates from the parameters, each times its rate."""
        targets: dict[float, list[Tensor]] = defaultdict(list)
        values: dict[float, list[Tensor]] = defaultdict(list)
        updates = scattered.wait()
        start = 0
        for job in sorted(jobs, key=lambda job: job.owner):
            for holder in job.holders:
                if holder.rank != self.world.rank:
                    continue
                shard = self.shards[job.matrix, holder.slices]
                target = shard.parameter[shard.local_index]
                end = start + target.numel()
                update = updates[start:end]
                start = end
                lr = rates[shard.parameter]
                rate = self.options.rate(lr, job.shape)
                targets[rate].append(target)
                values[rate].append(update.view(target.shape))
        for rate in targets:
            torch._foreach_add_(targets[rate], values[rate], alpha=-rate)


def _split(jobs: Sequence[Assignment], gathered: Tensor) -> dict[str, list[tuple[Slices, Tensor]]]:
    """Return matrix -> its rectangles, which `gathered` has in the order of their ranks."""
    moved = [(holder, job.matrix) for job in jobs for holder in job.owned]
    moved.sort(key=lambda pair: pair[0].rank)
    sizes = [num_elements(holder.slices) for holder, _ in moved]
    chunks = gathered.split(sizes)
    parts: dict[str, list[tuple[Slices, Tensor]]] = defaultdict(list)
    for (holder, matrix), chunk in zip(moved, chunks, strict=True):
        parts[matrix].append((holder.slices, chunk))
    return parts


def _assemble(shape: Shape, parts: Sequence[tuple[Slices, Tensor]]) -> Tensor:
    _, first = parts[0]
    if len(parts) == 1:
        return first.view(shape)
    matrix = first.new_empty(shape)
    for slices, values in parts:
        target = matrix[as_index(slices)]
        target.copy_(values.view(target.shape))
    return matrix
