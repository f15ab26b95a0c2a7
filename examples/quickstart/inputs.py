"""Writes what the recipes of examples/recipes read, into runs/inputs (or a folder given).

python -m examples.quickstart.inputs largest     largest_train.jsonl, largest_eval.jsonl
python -m examples.quickstart.inputs addition    scratch/ (a model), addition_{sft,sft_eval,train,eval}.jsonl
python -m examples.quickstart.inputs gsm8k       gsm8k_train.jsonl, gsm8k_eval.jsonl
python -m examples.quickstart.inputs squares     squares/ (pictures), squares_train.jsonl, squares_eval.jsonl
"""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from examples.quickstart import pictures, prepare, scratch, tasks

INPUTS = Path("runs/inputs")
NUM_LARGEST = 4096  # questions; a run of 60 steps reads 960 of them
NUM_PICTURES = 4096
WRONG_SUMS = 0.0  # share of wrong demonstrations: too few steps leave RL enough to learn


def largest(out: Path, seed: int = 0) -> None:
    """The data of quickstart_grpo.yaml and quickstart_ppo.yaml."""
    train, held_out = tasks.largest_of_three(seed, NUM_LARGEST)
    tasks.write_rows(out / "largest_train.jsonl", train)
    tasks.write_rows(out / "largest_eval.jsonl", held_out)


def addition(out: Path, seed: int = 0) -> None:
    """The model and the data of scratch_sft.yaml and scratch_grpo.yaml."""
    train, held_out = tasks.addition(seed)
    tasks.write_rows(out / "addition_sft.jsonl", tasks.demonstrations(train, seed, WRONG_SUMS))
    tasks.write_rows(out / "addition_sft_eval.jsonl", tasks.demonstrations(held_out, seed))
    tasks.write_rows(out / "addition_train.jsonl", train)
    tasks.write_rows(out / "addition_eval.jsonl", held_out)
    shutil.rmtree(out / "scratch", ignore_errors=True)
    scratch.make(out / "scratch", seed)


def gsm8k(out: Path) -> None:
    """The data of gsm8k_grpo.yaml."""
    published = prepare.gsm8k()
    tasks.write_rows(out / "gsm8k_train.jsonl", tasks.gsm8k(published / "train.jsonl"))
    tasks.write_rows(out / "gsm8k_eval.jsonl", tasks.gsm8k(published / "test.jsonl"))


def squares(out: Path, seed: int = 0) -> None:
    """The data of image_grpo.yaml."""
    train, held_out = pictures.squares(out / "squares", seed, NUM_PICTURES, tasks.NUM_EVAL)
    tasks.write_rows(out / "squares_train.jsonl", train)
    tasks.write_rows(out / "squares_eval.jsonl", held_out)


def main(arguments: list[str]) -> int:
    """Write one task's inputs."""
    known: dict[str, Callable[[Path], None]] = {
        "largest": largest,
        "addition": addition,
        "gsm8k": gsm8k,
        "squares": squares,
    }
    if not arguments or arguments[0] not in known:
        print(__doc__, file=sys.stderr)
        return 2
    out = Path(arguments[1]) if len(arguments) > 1 else INPUTS
    try:
        known[arguments[0]](out)
    except prepare.UnavailableError as error:
        print(error, file=sys.stderr)
        return 3
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
