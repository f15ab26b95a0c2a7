"""What `make quickstart` runs: a real pretrained model gets better at a task by GRPO, computed by our own engine.

Model and data are prepared once; an earlier run is moved aside; `dovetail train` does the work; transformers, which
knows nothing of dovetail, loads the result. Without a network, a model made from scratch takes the pretrained one's
place, and every line says so.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch

from examples.quickstart import check, inputs, pace, prepare

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
RUN = Path("runs/quickstart")
FETCHING = "fetching SmolLM2-135M-Instruct (93 MB, once) ..."
NUM_CHECKED = 50  # held-out questions of the last check


def main(overrides: list[str]) -> int:
    """Run the quickstart; `overrides` go to `dovetail train` as they are."""
    how = "SmolLM2-135M-Instruct is in the cache" if prepare.is_there(prepare.MODEL) else FETCHING
    print(f"Quickstart: {how}", flush=True)
    try:
        model = prepare.smollm2()
    except prepare.MissingExtraError as error:
        print(error, file=sys.stderr)
        return 2
    except prepare.UnavailableError as error:
        print(
            f"No pretrained model: {error}. Training a 1.7M-parameter model FROM SCRATCH instead.",
            flush=True,
        )
        return _from_scratch(overrides)
    inputs.largest(inputs.INPUTS)
    _move_aside(RUN)
    prompts, fixed = (
        pace.PROMPTS,
        [f"model.path={model}", f"model.dtype={_fast_dtype()}", f"run_dir={RUN}"],
    )
    if not (torch.cuda.is_available() or any("trainer." in override for override in overrides)):
        fits = pace.pace(pace.measure(model, _fast_dtype()))
        print(fits.describe(), flush=True)
        prompts = fits.prompts
        fixed.append(f"trainer.prompts_per_step={prompts}")
    status = _train("quickstart_grpo.yaml", [*fixed, *overrides])
    status = status or _last_check(model, "largest_eval.jsonl", 6)
    if not status:
        print(pace.conclude(check.read_rows(RUN / "metrics.jsonl"), prompts), flush=True)
    return status


def _from_scratch(overrides: list[str]) -> int:
    """The same in small: demonstrations first, since a random model is never right by chance, then GRPO."""
    inputs.addition(inputs.INPUTS)
    warm = RUN.with_name("quickstart-sft")
    for run in (RUN, warm):
        _move_aside(run)
    status = _train("scratch_sft.yaml", [f"run_dir={warm}", *overrides])
    status = status or _train(
        "scratch_grpo.yaml", [f"model.path={warm / 'hf'}", f"run_dir={RUN}", *overrides]
    )
    return status or _last_check(warm / "hf", "addition_eval.jsonl", 4)


def _train(recipe: str, overrides: list[str]) -> int:
    """`dovetail train` with as many threads as this process may use, unless the user has said how many."""
    command = [
        sys.executable,
        "-m",
        "dovetail",
        "train",
        os.path.relpath(RECIPES / recipe),
        *overrides,
    ]
    print("\n$", " ".join(["dovetail", *command[3:]]), flush=True)
    threads = {"OMP_NUM_THREADS": str(_cores()), **os.environ}
    return subprocess.run(command, env=threads, check=False).returncode


def _last_check(before: Path, held_out: str, max_new_tokens: int) -> int:
    """Load the result with transformers alone and compare its greedy answers with the starting model's."""
    rows = check.read_rows(inputs.INPUTS / held_out)[:NUM_CHECKED]
    result = RUN / "hf"
    print(f"\nLoading the result in transformers, for {len(rows)} held-out prompts ...", flush=True)
    first, last = (check.accuracy(path, rows, max_new_tokens) for path in (before, result))
    print(f"Loaded in transformers: {result}")
    print(
        f"Greedy accuracy on {len(rows)} held-out prompts, computed by transformers: {first:.2f} -> {last:.2f}"
    )
    print(f"Curve: {RUN / 'metrics.jsonl'}   samples: {RUN / 'rollouts'}   data: {inputs.INPUTS}")
    return 0


def _move_aside(run: Path) -> None:
    """runs/quickstart -> runs/quickstart.1, or the next number that is free."""
    if run.exists():
        number = 1
        while (aside := run.with_name(f"{run.name}.{number}")).exists():
            number += 1
        run.rename(aside)
        print(f"The earlier run is now {aside}")


def _fast_dtype() -> str:
    """bfloat16 where the processor (Linux tells) or the GPU multiplies it fast, else float32."""
    features = Path("/proc/cpuinfo")
    words = set(features.read_text(encoding="utf-8").split()) if features.is_file() else set()
    fast = bool(words & {"avx512_bf16", "amx_bf16"}) or torch.cuda.is_available()
    return "bfloat16" if fast else "float32"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
