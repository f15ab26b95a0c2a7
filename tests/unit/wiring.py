"""Where a job holds the value of a recipe's key."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SAME = object()  # the value itself arrives


@dataclass(frozen=True)
class Leaf:
    """One key, a value of it, and where a job holds that value: `arrived` of the job is `expected`.

    algorithm: whose job. FOLDER in a value stands for the folder of the inputs.
    """

    key: str
    value: Any
    arrived: Callable[[Any], Any]
    expected: Any = SAME
    algorithm: str = "ppo"


def optims(name: str) -> Callable[[Any], Any]:
    """A field of the optimizer settings of policy and critic."""
    return lambda job: [vars(engine.options.optim)[name] for engine in (job.task.policy, job.task.critic)]


def grouped(name: str) -> Callable[[Any], Any]:
    """A field of the parameter groups of policy and critic."""
    return lambda job: [[getattr(group, name) for group in groups] for groups in optims("groups")(job)]


def trained(name: str) -> Callable[[Any], Any]:
    """An option of the engines that are trained."""
    return lambda job: [vars(engine.options)[name] for engine in (job.task.policy, job.task.critic)]


def balance(name: str) -> Callable[[Any], Any]:
    return lambda job: vars(job.task.policy.options.balance)[name]


def part(path: str) -> Callable[[Any], Any]:
    """An attribute of an attribute of the job."""

    def found(job: Any) -> Any:
        for name in path.split("."):
            job = getattr(job, name)
        return job

    return found


def wired(function: Any) -> str:
    """`module:function` of one with options."""
    return f"{function.func.__module__}:{function.func.__name__}"


def reward(path: str) -> Callable[[Any], Any]:
    """Of the first reward; a key of a mapping is a part of the path too."""

    def value(job: Any) -> Any:
        at = next(iter(job.rewards.rewards.values()))
        for name in path.split("."):
            at = at[name] if isinstance(at, Mapping) else getattr(at, name)
        return at

    return value


def eval_set(name: str) -> Callable[[Any], Any]:
    """A field of the first of eval.sets."""
    return lambda job: getattr(job.task.eval_sets[0], name)


MODELS = ("policy", "critic", "reference", "sampler")


def noted(words: str) -> Callable[[Any], Any]:
    """Whether the job's notes have these words."""
    return lambda job: words in str(job.notes)


def first_prompt(job: Any) -> str:
    return str(job.task.decode.keywords["tokenizer"].decode(job.task.prompts[0].ids))


def logger(name: str) -> Callable[[Any], Any]:
    """A key of the first logger."""
    return lambda job: vars(job.recipe.trainer.loggers[0])[name]
