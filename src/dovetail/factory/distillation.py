"""Makes the task of distillation."""

from collections.abc import Mapping
from typing import Any

from dovetail.engine.native import NativeEngine
from dovetail.engine.teacher import Teacher
from dovetail.errors import ConfigError
from dovetail.recipe.distillation import SAMPLED
from dovetail.recipe.schema import Recipe
from dovetail.rl.distillation_task import DistillationTask, Rows, prompt_of

Loaded = tuple[Rows, Rows, Mapping[str, Rows], str]


def distillation_task(
    recipe: Recipe, policy: NativeEngine, teacher: NativeEngine, loaded: Loaded, **keys: Any
) -> DistillationTask:
    """loaded: rows of data.train, data.eval and eval.sets. keys: fields of the task. Collective."""
    rows, held_out, sets, _ = loaded
    by_head = vars(recipe.algorithm)["divergence"] != SAMPLED
    return DistillationTask(
        recipe=recipe,
        policy=policy,
        teacher=Teacher.of(teacher, policy) if by_head else teacher,
        rows=rows,
        held_out=held_out,
        eval_sets=sets,
        **keys,
    )


def check_prompts(rows: Rows, longest: int) -> None:
    """Samples continue the prompts of rows that have completions, too."""
    most = max(len(prompt_of(number, row).ids) for number, row in enumerate(rows))
    if most > longest:
        raise ConfigError(
            f"the longest prompt of data.train has {most} tokens, and rollout.max_new_tokens leaves {longest} of "
            "trainer.tokens_per_batch; raise the latter, lower the former, or set algorithm.lmbda=0, which samples nothing"
        )
