"""What algorithms of preferences share: how rows are packed, and what their losses read."""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, cast

from dovetail.batch.loss import LossFn, TokenStats
from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.data.examples import Preference
from dovetail.engine.native import Engine
from dovetail.rl.custom import Custom

if TYPE_CHECKING:
    from dovetail.recipe.preferences import PreferenceSection
    from dovetail.recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True)
class PreferenceAlgorithm(ABC):
    """An algorithm on pairs of completions: its batch and its loss."""

    section: "PreferenceSection"
    loss: LossFn

    @classmethod
    def make(cls, recipe: "Recipe", _: Custom) -> Self:
        section = cast("PreferenceSection", recipe.algorithm)
        return cls(section=section, loss=cls.make_loss(section))

    @classmethod
    @abstractmethod
    def make_loss(cls, section: "PreferenceSection") -> LossFn: ...

    @property
    def scores_reference_once(self) -> bool:
        """Whether the reference scores all rows before the first step, and is freed."""
        return False

    def pack(self, rows: Seq[Preference]) -> PackedBatch:
        """Returns sequences with the fields of their rows, first the chosen one of a pair."""
        sequences = []
        for number, row in enumerate(rows):
            if row.chosen is not None:
                sequences.append(self.sequence(row.chosen, number, is_chosen=True))
            if row.rejected is not None:
                sequences.append(self.sequence(row.rejected, number, is_chosen=False))
        return PackedBatch.pack(sequences)

    def sequence(self, given: Sequence, pair: int, *, is_chosen: bool) -> Sequence:
        return replace(given, group=pair)

    def complete(
        self, batch: PackedBatch, policy: Engine, reference: Engine | None, max_tokens: int
    ) -> PackedBatch:
        """Adds fields that depend on all sequences of an update. max_tokens: of a sequence."""
        return batch

    def stats(self, batch: PackedBatch, policy: Engine) -> Any:
        """Returns what the loss reads, [n] of counted tokens."""
        scored = policy.score(batch)
        return TokenStats(scored.logprob[batch.mask], scored.entropy[batch.mask])
