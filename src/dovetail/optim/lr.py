"""Learning rates as functions of the step. The first step's is never 0."""

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine", "wsd"]


def lr_factor(
    schedule: Schedule, step: int, *, warmup: int = 0, total: int = 1, floor: float = 0.0, decay: int | None = None
) -> float:
    """The factor on the base rate at `step`, counted from 0.

    Warm-up rises linearly and reaches 1 at step `warmup`: (step + 1) / (warmup + 1). Then: constant; linear or cosine
    from 1 to `floor` over `decay` steps (default: at the last of `total` steps); wsd (warm-up, stable, decay): 1 until
    the last `decay` steps (default: a tenth of `total`), then linearly to `floor`. The first of those has the factor 1, so
    they are two at least.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule == "constant":
        return 1.0
    start, last = warmup, total - 1
    if schedule == "wsd":
        start = max(warmup, total - max(2, total // 10 if decay is None else decay))  # of one step none would be lower
        if step < start:
            return 1.0
    elif decay is not None:
        last = min(last, start + decay - 1)
    progress = min(1.0, (step - start) / max(1, last - start))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress
    return floor + (1 - floor) * shape
