"""Sequence-length balancing over replicas and micro-batches, the same on every rank."""

from collections.abc import Sequence as Seq
from heapq import heapreplace
from itertools import accumulate

from dovetail.errors import DataError


def plan_microbatches(
    lengths: Seq[int], replicas: int, budget: int | None, multiple: int = 1, width: int = 1 << 20
) -> list[list[list[int]]]:
    """Sequence numbers: [replica][micro-batch].

    Sequences go longest first to the least loaded replica, and first fit into its micro-batches of at most `budget` tokens,
    padded to `multiple`. All replicas have equally many micro-batches; some may be empty. A sequence of n tokens costs
    n (1 + n / 12 width).
    """
    if budget is not None:
        for i, n in enumerate(lengths):
            if _padded(n, multiple) > budget:
                raise DataError(
                    f"sequence {i} has {n} tokens ({_padded(n, multiple)} with padding), more than tokens_per_batch="
                    f"{budget}; raise that (in a recipe trainer.tokens_per_batch) or leave the sequence out (data.overlong=drop)"
                )
    loads = [(0.0, 0, replica) for replica in range(replicas)]  # a heap of (cost, sequences, replica)
    dealt: list[list[int]] = [[] for _ in range(replicas)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, count, replica = loads[0]
        heapreplace(loads, (load + lengths[i] * (1 + lengths[i] / (12 * width)), count + 1, replica))
        dealt[replica].append(i)
    plans = []
    for sequences in dealt:
        bins: list[tuple[int, list[int]]] = []
        for i in sequences:
            for b, (used, members) in enumerate(bins):
                if budget is None or _padded(used + lengths[i], multiple) <= budget:
                    bins[b] = (used + lengths[i], [*members, i])
                    break
            else:
                bins.append((lengths[i], [i]))
        plans.append([members for _, members in bins])
    count = max(map(len, plans), default=0)
    return [plan + [[] for _ in range(count - len(plan))] for plan in plans]


def balanced_split(lengths: Seq[int]) -> int:
    """Sequences of the first half, for the most equal halves."""
    ends = list(accumulate(lengths))
    return min(range(1, len(lengths)), key=lambda cut: abs(2 * ends[cut - 1] - ends[-1]))


def _padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
