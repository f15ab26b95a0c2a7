"""Losses and advantages of users: imported, then tried on a small batch."""

import importlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, update_wrapper, wraps
from pathlib import Path
from typing import Any, cast

import torch

from dovetail.batch.loss import LossFn, TokenStats
from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.errors import ConfigError, UserError, users_line
from dovetail.recipe.algorithms import AggregatedSection
from dovetail.recipe.functions import FunctionSection, LossSection
from dovetail.recipe.schema import Recipe
from dovetail.rewards.custom_modules import look_in
from dovetail.rl.algorithms.policy_gradient import RLAlgorithm
from dovetail.rl.algorithms.sft import SFT
from dovetail.rl.algorithms.table import AnyAlgorithm, make_algorithm
from dovetail.rl.custom import Custom, CustomAdvantage, CustomLoss, custom_advantages
from dovetail.rl.losses import Aggregation, weight_fields
from dovetail.rl.step_metrics import EMPTY_UPDATE, sample_metrics

LOSS = "algorithm.loss"
ADVANTAGE = "algorithm.advantage"
LENGTHS = (5, 4, 6, 3)
PROMPT = 1  # tokens of two responses to each of two prompts
REWARDS = (0.0, 1.0, 0.5, 0.5)
GROUPS = (0, 0, 1, 1)
STEP_NAMES = ("step", "timestamp", "skipped", "fault", "flops", "work", "mfu", "peak_memory_gib")
STEP_PREFIXES = ("eval", "reward", "seconds/", "step_", "tokens")


class CustomFunctionError(ConfigError):
    def __init__(self, function: str, cause: str) -> None:
        super().__init__(f"{function}: {cause}")
        self.cause = cause


def load_algorithm(recipe: Recipe, folder: Path) -> AnyAlgorithm:
    """Returns the algorithm of a recipe, whose imported functions were tried on a small batch.

    folder: where their modules are looked up first. ConfigError where they cannot be used.
    """
    section = recipe.algorithm
    custom = Custom()
    if section.custom_loss is not None:
        custom = replace(custom, loss=load_function(section.custom_loss, folder, LOSS))
    if section.custom_advantage is not None:
        function = load_function(section.custom_advantage, folder, ADVANTAGE)
        custom = replace(custom, advantage=function)
    algorithm = make_algorithm(recipe, custom)
    fields = list[str]()
    if isinstance(algorithm, RLAlgorithm):
        fields = algorithm.fields.names
    if custom.loss is not None and section.custom_loss is not None:
        assert isinstance(algorithm, SFT | RLAlgorithm)
        aggregation = cast("AggregatedSection", section).aggregation
        given = ["advantage", *fields] if fields else []
        batch = _trial_batch(aggregation, given)
        try_loss(algorithm.loss, custom.loss, batch, section.custom_loss)
    if custom.advantage is not None and section.custom_advantage is not None:
        batch = _trial_batch("token", fields)
        try_advantage(custom.advantage, batch, section.custom_advantage)
    return algorithm


def load_function(
    section: FunctionSection | LossSection, folder: Path, key: str
) -> Callable[..., Any]:
    """Returns a function with the section's options. Files of `folder` come before installed modules."""
    assert section.function is not None
    function = imported(section.function, folder, key)
    name = section.function.partition(":")[2]
    with _tried(key, section.function):
        accepted = inspect.signature(function).parameters
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
        unknown = [option for option in section.options if option not in accepted and not takes_all]
        if unknown:
            takes = f"{name}({', '.join(accepted)}) does not take"
            raise TypeError(f"{key}.options has {', '.join(unknown)}, which {takes}")

    where = f"{key} {section.function}"

    @wraps(function)
    def called(*given: Any, **options: Any) -> Any:
        try:
            return function(*given, **options)
        except Exception as error:
            raise CustomFunctionError(where, _cause(error, given[-1])) from error

    with_options = partial(called, **section.options)
    return update_wrapper(with_options, function)  # which has its attribute `separable`


def imported(function: str, folder: Path, key: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    look_in(folder, module)
    with _tried(key, function):
        loaded = importlib.import_module(module)
        found = vars(loaded).get(name)
        if not callable(found):
            raise LookupError(f"module {module} ({loaded.__file__}) has no function {name!r}")
        return found


def try_loss(
    loss: LossFn, custom: CustomLoss, batch: PackedBatch, section: FunctionSection | LossSection
) -> None:
    """loss: the algorithm's, which calls `custom`."""
    logprob = torch.linspace(-3, -1, len(batch)).requires_grad_()
    stats = TokenStats(logprob, torch.linspace(0.5, 2, len(batch)).requires_grad_())
    with _tried(LOSS, section.function):
        total, _, _ = loss(stats, batch)
        returned = custom(stats, batch)
        if isinstance(returned, tuple):
            _check_names(returned[1])
        if not total.requires_grad:
            raise ValueError(
                "its value depends on no log-prob; compute it from stats.logprob or stats.entropy"
            )
        total.backward()
        grads = [x.grad for x in stats if x.grad is not None]
        if not all(bool(x.isfinite().all()) for x in (total, *grads)):
            raise ValueError("its value or gradient is not finite for log-probs between -3 and -1")


def try_advantage(
    custom: CustomAdvantage, batch: PackedBatch, section: FunctionSection | LossSection
) -> None:
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    with _tried(ADVANTAGE, section.function):
        found = custom_advantages(custom, rewards, torch.tensor(GROUPS), batch)
        if not found.isfinite().all():
            raise ValueError(
                "an advantage is not finite for rewards [0, 1, 0.5, 0.5] of groups [0, 0, 1, 1]"
            )


def _check_names(names: Iterable[Any]) -> None:
    """Raises ValueError if a metric has the name of a metric of every step."""
    taken = {*EMPTY_UPDATE, *sample_metrics([], compared=True), *STEP_NAMES}
    taken.remove("clip_fraction")  # the built-in term's
    for name in names:
        if not isinstance(name, str) or name in taken or name.startswith(STEP_PREFIXES):
            raise ValueError(
                f"a metric cannot be called {name!r}; choose a string that is not a metric of "
                "every step"
            )


@contextmanager
def _tried(key: str, function: str | None) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        cause = error.cause if isinstance(error, CustomFunctionError) else _cause(error)
        raise ConfigError(f"{key} {function} was tried before the run: {cause}") from error


def _cause(error: Exception, batch: PackedBatch | None = None) -> str:
    name = type(error).__name__
    what = str(error)
    place = users_line(error)
    if isinstance(error, KeyError) and batch is not None:
        name = "LookupError"
        what = f"no {error}; the fields of this run are {', '.join(sorted(batch.fields))}"
    said = what if isinstance(error, UserError) else f"{name}: {what}"
    return f"{said} ({place})" if place else said


def _trial_batch(aggregation: Aggregation, given: Collection[str]) -> PackedBatch:
    """Returns counted tokens with the fields `given`, and those of the aggregation."""
    masks = [[False] * PROMPT + [True] * (n - PROMPT) for n in LENGTHS]
    rows = [
        Sequence(list(range(1, len(mask) + 1)), mask=mask, group=i // 2)
        for i, mask in enumerate(masks)
    ]
    batch = PackedBatch.pack(rows)
    near = torch.linspace(-3, -1, len(batch)).flip(0)
    known = {"advantage": torch.linspace(-1, 1, len(batch)), "temperature": torch.ones(len(batch))}
    known["rollout_weight"] = torch.linspace(0, 2, len(batch))
    batch = batch.with_fields(**{name: known.get(name, near) for name in given})
    batch = batch.with_fields(**weight_fields(batch, aggregation, float(max(LENGTHS))))
    return batch.compact(batch.mask.nonzero().flatten())
