"""The task of a run, by its algorithm: rows, engines and what samples, in this order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, singledispatch
from itertools import chain
from pathlib import Path
from typing import Any

from dovetail.data.examples import Prompt, load_preferences, load_prompts, load_sft
from dovetail.engine.native import Engine
from dovetail.engine.teacher import Teacher
from dovetail.errors import ConfigError
from dovetail.factory.dataset import Dataset, limits_of, load_dataset
from dovetail.factory.layouts import check_positions
from dovetail.factory.models import (
    Role,
    frozen_engine,
    reward_model,
    role_of,
    trained_engine,
    trained_policy,
)
from dovetail.factory.opened import Opened
from dovetail.factory.remote import check_prompts, check_sent
from dovetail.factory.rewards import custom_metrics, make_rewards
from dovetail.factory.rows import reads_answer
from dovetail.factory.sampling import backend_of, make_sampling, open_stream, sampling_ranks
from dovetail.parallel.consensus import agreed
from dovetail.recipe.evaluation import default_metrics
from dovetail.recipe.schema import Recipe
from dovetail.rl.algorithms.distillation import Distillation
from dovetail.rl.algorithms.policy_gradient import RLAlgorithm
from dovetail.rl.algorithms.preference import PreferenceAlgorithm
from dovetail.rl.algorithms.sft import SFT
from dovetail.rl.algorithms.table import AnyAlgorithm
from dovetail.rl.asynchronous.sampler import AsyncSampler
from dovetail.rl.collect import SampleCollector
from dovetail.rl.distillation_task import DistillationTask, prompt_of
from dovetail.rl.evaluation import EvalSet
from dovetail.rl.preference_task import PreferenceTask
from dovetail.rl.reward_manager import FunctionReward, RewardManager
from dovetail.rl.tasks import RLTask, SupervisedTask
from dovetail.run.directory import CRITIC, POLICY
from dovetail.run.trainer import TrainTask


@dataclass(frozen=True, kw_only=True)
class BuiltTask:
    """A task with the recipe that it follows. engines: those with a checkpoint, by role."""

    task: TrainTask
    recipe: Recipe
    rows: str  # fingerprint
    lengths: Sequence[int]
    engines: Mapping[str, Engine]
    rewards: RewardManager | None = None
    stream: AsyncSampler | None = None


@singledispatch
def build_task(algorithm: AnyAlgorithm, opened: Opened) -> BuiltTask:
    """Builds the task of a run. Collective."""
    raise NotImplementedError(type(algorithm))


@build_task.register
def build_supervised(algorithm: SFT, opened: Opened) -> BuiltTask:
    setup = opened.setup
    limits = limits_of(setup, setup.longest_row, setup.recipe.data.max_length, "data.max_length")
    rows, opened = load_dataset(opened, partial(load_sft, limits=limits))
    policy = trained_policy(opened.setup, opened.resumed)
    task = SupervisedTask(algorithm=algorithm, policy=policy, **row_fields(opened, rows))
    return built(task, opened, rows, {POLICY: policy})


@build_task.register
def build_preference(algorithm: PreferenceAlgorithm, opened: Opened) -> BuiltTask:
    setup = opened.setup
    recipe = setup.recipe
    role = None
    if recipe.algorithm.needs_reference:
        role = role_of(setup, recipe.reference, "reference")
    limits = limits_of(setup, setup.longest_row, recipe.data.max_length, "data.max_length")
    paired = recipe.algorithm.rows == "pair"
    if paired:
        limits = replace(limits, together=setup.longest_row)
    rows, opened = load_dataset(opened, partial(load_preferences, limits=limits, paired=paired))
    policy = trained_policy(opened.setup, opened.resumed)
    task = PreferenceTask(
        algorithm=algorithm,
        policy=policy,
        max_tokens=limits.max_tokens or 0,
        reference=None if role is None else frozen_engine(setup, role),
        **row_fields(opened, rows),
    )
    return built(task, opened, rows, {POLICY: policy})


@build_task.register
def build_distillation(algorithm: Distillation, opened: Opened) -> BuiltTask:
    setup = opened.setup
    recipe = setup.recipe
    section = algorithm.section
    role = role_of(setup, recipe.teacher, "teacher")
    ranks = sampling_ranks(setup) if section.samples else None
    longest = setup.longest_row - recipe.rollout.max_new_tokens
    load: Callable[..., list[Any]]
    if section.rows == "completion":
        asked = recipe.data.max_length
        limits = limits_of(setup, setup.longest_row, asked, "data.max_length")
        load = partial(load_sft, limits=limits)
    else:
        limits = limits_of(setup, longest, recipe.data.max_prompt_length)
        load = partial(load_prompts, limits=limits, answers=False)
    loaded: tuple[Dataset[Any], Opened] = load_dataset(opened, load)
    rows, opened = loaded
    if section.samples:
        check_prompt_lengths(rows.train, longest)
    policy = trained_policy(opened.setup, opened.resumed)
    sampling = {} if ranks is None else vars(make_sampling(opened, ranks))
    teacher = frozen_engine(setup, role)
    task = DistillationTask(
        algorithm=algorithm,
        policy=policy,
        teacher=teacher if section.is_sampled else Teacher.of(teacher, policy),
        **sampling,
        **row_fields(opened, rows),
    )
    return built(task, opened, rows, {POLICY: policy})


@build_task.register
def build_rl(algorithm: RLAlgorithm, opened: Opened) -> BuiltTask:
    setup = opened.setup
    recipe = setup.recipe
    rewards = open_rewards(opened)
    roles = dict[str, Role]()
    if recipe.algorithm.needs_critic:
        roles["critic"] = role_of(setup, recipe.critic, "critic")
    if algorithm.fields.reference_logprob:
        roles["reference"] = role_of(setup, recipe.reference, "reference")
    ranks = sampling_ranks(setup)
    rows, opened = load_rl_prompts(opened)
    with agreed(setup.mesh):
        check_sent(recipe, rows.train)
        check_prompts(
            setup.source, ranks.replicas, all_prompts(rows), recipe.rollout.max_new_tokens
        )
    eval_sets = make_eval_sets(opened, rows)
    setup = opened.setup
    engines = {POLICY: trained_policy(setup, opened.resumed)}
    if "critic" in roles:
        lr = recipe.critic.lr or recipe.optim.lr
        engines[CRITIC] = trained_engine(setup, opened.resumed, roles["critic"], CRITIC, lr)
    sampling = make_sampling(opened, ranks)
    stream = None
    if recipe.trainer.max_lag is not None:
        stream = open_stream(opened, sampling, rows)
        sampling = replace(sampling, sampler=stream)
    collector = SampleCollector(
        policy=engines[POLICY],
        prompts=rows.train,
        rewards=rewards,
        write_eval=opened.directory.write_eval,
        rollout_end=opened.directory.callbacks.replace_samples,
        sampler_metrics=dict if stream is None else lambda: stream.counts,
        **vars(sampling),
        **{**shared_fields(opened, rows), "eval_sets": eval_sets},
    )
    reference = None
    if "reference" in roles:
        reference = frozen_engine(setup, roles["reference"])
    task = RLTask(
        recipe=setup.recipe,
        policy=engines[POLICY],
        algorithm=algorithm,
        collector=collector,
        critic=engines.get(CRITIC),
        reference=reference,
        progress=setup.progress,
    )
    return replace(built(task, opened, rows, engines), rewards=rewards, stream=stream)


def open_rewards(opened: Opened) -> RewardManager:
    """Loads the rewards of a recipe, and their models. Collective."""
    setup = opened.setup
    recipe = setup.recipe
    run_dir = Path(recipe.run_dir)
    rewards = make_rewards(
        recipe.reward,
        setup.mesh,
        setup.start.folder,
        run_dir,
        partial(reward_model, setup),
        opened.printed,
    )
    opened.at_close.callback(rewards.close)
    for reward in rewards.rewards.values():
        if isinstance(reward, FunctionReward) and reward.runner is not None:
            reward.runner.watch = setup.progress.advance
    return rewards


def make_eval_sets(opened: Opened, rows: Dataset[Prompt]) -> list[EvalSet]:
    """Returns the sets of eval.sets, whose metrics may be the user's functions. Collective."""
    setup = opened.setup
    recipe = setup.recipe
    named = [metric for each in recipe.eval.sets for metric in each.metrics]
    custom = custom_metrics(
        dict.fromkeys(named),
        setup.mesh,
        setup.start.folder,
        recipe.reward.timeout_seconds,
        opened.directory.say,
        opened.at_close,
        opened.printed,
    )
    sets = []
    for each in recipe.eval.sets:
        keys = each.values_for(EvalSet)
        keys["metrics"] = each.metrics or default_metrics(each.samples)
        sets.append(EvalSet(**keys, prompts=rows.eval_sets[each.name], custom=custom))
    return sets


def load_rl_prompts(opened: Opened) -> tuple[Dataset[Prompt], Opened]:
    """Returns prompts that leave room for their completions. Collective."""
    setup = opened.setup
    recipe = setup.recipe
    new_tokens = recipe.rollout.max_new_tokens
    limits = limits_of(setup, setup.longest_row - new_tokens, recipe.data.max_prompt_length)
    load = partial(load_prompts, limits=limits, answers=reads_answer(recipe.reward))
    rows, opened = load_dataset(opened, load)
    lengths = [len(prompt.ids) for prompt in all_prompts(rows)]
    key = "rollout.max_new_tokens"
    check_positions(setup.source.config, backend_of(recipe), lengths, new_tokens, key)
    return rows, opened


def all_prompts(rows: Dataset[Prompt]) -> list[Prompt]:
    return [*rows.train, *rows.held_out, *chain(*rows.eval_sets.values())]


def check_prompt_lengths(rows: Sequence[Any], longest: int) -> None:
    """Raises ConfigError if a row's prompt leaves no room for a completion."""
    most = max(len(prompt_of(number, row).ids) for number, row in enumerate(rows))
    if most > longest:
        raise ConfigError(
            f"the longest prompt of data.train has {most} tokens, and rollout.max_new_tokens "
            f"leaves {longest} of "
            "trainer.tokens_per_batch; raise the latter, lower the former, or set "
            "algorithm.lmbda=0, which samples nothing"
        )


def shared_fields(opened: Opened, rows: Dataset[Any]) -> dict[str, Any]:
    """Returns what every task takes of its rows."""
    return {
        "recipe": opened.setup.recipe,
        "progress": opened.setup.progress,
        "held_out": rows.held_out,
        "eval_sets": rows.eval_sets,
        "first_row": opened.directory.first_row,
        "parts": rows.parts,
    }


def row_fields(opened: Opened, rows: Dataset[Any]) -> dict[str, Any]:
    return {**shared_fields(opened, rows), "rows": rows.train}


def built(
    task: TrainTask, opened: Opened, rows: Dataset[Any], engines: Mapping[str, Engine]
) -> BuiltTask:
    return BuiltTask(
        task=task,
        recipe=opened.setup.recipe,
        rows=rows.fingerprint,
        lengths=rows.lengths,
        engines=engines,
    )
