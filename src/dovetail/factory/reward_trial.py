"""Rewards are loaded and called once before a run. Imports no torch."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from dovetail.data.columns import extra_columns
from dovetail.data.rows import JsonRow
from dovetail.errors import ConfigError, quoted
from dovetail.recipe.reward import RewardPart
from dovetail.rewards.runner import CallLimits, RewardRunner
from dovetail.rewards.samples import FIRST_SAMPLES, RewardInput
from dovetail.rewards.signatures import LIMIT

TRIAL_SECONDS = 1.0
SHOWN = 40  # characters of a completion in a message


def try_reward(
    part: RewardPart, folder: Path, firsts: Sequence[Sequence[JsonRow]], samples: int
) -> None:
    """Load a reward, and call it for a completion of one of the first rows.

    folder: of its module. firsts: the first rows of each source; none where they are not known.
    samples: completions of a prompt. ConfigError where it cannot be loaded, needs columns that rows
    lack, or fails on each of the first rows. A call that takes longer than a second proves nothing,
    and an asynchronous function is not called.
    """
    columns = None
    others = [rows[0].given for rows in firsts]
    if firsts:
        names = extra_columns(firsts[0][0])
        columns = [name for name in names if all(name in given for given in others)]
    with ExitStack() as stack:
        runner = RewardRunner(
            part.name,
            function=part.function,
            options=part.options,
            directory=folder,
            timeout=min(TRIAL_SECONDS, part.timeout_seconds),
            limits=CallLimits(batch=part.batch, workers=1, columns=columns),
            output=stack.enter_context(open(os.devnull, "wb")),
        )
        stack.callback(runner.close)
        if firsts and not runner.is_async:
            _call(runner, part, firsts[0][:FIRST_SAMPLES], 1 if part.batch == "sample" else samples)


def _call(runner: RewardRunner, part: RewardPart, rows: Sequence[JsonRow], samples: int) -> None:
    """Until it succeeds for one of `rows`."""
    problems = []
    for row in rows:
        completion = _completion(row)
        given = RewardInput(
            completion=completion,
            completion_ids=list(completion.encode()) or [0],  # no tokenizer is loaded yet
            answer=row.values.get("answer"),
            prompt=row.values["prompt"],
            columns=extra_columns(row),
        )
        error = runner.score([given] * samples)[0].error
        if error is None or LIMIT in error:
            return
        shown = quoted(given.completion[:SHOWN])
        problems.append(f"{row.path}:{row.line} with the completion {shown}: {error}")
    tried = f"reward {part.function or part.name} was tried on {problems[0]}"
    edit = "correct the function, which has to return a number or None for any text, or the rows"
    raise ConfigError(f"{tried}; {edit}")


def _completion(row: JsonRow) -> str:
    """The row's own completion or answer."""
    for name in ("completion", "answer"):
        if isinstance(row.values.get(name), str | int | float):
            return str(row.values[name])
    return ""
