"""Notes at the start of a run."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from dovetail import system
from dovetail.arch.transformers_spec import AnySpec
from dovetail.errors import ConfigError
from dovetail.factory.layouts import max_positions
from dovetail.recipe.reward import RewardSection
from dovetail.recipe.schema import Recipe


def notes(
    recipe: Recipe,
    config: Mapping[str, Any],
    lengths: Sequence[int],
    others: Sequence[str] = (),
    done: int = 0,
) -> list[str]:
    """lengths: tokens of each training row. done: steps of a resumed run."""
    lines = list(dict.fromkeys(others))
    algorithm = recipe.algorithm
    trainer = recipe.trainer
    if missed := [str(step) for step in trainer.profile.steps if not done < step <= trainer.steps]:
        lines.append(
            f"not profiled, since the run takes steps {done + 1} to {trainer.steps}: "
            f"{', '.join(missed)}"
        )
    if idle := _idle(recipe):
        lines.append(f"without effect, since algorithm.name is {algorithm.name}: {', '.join(idle)}")
    lines += algorithm.notes(recipe)
    if trainer.eval_every and recipe.data.eval is None and not recipe.eval.sets:
        lines.append(
            "without effect, since there is no data.eval and no eval.sets: trainer.eval_every"
        )
    if trainer.prompts_per_step > len(lengths):
        rows = f"trainer.prompts_per_step is {trainer.prompts_per_step}, and data.train has {len(lengths)} rows"
        lines.append(f"{rows}: a step takes some of them more than once")
    if trainer.max_lag and recipe.correction is None:
        keys = f"trainer.max_lag={trainer.max_lag} with algorithm.correction={{ratio: none}}"
        lines.append(
            f"{keys}: samples of older policies count as if they were the policy's own "
            "(mismatch.md)"
        )
    most = max_positions(config)
    if not algorithm.samples and most is not None and max(lengths) > most:
        most_here = f"{most} positions (max_position_embeddings): those beyond were never trained"
        lines.append(
            f"the longest row of data.train has {max(lengths)} tokens, but the model has "
            f"{most_here}"
        )
    return lines


def cpu_notes(recipe: Recipe) -> list[str]:
    """Notes for ranks that compute on a CPU."""
    if recipe.model.dtype != "bfloat16" or system.has_bfloat16_instructions():
        return []
    slow = "this CPU has no instructions for bfloat16, and computes it slowly"
    return [f"{slow}; model.dtype=float32 is faster here"]


def _idle(recipe: Recipe) -> list[str]:
    """Keys without effect."""
    algorithm = recipe.algorithm
    trainer = recipe.trainer
    idle = list[str]()
    is_rl = algorithm.rewarded
    uses = {
        "critic": algorithm.needs_critic,
        "teacher": algorithm.needs_teacher,
        "reference": is_rl or algorithm.needs_reference,
    }
    for name in [name for name, is_used in uses.items() if not is_used]:
        idle += [f"{name}.{key}" for key, value in vars(recipe)[name] if value is not None]
    if not algorithm.samples and recipe.data.max_prompt_length is not None:
        idle.append("data.max_prompt_length")
    if not is_rl:
        default = RewardSection(name="exact_match")
        idle += ["trainer.stop_at_reward"] if trainer.stop_at_reward is not None else []
        used = [key for key, value in recipe.reward if value not in (None, dict(default)[key])]
        idle += [f"reward.{'import' if key == 'function' else key}" for key in used]
    if algorithm.rows == "prompt" and recipe.data.max_length is not None:
        idle.append("data.max_length")
    return idle


def rows_line(lengths: Sequence[int], held_out: int) -> str:
    sizes = f"{min(lengths)} to {max(lengths)} tokens (median {median(lengths):g})"
    return f"{'rows':<9}{len(lengths)} of {sizes}; {held_out} held out"


def check_experts(recipe: Recipe, spec: AnySpec) -> None:
    asked = {f"model.moe.{name}": value for name, value in recipe.model.moe}
    asked["rollout.router_replay"] = recipe.rollout.router_replay
    wanted = [key for key, value in asked.items() if value not in (0.0, "none")]
    if wanted and spec.moe is None:
        model = f"{recipe.model.path} is a {spec.family} model without experts that the native engine routes to"
        raise ConfigError(f"{', '.join(wanted)}: {model}; leave these keys out")
