"""What command lines of benchmarks have in common: numbers and devices that make sense, and one message where they do not."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

import torch

from dovetail.errors import ConfigError, UserError
from dovetail.parallel.process_group import pick_device

CPU_SHAPES = (
    "tiny",
    "tiny-moe",
    "0.5b",
)  # of `engines.SHAPES` and `sampler.SHAPES`: the others are for GPUs


def positive(text: str) -> int:
    """A whole number, 1 or more."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 1 or more")
    return int(text)


def natural(text: str) -> int:
    """A whole number, 0 or more."""
    return 0 if text.strip() == "0" else positive(text)


def device(text: str) -> str:
    """The kind of a device that is here. argparse reads a default through this too, so one that is not here is told."""
    try:
        return pick_device(text).type
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def check_visible(on: str, ranks: int) -> None:
    """Refuse fewer GPUs than ranks. For programs that start others: nothing is put on a GPU, whose memory is theirs."""
    if on == "cuda" and torch.cuda.device_count() < ranks:
        raise ConfigError(
            f"GPUs needed: {ranks}; torch {torch.__version__} sees {torch.cuda.device_count()}"
        )


def check_shape(shape: str, on: str) -> None:
    """Refuse a model that a CPU's memory and patience are too small for."""
    if on == "cpu" and shape not in CPU_SHAPES:
        raise ConfigError(f"--shape {shape} needs a GPU; on a CPU: --shape tiny")


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """End with what `main` returns, or with exit status 2 and one message where the user was mistaken."""
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
