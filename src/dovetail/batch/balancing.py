"""Balancing of sequence lengths."""

from collections.abc import Sequence as Seq
from heapq import heapreplace
from itertools import accumulate

from dovetail.errors import DataError


def plan_microbatches(
    lengths: Seq[int],
    replicas: int,
    budget: int | None,
    multiple: int = 1,
    width: int = 1 << 20,
    groups: Seq[int | None] = (),
) -> list[list[list[int]]]:
    """Sequence numbers by replica and micro-batch; all replicas have equally many, some empty.

    Units (`split_units`) go longest first to the least loaded replica (a sequence costs n (1 + n / 12 width)), and first fit
    into micro-batches of at most `budget` tokens, padded to `multiple`.
    """
    units = split_units(len(lengths), groups)
    sizes = [sum(lengths[i] for i in unit) for unit in units]
    for unit, size in zip(units, sizes, strict=True):
        if budget is not None and _padded(size, multiple) > budget:
            raise _too_long(unit, size, _padded(size, multiple), budget, groups)
    # a heap of (cost, sequences, replica)
    loads = [(0.0, 0, replica) for replica in range(replicas)]
    dealt: list[list[int]] = [[] for _ in range(replicas)]
    for u in sorted(range(len(units)), key=lambda u: (-sizes[u], u)):
        load, count, replica = loads[0]
        cost = sum(lengths[i] * (1 + lengths[i] / (12 * width)) for i in units[u])
        heapreplace(loads, (load + cost, count + len(units[u]), replica))
        dealt[replica].append(u)
    plans = []
    for numbers in dealt:
        bins: list[tuple[int, list[int]]] = []
        for u in numbers:
            for b, (used, members) in enumerate(bins):
                if budget is None or _padded(used + sizes[u], multiple) <= budget:
                    bins[b] = (used + sizes[u], members + units[u])
                    break
            else:
                bins.append((sizes[u], units[u]))
        plans.append([members for _, members in bins])
    count = max(map(len, plans), default=0)
    return [plan + [[] for _ in range(count - len(plan))] for plan in plans]


def split_units(count: int, groups: Seq[int | None]) -> list[list[int]]:
    """Sequences that stay together: those of a group, or one without."""
    units: dict[int, list[int]] = {}  # by group, or -1 - sequence
    for i in range(count):
        group = groups[i] if groups else None
        units.setdefault(-1 - i if group is None else group, []).append(i)
    return list(units.values())


def balanced_split(lengths: Seq[int]) -> int:
    """Sequences in the first of the most equal halves."""
    ends = list(accumulate(lengths))
    return min(range(1, len(lengths)), key=lambda cut: abs(2 * ends[cut - 1] - ends[-1]))


def _too_long(
    unit: list[int], size: int, padded: int, budget: int, groups: Seq[int | None]
) -> DataError:
    what = f"sequence {unit[0]}"
    drop = "leave the sequence out (data.overlong_rows=drop)"
    if groups and groups[unit[0]] is not None:
        what = f"group {groups[unit[0]]} (sequences {', '.join(map(str, unit))})"
        drop = "leave the group out; its sequences share a micro-batch"
    return DataError(
        f"{what} has {size} tokens ({padded} with padding), more than tokens_per_batch={budget}; "
        f"raise that to {padded} or "
        f"more (in a recipe trainer.tokens_per_batch) or {drop}"
    )


def _padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
