"""One training step on preferences."""

import math
from array import array
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dovetail.batch.loss import LossFn, TokenStats
from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.data.examples import Preference
from dovetail.engine.base import Engine, StepReport
from dovetail.launch.progress import Progress
from dovetail.rl.preference_losses import last_tokens, nll_fields
from dovetail.rl.step_metrics import Row, length_metrics, update_metrics
from dovetail.rl.tasks import inner_batches, never, step_rows

if TYPE_CHECKING:  # pydantic is not needed to run a task
    from dovetail.recipe.schema import Recipe

REFERENCE = "reference_logprob"
Rows = Seq[Preference]


@dataclass(kw_only=True)
class PreferenceTask:
    """DPO and its kin, and reward models.

    reference: of dpo and kto. precompute: score it once, before the first step, and drop it. longest: most tokens of a
    sequence.
    """

    recipe: "Recipe"
    policy: Engine
    loss: LossFn
    rows: Rows
    held_out: Rows
    longest: int
    reference: Engine | None = None
    precompute: bool = False
    progress: Progress = field(default_factory=Progress)
    first_row: int = 0
    parts: Seq[tuple[int, float]] = ()
    eval_sets: Mapping[str, Rows] = field(default_factory=dict)

    @property
    def trained(self) -> list[Engine]:
        return [self.policy]

    def sample_rows(self) -> list[dict[str, Any]]:
        return []

    def step(self, step: int, stopping: Callable[[], bool] = never) -> Row | None:
        self._precompute(step)
        chosen = step_rows(self.recipe, len(self.rows), step, self.first_row, self.parts)
        batch = self._scored([self.rows[i] for i in chosen], step + 1)
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
        row: Row = {}
        sets = {"eval_": self.held_out, **{f"eval/{name}/": rows for name, rows in self.eval_sets.items()}}
        for prefix, rows in sets.items():
            if rows:
                self.progress.phase("eval", step)
                batch = self._complete(self._scored(rows))
                counted = batch.compact(batch.mask.nonzero().flatten())
                with torch.no_grad():
                    total, count, sums = self.loss(self._stats(batch), counted)
                metrics = {name: float(s.total) / float(s.count) for name, s in sums.items() if float(s.count)}
                metrics = with_margins({"loss": float(total) / float(count), **metrics})
                row |= {f"{prefix}{name}": value for name, value in metrics.items()}
        return row

    def _precompute(self, step: int) -> None:
        if self.reference is None or not self.precompute:
            return
        self.progress.phase("score", step)
        add = partial(with_reference, reference=self.reference, count=self.recipe.trainer.prompts_per_step)
        self.rows, self.held_out = add(self.rows), add(self.held_out)
        self.eval_sets = {name: add(rows) for name, rows in self.eval_sets.items()}
        self.reference = None

    def _stats(self, batch: PackedBatch) -> Any:
        """Of counted tokens."""
        if self.recipe.algorithm.name == "reward":
            return self.policy.values(batch)[batch.mask]
        return TokenStats(*(x[batch.mask] for x in self.policy.score(batch)))

    def _scored(self, rows: Rows, step: int | None = None) -> PackedBatch:
        """With the log-probs of a reference that is scored live."""
        batch = pack_preferences(rows, self.recipe.algorithm.name)
        if self.reference is None:
            return batch
        if step is not None:
            self.progress.phase("score", step)
        return batch.with_fields(reference_logprob=self.reference.score(batch).logprob)

    def _complete(self, batch: PackedBatch) -> PackedBatch:
        """An optimizer step's batch with what depends on all of it."""
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
    """Pairs as groups, first the chosen one; of kto single sequences with the field `label`."""
    sequences: list[Sequence] = []
    for number, row in enumerate(rows):
        for each, label in ((row.chosen, 1.0), (row.rejected, 0.0)):
            if each is None:
                continue
            if algorithm == "kto":
                each = replace(each, fields={**each.fields, "label": label})
            else:
                each = replace(each, group=number)
            sequences.append(_with_prompt(each, chosen=label == 1) if algorithm == "orpo" else each)
    batch = PackedBatch.pack(sequences)
    return batch.with_mask(last_tokens(batch)) if algorithm == "reward" else batch


def _with_prompt(sequence: Sequence, *, chosen: bool) -> Sequence:
    """ORPO also trains the prompts of chosen rows; `completion` says which tokens the odds are of."""
    assert sequence.mask is not None
    completion = [float(kept) for kept in sequence.mask]
    mask = [True] * len(sequence.ids) if chosen else sequence.mask
    return replace(sequence, mask=mask, fields={**sequence.fields, "completion": completion})


def mismatched(batch: PackedBatch, longest: int) -> PackedBatch:
    """Each prompt with the completion of the sequence before it, cut to `longest` tokens."""
    tokens, masks = ([x.tolist() for x in column.split(batch.lengths)] for column in (batch.tokens, batch.mask))
    starts = [mask.index(True) + 1 for mask in masks]
    rows = []
    for i, (ids, start) in enumerate(zip(tokens, starts, strict=True)):
        wrong = (ids[:start] + tokens[i - 1][starts[i - 1] :])[:longest]
        mask = [False] * start + [True] * (len(wrong) - start)
        rows.append(Sequence(wrong, mask, media=batch.media[i] if batch.media else None))
    return PackedBatch.pack(rows)


def with_reference(rows: Rows, reference: Engine, count: int) -> list[Preference]:
    """Pairs with the reference's log-probs as a field of their sequences, scored `count` at a time. Collective."""
    done = []
    for start in range(0, len(rows), count):
        some = rows[start : start + count]
        batch = pack_preferences(some, "dpo")
        scored = [array("d", x.tolist()) for x in batch.unpack(reference.score(batch).logprob, by_token=True)]
        for row, chosen, rejected in zip(some, scored[::2], scored[1::2], strict=True):
            assert row.chosen is not None and row.rejected is not None
            pair = (
                replace(x, fields={REFERENCE: values}) for x, values in ((row.chosen, chosen), (row.rejected, rejected))
            )
            done.append(replace(row, **dict(zip(("chosen", "rejected"), pair, strict=True))))
    return done


def without_nan(report: StepReport) -> StepReport:
    """Without metrics that counted nothing, as of bad completions where there were none."""
    return replace(report, metrics={name: x for name, x in report.metrics.items() if not math.isnan(x)})


def with_margins(row: Row) -> Row:
    """Of completions without pairs, the difference of the means."""
    if "rewards/margins" in row or not {"rewards/chosen", "rewards/rejected"} <= row.keys():
        return row
    return {**row, "rewards/margins": row["rewards/chosen"] - row["rewards/rejected"]}
