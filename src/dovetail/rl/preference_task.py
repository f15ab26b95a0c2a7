"""One step on preferences."""

import math
from array import array
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, replace

import torch

from dovetail.batch.packed import PackedBatch
from dovetail.data.examples import Preference
from dovetail.engine.base import StepReport
from dovetail.engine.native import Engine
from dovetail.rl.algorithms.preference import PreferenceAlgorithm
from dovetail.rl.step_metrics import Row, length_metrics, update_metrics
from dovetail.rl.tasks import RowsTask, inner_batches, update_work

Rows = Seq[Preference]


@dataclass(kw_only=True)
class PreferenceTask(RowsTask):
    """Trains on pairs, or on completions that are marked. max_tokens: of a sequence."""

    algorithm: PreferenceAlgorithm
    max_tokens: int
    reference: Engine | None = None

    def step(self, step: int, stopping: Callable[[], bool] = bool) -> Row | None:
        self._score_once(step)
        batch = self._scored(self.rows_of(step), step + 1)
        reports = []
        for part in inner_batches(batch, self.recipe, step):
            complete = self._complete(part)
            self.progress.phase("update", step + 1)
            report = self.policy.train_step(complete, self.algorithm.loss)
            reports.append(without_nan(report))
        return {
            **with_margins(update_metrics(reports)),
            "tokens": len(batch),
            **length_metrics("sequence_length", batch.lengths),
            "work": {"update": update_work(batch, self.recipe)},
        }

    def evaluate(self, step: int) -> Row:
        self._score_once(step)
        return super().evaluate(step)

    def measure(self, name: str, rows: Rows) -> Row:
        batch = self._complete(self._scored(rows))
        counted = batch.compact(batch.mask.nonzero().flatten())
        with torch.no_grad():
            total, count, sums = self.algorithm.loss(
                self.algorithm.stats(batch, self.policy), counted
            )
        metrics = {
            name: float(s.total) / float(s.count) for name, s in sums.items() if float(s.count)
        }
        return with_margins({"loss": float(total) / float(count), **metrics})

    def _score_once(self, step: int) -> None:
        """Scores all rows with the reference before the first step, and frees it."""
        if self.reference is None or not self.algorithm.scores_reference_once:
            return
        self.progress.phase("score", step)
        self.rows = self._with_reference(self.rows, self.reference)
        self.held_out = self._with_reference(self.held_out, self.reference)
        self.eval_sets = {
            name: self._with_reference(rows, self.reference)
            for name, rows in self.eval_sets.items()
        }
        self.reference = None

    def _with_reference(self, rows: Rows, reference: Engine) -> list[Preference]:
        """Returns pairs with the reference's log-probs as a field. Collective."""
        count = self.recipe.trainer.prompts_per_step
        done = []
        for start in range(0, len(rows), count):
            some = rows[start : start + count]
            batch = self.algorithm.pack(some)
            scored = [
                {"reference_logprob": array("d", x.tolist())}
                for x in batch.unpack(reference.score(batch).logprob, by_token=True)
            ]
            for row, chosen, rejected in zip(some, scored[::2], scored[1::2], strict=True):
                assert row.chosen is not None and row.rejected is not None
                first = replace(row.chosen, fields=chosen)
                second = replace(row.rejected, fields=rejected)
                done.append(replace(row, chosen=first, rejected=second))
        return done

    def _scored(self, rows: Rows, step: int | None = None) -> PackedBatch:
        batch = self.algorithm.pack(rows)
        if self.reference is None:
            return batch
        if step is not None:
            self.progress.phase("score", step)
        return batch.with_fields(reference_logprob=self.reference.score(batch).logprob)

    def _complete(self, batch: PackedBatch) -> PackedBatch:
        return self.algorithm.complete(batch, self.policy, self.reference, self.max_tokens)


def without_nan(report: StepReport) -> StepReport:
    metrics = {name: x for name, x in report.metrics.items() if not math.isnan(x)}
    return replace(report, metrics=metrics)


def with_margins(row: Row) -> Row:
    """Adds the difference of means, where completions have no pairs."""
    if "rewards/margins" in row or not {"rewards/chosen", "rewards/rejected"} <= row.keys():
        return row
    return {**row, "rewards/margins": row["rewards/chosen"] - row["rewards/rejected"]}
