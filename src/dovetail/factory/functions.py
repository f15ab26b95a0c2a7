"""Losses and advantages of users: imported, then tried on a small batch."""

import importlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial, update_wrapper, wraps
from pathlib import Path
from typing import Any

import torch

from dovetail.batch.loss import LossFn, TokenStats
from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.errors import ConfigError, UserError, users_line
from dovetail.recipe.algorithms import PPO, SFT, PolicyGradient
from dovetail.recipe.functions import FunctionSection, LossSection, OwnFunction
from dovetail.recipe.preferences import CPO, DPO, KTO, ORPO, AnyPreference, SimPO
from dovetail.recipe.schema import Recipe
from dovetail.rewards.custom_modules import look_in
from dovetail.rl.experience import OwnAdvantage, own_advantages
from dovetail.rl.losses import PolicyLoss, SFTLoss, weight_fields
from dovetail.rl.preference_losses import CPOLoss, DPOLoss, KTOLoss, ORPOLoss, RewardLoss
from dovetail.rl.step_metrics import EMPTY_UPDATE, sample_metrics

LENGTHS = (5, 4, 6, 3)
PROMPT = 1  # tokens of two responses to each of two prompts
STEP_NAMES = ("step", "timestamp", "skipped", "fault", "flops", "work", "mfu", "peak_memory_gib")
STEP_PREFIXES = ("eval", "reward", "seconds/", "step_", "tokens")


class OwnFunctionError(ConfigError):
    def __init__(self, function: str, cause: str) -> None:
        super().__init__(f"{function}: {cause}")
        self.cause = cause


def sft_loss(algorithm: SFT, folder: Path) -> SFTLoss:
    if algorithm.loss is None:
        return SFTLoss()
    loss = SFTLoss(own=load_function(algorithm.loss, folder, "algorithm.loss"))
    try_loss(loss, _trial(algorithm.aggregation, ()), algorithm.loss)
    return loss


def policy_loss(
    algorithm: PolicyGradient, folder: Path, given: Collection[str] = (), **keys: Any
) -> PolicyLoss:
    """given: fields of the run's batches. keys: fields of `PolicyLoss`."""
    section = algorithm.loss
    if section.function is None:
        return PolicyLoss(**keys, term=section.name or "ppo", **section.options)
    loss = PolicyLoss(**keys, own=load_function(section, folder, "algorithm.loss"))
    try_loss(loss, _trial(algorithm.aggregation, given), section)
    return loss


def preference_loss(algorithm: AnyPreference) -> LossFn:
    if isinstance(algorithm, DPO):
        return DPOLoss(kind=algorithm.loss, **same_keys(algorithm, DPOLoss))
    if isinstance(algorithm, KTO):
        return KTOLoss(**same_keys(algorithm, KTOLoss))
    if isinstance(algorithm, CPO | SimPO):
        margin = {"gamma": algorithm.simpo_gamma} if isinstance(algorithm, SimPO) else {}
        return CPOLoss(kind=algorithm.loss, **same_keys(algorithm, CPOLoss), **margin)
    if isinstance(algorithm, ORPO):
        return ORPOLoss(beta=algorithm.beta)
    return RewardLoss(center=algorithm.center_rewards_coefficient)


def same_keys(section: Iterable[tuple[str, Any]], settings: type) -> dict[str, Any]:
    """Values whose keys are fields of `settings`."""
    names = {field.name for field in fields(settings)}
    return {name: value for name, value in section if name in names}


def fields_of(recipe: Recipe, algorithm: PolicyGradient) -> list[str]:
    """Fields of a step's batch before advantages."""
    recomputed = algorithm.needs_old_logprobs or recipe.rollout.router_replay == "trainer"
    weighed = (
        recipe.correction is not None
        and recipe.correction.old == "recomputed"
        and not recipe.weighs_in_update
    )
    has = {
        "rollout_logprob": True,
        "temperature": recipe.rollout.temperature != 1.0,
        "old_logprob": recomputed
        or (recipe.correction is not None and not recipe.weighs_in_update),
        "lag": not recipe.rollout.inside,
        "rollout_weight": weighed,
        "reference_logprob": algorithm.wants_reference or recipe.reference.path is not None,
        "old_value": isinstance(algorithm, PPO),
    }
    return [name for name, is_there in has.items() if is_there]


def advantage(
    section: OwnFunction, folder: Path, given: Collection[str] = ()
) -> OwnAdvantage | None:
    if section is None:
        return None
    own = load_function(section, folder, "algorithm.advantage")
    batch = _trial("token", given)
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.5], dtype=torch.float64)
    groups = torch.tensor([0, 0, 1, 1])
    with _tried("algorithm.advantage", section.function):
        if not own_advantages(own, rewards, groups, batch).isfinite().all():
            raise ValueError(
                "an advantage is not finite for rewards [0, 1, 0.5, 0.5] of groups [0, 0, 1, 1]"
            )
    return own


def load_function(
    section: FunctionSection | LossSection, folder: Path, key: str
) -> Callable[..., Any]:
    """Files of `folder` come before installed modules."""
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

    @wraps(function)
    def called(*given: Any, **options: Any) -> Any:
        try:
            return function(*given, **options)
        except Exception as error:
            raise OwnFunctionError(f"{key} {section.function}", _cause(error, given[-1])) from error

    return update_wrapper(
        partial(called, **section.options), function
    )  # with its attribute `separable`


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
    loss: PolicyLoss | SFTLoss, batch: PackedBatch, section: FunctionSection | LossSection
) -> None:
    logprob = torch.linspace(-3, -1, len(batch)).requires_grad_()
    stats = TokenStats(logprob, torch.linspace(0.5, 2, len(batch)).requires_grad_())
    with _tried("algorithm.loss", section.function):
        total, _, _ = loss(stats, batch)
        if loss.own is not None and isinstance(returned := loss.own(stats, batch), tuple):
            _check_names(returned[1])
        if not total.requires_grad:
            raise ValueError(
                "its value depends on no log-prob; compute it from stats.logprob or stats.entropy"
            )
        total.backward()
        grads = [x.grad for x in stats if x.grad is not None]
        if not all(bool(x.isfinite().all()) for x in (total, *grads)):
            raise ValueError("its value or gradient is not finite for log-probs between -3 and -1")


def _check_names(names: Iterable[Any]) -> None:
    """ValueError if a metric has the name of a metric of every step."""
    taken = {*EMPTY_UPDATE, *sample_metrics([], compared=True), *STEP_NAMES} - {
        "clip_fraction"
    }  # of the term
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
        cause = error.cause if isinstance(error, OwnFunctionError) else _cause(error)
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


def _trial(aggregation: Any, given: Collection[str]) -> PackedBatch:
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
