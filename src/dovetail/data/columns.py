"""The columns that each kind of training reads. Imports no torch."""

from typing import Any, Literal

from dovetail.data.rows import JsonRow
from dovetail.errors import quoted

OWN = ("id", "prompt", "answer", "input_ids", "images", "videos")
ScoreColumn = Literal["input_ids", "completion"]
SftColumn = Literal["messages", "text", "input_ids", "completion"]


def prompt_column(row: JsonRow, *, answers: bool) -> Literal["prompt", "input_ids"]:
    """The column that holds the prompt of an RL row. answers: whether it needs one.

    Raises DataError where columns are missing.
    """
    if answers:
        row.require("prompt", "answer")
        if row.values["answer"] is None:
            raise row.error("answer is null, which no reward can compare with; leave the row out")
    elif row.values.get("prompt") is None and row.gives("input_ids", instead_of="prompt"):
        return "input_ids"
    row.require("prompt")
    return "prompt"


def extra_columns(row: JsonRow) -> dict[str, Any]:
    """What rewards get of an RL row beside its prompt and answer."""
    return {key: value for key, value in row.given.items() if key not in OWN}


def sft_column(row: JsonRow) -> SftColumn:
    """The column that an SFT row is trained on; DataError where columns are missing."""
    if row.has("chosen", "rejected"):
        raise row.error(
            "the row has a chosen and a rejected completion, which algorithm sft does not train "
            "(preferences are for dpo and its kin); to train the chosen one, set "
            "data.columns={completion: chosen}"
        )
    if row.gives("messages", instead_of="prompt"):
        return "messages"
    if not row.has("prompt") and row.gives("text", instead_of="prompt"):
        return "text"
    if not row.has("prompt") and row.gives("input_ids", instead_of="prompt"):
        return "input_ids"
    row.require("prompt", "completion")
    if row.values.get("label") is False:
        raise row.error(
            "label is false, which marks a completion that is not to be learned (TRL's unpaired "
            "preferences), and sft trains every completion; leave such rows out, or rename the "
            "column if it says something else"
        )
    return "completion"


def is_pair(row: JsonRow, *, paired: bool) -> bool:
    """Whether a preference row has two completions, not one with a label.

    Raises DataError where columns are missing, or where `paired` and there is only one.
    """
    row.require("prompt")
    if row.has("chosen", "rejected"):
        return True
    if paired:
        raise row.error(
            "the row has no chosen and rejected completion to compare; completions with a label "
            "(true or false) are for algorithm kto"
        )
    row.require("completion", "label")
    if row.values["label"] not in (True, False):
        expected = "true for a good completion, false for a bad one"
        raise row.error(f"label is {quoted(row.values['label'])}; expected {expected}")
    return False


def score_column(row: JsonRow) -> ScoreColumn:
    """The column of a row that is scored; DataError where columns are missing."""
    if row.gives("input_ids", instead_of="prompt"):
        return "input_ids"
    expected = 'score takes rows of "prompt" and "completion", or of "input_ids"'
    row.require("prompt", "completion", expected=expected)
    return "completion"
