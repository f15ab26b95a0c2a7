"""Blocks on a GPU."""

import torch


def poison() -> None:
    """What memory holds that nobody wrote."""
    torch.empty(1 << 28, device="cuda").fill_(float("nan"))
