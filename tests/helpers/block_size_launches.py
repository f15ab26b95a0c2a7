"""python -m tests.helpers.block_size_launches: every kernel of bench/block_sizes.py once, with its first choice."""

import importlib

import torch


def main() -> None:
    sizes, on = importlib.import_module("bench.block_sizes"), torch.device("cpu")
    for name, launch, choices, used in [
        *sizes.block_launches(2, 28, on),
        *sizes.expert_launches(2, on),
    ]:
        assert used in choices, name
        launch(*choices[0])


if __name__ == "__main__":
    main()
