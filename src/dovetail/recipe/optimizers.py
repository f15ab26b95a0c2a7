"""Names of optimizers. Needs no pydantic."""

import importlib.util
from typing import Literal, get_args

from dovetail.errors import ConfigError, quoted

RuleName = Literal[
    "adamw", "muon", "adamw8bit",
    "sgd", "adam", "nadam", "radam", "adamax", "adadelta", "adagrad", "asgd", "rmsprop", "rprop",
]  # fmt: skip


def refuse_name(given: str) -> str:
    name = given.lower().removeprefix("torch.optim.")
    if name not in get_args(RuleName):
        names = ", ".join(get_args(RuleName))
        raise ValueError(
            f"{quoted(given)}; expected one of {names}, or a class of yours: {{import: "
            f"module:Class}}"
        )
    return name


def require_torchao() -> None:
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "adamw8bit needs torchao, which is not installed: pip install 'dovetail-rl[torchao]'"
        )
