"""How fast this machine trains, measured before the run, so that the run fits its time budget and says how long it takes."""

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import relpath
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

BUDGET_SECONDS, STEPS, PROMPTS, SAMPLES = 330, 40, 16, 8  # of quickstart_grpo.yaml
TOKENS = 36  # of a prompt and its completion
MEASURED = 8  # sequences
OVERHEAD = 1.5  # of a step, over its forward and backward passes: sampling and the optimizer
EVALUATION = 0.3  # of a step of 16 prompts: 100 prompts without a backward pass
ENOUGH = 20  # steps in which the model learns the task
FEW = 10  # steps below which nothing is to be expected
TARGET = 0.9  # reward at which the recipe stops
MEASURING_SECONDS = 15.0  # after which no further round is measured


@dataclass(frozen=True)
class Pace:
    """What fits: prompts a step, seconds of such a step, and steps."""

    prompts: int
    seconds: float
    steps: int

    def describe(self) -> str:
        """For the user, before the run."""
        total = self.steps * self.seconds + 2 * _evaluation(self.seconds / self.prompts)
        told = f"This machine takes about {self.seconds:.2g} s for a step of {self.prompts} prompts"
        if self.prompts == PROMPTS and self.steps == STEPS:
            return f"{told}: {STEPS} steps and both evaluations take about {total:.0f} s."
        fits = f"about {self.steps} of them fit into {BUDGET_SECONDS} s"
        if total > BUDGET_SECONDS:
            fits = f"one of them and both evaluations take about {total:.0f} s, more than the {BUDGET_SECONDS} s meant"
        few = f" {TOO_FEW}" if self.steps < FEW else ""
        return f"{told}: {fits}.{few} {_whole(self.seconds / self.prompts)}"


def pace(seconds_a_sequence: float) -> Pace:
    """The most prompts a step of which enough steps fit, or two prompts."""
    prompt = seconds_a_sequence * SAMPLES * OVERHEAD
    left = BUDGET_SECONDS - 2 * _evaluation(prompt)
    prompts = next((n for n in (16, 8, 4) if ENOUGH * n * prompt <= left), 2)
    return Pace(prompts, prompts * prompt, max(1, min(STEPS, int(left / (prompts * prompt)))))


def conclude(rows: Sequence[Mapping[str, Any]], prompts: int) -> str:
    """What a run shows and what to do, for the user; "" where it had enough steps. rows: of its metrics.jsonl."""
    seconds = [row["step_seconds"] for row in rows]
    if len(rows) >= FEW or not rows or (rows[-1].get("reward_mean") or 0.0) >= TARGET:
        return ""
    spent = sum(seconds)
    beyond = f", more than the {BUDGET_SECONDS} s meant" if spent > BUDGET_SECONDS else ""
    done = f"{len(rows)} of {STEPS} steps were made, in {spent:.0f} s{beyond}."
    return f"{done} {TOO_FEW} {_whole(statistics.mean(seconds) / prompts)}"


TOO_FEW = (
    "So few steps show that everything works here, from a pretrained model to one that transformers loads, not that it "
    "learns: the reward may stay as it is, or fall."
)


def _whole(prompt_seconds: float) -> str:
    return (
        f"All {STEPS} steps of {PROMPTS} prompts would take about {STEPS * PROMPTS * prompt_seconds / 60:.0f} minutes: "
        f"{relpath(sys.executable)} -m examples.quickstart trainer.time_budget_seconds=null"
    )


def measure(model_dir: Path, dtype: str) -> float:
    """Seconds of a forward and a backward pass, a sequence: the median of three rounds, of fewer where they are slow."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=getattr(torch, dtype), local_files_only=True
    )
    seconds, start = list[float](), time.monotonic()
    for count in (1, MEASURED, MEASURED, MEASURED):  # the first one warms up
        if (
            time.monotonic() - start + (count * seconds[-1] if seconds else 0.0) > MEASURING_SECONDS
            and seconds
        ):
            break
        ids = torch.randint(1000, (count, TOKENS), generator=torch.Generator().manual_seed(0))
        begun = time.monotonic()
        model(input_ids=ids, labels=ids).loss.backward()
        seconds.append((time.monotonic() - begun) / count)
    return statistics.median(seconds[1:] or seconds)


def _evaluation(prompt_seconds: float) -> float:
    return EVALUATION * PROMPTS * prompt_seconds
