"""python -m tests.unit.block_size_launches: every kernel of bench/block_sizes.py once, with its first choice."""

import torch

from bench.block_sizes import block_launches, expert_launches


def main() -> None:
    on = torch.device("cpu")
    for name, launch, choices, used in [*block_launches(2, 28, on), *expert_launches(2, on)]:
        assert used in choices, name
        launch(*choices[0])


if __name__ == "__main__":
    main()
