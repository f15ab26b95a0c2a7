"""The process of a reward, and its keeper, which forks it and ends it with all descendants.

Messages are JSON lines. The first says what to load, others hold calls: lists of samples.
"""

import asyncio
import math
import os
import select
import signal
import sys
import threading
from collections.abc import Mapping, Sequence as Seq
from contextlib import suppress
from json import dumps, loads  # bound before a reward may replace them
from typing import Any, NoReturn, TextIO

from dovetail.rewards.signatures import LIMIT, Call, Scorer, UserErrors, load
from dovetail.system import adopt_orphans, die_with_parent, end_children

Result = dict[str, Any]  # value, error and extra
OUTPUT = 2  # in sys.argv, behind sys.path: a file for what is printed
KILLED = 128  # and the signal: the keeper's exit code for a reward that was killed
END_SECONDS = 10.0  # for killed processes to be gone
POLL_MILLISECONDS = 1000.0


def main() -> NoReturn:
    adopt_orphans()
    child = os.fork()
    if child:
        _keep(child)
    die_with_parent()
    os.setsid()  # signals to its group do not reach the keeper
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # user code must not read requests or write answers
    if len(sys.argv) > OUTPUT:
        os.dup2(int(sys.argv[OUTPUT]), 2)
    os.dup2(2, 1)
    with suppress(BrokenPipeError):
        _serve(requests, answers)
    os._exit(0)  # user code may have started threads


def _serve(requests: TextIO, answers: TextIO) -> None:
    """Loads the reward of the first message, and answers those with calls."""
    first = requests.readline()
    if not first:
        return
    setup: dict[str, Any] = loads(first)
    scorer: Scorer | None = None
    if setup["log"] is not None:
        _print_to(setup["log"])
    with UserErrors() as caught:
        scorer = load(setup)
    is_async = scorer is not None and scorer.is_async
    ready = {"value": float(is_async), "error": caught.error}
    _write(answers, setup["id"], [ready])
    if scorer is None:
        return
    for line in requests:
        request = loads(line)
        if "log" in request:
            _print_to(request["log"])
            continue
        calls = [Call(samples, request["trainer_state"]) for samples in request["calls"]]
        results = run_calls(scorer, calls, setup["timeout"])
        sys.stdout.flush()  # what the function printed
        _write(answers, request["id"], results, [each for call in calls for each in call.metrics])


def _write(
    answers: TextIO, request: str, results: Seq[Result], metrics: Seq[tuple[str, float]] = ()
) -> None:
    answer = {"id": request, "results": results, "metrics": metrics}
    answers.write(dumps(answer, default=str) + "\n")


def _print_to(log: str) -> None:
    """Append to a file what is printed from now on."""
    sys.stdout.flush()
    with suppress(OSError), open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _keep(child: int) -> NoReturn:
    """Ends with `child`, or when the request pipe closes."""
    # a reward may signal its parent
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    threading.Thread(target=_end_when_closed, args=(child,), daemon=True).start()
    ended, status = os.wait()
    while ended != child:
        ended, status = os.wait()
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    _end(child, KILLED + number if number else 0)


def _end_when_closed(child: int) -> NoReturn:
    runner = os.getppid()
    requests = select.poll()
    requests.register(0, 0)  # only for the end of the pipe
    while not requests.poll(POLL_MILLISECONDS) and os.getppid() == runner:
        pass  # forks of the runner may hold the pipe open
    _end(child)


def _end(child: int, code: int = 0) -> NoReturn:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # all that is known without /proc
    end_children(seconds=END_SECONDS)
    os._exit(code)


def run_calls(scorer: Scorer, calls: Seq[Call], timeout: float) -> list[Result]:
    """Returns results in order. Asynchronous calls run at the same time, each with its own `timeout`."""

    async def gathered() -> list[list[Result]]:
        return await asyncio.gather(*[_await_call(scorer, call, timeout) for call in calls])

    if scorer.is_async:
        parts = asyncio.run(gathered())
    else:
        parts = [_run_call(scorer, call) for call in calls]
    return [result for part in parts for result in part]


async def _await_call(scorer: Scorer, call: Call, timeout: float) -> list[Result]:
    values: Seq[Any] = []
    with UserErrors() as caught:
        try:
            values = await asyncio.wait_for(scorer.score(call), timeout)
        except TimeoutError:
            caught.error = f"no answer within {timeout:g} s {LIMIT}"
    return _results(call, values, caught.error)


def _run_call(scorer: Scorer, call: Call) -> list[Result]:
    values: Seq[Any] = []
    with UserErrors() as caught:
        values = scorer.score(call)
    return _results(call, values, caught.error)


def _results(call: Call, values: Seq[Any], error: str | None) -> list[Result]:
    if error is not None:
        return [{"value": None, "error": error}] * len(call.samples)
    results = [_result(value) for value in values]
    if call.extra:
        for index, result in enumerate(results):
            result["extra"] = {column: each[index] for column, each in call.extra.items()}
    return results


def _result(value: Any) -> Result:
    """A finite number, None, or why it is neither."""
    number: float | None = None
    if isinstance(value, UserErrors):
        return {"value": None, "error": value.error}
    with UserErrors() as caught:
        if isinstance(value, Mapping):  # verl allows more metrics
            if "score" not in value:
                lacking = f"the reward returned {value!r:.100}, a mapping without 'score'"
                return {"value": None, "error": lacking}
            value = value["score"]
        if value is not None:
            number = math.nan if isinstance(value, (str, bytes)) else float(value)
    error = caught.error
    if error is None and number is not None and not math.isfinite(number):
        error = f"the reward returned {value!r:.100}, which is not a finite number"
    return {"value": number if error is None else None, "error": error}
