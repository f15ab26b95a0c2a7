"""What ranks send each other: the formulas of docs/parallelism.md, read from its tables, and a counter of the real bytes.

A formula is written as in the docs, with a space for a product: `4 (tp - 1) t D`. One rank sends to the p ranks of a
group, itself left out: of an all_gather its shard p - 1 times; of a reduce_scatter or an all_to_all of N elements
(p - 1) / p N; of an all_reduce twice that; of a message all of it.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from dovetail.arch.registry import ulysses_degree
from dovetail.arch.spec import ArchSpec
from dovetail.engine import native
from dovetail.engine.stage import TrainingRunner, begin_gathers
from dovetail.parallel import collectives
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.pipeline.partition import partition

DOC = Path(__file__).parents[2] / "docs" / "parallelism.md"
EACH_MICRO_BATCH, ONCE_A_STEP = "### Each micro-batch", "### Once a step"
PRODUCT = re.compile(r"(?<=[\w)]) (?=[\w(])")


@dataclass(frozen=True)
class Step:
    """What one rank does in a step, as far as it decides what it sends."""

    spec: ArchSpec
    layout: Layout
    tokens: int  # of a micro-batch, with its padding
    micros: int
    counted: int  # tokens of a micro-batch on this rank
    all_counted: int  # and on all cp ranks
    rank: int = 0  # on pp
    values: bool = False
    separable: bool = True
    recompute: bool = False

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(range(self.rank, self.layout.pp * self.layout.virtual_stages, self.layout.pp))

    @property
    def first(self) -> bool:
        return 0 in self.stages

    @property
    def last(self) -> bool:
        return self.layout.pp * self.layout.virtual_stages - 1 in self.stages

    @property
    def letters(self) -> dict[str, int]:
        """What the letters of the formulas stand for."""
        a, tp, cp, dp = self.spec.attention, self.layout.tp, self.layout.cp, self.layout.dp
        assert dp is not None
        h, g, C, D = a.num_heads // tp, max(1, a.num_kv_heads // tp), a.head_dim, self.spec.width
        P = D * (2 * h + 2 * g) * C + 3 * D * self.spec.ffn_width // tp + 2 * D
        return {
            **{"tp": tp, "cp": cp, "f": dp * cp, "u": ulysses_degree(self.spec, self.layout)},
            **{
                "t": self.tokens // (cp * tp),
                "n": self.counted,
                "A": self.all_counted,
                "V": self.spec.vocab_size,
            },
            **{"D": D, "C": C, "h": h, "g": g, "c": max(1, tp // a.num_kv_heads), "P": P},
        }

    def times(self, what: str) -> int:
        """How often a row of the tables counts, each way."""
        if what.startswith("a layer"):
            return sum(len(partition(self.spec, self.layout)[stage]) for stage in self.stages)
        first, last, lm, tied = (
            self.first,
            self.last,
            not self.values,
            self.spec.tie_embeddings and not self.values,
        )
        return {
            "hidden states": len(self.stages),
            "the table's rows": first,
            "the head's tokens": last and lm,
            "the head's statistics": (last and lm) * (1 if self.separable else 2),
            "values": last and not lm,
            "a loss of whole sequences": last and not self.separable,
            "the table; the head": (first or last) if tied else first + (last and lm),
            "the final norm": last,
            "the final norm; a value head": last * (1 if lm else 2),
            "a tied table": tied and self.layout.pp > 1 and (first or last),
        }[what]


def expected(step: Step) -> dict[str, Fraction]:
    """Bytes that a rank sends in a step, by axis, collective and phase: the tables of the docs."""
    found: dict[str, Fraction] = defaultdict(Fraction)
    for row in table(EACH_MICRO_BATCH):
        each = value_of(row["elements, each way"], step.letters) * int(row["bytes"])
        size, axis = each * step.times(row["what"]) * step.micros, row["axis"]
        if axis == "pp":
            found["to_next send"] += size - each * step.micros * step.last
            found["to_previous send"] += size - each * step.micros * step.first
        elif axis == "fsdp" and step.layout.pp > 1:  # gathered once a step
            found["fsdp all_gather forward"] += size / step.micros
        else:
            for phase in ("forward", "backward"):
                found[f"{axis} {row[phase]} {phase}"] += size
            if step.recompute and axis != "fsdp" and row["what"].startswith("a layer"):
                again = (
                    Fraction(1, 2) if row["forward"] == "reduce_scatter" else 1
                )  # nobody needs the last output
                found[f"{axis} {row['forward']} backward"] += size * again
    for row in table(ONCE_A_STEP):
        size = value_of(row["elements"], step.letters) * int(row["bytes"]) * step.times(row["what"])
        found[
            f"{row['axis']} {row['collective']} {'backward' if row['axis'] == 'fsdp' else 'update'}"
        ] += size
    return {key: size for key, size in found.items() if size and " none " not in key}


def table(heading: str) -> list[dict[str, str]]:
    """The rows of the table under a heading of docs/parallelism.md, by the names of its columns; backticks are gone."""
    text = DOC.read_text().splitlines()
    rest = text[text.index(heading) :]
    lines = takewhile(bool, dropwhile(lambda line: not line.startswith("|"), rest))
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def value_of(formula: str, letters: Mapping[str, int]) -> Fraction:
    """A formula's value, exactly."""
    names = {name: Fraction(value) for name, value in letters.items()}
    code = re.sub(r"\b(\d+)\b", r"Fraction(\1)", PRODUCT.sub(" * ", formula))
    return Fraction(eval(code, {"__builtins__": {}, "Fraction": Fraction, "max": max}, names))


COLLECTIVES: Mapping[
    str, tuple[str, Callable[[int], Fraction]]
] = {  # by torch's names, of 2.11 and of 2.13
    "all_gather_into_tensor": ("all_gather", lambda p: Fraction(p - 1)),
    "all_gather_single": ("all_gather", lambda p: Fraction(p - 1)),
    "reduce_scatter_tensor": ("reduce_scatter", lambda p: Fraction(p - 1, p)),
    "reduce_scatter_single": ("reduce_scatter", lambda p: Fraction(p - 1, p)),
    "all_to_all_single": ("all_to_all", lambda p: Fraction(p - 1, p)),
    "all_reduce": ("all_reduce", lambda p: Fraction(2 * (p - 1), p)),
    "isend": ("send", lambda _: Fraction(1)),
}
INPUTS = ("input_tensor", "input", "tensor")


@dataclass
class Traffic:
    """Bytes that this rank sent: by axis, collective, and what the engine was at (forward, backward or update)."""

    names: Mapping[str, str]
    phase: str = "update"
    sent: dict[str, Fraction] = field(default_factory=lambda: defaultdict(Fraction))

    def counting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """`original`, one of torch's collectives, with a counter before it."""
        kind, share = COLLECTIVES[name]
        given = 0 if name in ("all_reduce", "isend") else 1

        def counted(*args: Any, group: dist.ProcessGroup, **kwargs: Any) -> Any:
            named = [kwargs[key] for key in INPUTS if key in kwargs]
            x = named[0] if named else args[given]
            axis = self.names[str(group.group_name)]
            what = f"{axis} send" if kind == "send" else f"{axis} {kind} {self.phase}"
            self.sent[what] += share(group.size()) * x.numel() * x.element_size()
            return original(*args, group=group, **kwargs)

        return counted

    def during(self, phase: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """`original`, whose collectives count as those of `phase`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.phase, before = phase, self.phase
            try:
                return original(*args, **kwargs)
            finally:
                self.phase = before

        return run


@contextmanager
def counted(mesh: Mesh) -> Iterator[dict[str, Fraction]]:
    """Count what this rank sends over the groups of a mesh: a model's own collectives, FSDP2's and the executor's."""
    axes = [
        *mesh.axes.values(),
        *(axis for pair in mesh.context.values() for axis in pair),
        *mesh.copies.values(),
    ]
    groups = {str(axis.group.group_name): axis.name for axis in axes if axis.group is not None}
    channels = {"to_next": mesh.channels.to_next, "to_previous": mesh.channels.to_previous}
    traffic = Traffic(
        groups
        | {
            str(channel.group.group_name): name
            for name, channel in channels.items()
            if channel is not None
        }
    )
    phases = {
        "forward": "forward",
        "backward": "backward",
        "weight": "backward",
        "finish": "backward",
    }
    with ExitStack() as patches:
        for name in COLLECTIVES:
            if name in vars(dist):
                patches.enter_context(
                    mock.patch.object(dist, name, traffic.counting(name, vars(dist)[name]))
                )
        for name, flat in (
            ("_FLAT_GATHER", "all_gather_single"),
            ("_FLAT_SCATTER", "reduce_scatter_single"),
        ):
            patches.enter_context(
                mock.patch.object(
                    collectives, name, traffic.counting(flat, vars(collectives)[name])
                )
            )
        for name, phase in phases.items():
            patches.enter_context(
                mock.patch.object(
                    TrainingRunner, name, traffic.during(phase, vars(TrainingRunner)[name])
                )
            )
        early = traffic.during(
            "forward", begin_gathers
        )  # of what the first forward pass would gather
        patches.enter_context(mock.patch.object(native, "begin_gathers", early))
        yield traffic.sent
