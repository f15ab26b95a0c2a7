"""What the clock and the memory say in rows of metrics.jsonl."""

from collections.abc import Mapping, Sequence
from typing import Any

CLOCKED = ("step_seconds", "timestamp", "peak_memory_gib", "mfu", "gpu_utilization")
PREFIXES = ("seconds/", "tokens_per_second", "samples_per_second", "memory/")


def timeless(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows without it."""
    return [
        {k: v for k, v in row.items() if k not in CLOCKED and not k.startswith(PREFIXES)}
        for row in rows
    ]
