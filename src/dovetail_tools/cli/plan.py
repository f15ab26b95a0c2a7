"""`dovetail plan --rollout`: GPUs for trainer and engines."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dovetail.errors import ConfigError, DataError, quoted
from dovetail.launch.process import put
from dovetail.records.runs import ROLLOUT, check_runs, read_samples, sample_files
from dovetail_tools.simulator import Setup, Simulation, SimulationResult, lognormal

COUNTED = 16  # simulated steps, after those that fill the pool
SPLITS = 12  # of the GPUs that are tried
NEARLY = 0.97  # of the best throughput: a smaller lag is worth the rest
LONGEST_TAIL = 100  # times the mean: the 99.9 % quantile of a log-normal distribution
COLUMNS = "max_lag,running,trainer,engines,tokens/s,speedup,step,trainer idle,engines idle,mean lag"


@dataclass(frozen=True)
class Plan:
    """trainer, engines: their GPUs, in turns the same ones. running: most samples of an engine."""

    max_lag: int
    running: int
    trainer: int
    engines: int
    outcome: SimulationResult

    @property
    def speed(self) -> float:
        return self.outcome.tokens_per_second


def run(args: argparse.Namespace) -> None:
    if args.gpus < args.engine_gpus:
        raise ConfigError(f"--engine-gpus {args.engine_gpus}: there are only --gpus {args.gpus}")
    lengths = lengths_of(args.rollout)
    setup = Setup(
        engines=1, max_running=args.decode[-1][0], decode=args.decode, prefill_tokens_per_second=args.prefill,
        train_tokens_per_second=args.train, push_ms=1000 * args.push_seconds, groups_per_step=args.prompts,
        samples=args.samples, prompt_tokens=args.prompt_tokens, max_lag=0,
    )  # fmt: skip
    plans = compare(setup, lengths, args.gpus, args.engine_gpus, args.max_lag)
    tokens = [length for group in lengths for length in group]
    mean = sum(tokens) / len(tokens)
    put(
        f"{args.prompts} prompts x {args.samples} responses a step of {mean:,.0f} tokens, at "
        f"most {max(tokens):,}\n\n"
    )
    put(table(plans, args.gpus))


def lengths_of(given: str) -> list[list[int]]:
    """Returns the lengths of responses, by prompt."""
    path = Path(given)
    (mean, colon, longest) = given.partition(":")
    if colon and mean.isdecimal() and longest.isdecimal():
        if not 0 < int(mean) <= int(longest) <= LONGEST_TAIL * int(mean):
            raise ConfigError(
                f"--rollout {given}: expected MEAN:LONGEST with LONGEST 1 to {LONGEST_TAIL} "
                "times MEAN"
            )
        return [[length] for length in lognormal(int(mean), int(longest))]
    if path.is_file():
        try:
            lengths = json.loads(path.read_bytes())
        except ValueError as error:
            raise DataError(f"{path} is no JSON list of lengths: {error}") from error
        if (
            not isinstance(lengths, list)
            or not lengths
            or not all(type(n) is int and n > 0 for n in lengths)
        ):
            raise DataError(
                f"{path}: expected a JSON list of lengths in tokens, such as [512, 2048]"
            )
        return [[length] for length in lengths]
    if not path.exists():
        raise ConfigError(
            f"--rollout {quoted(given)}: expected a run_dir, a JSON list of lengths, or "
            "MEAN:LONGEST"
        )
    check_runs([path])
    groups: dict[str, list[int]] = {}
    for file in sample_files(path):
        for row in read_samples(file) if file.kind == ROLLOUT else ():
            if row["tokens"]:
                groups.setdefault(f"{file.step} {row['id']}", []).append(row["tokens"])
    if not groups:
        raise DataError(
            f"{path} has no samples yet; give another run, a JSON list of lengths, or MEAN:LONGEST"
        )
    return list(groups.values())


def table(plans: Sequence[Plan], gpus: int) -> str:
    synchronous = max(plan.speed for plan in plans if plan.max_lag == 0)
    rows: list[Sequence[str]] = [COLUMNS.split(",")]
    for plan in plans:
        out = plan.outcome
        shared = plan.trainer + plan.engines > gpus
        lag = "0, in turns" if shared else str(plan.max_lag)
        sizes = map(str, (plan.running, plan.trainer, plan.engines))
        speeds = (
            f"{plan.speed:,.0f}",
            f"{plan.speed / synchronous:.2f} x",
            f"{out.step_ms / 1000:,.1f} s",
        )
        idle = f"{out.trainer_idle:.0%}", f"{out.engine_idle:.0%}"
        rows.append((lag, *sizes, *speeds, *idle, f"{out.mean_lag:.1f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join([*lines, "", advice(best(plans), gpus, synchronous)]) + "\n"


def advice(plan: Plan, gpus: int, synchronous: float) -> str:
    if plan.trainer + plan.engines > gpus:
        return "take the synchronous loop with all GPUs in turns: none of these is faster by more than 3 %"
    taken = f"max_lag {plan.max_lag}, max_num_seqs {plan.running}, trainer {plan.trainer} and engines {plan.engines}"
    speedup = f"{plan.speed / synchronous:.2f} times the tokens/s of the fastest synchronous layout"
    return f"take {taken} of the {gpus} GPUs: {speedup}"


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
    tried = (
        sorted({splits[i * (len(splits) - 1) // (SPLITS - 1)] for i in range(SPLITS)})
        if splits
        else []
    )
    return plans + [
        max(
            (
                simulated(lag, gpus - count, count, running)
                for count in tried
                for running, _ in setup.decode
            ),
            key=lambda plan: plan.speed,
        )
        for lag in (sorted({0, *lags}) if tried else ())
    ]


def best(plans: Sequence[Plan]) -> Plan:
    """The smallest lag that is nearly as fast as the fastest."""
    fastest = max(plan.speed for plan in plans)
    return next(plan for plan in plans if plan.speed >= NEARLY * fastest)
