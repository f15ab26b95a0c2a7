"""A process that answers one JSON line a sample for one reward function, and its keeper, which forks it.

The keeper runs no user code; it ends the reward and all its descendants. The first request says what to load.
"""

import importlib
import inspect
import math
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from json import dumps, loads  # bound before a reward may replace them
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import Any, NoReturn

from dovetail.rl.reward_functions import BUILT_IN
from dovetail.system import adopt_orphans, die_with_parent, end_children

Scorer = Callable[[Mapping[str, Any]], Any]
# Frames that are not a user's: this package and Python's import system.
OURS = (str(Path(__file__).parents[1]) + os.sep, "<frozen ", importlib.__file__)
POSITIONAL = frozenset({"completion", "answer", "_answer", "finish", "_finish"})  # arguments of every built-in
_MOST_TEXT = 1000  # characters of an exception in an error
END_SECONDS = 10.0  # for killed processes to be gone
POLL_MILLISECONDS = 1000.0


class CapturedOutput:
    """Any exception of user code, as text."""

    error: str | None = None

    def __enter__(self) -> "CapturedOutput":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if kind is not None:
            self.error = f"{kind.__name__}: {error!s:.{_MOST_TEXT}}{_place(trace)}"
        return True


def _place(trace: TracebackType | None) -> str:
    """The innermost line in the user's first file."""
    lines = [(frame.f_code.co_filename, line) for frame, line in walk_tb(trace)]
    user = [(file, line) for file, line in lines if not file.startswith(OURS)]
    return next((f" ({file}:{line})" for file, line in reversed(user) if file == user[0][0]), "")


def main() -> NoReturn:
    adopt_orphans()
    child = os.fork()
    if child:
        _keep(child)
    die_with_parent()
    os.setsid()  # signals to the reward's process group do not reach the keeper
    requests, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # user code must not read requests or write answers
    os.dup2(2, 1)
    setup = loads(requests.readline())
    scorer = None
    with CapturedOutput() as caught:
        scorer = load(setup["name"], setup["function"], setup["options"], setup["directory"])
    answers.write(dumps({"id": setup["id"], "value": None, "error": caught.error}) + "\n")
    if scorer is not None:
        for line in requests:
            sample = loads(line)
            answer = evaluate(scorer, sample)
            sys.stdout.flush()  # what the function printed
            answers.write(dumps({"id": sample["id"], **answer}) + "\n")
    os._exit(0)  # a user's module may have started threads


def _keep(child: int) -> NoReturn:
    """Ends with `child`, or when the request pipe closes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # a reward may signal its parent
    threading.Thread(target=_end_when_closed, args=(child,), daemon=True).start()
    while os.wait()[0] != child:
        pass
    _end(child)


def _end_when_closed(child: int) -> NoReturn:
    runner, requests = os.getppid(), select.poll()
    requests.register(0, 0)  # only for the end of the pipe
    while not requests.poll(POLL_MILLISECONDS) and os.getppid() == runner:
        pass  # other forks of the runner may hold the pipe open
    _end(child)


def _end(child: int) -> NoReturn:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # without /proc only its process group is known
    end_children(seconds=END_SECONDS)
    os._exit(0)


def evaluate(scorer: Scorer, sample: Mapping[str, Any]) -> dict[str, Any]:
    value: Any = None
    number = math.nan
    with CapturedOutput() as caught:
        value = scorer(sample)
        if isinstance(value, Mapping):  # verl allows more metrics
            value = value["score"]
        if value is not None and not isinstance(value, (str, bytes)):
            number = float(value)
    error = caught.error
    if error is None and value is not None and not math.isfinite(number):
        error = f"the reward returned {value!r:.100}, which is not a finite number"
    return {"value": None if error or value is None else number, "error": error}


def load(name: str | None, function: str | None, options: Mapping[str, Any], directory: str | None) -> Scorer:
    """The scorer of a built-in `name`, or of "module:function" in `directory`."""
    if function is None:
        assert name is not None
        _check_options(options, frozenset(inspect.signature(BUILT_IN[name]).parameters) - POSITIONAL)
        built_in = BUILT_IN[name]
        return lambda sample: built_in(sample["completion"], sample["answer"], sample["finish"], **options)
    if directory is not None:
        sys.path.insert(0, directory)
    module, _, attribute = function.partition(":")
    reward = vars(importlib.import_module(module)).get(attribute)
    if not callable(reward):
        raise LookupError(f"module {module} has no function {attribute!r}")
    if inspect.iscoroutinefunction(reward):
        raise TypeError(f"{function} is an async function, which is not awaited; define it with def, not async def")
    parameters = inspect.signature(reward).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    accepted = None if takes_all else frozenset(parameters)
    if accepted is not None:
        _check_options(options, accepted)
    if "solution_str" in parameters:
        return partial(_verl, reward, accepted, options)
    if "completions" in parameters:
        return partial(_trl, reward, accepted, options)
    raise TypeError(
        f"{function}({', '.join(parameters)}) has neither signature of a reward: "
        "f(data_source, solution_str, ground_truth, extra_info) or f(prompts, completions, **columns)"
    )


def _check_options(options: Mapping[str, Any], accepted: frozenset[str]) -> None:
    unknown = sorted(options.keys() - accepted)
    if unknown:
        known = ", ".join(sorted(accepted)) or "none"
        raise TypeError(f"reward.options has {', '.join(unknown)}, which it does not take (it takes: {known})")


def _verl(
    function: Callable[..., Any], accepted: frozenset[str] | None, options: Mapping[str, Any], sample: Mapping[str, Any]
) -> Any:
    columns = dict(sample["columns"])
    source, extra = columns.pop("data_source", None), columns.pop("extra_info", None)
    extra = {**columns, **extra} if isinstance(extra, dict) else columns
    arguments = {
        "data_source": source,
        "solution_str": sample["completion"],
        "ground_truth": sample["answer"],
        "extra_info": {"prompt": sample["prompt"], "finish": sample["finish"], **extra},
        **options,
    }
    return function(**_only(arguments, accepted))


def _trl(
    function: Callable[..., Any], accepted: frozenset[str] | None, options: Mapping[str, Any], sample: Mapping[str, Any]
) -> Any:
    """Lists of one sample: a failure drops one sample. A chat prompt gets a chat completion."""
    text = sample["completion"]
    is_chat = isinstance(sample["prompt"], list)
    completion = [{"role": "assistant", "content": text}] if is_chat else text
    columns = {**sample["columns"], "answer": sample["answer"], "finish": sample["finish"]}
    columns |= {"prompts": sample["prompt"], "completions": completion}
    arguments = {**{key: [value] for key, value in columns.items()}, **options}
    returned = function(**_only(arguments, accepted))
    if not isinstance(returned, Iterable) or isinstance(returned, (str, bytes, Mapping)):
        raise TypeError(f"expected a list of 1 reward for 1 completion, got {returned!r:.100}")
    rewards = list(returned)
    if len(rewards) != 1:
        raise ValueError(f"expected a list of 1 reward for 1 completion, got {len(rewards)}")
    return rewards[0]


def _only(arguments: dict[str, Any], accepted: frozenset[str] | None) -> dict[str, Any]:
    return arguments if accepted is None else {key: value for key, value in arguments.items() if key in accepted}
