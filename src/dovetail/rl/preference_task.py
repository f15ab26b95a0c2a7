"""One step on preferences."""

import math
from array import array
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from dovetail.batch.loss import LossFn, TokenStats
from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.data.examples import Preference
from dovetail.engine.base import StepReport
from dovetail.engine.native import Engine
from dovetail.rl.preference_losses import last_tokens, nll_fields
from dovetail.rl.step_metrics import Row, length_metrics, update_metrics
from dovetail.rl.tasks import RowsTask, inner_batches

Rows = Seq[Preference]


@dataclass(kw_only=True)
class PreferenceTask(RowsTask):
    """reference: of dpo and kto. precompute: score with it once, then drop it. longest: tokens of a sequence."""

    loss: LossFn
    longest: int
    reference: Engine | None = None
    precompute: bool = False

    def step(self, step: int, stopping: Callable[[], bool] = bool) -> Row | None:
        self._precompute(step)
        batch = self._scored(self.rows_of(step), step + 1)
        reports = []
        for part in inner_batches(batch, self.recipe, step):
            complete = self._complete(part)
            self.progress.phase("update", step + 1)
            reports.append(without_nan(self.policy.train_step(complete, self.loss)))
        epochs = self.recipe.algorithm.epochs
        return {
            **with_margins(update_metrics(reports)),
            "tokens": len(batch),
            **length_metrics("sequence_length", batch.lengths),
            "work": {"update": (len(batch) * epochs, batch.num_sequences * epochs)},
        }

    def evaluate(self, step: int) -> Row:
        self._precompute(step)
        return super().evaluate(step)

    def measure(self, name: str, rows: Rows) -> Row:
        batch = self._complete(self._scored(rows))
        counted = batch.compact(batch.mask.nonzero().flatten())
        with torch.no_grad():
            total, count, sums = self.loss(self._stats(batch), counted)
        metrics = {
            name: float(s.total) / float(s.count) for name, s in sums.items() if float(s.count)
        }
        return with_margins({"loss": float(total) / float(count), **metrics})

    def _precompute(self, step: int) -> None:
        if self.reference is None or not self.precompute:
            return
        self.progress.phase("score", step)
        add = partial(
            with_reference, reference=self.reference, count=self.recipe.trainer.prompts_per_step
        )
        self.rows = add(self.rows)
        self.held_out = add(self.held_out)
        self.eval_sets = {name: add(rows) for name, rows in self.eval_sets.items()}
        self.reference = None

    def _stats(self, batch: PackedBatch) -> Any:
        """[n], of counted tokens."""
        if self.recipe.algorithm.name == "reward":
            return self.policy.values(batch)[batch.mask]
        return TokenStats(*(x[batch.mask] for x in self.policy.score(batch)))

    def _scored(self, rows: Rows, step: int | None = None) -> PackedBatch:
        batch = pack_preferences(rows, self.recipe.algorithm.name)
        if self.reference is None:
            return batch
        if step is not None:
            self.progress.phase("score", step)
        return batch.with_fields(reference_logprob=self.reference.score(batch).logprob)

    def _complete(self, batch: PackedBatch) -> PackedBatch:
        """Adds the fields that depend on the whole batch."""
        algorithm = self.recipe.algorithm
        if algorithm.name == "orpo":
            return batch.with_fields(**nll_fields(batch, 1.0))
        if algorithm.name in ("cpo", "simpo") and algorithm.cpo_alpha:
            return batch.with_fields(**nll_fields(batch, algorithm.cpo_alpha))
        if algorithm.name != "kto" or self.reference is None:
            return batch
        wrong = mismatched(batch, self.longest)
        ratio = self.policy.score(wrong).logprob - self.reference.score(wrong).logprob
        kl = max(0.0, float(ratio[wrong.mask].sum()) / batch.num_sequences)
        return batch.with_fields(kl=torch.full((len(batch),), kl, dtype=ratio.dtype))


def pack_preferences(rows: Rows, algorithm: str) -> PackedBatch:
    """Pairs as groups, first the chosen one; of kto single sequences with the field `label`.

    ORPO also trains the prompts of chosen rows; the field `completion` says which tokens its odds are of.
    """
    sequences: list[Sequence] = []
    for number, row in enumerate(rows):
        for each, label in ((row.chosen, 1.0), (row.rejected, 0.0)):
            if each is None:
                continue
            if algorithm == "kto":
                each = replace(each, fields={**each.fields, "label": label})
            else:
                each = replace(each, group=number)
            if algorithm == "orpo":
                assert each.mask is not None
                fields = {**each.fields, "completion": [float(kept) for kept in each.mask]}
                each = replace(
                    each, mask=[True] * len(each.ids) if label else each.mask, fields=fields
                )
            sequences.append(each)
    batch = PackedBatch.pack(sequences)
    return batch.with_mask(last_tokens(batch)) if algorithm == "reward" else batch


def mismatched(batch: PackedBatch, longest: int) -> PackedBatch:
    """Each prompt with the previous sequence's completion, of at most `longest` tokens."""
    tokens, masks = (
        [x.tolist() for x in column.split(batch.lengths)] for column in (batch.tokens, batch.mask)
    )
    starts = [mask.index(True) + 1 for mask in masks]
    rows = []
    for i, (ids, start) in enumerate(zip(tokens, starts, strict=True)):
        wrong = (ids[:start] + tokens[i - 1][starts[i - 1] :])[:longest]
        mask = [False] * start + [True] * (len(wrong) - start)
        rows.append(Sequence(wrong, mask, media=batch.media[i] if batch.media else None))
    return PackedBatch.pack(rows)


def with_reference(rows: Rows, reference: Engine, count: int) -> list[Preference]:
    """Pairs with the reference's log-probs as a field, `count` at a time. Collective."""
    done = []
    for start in range(0, len(rows), count):
        some = rows[start : start + count]
        batch = pack_preferences(some, "dpo")
        scored = [
            array("d", x.tolist())
            for x in batch.unpack(reference.score(batch).logprob, by_token=True)
        ]
        for row, chosen, rejected in zip(some, scored[::2], scored[1::2], strict=True):
            assert row.chosen is not None and row.rejected is not None
            first = replace(row.chosen, fields={"reference_logprob": chosen})
            second = replace(row.rejected, fields={"reference_logprob": rejected})
            done.append(replace(row, chosen=first, rejected=second))
    return done


def without_nan(report: StepReport) -> StepReport:
    return replace(
        report, metrics={name: x for name, x in report.metrics.items() if not math.isnan(x)}
    )


def with_margins(row: Row) -> Row:
    """The margin of completions without pairs is the difference of means."""
    if "rewards/margins" in row or not {"rewards/chosen", "rewards/rejected"} <= row.keys():
        return row
    return {**row, "rewards/margins": row["rewards/chosen"] - row["rewards/rejected"]}
