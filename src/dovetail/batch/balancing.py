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

    Units (`split_units`) go longest first to the least loaded replica (a sequence costs
    n (1 + n / 12 width)), and first fit into micro-batches of at most `budget` tokens, padded to
    `multiple`.
    """
    units = split_units(len(lengths), groups)
    sizes = [sum(lengths[i] for i in unit) for unit in units]
    if budget is not None:
        for unit, size in zip(units, sizes, strict=True):
            padded = _padded(size, multiple)
            if padded > budget:
                raise _too_long(unit, size, padded, budget, groups)
    # a heap of (cost, sequences, replica)
    loads = [(0.0, 0, replica) for replica in range(replicas)]
    dealt: list[list[int]] = [[] for _ in range(replicas)]
    longest_first = sorted(range(len(units)), key=lambda number: (-sizes[number], number))
    for number in longest_first:
        unit = units[number]
        load, count, replica = loads[0]
        cost = sum(lengths[i] * (1 + lengths[i] / (12 * width)) for i in unit)
        more = (load + cost, count + len(unit), replica)
        heapreplace(loads, more)
        dealt[replica].append(number)
    plans = []
    for numbers in dealt:
        chosen = [units[number] for number in numbers]
        plans.append(_first_fit(chosen, lengths, budget, multiple))
    most = max(map(len, plans), default=0)
    for plan in plans:
        while len(plan) < most:
            plan.append([])
    return plans


def _first_fit(
    units: list[list[int]], lengths: Seq[int], budget: int | None, multiple: int
) -> list[list[int]]:
    """Returns micro-batches; each unit is in the first that had room for it."""
    used: list[int] = []  # tokens
    bins: list[list[int]] = []
    for unit in units:
        size = sum(lengths[i] for i in unit)
        for place, tokens in enumerate(used):
            if budget is None or _padded(tokens + size, multiple) <= budget:
                used[place] += size
                bins[place] += unit
                break
        else:
            used.append(size)
            bins.append([*unit])
    return bins


def split_units(count: int, groups: Seq[int | None]) -> list[list[int]]:
    """Sequences that stay together: those of a group, or one without."""
    units: dict[int, list[int]] = {}  # by group, or -1 - sequence
    for i in range(count):
        key = -1 - i
        if groups:
            group = groups[i]
            key = key if group is None else group
        members = units.setdefault(key, [])
        members.append(i)
    return list(units.values())


def balanced_split(lengths: Seq[int]) -> int:
    """Sequences in the first of the most equal halves."""
    ends = list(accumulate(lengths))
    total = ends[-1]
    cuts = range(1, len(lengths))
    return min(cuts, key=lambda cut: abs(2 * ends[cut - 1] - total))


def _too_long(
    unit: list[int], size: int, padded: int, budget: int, groups: Seq[int | None]
) -> DataError:
    first = unit[0]
    what = f"sequence {first}"
    drop = "leave the sequence out (data.overlong_rows=drop)"
    if groups and groups[first] is not None:
        members = ", ".join(map(str, unit))
        what = f"group {groups[first]} (sequences {members})"
        drop = "leave the group out; its sequences share a micro-batch"
    return DataError(
        f"{what} has {size} tokens ({padded} with padding), more than tokens_per_batch={budget}; "
        f"raise that to {padded} or "
        f"more (in a recipe trainer.tokens_per_batch) or {drop}"
    )


def _padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
