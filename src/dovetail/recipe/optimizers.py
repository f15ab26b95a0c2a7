"""Names of optimizers. Needs no pydantic."""

import importlib.util
from collections.abc import Mapping
from typing import Literal, get_args

from dovetail.errors import ConfigError, quoted

RuleName = Literal[
    "adamw",
    "muon",
    "adamw8bit",
    "sgd",
    "adam",
    "nadam",
    "radam",
    "adamax",
    "adadelta",
    "adagrad",
    "asgd",
    "rmsprop",
    "rprop",
]
NOT_ELEMENTWISE: Mapping[str, str] = {
    "lbfgs": "evaluates the loss several times a step and keeps products of whole gradients",
    "adafactor": "keeps sums over rows and columns of whole matrices",
    "shampoo": "multiplies whole matrices",
    "soap": "multiplies whole matrices",
    "lamb": "divides by norms of whole tensors",
    "lars": "divides by norms of whole tensors",
    "sparseadam": "takes sparse gradients only",
}


def refuse_name(given: str) -> str:
    """In lower letters, if it is known. Raises ValueError."""
    name = given.lower().removeprefix("torch.optim.")
    if name in NOT_ELEMENTWISE:
        raise ValueError(f"{quoted(given)} {NOT_ELEMENTWISE[name]}, so it cannot update shards; take adamw or muon")
    if name not in get_args(RuleName):
        raise ValueError(
            f"{quoted(given)}; expected one of {', '.join(get_args(RuleName))}, or a class of yours: {{import: module:Class}}"
        )
    return name


def require_torchao() -> None:
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "optim.name=adamw8bit needs torchao, which is not installed: pip install 'dovetail-rl[torchao]'"
        )
