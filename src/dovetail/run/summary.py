"""What a run says at its end."""

from pathlib import Path

from dovetail.run.console import curve
from dovetail.run.learning import EQUAL
from dovetail.run.outcome import Outcome
from dovetail.run.paths import CHECKPOINTS, HF


def summary(outcome: Outcome, steps: int, run_dir: Path, saved_step: int | None) -> list[str]:
    """Returns lines. steps: those of the recipe. saved_step: of the newest checkpoint."""
    rows = outcome.rows
    key = "reward_mean" if rows and "reward_mean" in rows[-1] else "loss"
    chart = curve([float(row[key]) for row in rows if row.get(key) is not None])
    lines = [f"\n{key} over {len(rows)} steps\n{chart}"] if chart else []
    lines.append("")
    for name in outcome.before:
        if name in outcome.after:
            change = f"{outcome.before[name]:.3f} -> {outcome.after[name]:.3f}"
            lines.append(_line(name, change))
    if outcome.early:
        lines.append(_line("ended early", f"after {len(rows)} of {steps} steps: {outcome.early}"))
    seconds = sum(row["step_seconds"] for row in rows)
    tokens = sum(row["tokens"] for row in rows)
    lines.append(_line("tokens/s", f"{tokens / max(seconds, 1e-9):,.0f} ({seconds:.0f} s)"))
    if rows and all(row.get("equal_groups") == 1.0 for row in rows):
        why = f"every group of samples had equal rewards, in every step; {EQUAL}"
        lines.append(_line("learned", f"nothing: {why}"))
    elif rows and not tokens:
        lines.append(_line("learned", "nothing: no step had a sample with a reward"))
    return lines + _model(outcome, run_dir, saved_step)


def _model(outcome: Outcome, run_dir: Path, saved_step: int | None) -> list[str]:
    if not outcome.stopped:
        return [_line("model", str(run_dir / HF))]
    if saved_step is None:
        return [_line("model", "not written: stopped, and there is no checkpoint")]
    goes_on = "not written: stopped; the same command goes on from the checkpoint"
    saved = run_dir / CHECKPOINTS / f"step_{saved_step:06}"
    return [_line("model", goes_on), _line("checkpoint", str(saved))]


def _line(name: str, text: str) -> str:
    return f"{name:<18} {text}"
