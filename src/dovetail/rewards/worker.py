"""The process of a reward, and its keeper, which forks it and ends it with all descendants.

Messages are JSON lines. The first says what to load, others hold calls: lists of samples.
"""

import asyncio
import importlib
import inspect
import math
import os
import select
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence as Seq
from contextlib import suppress
from functools import partial
from json import dumps, loads  # bound before a reward may replace them
from pathlib import Path
from traceback import walk_tb
from typing import Any, NoReturn, TextIO

from dovetail.rewards.built_in import BUILT_IN, compiled
from dovetail.rewards.code import REQUIRED, code, find_isolation
from dovetail.rewards.own_modules import look_in
from dovetail.system import adopt_orphans, die_with_parent, end_children

Sample = Mapping[str, Any]
Result = dict[str, Any]  # value and error
Scorer = Callable[[Seq[Sample]], Any]  # a value for each sample of a call, or an awaitable of these
OURS = (
    str(Path(__file__).parents[1]) + os.sep,
    "<frozen ",
    "<string>",
    importlib.__file__,
)  # frames of no user
POSITIONAL = frozenset(
    {"completion", "answer", "_answer", "finish", "_finish"}
)  # of every built-in
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
VERL_BATCH = tuple(f"{name}s" for name in VERL)
OF_TRL = ("prompts", "completions", "answer", "finish")  # what the form of TRL gets
ONLY_IN_TRL = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
_MOST_TEXT = 1000  # characters of an exception
OUTPUT = 2  # in sys.argv, behind sys.path: a file for what is printed
KILLED = 128  # and the signal: the keeper's exit code for a reward that was killed
END_SECONDS = 10.0  # for killed processes to be gone
POLL_MILLISECONDS = 1000.0
LONGER = "where it needs longer, raise reward.timeout_seconds"


class CapturedOutput:
    """Turns exceptions of user code, and exits, into the text `error`."""

    error: str | None = None

    def __enter__(self) -> "CapturedOutput":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if isinstance(error, asyncio.CancelledError):
            return False
        if error is not None:
            self.error = f"{type(error).__name__}: {error!s:.{_MOST_TEXT}}{_place(error)}"
        return True


def _place(error: BaseException) -> str:
    """The innermost line in the user's first file."""
    lines = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    user = [(file, line) for file, line in lines if not file.startswith(OURS)]
    return next((f" ({file}:{line})" for file, line in reversed(user) if file == user[0][0]), "")


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
        _answer(requests, answers)
    os._exit(0)  # user code may have started threads


def _answer(requests: TextIO, answers: TextIO) -> None:
    if not (first := requests.readline()):
        return
    setup: dict[str, Any] = loads(first)
    loaded: tuple[Scorer, bool] | None = None
    if setup["log"] is not None:
        _print_to(setup["log"])
    with CapturedOutput() as caught:
        loaded = load(setup)
    ready = {"value": float(loaded is not None and loaded[1]), "error": caught.error}
    answers.write(dumps({"id": setup["id"], "results": [ready]}) + "\n")
    if loaded is not None:
        for line in requests:
            request = loads(line)
            if "log" in request:
                _print_to(request["log"])
                continue
            results = run_calls(*loaded, request["calls"], setup["timeout"])
            sys.stdout.flush()  # what the function printed
            answers.write(dumps({"id": request["id"], "results": results}) + "\n")


def _print_to(log: str) -> None:
    """Append to a file what is printed from now on."""
    sys.stdout.flush()
    with suppress(OSError), open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _keep(child: int) -> NoReturn:
    """Ends with `child`, or when the request pipe closes."""
    signal.pthread_sigmask(
        signal.SIG_BLOCK, signal.valid_signals()
    )  # a reward may signal its parent
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


def run_calls(
    scorer: Scorer, asynchronous: bool, calls: Seq[Seq[Sample]], timeout: float
) -> list[Result]:
    """In order. Asynchronous calls run at the same time, each with its own `timeout`."""

    async def gathered() -> list[list[Result]]:
        return await asyncio.gather(*[_await_call(scorer, call, timeout) for call in calls])

    parts = asyncio.run(gathered()) if asynchronous else [_run_call(scorer, call) for call in calls]
    return [result for part in parts for result in part]


async def _await_call(scorer: Scorer, call: Seq[Sample], timeout: float) -> list[Result]:
    values: Seq[Any] = []
    with CapturedOutput() as caught:
        try:
            values = await asyncio.wait_for(scorer(call), timeout)
        except TimeoutError:
            caught.error = f"no answer within {timeout:g} s; {LONGER}"
    return _results(call, values, caught.error)


def _run_call(scorer: Scorer, call: Seq[Sample]) -> list[Result]:
    values: Seq[Any] = []
    with CapturedOutput() as caught:
        values = scorer(call)
    return _results(call, values, caught.error)


def _results(call: Seq[Sample], values: Seq[Any], error: str | None) -> list[Result]:
    return (
        [{"value": None, "error": error}] * len(call)
        if error is not None
        else [_result(value) for value in values]
    )


def _result(value: Any) -> Result:
    number = math.nan
    if isinstance(value, CapturedOutput):
        return {"value": None, "error": value.error}
    with CapturedOutput() as caught:
        if isinstance(value, Mapping):  # verl allows more metrics
            if "score" not in value:
                return {
                    "value": None,
                    "error": f"the reward returned {value!r:.100}, a mapping without 'score'",
                }
            value = value["score"]
        if value is not None and not isinstance(value, (str, bytes)):
            number = float(value)
    if caught.error is not None or value is None:
        return {"value": None, "error": caught.error}
    if not math.isfinite(number):
        return {
            "value": None,
            "error": f"the reward returned {value!r:.100}, which is not a finite number",
        }
    return {"value": number, "error": None}


def load(setup: Mapping[str, Any]) -> tuple[Scorer, bool]:
    """The scorer, and whether it is asynchronous."""
    name = setup["name"]
    function = setup["function"]
    options = setup["options"]
    if (address := setup["address"]) is not None:
        servers = importlib.import_module("dovetail.rewards.judge")  # other rewards need no HTTP
        if "prompt" in address:
            return _each_awaited(servers.Judge(**address).score), True
        return partial(_awaited_list, servers.RemoteModel(**address).score), True
    if function is None:
        return _built_in(name, options), False
    reward = _imported(function, setup["directory"])
    asynchronous = any(map(inspect.iscoroutinefunction, (reward, type(reward).__call__)))
    parameters = inspect.signature(reward).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if not takes_all:
        _check_options(options, frozenset(parameters))
    needed = _needed(function, parameters, options)
    if setup["columns"] is not None and "completions" in parameters:
        _refuse_lacking(function, needed, [*OF_TRL, *setup["columns"], *options])

    def call(arguments: dict[str, Any]) -> Any:
        given = {**arguments, **options}
        _refuse_lacking(function, needed, [*arguments, *options])
        value = reward(
            **{key: value for key, value in given.items() if takes_all or key in parameters}
        )
        if not asynchronous and inspect.iscoroutine(value):
            value.close()
            raise TypeError(f"{function} returned a coroutine; make the wrapper `async def`")
        return value

    if "solution_str" in parameters:
        return (_each_awaited if asynchronous else _each)(
            lambda sample: call(_verl_arguments(sample))
        ), asynchronous
    arguments = {"completions": _trl_arguments, "solution_strs": _verl_batch_arguments}
    make = next((make for parameter, make in arguments.items() if parameter in parameters), None)
    if make is None:
        raise TypeError(
            f"{function}({', '.join(parameters)}) has neither signature of a reward: "
            "f(data_source, solution_str, ground_truth, extra_info) or f(prompts, completions, "
            "**columns)"
        )
    if asynchronous:
        return partial(
            _awaited_list, lambda samples: call(make(samples)), spread=setup["metric"]
        ), True
    return lambda samples: _as_list(
        call(make(samples)), len(samples), spread=setup["metric"]
    ), False


def _built_in(name: str, options: Mapping[str, Any]) -> Scorer:
    built_in = BUILT_IN[name]
    _check_options(options, frozenset(inspect.signature(built_in).parameters) - POSITIONAL)
    if "pattern" in options:
        compiled(options["pattern"], "reward.options.pattern")
    if built_in is code:
        find_isolation(options.get("isolation", REQUIRED))
    return _each(lambda s: built_in(s["completion"], s["answer"], s["finish"], **options))


def _imported(function: str, directory: str | None) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    if directory is not None:
        look_in(directory, module)
    loaded = vars(importlib.import_module(module))
    reward = loaded.get(name)
    if not callable(reward):
        raise LookupError(f"module {module} ({loaded.get('__file__')}) has no function {name!r}")
    return reward


def _needed(
    function: str, parameters: Mapping[str, inspect.Parameter], options: Mapping[str, Any]
) -> list[str]:
    """What each call has to give. TypeError for what none gives."""
    if unnamed := [p.name for p in parameters.values() if p.kind is p.POSITIONAL_ONLY]:
        raise TypeError(
            f"{function} takes {', '.join(unnamed)} by position only, but is called by names; "
            "drop the /"
        )
    required = [p for p in parameters.values() if p.default is p.empty and p.name not in options]
    needed = [p.name for p in required if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    verl = next((names for names in (VERL, VERL_BATCH) if names[1] in parameters), None)
    if never := [name for name in needed if (name not in verl if verl else name in ONLY_IN_TRL)]:
        given = ", ".join(verl or (*OF_TRL, "the columns of the rows"))
        raise TypeError(
            f"{function} needs {', '.join(never)}, which no reward is given; it gets {given}, "
            "and reward.options"
        )
    return needed


def _refuse_lacking(function: str, needed: Seq[str], given: Seq[str]) -> None:
    if lacking := [name for name in needed if name not in given]:
        needs = f"{function} needs {', '.join(lacking)}"
        raise TypeError(f"{needs}, but the rows give {', '.join(given)}")


def _check_options(options: Mapping[str, Any], accepted: frozenset[str]) -> None:
    unknown = sorted(options.keys() - accepted)
    if unknown:
        known = ", ".join(sorted(accepted)) or "none"
        raise TypeError(
            f"reward.options has {', '.join(unknown)}, which it does not take (it takes: {known})"
        )


def _each(call_one: Callable[[Sample], Any]) -> Scorer:
    def score(samples: Seq[Sample]) -> list[Any]:
        values: list[Any] = []
        for sample in samples:
            with CapturedOutput() as caught:
                values.append(call_one(sample))
            if caught.error is not None:
                values.append(caught)
        return values

    return score


def _each_awaited(call_one: Callable[[Sample], Awaitable[Any]]) -> Scorer:
    async def value(sample: Sample) -> Any:
        with CapturedOutput() as caught:
            return await call_one(sample)
        return caught

    async def score(samples: Seq[Sample]) -> list[Any]:
        return await asyncio.gather(*[value(sample) for sample in samples])

    return score


def _verl_arguments(sample: Sample) -> dict[str, Any]:
    columns = dict(sample["columns"])
    source = columns.pop("data_source", None)
    extra = columns.pop("extra_info", None)
    extra = {**columns, **extra} if isinstance(extra, dict) else columns
    return {
        "data_source": source,
        "solution_str": sample["completion"],
        "ground_truth": sample["answer"],
        "extra_info": {"prompt": sample["prompt"], "finish": sample["finish"], **extra},
    }


def _verl_batch_arguments(samples: Seq[Sample]) -> dict[str, list[Any]]:
    each = [_verl_arguments(sample) for sample in samples]
    return {
        names: [row[name] for row in each] for name, names in zip(VERL, VERL_BATCH, strict=True)
    }


def _trl_arguments(samples: Seq[Sample]) -> dict[str, list[Any]]:
    rows = []
    for sample in samples:
        text = sample["completion"]
        completion = (
            [{"role": "assistant", "content": text}] if isinstance(sample["prompt"], list) else text
        )
        row = {**sample["columns"], "answer": sample["answer"], "finish": sample["finish"]}
        rows.append({**row, "prompts": sample["prompt"], "completions": completion})
    return {
        key: [row.get(key) for row in rows]
        for key in dict.fromkeys(key for row in rows for key in row)
    }


async def _awaited_list(
    call: Callable[[Seq[Sample]], Any], samples: Seq[Sample], *, spread: bool = False
) -> list[Any]:
    return _as_list(await call(samples), len(samples), spread=spread)


def _as_list(returned: Any, count: int, *, spread: bool) -> list[Any]:
    """spread: one number is that of all samples."""
    if spread and not isinstance(returned, Iterable):
        return [returned] * count
    s = "s" * (count > 1)
    expected = f"expected a list of {count} reward{s} for {count} completion{s}"
    if not isinstance(returned, Iterable) or isinstance(returned, (str, bytes, Mapping)):
        raise TypeError(f"{expected}, got {returned!r:.100}")
    rewards = list(returned)
    if len(rewards) != count:
        raise ValueError(f"{expected}, got {len(rewards)}")
    return rewards
