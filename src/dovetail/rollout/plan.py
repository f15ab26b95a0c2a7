"""How many GPUs the trainer and the engines of a run should have: layouts compared by simulation. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dovetail.rollout.simulator import Outcome, Setup, Simulation

COUNTED = 16  # simulated steps, after those that fill the pool
SPLITS = 12  # of the GPUs that are tried
NEARLY = 0.97  # of the best throughput: a smaller lag is worth the rest


@dataclass(frozen=True)
class Plan:
    """trainer, engines: their GPUs, in turns the same ones. running: most samples of an engine."""

    max_lag: int
    running: int
    trainer: int
    engines: int
    outcome: Outcome

    @property
    def speed(self) -> float:
        return self.outcome.tokens_per_second


def compare(
    setup: Setup, lengths: Sequence[Sequence[int]], gpus: int, engine_gpus: int, lags: Sequence[int]
) -> list[Plan]:
    """All GPUs in turns, and the best split for max_lag 0 and each of `lags`. setup: a train speed of one GPU.

    Numbers of running samples are those of setup.decode: fewer ones end sooner, and a step waits for its longest.
    """

    def simulated(lag: int, trainer: int, engines: int, running: int = setup.max_running) -> Plan:
        made = replace(
            setup,
            max_running=running,
            engines=engines // engine_gpus,
            train_tokens_per_second=setup.train_tokens_per_second * trainer,
            max_lag=lag,
            warmup=lag + 2,
            steps=lag + 2 + COUNTED,
        )
        return Plan(lag, running, trainer, engines, Simulation(made, lengths).run())

    plans = [simulated(0, gpus, gpus - gpus % engine_gpus)]
    splits = range(engine_gpus, gpus, engine_gpus)
    tried = sorted({splits[i * (len(splits) - 1) // (SPLITS - 1)] for i in range(SPLITS)}) if splits else []
    return plans + [
        max(
            (simulated(lag, gpus - count, count, running) for count in tried for running, _ in setup.decode),
            key=lambda plan: plan.speed,
        )
        for lag in (sorted({0, *lags}) if tried else ())
    ]


def best(plans: Sequence[Plan]) -> Plan:
    """The smallest lag that is nearly as fast as the fastest."""
    fastest = max(plan.speed for plan in plans)
    return next(plan for plan in plans if plan.speed >= NEARLY * fastest)
