"""Rewards as scorers of calls: built-ins, judges, and functions of verl's and TRL's signatures."""

import asyncio
import importlib
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any

from dovetail.rewards.built_in import BUILT_IN, compiled
from dovetail.rewards.code import REQUIRED, code, find_isolation
from dovetail.rewards.custom_modules import look_in

Sample = Mapping[str, Any]
NOT_USERS = (f"{Path(__file__).parents[1]}/", "<frozen ", "<string>", importlib.__file__)
POSITIONAL = frozenset({"completion", "answer", "_answer", "finish", "_finish"})  # of built-ins
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
VERL_BATCH = tuple(f"{name}s" for name in VERL)
TRL_COLUMNS = ("prompts", "completions", "answer", "finish")
TRL_TRAINER = ("completion_ids", "trainer_state", "log_extra", "log_metric")
ONLY_IN_TRL = ("environments",)
MAX_TEXT = 1000  # characters of an exception
LIMIT = "(reward.timeout_seconds)"  # in the message of a reward that took longer


class UserErrors:
    """Turns exceptions of user code, and exits, into the text `error`."""

    error: str | None = None

    def __enter__(self) -> "UserErrors":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if isinstance(error, asyncio.CancelledError):
            return False
        if error is not None:
            self.error = f"{type(error).__name__}: {error!s:.{MAX_TEXT}}{_place(error)}"
        return True


def _place(error: BaseException) -> str:
    """The innermost line in the user's first file."""
    lines = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    user = [(file, line) for file, line in lines if not file.startswith(NOT_USERS)]
    return next((f" ({file}:{line})" for file, line in reversed(user) if file == user[0][0]), "")


@dataclass
class Call:
    """Samples of one call of a reward, and what it logs by TRL's `log_metric` and `log_extra`."""

    samples: Seq[Sample]
    trainer_state: Mapping[str, Any]
    metrics: list[tuple[str, float]] = field(default_factory=list)
    extra: dict[str, list[Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics.append((str(name), float(value)))

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """values: one for each sample of the call."""
        listed = list(values)
        if len(listed) != len(self.samples):
            got = f"got {len(listed)} for {column!r}"
            raise ValueError(f"log_extra expects {len(self.samples)} values, {got}")
        self.extra[str(column)] = listed


@dataclass(frozen=True)
class Scorer:
    """score: gives a value for each sample of a call, or an awaitable of these."""

    score: Callable[[Call], Any]
    is_async: bool = False


def load(setup: Mapping[str, Any]) -> Scorer:
    """The reward of a `RewardRunner`'s setup."""
    address = setup["address"]
    if address is not None:
        return _at_address(address)
    if setup["function"] is None:
        return _built_in(setup["name"], setup["options"])
    function = _imported(setup["function"], setup["directory"])
    reward = CustomReward(setup["function"], function, setup["options"])
    return _by_signature(reward, setup["columns"], spread=setup["metric"])


def _at_address(address: Mapping[str, Any]) -> Scorer:
    judge = importlib.import_module("dovetail.rewards.judge")  # other rewards need no HTTP
    if "prompt" in address:
        return Scorer(_each_awaited(judge.Judge(**address).score), is_async=True)
    model = judge.RemoteModel(**address)

    async def score(call: Call) -> list[Any]:
        return as_list(await model.score(call.samples), len(call.samples))

    return Scorer(score, is_async=True)


def _built_in(name: str, options: Mapping[str, Any]) -> Scorer:
    reward = BUILT_IN[name]
    _check_options(options, frozenset(inspect.signature(reward).parameters) - POSITIONAL)
    if "pattern" in options:
        compiled(options["pattern"], "reward.options.pattern")
    if reward is code:
        find_isolation(options.get("isolation", REQUIRED))
    return Scorer(_each(lambda s: reward(s["completion"], s["answer"], s["finish"], **options)))


def _imported(function: str, directory: str | None) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    if directory is not None:
        look_in(directory, module)
    loaded = vars(importlib.import_module(module))
    reward = loaded.get(name)
    if not callable(reward):
        raise LookupError(f"module {module} ({loaded.get('__file__')}) has no function {name!r}")
    return reward


class CustomReward:
    """A function of the user, called by name with those arguments that it takes.

    TypeError for options that it does not take, or parameters that no reward is given.
    """

    def __init__(self, name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self.name = name
        self.parameters = inspect.signature(function).parameters
        self.options = options
        self.is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        self._function = function
        kinds = {parameter.kind for parameter in self.parameters.values()}
        self._takes_all = inspect.Parameter.VAR_KEYWORD in kinds
        if not self._takes_all:
            _check_options(options, frozenset(self.parameters))
        self._needed = self._parameters_without_default()

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        given = {**arguments, **self.options}
        self.refuse_lacking(list(given))
        value = self._function(**{key: value for key, value in given.items() if self._takes(key)})
        if not self.is_async and inspect.iscoroutine(value):
            value.close()
            raise TypeError(f"{self.name} returned a coroutine; make the wrapper `async def`")
        return value

    def _takes(self, name: str) -> bool:
        return self._takes_all or name in self.parameters

    def _parameters_without_default(self) -> list[str]:
        parameters = self.parameters.values()
        if unnamed := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
            raise TypeError(
                f"{self.name} takes {', '.join(unnamed)} by position only, but is called by "
                "names; drop the /"
            )
        required = [p for p in parameters if p.default is p.empty and p.name not in self.options]
        needed = [p.name for p in required if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        verl = next((names for names in (VERL, VERL_BATCH) if names[1] in self.parameters), None)
        if verl is not None:
            never = [name for name in needed if name not in verl]
        else:
            never = [name for name in needed if name in ONLY_IN_TRL]
        if never:
            given = ", ".join(verl or (*TRL_COLUMNS, *TRL_TRAINER, "the columns of the rows"))
            raise TypeError(
                f"{self.name} needs {', '.join(never)}, which no reward is given; it gets "
                f"{given}, and reward.options"
            )
        return needed

    def refuse_lacking(self, given: Seq[str]) -> None:
        if lacking := [name for name in self._needed if name not in given]:
            columns = [name for name in given if name not in TRL_TRAINER]
            needs = f"{self.name} needs {', '.join(lacking)}"
            raise TypeError(f"{needs}, but the rows give {', '.join(columns)}")


def _by_signature(reward: CustomReward, columns: Seq[str] | None, *, spread: bool) -> Scorer:
    """columns: of the rows, if they are known. spread: see `as_list`."""
    names = reward.parameters
    if columns is not None and "completions" in names:
        reward.refuse_lacking([*TRL_COLUMNS, *TRL_TRAINER, *columns, *reward.options])
    if "solution_str" in names:
        each = _each_awaited if reward.is_async else _each
        return Scorer(each(lambda sample: reward(_verl_arguments(sample))), reward.is_async)
    if "completions" in names:
        arguments = _trl_arguments
    elif "solution_strs" in names:
        arguments = _verl_batch_arguments
    else:
        raise TypeError(
            f"{reward.name}({', '.join(names)}) has neither signature of a reward: "
            "f(data_source, solution_str, ground_truth, extra_info) or f(prompts, completions, "
            "**columns)"
        )

    def score(call: Call) -> list[Any]:
        return as_list(reward(arguments(call)), len(call.samples), spread=spread)

    async def score_awaited(call: Call) -> list[Any]:
        return as_list(await reward(arguments(call)), len(call.samples), spread=spread)

    return Scorer(score_awaited if reward.is_async else score, reward.is_async)


def _check_options(options: Mapping[str, Any], accepted: frozenset[str]) -> None:
    unknown = sorted(options.keys() - accepted)
    if unknown:
        known = ", ".join(sorted(accepted)) or "none"
        raise TypeError(
            f"reward.options has {', '.join(unknown)}, which it does not take (it takes: {known})"
        )


def _each(call_one: Callable[[Sample], Any]) -> Callable[[Call], list[Any]]:
    """Samples whose function raises get the `UserErrors` in place of a value."""

    def score(call: Call) -> list[Any]:
        values: list[Any] = []
        for sample in call.samples:
            with UserErrors() as caught:
                values.append(call_one(sample))
            if caught.error is not None:
                values.append(caught)
        return values

    return score


def _each_awaited(call_one: Callable[[Sample], Awaitable[Any]]) -> Callable[[Call], Any]:
    async def value(sample: Sample) -> Any:
        with UserErrors() as caught:
            return await call_one(sample)
        return caught

    async def score(call: Call) -> list[Any]:
        return await asyncio.gather(*[value(sample) for sample in call.samples])

    return score


def _verl_arguments(sample: Sample) -> dict[str, Any]:
    columns = dict(sample["columns"])
    source = columns.pop("data_source", None)
    extra = columns.pop("extra_info", None)
    if isinstance(extra, dict):
        columns |= extra
    return {
        "data_source": source,
        "solution_str": sample["completion"],
        "ground_truth": sample["answer"],
        "extra_info": {"prompt": sample["prompt"], "finish": sample["finish"], **columns},
    }


def _verl_batch_arguments(call: Call) -> dict[str, Any]:
    each = [_verl_arguments(sample) for sample in call.samples]
    names = zip(VERL, VERL_BATCH, strict=True)
    return {plural: [arguments[name] for arguments in each] for name, plural in names}


def _trl_arguments(call: Call) -> dict[str, Any]:
    """Lists of one value for each sample, and what TRL's trainer gives to a whole call."""
    rows = [
        {
            **sample["columns"],
            "answer": sample["answer"],
            "finish": sample["finish"],
            "prompts": sample["prompt"],
            "completions": _trl_completion(sample),
            "completion_ids": list(sample["completion_ids"]),
        }
        for sample in call.samples
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    return {
        **{name: [row.get(name) for row in rows] for name in names},
        "trainer_state": SimpleNamespace(**call.trainer_state),
        "log_extra": call.log_extra,
        "log_metric": call.log_metric,
    }


def _trl_completion(sample: Sample) -> Any:
    """A message where the prompt is a conversation, else the text."""
    if isinstance(sample["prompt"], list):
        return [{"role": "assistant", "content": sample["completion"]}]
    return sample["completion"]


def as_list(returned: Any, count: int, *, spread: bool = False) -> list[Any]:
    """The values of a call. spread: one number is that of all samples."""
    if spread and not isinstance(returned, Iterable):
        return [returned] * count
    plural = "" if count == 1 else "s"
    expected = f"expected a list of {count} reward{plural} for {count} completion{plural}"
    if not isinstance(returned, Iterable) or isinstance(returned, (str, bytes, Mapping)):
        raise TypeError(f"{expected}, got {returned!r:.100}")
    rewards = list(returned)
    if len(rewards) != count:
        raise ValueError(f"{expected}, got {len(rewards)}")
    return rewards
