"""Makes the losses and the task of preferences."""

from collections.abc import Mapping
from typing import Any

from dovetail.batch.loss import LossFn
from dovetail.data.examples import Preference
from dovetail.engine.base import Engine
from dovetail.recipe.algorithms import SFT, PolicyGradient
from dovetail.recipe.distillation import Distillation
from dovetail.recipe.preferences import CPO, DPO, KTO, ORPO, AnyPreference, SimPO
from dovetail.recipe.schema import Recipe
from dovetail.rl.preference_losses import CPOLoss, DPOLoss, KTOLoss, ORPOLoss, RewardLoss
from dovetail.rl.preference_task import PreferenceTask

Loaded = tuple[list[Preference], list[Preference], Mapping[str, list[Preference]], str]


def preference_loss(algorithm: AnyPreference) -> LossFn:
    if isinstance(algorithm, DPO):
        return DPOLoss(kind=algorithm.loss, beta=algorithm.beta, label_smoothing=algorithm.label_smoothing)
    if isinstance(algorithm, KTO):
        return KTOLoss(
            beta=algorithm.beta,
            desirable_weight=algorithm.desirable_weight,
            undesirable_weight=algorithm.undesirable_weight,
        )
    if isinstance(algorithm, CPO | SimPO):
        margin = {"gamma": algorithm.simpo_gamma} if isinstance(algorithm, SimPO) else {}
        return CPOLoss(kind=algorithm.loss, beta=algorithm.beta, label_smoothing=algorithm.label_smoothing, **margin)
    if isinstance(algorithm, ORPO):
        return ORPOLoss(beta=algorithm.beta)
    return RewardLoss(center=algorithm.center_rewards_coefficient)


def preference_task(
    recipe: Recipe, policy: Engine, reference: Engine | None, loaded: Loaded, **keys: Any
) -> PreferenceTask:
    """loaded: rows of data.train, data.eval and eval.sets. keys: fields of the task."""
    algorithm = recipe.algorithm
    assert not isinstance(algorithm, SFT | PolicyGradient | Distillation)
    rows, held_out, sets, _ = loaded
    return PreferenceTask(
        recipe=recipe,
        policy=policy,
        loss=preference_loss(algorithm),
        rows=rows,
        held_out=held_out,
        eval_sets=sets,
        reference=reference,
        precompute=isinstance(algorithm, DPO) and algorithm.precompute_ref_log_probs,
        **keys,
    )
