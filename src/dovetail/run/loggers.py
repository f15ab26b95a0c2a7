"""Experiment trackers: wandb 0.31, mlflow 3.17, tensorboard 2.21, trackio 0.43, swanlab 0.10. Keys come from their variables."""

import importlib
import importlib.util
import json
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError
from dovetail.jsonl import Row, as_text
from dovetail.launch.process import from_environment
from dovetail.recipe.tracking import LoggerSection

PROJECT = "dovetail"
SHOWN_SAMPLES = 16
SAMPLES_EVERY = 10  # of a step, and steps
COLUMNS = ("id", "sample", "prompt", "completion", "answer", "reward")
GROUPS: Seq[tuple[str, str]] = (  # start of a metric's name, its replacement
    ("eval/", "eval/"), ("eval_", "eval/"), ("seconds/", "time/"), ("step_seconds", "time/step"),
    ("tokens_per_second/", "perf/tokens_per_second/"), ("samples_per_second/", "perf/samples_per_second/"),
    ("tokens", "perf/tokens"), ("mfu", "perf/mfu"), ("gpu_utilization", "perf/gpu_utilization"),
    ("trainer_idle", "perf/trainer_idle"), ("pool_", "pool/"),
    ("peak_memory_gib", "memory/peak_gib"), ("memory/", "memory/"),
    ("reward/", "reward/"), ("reward_", "reward/"), ("equal_groups", "reward/equal_groups"),
    ("response_length_", "response_length/"), ("truncated_fraction", "response_length/truncated_fraction"),
    ("stop_fraction", "response_length/stop_fraction"), ("prompt_length_", "prompt_length/"),
    ("mismatch_", "mismatch/"), ("replayed_mismatch_", "mismatch/replayed_"), ("stale_mismatch_", "mismatch/stale_"),
    ("lag_", "mismatch/lag_"), ("correction_", "correction/"), ("critic_", "critic/"), ("", "train/"),
)  # fmt: skip

Log = tuple[
    Callable[[int, Mapping[str, float], Seq[Row]], None], Callable[[], None]
]  # step, row, samples; the end


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """run_id survives a resume. first_step: of this start."""

    path: Path
    config: Mapping[str, Any]
    run_id: str = ""
    first_step: int = 1


def check_loggers(sections: Seq[LoggerSection]) -> None:
    for name in (section.name for section in sections):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # no origin: a mere folder, as wandb leaves behind
            raise ConfigError(
                f"trainer.loggers has {name}, which is not installed: pip install "
                f"'dovetail-rl[{name}]'"
            )


def grouped(row: Row) -> dict[str, float]:
    numbers = {
        k: v for k, v in row.items() if isinstance(v, (int, float)) and not isinstance(v, bool)
    }
    grouped = dict[str, float]()
    for name in numbers.keys() - {"step", "timestamp"}:
        start, group = next((start, group) for start, group in GROUPS if name.startswith(start))
        grouped[group + name.removeprefix(start)] = numbers[name]
    return grouped


def start_logger(section: LoggerSection, run: RunFacts) -> Log:
    starts = {
        "wandb": _wandb,
        "mlflow": _mlflow,
        "tensorboard": _tensorboard,
        "trackio": _trackio,
        "swanlab": _swanlab,
    }
    return starts[section.name](section, run)


def _unless_set(value: Any, default: Any, *variables: str) -> Any:
    """None: the library reads its variable."""
    return value or (None if any(map(from_environment, variables)) else default)


def _cells(samples: Seq[Row]) -> list[list[Any]]:
    plain = (str, int, float)
    rows = [[sample.get(name) for name in COLUMNS] for sample in samples]
    return [
        [cell if isinstance(cell, plain) else json.dumps(cell, default=as_text) for cell in row]
        for row in rows
    ]


def _wandb(section: LoggerSection, run: RunFacts) -> Log:
    wandb = importlib.import_module("wandb")
    started = wandb.init(
        project=_unless_set(section.project, PROJECT, "WANDB_PROJECT"),
        entity=section.entity,
        name=_unless_set(section.run_name, run.path.name, "WANDB_NAME"),
        tags=section.tags or None,
        group=section.group,
        id=_unless_set("", run.run_id, "WANDB_RUN_ID"),
        resume="allow",
        dir=str(run.path),
        config=dict(run.config),
    )
    started.define_metric("*", step_metric="step")

    def log(step: int, row: Mapping[str, float], samples: Seq[Row]) -> None:
        table = (
            {"samples": wandb.Table(columns=list(COLUMNS), data=_cells(samples))} if samples else {}
        )
        # wandb drops repeated steps of a resumed run
        started.log({"step": step, **row, **table}, step=max(step, started.step))

    return log, started.finish


def _mlflow(section: LoggerSection, run: RunFacts) -> Log:
    mlflow = importlib.import_module("mlflow")
    local = None if from_environment("MLFLOW_TRACKING_URI") else run.path.absolute()
    client = mlflow.MlflowClient(local and f"sqlite:///{local}/mlflow.db")
    project = section.project or from_environment("MLFLOW_EXPERIMENT_NAME") or PROJECT
    experiment = client.get_experiment_by_name(project)
    files = local and (local / "mlartifacts").as_uri()
    where = (
        experiment.experiment_id
        if experiment
        else client.create_experiment(project, artifact_location=files)
    )
    known = client.search_runs([where], f"tags.`dovetail.run_id` = '{run.run_id}'", max_results=1)
    tags = {"dovetail.run_id": run.run_id, **dict.fromkeys(section.tags, "true")}
    tags |= {"group": section.group} if section.group else {}
    name = section.run_name or run.path.name
    run_id = (known[0] if known else client.create_run(where, tags=tags, run_name=name)).info.run_id
    client.update_run(run_id, status="RUNNING")
    client.log_dict(run_id, dict(run.config), "config.json")

    def log(step: int, row: Mapping[str, float], samples: Seq[Row]) -> None:
        now = int(time.time() * 1000)
        client.log_batch(
            run_id, metrics=[mlflow.entities.Metric(name, x, now, step) for name, x in row.items()]
        )
        if samples:
            client.log_dict(
                run_id,
                {"columns": COLUMNS, "data": _cells(samples)},
                f"samples/step_{step:06}.json",
            )

    return log, lambda: client.set_terminated(run_id)


def _tensorboard(_: LoggerSection, run: RunFacts) -> Log:
    module = importlib.import_module("torch.utils.tensorboard")
    again = run.first_step if run.first_step > 1 else None  # hides later steps of an earlier start
    writer = module.SummaryWriter(str(run.path / "tensorboard"), purge_step=again)
    writer.add_text("config", f"```json\n{json.dumps(run.config, indent=2)}\n```")

    def log(step: int, row: Mapping[str, float], samples: Seq[Row]) -> None:
        for name, value in row.items():
            writer.add_scalar(name, value, step)
        if samples:
            writer.add_text(
                "samples", "\n\n".join(f"`{json.dumps(cells)}`" for cells in _cells(samples)), step
            )
        writer.flush()

    return log, writer.close


def _trackio(section: LoggerSection, run: RunFacts) -> Log:
    """Resumes by name."""
    project = section.project or PROJECT
    name = f"{section.run_name or run.path.name}-{run.run_id[:8]}"
    keys = {"group": section.group, "config": dict(run.config), "resume": "allow", "embed": False}
    started = importlib.import_module("trackio").init(project=project, name=name, **keys)
    return (lambda step, row, _: started.log(dict(row), step=step)), started.finish


def _swanlab(section: LoggerSection, run: RunFacts) -> Log:
    started = importlib.import_module("swanlab").init(
        project=_unless_set(section.project, PROJECT, "SWANLAB_PROJ_NAME", "SWANLAB_PROJECT_NAME"),
        workspace=section.entity,
        name=_unless_set(
            section.run_name, run.path.name, "SWANLAB_EXP_NAME", "SWANLAB_EXPERIMENT_NAME"
        ),
        tags=list(section.tags) or None,
        group=section.group,
        id=_unless_set("", run.run_id, "SWANLAB_RUN_ID"),
        resume="allow",
        log_dir=_unless_set("", str(run.path / "swanlog"), "SWANLAB_LOGDIR", "SWANLAB_LOG_DIR"),
        config=dict(run.config),
    )
    return (lambda step, row, _: started.log(dict(row), step=step)), started.finish
