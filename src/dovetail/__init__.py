"""The public surface of the library: `import dovetail as dt`. Names load on first use: the command line stays light."""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.batch.loss import Loss as Loss, Sum as Sum, TokenStats as TokenStats
    from dovetail.batch.packed import PackedBatch as PackedBatch, Sequence as Sequence
    from dovetail.engine.base import BatchReport as BatchReport, StepReport as StepReport
    from dovetail.engine.native import Engine as Engine
    from dovetail.factory.engine import (
        EngineOptions as EngineOptions,
        SamplingEngine as SamplingEngine,
        from_pretrained as from_pretrained,
    )
    from dovetail.factory.trainer import Trainer as Trainer
    from dovetail.optim.groups import ParamGroup as ParamGroup
    from dovetail.optim.optimizer import OptimSettings as OptimSettings
    from dovetail.parallel.layout import Layout as Layout
    from dovetail.parallel.process_group import ensure_process_group as ensure_process_group
    from dovetail.rl.samples import Sample as Sample
    from dovetail.run.callbacks import (
        TrainerCallback as TrainerCallback,
        TrainerState as TrainerState,
    )
    from dovetail.run.outcome import Outcome as Outcome
    from dovetail.sampler.turn import Completion as Completion, Turn as Turn

__version__ = "0.1.0"

HOMES: Mapping[str, str] = {
    "BatchReport": "dovetail.engine.base",
    "Completion": "dovetail.sampler.turn",
    "Engine": "dovetail.engine.native",
    "EngineOptions": "dovetail.factory.engine",
    "Layout": "dovetail.parallel.layout",
    "Loss": "dovetail.batch.loss",
    "OptimSettings": "dovetail.optim.optimizer",
    "Outcome": "dovetail.run.outcome",
    "PackedBatch": "dovetail.batch.packed",
    "ParamGroup": "dovetail.optim.groups",
    "Sample": "dovetail.rl.samples",
    "SamplingEngine": "dovetail.factory.engine",
    "Sequence": "dovetail.batch.packed",
    "StepReport": "dovetail.engine.base",
    "Sum": "dovetail.batch.loss",
    "TokenStats": "dovetail.batch.loss",
    "Trainer": "dovetail.factory.trainer",
    "TrainerCallback": "dovetail.run.callbacks",
    "TrainerState": "dovetail.run.callbacks",
    "Turn": "dovetail.sampler.turn",
    "ensure_process_group": "dovetail.parallel.process_group",
    "from_pretrained": "dovetail.factory.engine",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(
            f"module 'dovetail' has no attribute {name!r}; its public names: {', '.join(HOMES)}"
        )
    return getattr(importlib.import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return [*HOMES, "__version__"]
