"""Where a job holds the value of a recipe's key."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.factory.inference_servers import server_start
from dovetail.launch.inference_servers import ServerStart

SAME = object()  # the value itself arrives
LAYOUT = {
    "tp": 2, "pp": 2, "cp": 2, "dp": 2, "ep": 2, "virtual_stages": 2, "cp_mode": "gather", "pp_split": (1, 2, 2, 3),
    "schedule": "interleaved",
}  # fmt: skip
ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "completion": str(2 * n)} for n in range(6)]
PAIRED = {
    "dpo": "DPO",
    "kto": "KTO",
    "cpo": "CPO",
    "simpo": "CPO",
    "orpo": "ORPO",
    "reward": "Reward",
}
DISTILLED = ("distillation", "distillation-sampled")
PAIRS = [{"prompt": "1+1", "chosen": "=", "rejected": "2"}] * 6 + [
    {"prompt": "1+", "chosen": "123", "rejected": "1"}
]
SERVER = {"url": "http://127.0.0.1:9/get", "key_env": "K", "retries": 3, "request_seconds": 2.5}
JUDGE = {**SERVER, "prompt": "{completion}?", "pattern": "([0-9])", "scale": 10.0}
EVAL = {"name": "math", "samples": 3, "temperature": 0.5, "metrics": ("avg@2", "pass@3")}
REQUEST = {"model": "m", "max_tokens": 17, "temperature": 0.25}
WIRED = """
import torch


class Rule(torch.optim.SGD):
    pass


def loss(stats, batch, c=1):
    return -c * stats.logprob


def advantage(rewards, groups, batch, d=1):
    return d * rewards
"""
TOO_LONG = {"prompt": "1" * 100, "answer": "1", "completion": "1"}


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
    return lambda job: [
        vars(engine.options.optim)[name] for engine in (job.task.policy, job.task.critic)
    ]


def grouped(name: str) -> Callable[[Any], Any]:
    """A field of the parameter groups of policy and critic."""
    return lambda job: [
        [getattr(group, name) for group in groups] for groups in optims("groups")(job)
    ]


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
    return lambda job: getattr(job.task.collector.eval_sets[0], name)


MODELS = ("policy", "critic", "reference", "collector.sampler")


def advantage(job: Any) -> Any:
    """The function of the recipe in place of the algorithm's."""
    return job.task.algorithm.custom_advantage


def loss_name(job: Any) -> str:
    return type(job.task.algorithm.loss).__name__


def drawn(job: Any) -> Any:
    """What draws the samples of an RL job."""
    return job.task.collector


def noted(words: str) -> Callable[[Any], Any]:
    """Whether the job's notes have these words."""
    return lambda job: words in str(job.notes)


def fleet_urls(job: Any) -> list[str]:
    return [replica.client.url for replica in job.task.collector.sampler.fleet.replicas]


def pool_of(job: Any) -> Any:
    """Of an asynchronous run, as it will start."""
    buffer = job.stream.make_buffer()
    buffer.close()
    return buffer.controller


def engines_of(job: Any) -> ServerStart:
    """Those that the run starts."""
    start = server_start(job.recipe, ranks_on_gpus=True)
    assert start is not None
    return start


def pushed(name: str) -> Callable[[Any], Any]:
    """An option of pushes to engines."""
    return lambda job: getattr(job.task.collector.sampler.pusher.options, name)


def first_prompt(job: Any) -> str:
    tokenizer = drawn(job).decode.keywords["tokenizer"]
    return str(tokenizer.decode(drawn(job).prompts[0].ids))


def logger(name: str) -> Callable[[Any], Any]:
    """A key of the first logger."""
    return lambda job: vars(job.recipe.trainer.loggers[0])[name]


def of_folder(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [of_folder(part, folder) for part in value]
    if isinstance(value, dict):
        return {key: of_folder(part, folder) for key, part in value.items()}
    return value.replace("FOLDER", str(folder)) if isinstance(value, str) else value
