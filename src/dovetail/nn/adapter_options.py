"""The options of low-rank adapters."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Literal, TypeVar

from dovetail.errors import ConfigError

T = TypeVar("T")
ExpertAdapters = Literal["per_expert", "stacked"]
# The leaf names that `all-linear` adapts: attention with its latents, and feed-forward layers.
ALL_LINEAR = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)


STACKED_EXPERTS = "experts.gate_up_proj"


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Which layers get an adapter, and of what size; names and meanings are PEFT's `LoraConfig`.

    targets, exclude: module names or their endings, such as "q_proj"; "all-linear" stands for
    ALL_LINEAR. rank_pattern, alpha_pattern: regular expression of a module's name -> its value.
    experts: per_expert: adapters of gate, up and down of each expert; stacked: of the tensors
    gate_up_proj and down_proj of all experts, PEFT's `target_parameters`: gate and up share A.
    rslora: scale by alpha / sqrt(rank) in place of alpha / rank. seed: of the first A; B is 0.
    path: PEFT's directory with the first values.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: Sequence[str] = ("all-linear",)
    exclude: Sequence[str] = ()
    rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    experts: ExpertAdapters = "per_expert"
    seed: int = 0
    path: Path | None = None

    def __post_init__(self) -> None:
        for rank in (self.rank, *self.rank_pattern.values()):
            if rank < 1:
                raise ConfigError(f"an adapter of rank {rank}; expected 1 or more")

    def includes(self, module: str) -> bool:
        targets: list[str] = []
        for target in self.targets:
            targets += (*ALL_LINEAR, STACKED_EXPERTS) if target == "all-linear" else [target]
        return _ends(module, targets) and not _ends(module, self.exclude)

    def rank_of(self, module: str) -> int:
        return _first_match(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        alpha = _first_match(self.alpha_pattern, module, self.alpha)
        return alpha / sqrt(rank) if self.rslora else alpha / rank


def _ends(module: str, names: Sequence[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _first_match(patterns: Mapping[str, T], module: str, default: T) -> T:
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default
