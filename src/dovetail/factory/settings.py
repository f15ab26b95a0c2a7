"""From recipe sections to the settings of tasks and optimizers."""

from dovetail.optim.optimizer import OptimSettings
from dovetail.recipe.schema import (
    GRPO,
    PPO,
    PolicyGradient,
    Recipe,
)
from dovetail.rl.experience import AdvantageSettings
from dovetail.rl.tasks import RLSettings
from dovetail.rollout.base import SamplingParams


def rl_settings(
    recipe: Recipe, algorithm: PolicyGradient, stops: tuple[int, ...], banned: tuple[int, ...]
) -> RLSettings:
    rollout = recipe.rollout
    in_reward = algorithm.kl_in == "reward" and algorithm.kl_coef > 0
    ppo = algorithm if isinstance(algorithm, PPO) else None
    grpo = algorithm if isinstance(algorithm, GRPO) else None
    return RLSettings(
        sampling=SamplingParams(
            samples=rollout.samples_per_prompt,
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            seed=recipe.trainer.seed,
            stop_ids=stops,
            trace=rollout.replay == "rollout" or (rollout.monitor and rollout.backend == "native"),
            banned_ids=banned,
        ),
        advantages=AdvantageSettings(
            kind=recipe.algorithm.name,
            scale_by_std=grpo is not None and grpo.scale_by_std,
            normalize=algorithm.normalize_advantage,
            gamma=ppo.gamma if ppo else 1.0,
            lam=ppo.lam if ppo else 1.0,
            kl_coef=algorithm.kl_coef if in_reward else 0.0,
            kl_estimator=algorithm.kl_estimator,
        ),
        skip_equal_groups=grpo is not None and grpo.skip_equal_groups,
        old_logprobs=in_reward or algorithm.epochs * algorithm.minibatches > 1,
        critic_warmup=ppo.critic_warmup if ppo else 0,
        replay=rollout.replay,
        monitor=rollout.monitor,
    )


def optim_settings(recipe: Recipe, lr: float, head: str) -> OptimSettings:
    """The schedule counts optimizer steps, of which a training step has epochs x minibatches.

    A policy that waits for its critic's warmup has fewer steps.
    """
    optim, algorithm = recipe.optim, recipe.algorithm
    updates = algorithm.epochs * algorithm.minibatches
    waits = algorithm.critic_warmup if isinstance(algorithm, PPO) and head == "lm" else 0
    return OptimSettings(
        lr=lr,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        clip_norm=optim.clip_norm,
        schedule=optim.schedule,
        warmup_steps=optim.warmup_steps * updates,
        total_steps=max(1, recipe.trainer.steps - waits) * updates,
        min_lr_ratio=optim.min_lr_ratio,
        decay_steps=None if optim.decay_steps is None else optim.decay_steps * updates,
    )
