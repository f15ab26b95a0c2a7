"""Muon: Newton-Schulz on whole matrices, each gathered to one holder; AdamW for the rest.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/), as in torch.optim.Muon.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dovetail.errors import ConfigError
from dovetail.nn.model import StagedModel
from dovetail.optim.adamw import MOMENTS, Groups, SkippableAdamW, UpdateRule
from dovetail.optim.groups import match
from dovetail.parallel.collectives import Handle, begin_all_to_all
from dovetail.parallel.consensus import agreed, of_all
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import Region, Slices, as_index, overlap, within
from dovetail.weights.shards import FUSED

MOMENTUM = "momentum_buffer"
STACKED = tuple(ending for ending, _ in FUSED)
IN_A_BLOCK = re.compile(r"\.\d+\.")  # no embedding, head or last norm
ROUND_ELEMENTS = 3 << 26  # of a rank at a time; more where one is larger


@dataclass(frozen=True)
class Held:
    """A parameter as this rank holds it."""

    name: str
    local: nn.Parameter
    regions: tuple[Region, ...]


class Piece(NamedTuple):
    matrix: str
    shape: tuple[int, int]  # of the matrix
    part: Slices
    owned: bool
    parameter: nn.Parameter
    view: tuple[Any, ...]


class Part(NamedTuple):
    """A rectangle of a matrix, on some rank."""

    rank: int
    part: Slices
    owned: bool


@dataclass(frozen=True)
class Job:
    matrix: str
    shape: tuple[int, int]
    owner: int
    parts: tuple[Part, ...]


class Move(NamedTuple):
    sender: int
    receiver: int
    matrix: str
    part: Slices


def pieces_of(held: Held) -> Iterator[Piece]:
    """HF's matrices: q, k and v apart, and of each expert gate and up, in every form of a checkpoint."""
    for region in held.regions:
        name = region.checkpoint_name
        shape = region.checkpoint_shape
        there = region.checkpoint_slice
        if len(shape) == 2:
            yield Piece(
                name,
                (shape[0], shape[1]),
                there,
                region.owned,
                held.local,
                as_index(region.local_slice),
            )
            continue
        parts = next(len(parts) for ending, parts in FUSED if name.endswith(ending))
        size = shape[1] // parts
        starts = [start for start, _ in region.local_slice]
        for expert in range(*there[0]):
            for number in range(parts):
                matrix = ((expert, expert + 1), (number * size, (number + 1) * size), (0, shape[2]))
                if (shared := overlap(there, matrix)) is not None:
                    rows, columns = within(shared, matrix)[1:]
                    inside = [
                        slice(a + at, b + at)
                        for (a, b), at in zip(within(shared, there), starts, strict=True)
                    ]
                    index = (inside[0].start, *inside[1:])
                    sizes = (size, shape[2])
                    yield Piece(
                        f"{name}.{expert}.{number}",
                        sizes,
                        (rows, columns),
                        region.owned,
                        held.local,
                        index,
                    )


def muon_names(
    model: nn.Module, mesh: Mesh, held: Sequence[Held], patterns: Sequence[str]
) -> set[str]:
    """The names that match, or every matrix of the blocks. held: without norms and biases. Collective."""
    stacked = isinstance(model, StagedModel) and model.moe is not None
    names = {
        each.name
        for each in held
        if each.local.dim() == 2 or (stacked and each.name.endswith(STACKED))
    }
    if not patterns:
        return {name for name in names if IN_A_BLOCK.search(name)}
    chosen = match(model, mesh, patterns, "optim.options.matrices")
    with agreed(mesh):
        if wrong := [name for name in chosen if name not in names]:
            raise ConfigError(
                f"optim.options.matrices: {wrong[0]} is no matrix; give patterns of matrices alone"
            )
    return {*chosen}


def share_out(pieces: Sequence[Sequence[tuple[str, tuple[int, int], Slices, bool]]]) -> list[Job]:
    """Each matrix to its least loaded holder. pieces: by rank."""
    shapes: dict[str, tuple[int, int]] = {}
    parts: dict[str, list[Part]] = defaultdict(list)
    for rank, own in enumerate(pieces):
        for matrix, (rows, columns), part, owned in own:
            shapes[matrix] = (rows, columns)
            parts[matrix].append(Part(rank, tuple((start, stop) for start, stop in part), owned))
    work = [0] * len(pieces)
    jobs = list[Job]()
    holders = {matrix: sorted({part.rank for part in held}) for matrix, held in parts.items()}
    for matrix in sorted(
        parts, key=lambda m: (len(holders[m]), -_work(shapes[m]), m)
    ):  # least choice, then longest
        owner = min(holders[matrix], key=lambda rank: work[rank])
        work[owner] += _work(shapes[matrix])
        jobs.append(Job(matrix, shapes[matrix], owner, tuple(parts[matrix])))
    return jobs


def _work(shape: tuple[int, int]) -> int:
    short, long = sorted(shape)
    return short * short * (2 * long + short)


def newton_schulz(x: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """[B, m <= n, n] -> near their orthogonal factors."""
    a, b, c = coefficients
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


@dataclass(frozen=True, kw_only=True)
class MuonOptions:
    """torch.optim.Muon's. matrices: patterns of names; default: all of the blocks. adamw_lr: peak of the rest; default: lr."""

    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str | None = None
    matrices: Sequence[str] = ()
    adamw_lr: float | None = None

    def check(self) -> None:
        keys = {
            name: value
            for name, value in vars(self).items()
            if name not in ("matrices", "adamw_lr")
        }
        torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))], **keys)
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
    """lr: the peak. Collective."""

    state_names = (MOMENTUM, *MOMENTS)

    def __init__(
        self,
        groups: Groups,
        held: Sequence[Held],
        mesh: Mesh,
        options: MuonOptions,
        lr: float,
        **adamw: Any,
    ) -> None:
        self.share = 1.0 if options.adamw_lr is None else options.adamw_lr / lr
        self.options = options
        self.world = mesh["world"]
        self.device = mesh.device
        self.groups = [group for group in groups if group["muon"]]
        others = [group for group in groups if not group["muon"]]
        self.adamw = SkippableAdamW(others or [{"params": []}], **adamw, fused=True)
        self.param_groups = [*self.groups, *(self.adamw.param_groups if others else ())]
        self.state = self.adamw.state
        matrices = {parameter for group in self.groups for parameter in group["params"]}
        pieces = [piece for each in held if each.local in matrices for piece in pieces_of(each)]
        self.pieces = {(piece.matrix, piece.part): piece for piece in pieces}
        wide = any(piece.parameter.dtype == torch.float64 for piece in pieces)
        everyone = of_all([wide, [piece[:4] for piece in pieces]], mesh)
        # as in torch
        self.dtype = torch.float64 if any(each[0] for each in everyone) else torch.bfloat16
        rounds = _rounds(share_out([each[1] for each in everyone]), self.world.size)
        self.rounds = [
            [job for job in jobs if any(p.rank == self.world.rank for p in job.parts)]
            for jobs in rounds
        ]

    def begin(self, steps: int = 0) -> None:
        for group in self.groups:
            for parameter in group["params"]:
                if not self.state.get(parameter):
                    self.state[parameter] = {MOMENTUM: torch.zeros_like(parameter)}
        self.adamw.begin(steps)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """The host waits. Collective."""
        if bool(self.found_inf):
            return
        self.begin()
        self.adamw.found_inf = self.found_inf
        for group in self.param_groups[len(self.groups) :]:
            group["lr"] *= 1.0 if group["own_lr"] else self.share
        self.adamw.step()
        rates: dict[nn.Parameter, float] = {}
        for group in self.groups:
            params = group["params"]
            if not params:
                continue
            grads = [p.grad for p in params]
            buffers = [self.state[p][MOMENTUM] for p in params]
            torch._foreach_lerp_(buffers, grads, 1 - self.options.momentum)
            if self.options.nesterov:
                torch._foreach_lerp_(grads, buffers, self.options.momentum)  # they are freed after
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            rates |= dict.fromkeys(params, group["lr"])
        self._update(rates)

    def _update(self, rates: Mapping[nn.Parameter, float]) -> None:
        """A round is orthogonalized while the next comes and the last leaves."""
        coming = self._gather(self.rounds[0]) if self.rounds else None
        leaving = list[tuple[list[Job], Handle]]()
        for number, jobs in enumerate(self.rounds):
            assert coming is not None
            came = coming.wait()
            coming = (
                self._gather(self.rounds[number + 1]) if number + 1 < len(self.rounds) else None
            )
            updates = self._orthogonalized(
                [job for job in jobs if job.owner == self.world.rank], came
            )
            leaving.append((jobs, self._scatter(jobs, updates)))
            if number:
                self._apply(*leaving.pop(0), rates)
        for last in leaving:
            self._apply(*last, rates)

    def _gather(self, jobs: Sequence[Job]) -> Handle:
        moves = [
            Move(part.rank, job.owner, job.matrix, part.part)
            for job in jobs
            for part in job.parts
            if part.owned
        ]
        return self._exchange(moves, self._source)

    def _source(self, move: "Move") -> Tensor:
        piece = self.pieces[move.matrix, move.part]
        x = piece.parameter.grad if self.options.nesterov else self.state[piece.parameter][MOMENTUM]
        assert x is not None
        return x[piece.view]

    def _orthogonalized(self, jobs: Sequence[Job], came: Tensor) -> dict[str, Tensor]:
        """Matrix -> update [out, in]; equal shapes are one batch."""
        starts = _starts(jobs, self.world.size)
        batches: dict[tuple[int, int], list[tuple[str, Tensor, bool]]] = defaultdict(list)
        for job in jobs:
            rows, columns = job.shape
            owned = [part for part in job.parts if part.owned]
            first = starts[job.matrix, owned[0].rank, owned[0].part]
            whole = came[first : first + rows * columns].view(rows, columns)
            if len(owned) > 1:
                whole = came.new_empty(rows, columns)
                for part in owned:
                    start = starts[job.matrix, part.rank, part.part]
                    target = whole[as_index(part.part)]
                    target.copy_(came[start : start + target.numel()].view(target.shape))
            turned = rows > columns
            short = (columns, rows) if turned else (rows, columns)
            batches[short].append((job.matrix, whole.mT if turned else whole, turned))
        done: dict[str, Tensor] = {}
        o = self.options
        for batch in batches.values():
            result = newton_schulz(
                torch.stack([x for _, x, _ in batch]), o.ns_coefficients, o.ns_steps, o.eps
            )
            done |= {
                name: x.mT if turned else x
                for (name, _, turned), x in zip(batch, result.unbind(), strict=True)
            }
        return done

    def _scatter(self, jobs: Sequence[Job], updates: Mapping[str, Tensor]) -> Handle:
        moves = [
            Move(job.owner, part.rank, job.matrix, part.part) for job in jobs for part in job.parts
        ]
        return self._exchange(moves, lambda move: updates[move.matrix][as_index(move.part)])

    def _exchange(self, moves: Sequence["Move"], source: Callable[["Move"], Tensor]) -> Handle:
        to = [0] * self.world.size
        by = [0] * self.world.size
        for move in moves:
            to[move.receiver] += _elements(move.part) * (move.sender == self.world.rank)
            by[move.sender] += _elements(move.part) * (move.receiver == self.world.rank)
        own = sorted((m for m in moves if m.sender == self.world.rank), key=lambda m: m.receiver)
        flat = torch.empty(sum(to), dtype=self.dtype, device=self.device)
        sent = [*map(source, own)]
        if sent:
            views = [
                row.view(x.shape)
                for row, x in zip(flat.split([x.numel() for x in sent]), sent, strict=True)
            ]
            torch._foreach_copy_(views, sent)
        return Handle(flat) if self.world.size == 1 else begin_all_to_all(flat, to, by, self.world)

    def _apply(
        self, jobs: Sequence[Job], left: Handle, rates: Mapping[nn.Parameter, float]
    ) -> None:
        updates: dict[float, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        rest = sorted(jobs, key=lambda job: job.owner)
        came = left.wait()
        at = 0
        for job in rest:
            for part in job.parts:
                if part.rank == self.world.rank:
                    piece = self.pieces[job.matrix, part.part]
                    target = piece.parameter[piece.view]
                    targets, values = updates[self.options.rate(rates[piece.parameter], job.shape)]
                    targets.append(target)
                    values.append(came[at : at + target.numel()].view(target.shape))
                    at += target.numel()
        for rate, (targets, values) in updates.items():
            torch._foreach_add_(targets, values, alpha=-rate)


def _rounds(jobs: Sequence[Job], world: int) -> list[list[Job]]:
    rounds: list[list[Job]] = []
    number = [0] * world
    filled = [0] * world
    for job in sorted(jobs, key=lambda job: (sorted(job.shape), job.matrix)):
        elements = job.shape[0] * job.shape[1]
        if filled[job.owner] and filled[job.owner] + elements > ROUND_ELEMENTS:
            number[job.owner], filled[job.owner] = number[job.owner] + 1, 0
        filled[job.owner] += elements
        while len(rounds) <= number[job.owner]:
            rounds.append([])
        rounds[number[job.owner]].append(job)
    return rounds


def _starts(jobs: Collection[Job], world: int) -> dict[tuple[str, int, Slices], int]:
    starts = dict[tuple[str, int, Slices], int]()
    at = 0
    for rank in range(world):
        for job in jobs:
            for part in job.parts:
                if part.owned and part.rank == rank:
                    starts[job.matrix, rank, part.part] = at
                    at += _elements(part.part)
    return starts


def _elements(part: Slices) -> int:
    return math.prod(stop - start for start, stop in part)
