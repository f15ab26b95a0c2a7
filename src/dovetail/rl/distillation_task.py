"""One step of distillation, on rows with completions or on the student's samples."""

import random
import zlib
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from dovetail.batch.loss import LossFn
from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.data.examples import Prompt
from dovetail.engine.native import Engine
from dovetail.engine.teacher import Teacher, evaluate
from dovetail.launch.progress import Phase
from dovetail.rl.algorithms.distillation import Distillation
from dovetail.rl.collect import requests_for
from dovetail.rl.experience import pack_samples, score_old
from dovetail.rl.samples import Sample, sample_row
from dovetail.rl.step_metrics import Row, sample_metrics, update_metrics
from dovetail.rl.tasks import RowsTask, inner_batches, lengths_of, update_work, weighted
from dovetail.sampler.base import Sampler, SamplingParams
from dovetail.sampler.turn import generate_all

Rows = Seq[Sequence | Prompt]


@dataclass(kw_only=True)
class DistillationTask(RowsTask):
    """Trains a student on a teacher's distributions.

    teacher: an engine where it scores sampled tokens alone. sampler: where the student samples.
    """

    algorithm: Distillation
    teacher: Teacher | Engine
    sampler: Sampler | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    decode: Callable[[Seq[int]], str] = str
    samples: list[Sample] = field(init=False, default_factory=list)  # of the last step

    def sample_rows(self) -> list[dict[str, Any]]:
        return [sample_row(sample) for sample in self.samples]

    def step(self, step: int, stopping: Callable[[], bool] = bool) -> Row | None:
        rows = self.rows_of(step)
        on_policy = self.is_on_policy(step)
        self.samples = []
        if on_policy:
            self.progress.phase("push", step + 1)
            self.samples = self._sampled(rows, replace(self.sampling, step=step))
            self.progress.phase("wait")
            if stopping():
                return None
        batch = self._packed(self.samples or rows)
        self.progress.phase("score", step + 1)
        taught, loss = self.taught(batch)
        self.progress.phase("update", step + 1)
        reports = [
            self.policy.train_step(part, loss) for part in inner_batches(taught, self.recipe, step)
        ]
        lengths = lengths_of(batch)
        work = {}
        if self.samples:
            metrics = sample_metrics(self.samples, compared=False)
            lengths = {name: x for name, x in metrics.items() if not name.startswith("reward")}
            tokens = sum(len(sample.completion.ids) for sample in self.samples)
            work["rollout"] = (tokens, len(self.samples))
        work["score"] = (len(batch), batch.num_sequences)
        work["update"] = update_work(batch, self.recipe)
        row = {"tokens": len(batch), "on_policy": float(on_policy), **lengths, "work": work}
        return {**update_metrics(reports), **row}

    def measure(self, name: str, rows: Rows) -> Row:
        """Returns the loss and its metrics; with lmbda 1 on samples of the same noise every time."""
        given: Seq[Sequence | Prompt | Sample] = rows
        if self.algorithm.section.lmbda == 1:
            seed = zlib.crc32(f"{self.sampling.seed}/eval/{name}".encode())
            given = self._sampled(rows, replace(self.sampling, samples=1, seed=seed), "eval")
        report = evaluate(self.policy, *self.taught(self._packed(given)))
        return {"loss": report.loss, **report.metrics}

    def is_on_policy(self, step: int) -> bool:
        drawn = random.Random(f"{self.recipe.trainer.seed}/{step}/on_policy").random()
        return drawn < self.algorithm.section.lmbda

    def taught(self, batch: PackedBatch) -> tuple[PackedBatch, LossFn]:
        """Returns the batch with the teacher's fields, and the loss that reads them."""
        if isinstance(self.teacher, Teacher):
            batch, states = self.teacher.read(batch)
            return batch, self.algorithm.divergence_loss(states)
        if self.algorithm.fields.old_logprob == "policy":
            batch = score_old(self.policy, batch, "none")
        batch = batch.with_routing(None)
        scored = self.teacher.score(batch).logprob
        return batch.with_fields(teacher_logprob=scored), self.algorithm.sampled_loss()

    def _sampled(
        self, rows: Rows, params: SamplingParams, phase: Phase = "rollout"
    ) -> list[Sample]:
        assert self.sampler is not None
        self.sampler.refill(self.policy.weights(self.sampler.dtype))
        self.progress.phase(phase)
        prompts = [prompt_of(number, row) for number, row in enumerate(rows)]
        turns = generate_all(self.sampler, requests_for(prompts, params))
        return [Sample(prompts[turn.row], turn, self.decode(turn.ids), 0.0) for turn in turns]

    def _packed(self, rows: Seq[Sequence | Prompt | Sample]) -> PackedBatch:
        section = self.algorithm.section
        temperature = section.temperature
        if section.is_sampled:
            temperature = self.recipe.rollout.temperature
        if isinstance(rows[0], Sample):
            batch = pack_samples(cast("list[Sample]", rows), temperature)
            return weighted(batch, self.recipe)
        batch = PackedBatch.pack(cast("Seq[Sequence]", rows))
        if temperature != 1:
            batch = batch.with_fields(temperature=torch.full((len(batch),), temperature))
        return weighted(batch, self.recipe)


def prompt_of(number: int, row: Sequence | Prompt) -> Prompt:
    """Returns the tokens before the first trained one, at least one."""
    if isinstance(row, Prompt):
        return row
    mask = [True] if row.mask is None else [bool(kept) for kept in row.mask]
    start = max(1, mask.index(True)) if True in mask else len(mask)
    return Prompt(id=number, ids=tuple(row.ids[:start]), media=row.media)
