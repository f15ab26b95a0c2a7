"""The entries of `trainer.loggers`, and `trainer.profile`."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from dovetail.recipe.types import NotStrict, Section, key


class LoggerSection(Section):
    """An experiment tracker; keys and addresses come from its environment variables."""

    name: Literal["wandb", "mlflow", "tensorboard", "trackio", "swanlab"] = Field(
        description="an extra of the package"
    )
    project: str | None = key(
        None, "null: the tracker's variable, such as WANDB_PROJECT, else dovetail"
    )
    entity: str | None = key(None, "team of wandb, workspace of swanlab")
    run_name: str | None = key(None, "null: the last part of run_dir")
    tags: Annotated[tuple[str, ...], NotStrict] = key((), "of the run; wandb, swanlab and mlflow")
    group: str | None = key(None, "of runs; not tensorboard")


AsSteps = BeforeValidator(lambda given: (given,) if isinstance(given, int) else given)


def _as_sections(given: Any) -> Any:
    entries = given if isinstance(given, list | tuple) else [given]
    return tuple({"name": entry} if isinstance(entry, str) else entry for entry in entries)


class ProfileSection(Section):
    """Which steps are recorded in run_dir/profile (performance.md); SIGUSR2 to a running job records its next step."""

    steps: Annotated[tuple[PositiveInt, ...], AsSteps, NotStrict] = key(
        (), "from 1; [3, 5] is these two"
    )
    memory: bool = key(False, "also allocations: peaks by phase, and on GPUs a snapshot")


Loggers = Annotated[tuple[LoggerSection, ...], BeforeValidator(_as_sections), NotStrict]
