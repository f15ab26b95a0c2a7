"""Rewards of a recipe."""

import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from dovetail.data.chat import render
from dovetail.data.examples import Prompt
from dovetail.engine.native import Engine
from dovetail.errors import ConfigError, DataError
from dovetail.parallel.consensus import agreed
from dovetail.parallel.mesh import Mesh
from dovetail.recipe.evaluation import label
from dovetail.recipe.reward import RewardModelSection, RewardPart, RewardSection
from dovetail.rewards.runner import CallLimits, RewardRunner
from dovetail.rl.evaluation import CustomMetric
from dovetail.rl.reward_manager import FunctionReward, ModelReward, Reward, RewardManager

CACHE = "judge_cache.sqlite"  # in run_dir
ModelLoader = Callable[[RewardModelSection], tuple[Engine, Any]]  # with its tokenizer


class Printed:
    """What rewards and metrics print: kept until `log_to` names a file for it and the rest."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  # it is closed with this object
        self.runners: list[RewardRunner] = []  # on rank 0

    def log_to(self, path: Path) -> None:
        if self.runners:
            self.file.seek(0)
            with path.open("ab") as log:
                shutil.copyfileobj(self.file, log)
        for runner in self.runners:
            runner.log_to(path)


def make_rewards(
    section: RewardSection,
    mesh: Mesh,
    recipe_folder: Path,
    run_dir: Path,
    load_model: ModelLoader | None = None,
    printed: Printed | None = None,
) -> RewardManager:
    """Collective."""
    named = section.labelled()
    rewards = dict[str, Reward]()
    try:
        for label, part in named.items():
            if part.model is not None and part.model.path is not None and load_model is not None:
                engine, tokenizer = load_model(part.model)
                rewards[label] = ModelReward(engine, partial(_encode, tokenizer))
            else:
                limits = CallLimits(
                    batch=part.batch, workers=part.workers, concurrency=part.concurrency
                )
                keys: dict[str, Any] = {
                    "options": part.options,
                    "directory": recipe_folder,
                    "timeout": part.timeout_seconds,
                }
                address = _address(part, run_dir)
                keys |= {"address": address, "printed": printed}
                runner = _runner(mesh, part.name, part.function, limits, **keys)
                rewards[label] = FunctionReward(runner, mesh)
    except BaseException:
        RewardManager(rewards).close()
        raise
    name = " + ".join(part.function or label for label, part in named.items())
    return RewardManager(rewards, [part.weight for part in named.values()], name)


def _runner(
    mesh: Mesh,
    name: str | None,
    function: str | None,
    limits: CallLimits,
    printed: Printed | None = None,
    **keys: Any,
) -> RewardRunner | None:
    """Returns the runner on rank 0, else None."""
    runner = None
    output = None if printed is None else printed.file
    with agreed(mesh):
        if mesh["world"].rank == 0:
            try:
                runner = RewardRunner(name, function=function, limits=limits, output=output, **keys)
                if printed is not None:
                    printed.runners.append(runner)
            except ConfigError as error:
                problem = (
                    f"metric {function}, which is loaded as a reward: {error}"
                    if limits.metric
                    else str(error)
                )
                raise ConfigError(problem) from error
    return runner


def custom_metrics(
    metrics: Iterable[str],
    mesh: Mesh,
    folder: Path,
    timeout: float,
    say: Callable[[str], None],
    at_close: ExitStack,
    printed: Printed | None = None,
) -> dict[str, CustomMetric]:
    """Collective. The `module:function` ones of `metrics`."""
    found: dict[str, CustomMetric] = {}
    for metric in [metric for metric in metrics if ":" in metric]:
        limits = CallLimits(batch="step", metric=True)
        keys: dict[str, Any] = {"directory": folder, "timeout": timeout, "printed": printed}
        runner = _runner(mesh, None, metric, limits, **keys)
        found[metric] = CustomMetric(label(metric), runner, mesh, say)
        at_close.callback(found[metric].close)
    return found


def _address(part: RewardPart, run_dir: Path) -> dict[str, Any] | None:
    if part.judge is not None:
        given = part.judge.model_dump()
        request = {name: given.pop(name) for name in ("model", "max_tokens", "temperature")}
        return {
            **given,
            "request": request,
            "cache": str(run_dir / CACHE) if given["cache"] else None,
        }
    return (
        None if part.model is None or part.model.server is None else part.model.server.model_dump()
    )


def _encode(tokenizer: Any, prompt: Prompt, text: str) -> list[int]:
    if isinstance(prompt.prompt, str):
        joined = prompt.prompt + text
    elif tokenizer.chat_template:
        joined = render(tokenizer, [*prompt.prompt, {"role": "assistant", "content": text}])
    else:
        raise DataError(
            "the rows hold messages, but the reward model's tokenizer has no chat template"
        )
    return tokenizer.encode(joined, add_special_tokens=False)
