"""Which samples run together: waves of rows whose cache stays within a budget, as a pure function of the lengths."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Wave:
    """Prompts by number, longest first, and the rows to draw: (place in `prompts`, sample)."""

    prompts: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]


def plan_waves(lengths: Mapping[int, int], samples: int, new: int, budget: int) -> list[Wave]:
    """`samples` rows of every prompt (number -> length), `new` tokens each, in waves of at most `budget` entries.

    A wave costs its rows times its longest row, so prompts of like length go together. A prompt whose samples do not
    fit at once is spread over waves; a single row always gets its own, whatever it costs.
    """
    waves: list[Wave] = []
    prompts: list[int] = []
    rows: list[tuple[int, int]] = []
    longest = 0
    for prompt in sorted(lengths, key=lambda i: (-lengths[i], i)):
        for sample in range(samples):
            if rows and (len(rows) + 1) * longest > budget:
                waves.append(Wave(tuple(prompts), tuple(rows)))
                prompts, rows = [], []
            if not rows:
                longest = lengths[prompt] + new
            if not prompts or prompts[-1] != prompt:
                prompts.append(prompt)
            rows.append((len(prompts) - 1, sample))
    return [*waves, Wave(tuple(prompts), tuple(rows))] if rows else waves
