"""Reports of an engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dovetail.batch.routing import RoutingTrace


@dataclass(frozen=True)
class BatchReport:
    """Sums of one `forward_backward` over their counts; NaN without a count."""

    loss: float
    count: float  # over all ranks
    tokens: int
    metrics: Mapping[str, float]
    routing: RoutingTrace | None = None


@dataclass(frozen=True)
class StepReport:
    """A step over all batches since the last one. Without a count it is `skipped` without `faults`, and its loss is NaN."""

    loss: float  # as metrics a global sum over a global count
    grad_norm: float
    lr: float
    tokens: int  # without padding
    flops: float  # forward and backward, without recomputation
    skipped: bool
    metrics: Mapping[str, float]
    routing: RoutingTrace | None = None  # of every token, if asked for
    # what was not finite, by rank
    faults: Mapping[int, Sequence[str]] = field(default_factory=dict)

    def describe_faults(self) -> str:
        if self.skipped and not self.faults:
            return "the loss counted nothing"
        lines = [f"rank {rank}: {', '.join(names)}" for rank, names in self.faults.items()]
        return "not finite: " + "; ".join(lines)
