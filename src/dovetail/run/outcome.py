"""What a run gives back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Evaluations before and after a run, and its steps.

    rows: of all steps, with earlier starts. stopped: by a signal. early: why there are fewer steps.
    """

    before: Row
    after: Row
    rows: list[Row]
    stopped: bool
    early: str = ""


def evaluation_of(row: Mapping[str, Any]) -> Row:
    """Returns the columns of the evaluation after the row's step."""
    columns = [name for name in row if name.startswith(("eval_", "eval/"))]
    return {name: row[name] for name in columns if not name.endswith("_before")}
