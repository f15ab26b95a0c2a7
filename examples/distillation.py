"""On-policy distillation with the library alone: python examples/distillation.py STUDENT TEACHER NEW_DIRECTORY

The student samples, and its distribution at every sampled token is pulled to the teacher's (GKD, Agarwal et al. 2024).
"""

import sys

import torch

import dovetail as dt
from dovetail.engine.teacher import Teacher
from dovetail.rl.algorithms.distillation import DistillationLoss

PROMPTS = [[1, 5, 7], [1, 3], [1, 6, 2], [2, 9, 4, 4]]  # token ids


def sampled_batch(student: dt.SamplingEngine) -> dt.PackedBatch:
    """Completions behind their prompts; only completions are counted."""
    rows = []
    for completion in student.generate(PROMPTS, n=2, max_tokens=8):
        prompt = PROMPTS[completion.row]
        rows.append(
            dt.Sequence(
                [*prompt, *completion.ids], [False] * len(prompt) + [True] * len(completion.ids)
            )
        )
    return dt.PackedBatch.pack(rows)


def main(student_path: str, teacher_path: str, out: str, layout: dt.Layout) -> list[dt.StepReport]:
    """A few steps. Every rank runs all of this, with the same batch. The teacher may have a layout of its own."""
    options = dt.EngineOptions(optim=dt.OptimSettings(lr=1e-3), tokens_per_batch=64)
    student = dt.from_pretrained(student_path, layout=layout, dtype=torch.float32, options=options)
    teacher = Teacher.of(
        dt.from_pretrained(teacher_path, layout=layout, dtype=torch.float32), student
    )
    reports = []
    for _ in range(4):
        batch, states = teacher.read(sampled_batch(student))
        reports.append(
            student.train_step(batch, DistillationLoss(teacher=states, divergence="jsd", beta=0.5))
        )
    student.save_pretrained(out)
    return reports


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    student_path, teacher_path, out = sys.argv[1:]
    for report in main(student_path, teacher_path, out, dt.Layout()):
        print(
            f"divergence {report.metrics['divergence']:.4f}  entropy {report.metrics['entropy_mean']:.3f}"
        )
