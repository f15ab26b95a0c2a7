"""The public surface of the library: `import dovetail as dt`. Names load on first use: the command line stays light."""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.batch import Loss as Loss, PackedBatch as PackedBatch, Sequence as Sequence, Sum as Sum
    from dovetail.build.engine import EngineOptions as EngineOptions, from_pretrained as from_pretrained
    from dovetail.engine.base import Engine as Engine, StepReport as StepReport
    from dovetail.launch import ensure_process_group as ensure_process_group
    from dovetail.layout import Layout as Layout
    from dovetail.optim.optimizer import OptimSettings as OptimSettings
    from dovetail.tokenstats import TokenStats as TokenStats

__version__ = "0.1.0"

HOMES: Mapping[str, str] = {
    "Engine": "dovetail.engine.base",
    "EngineOptions": "dovetail.build.engine",
    "Layout": "dovetail.layout",
    "Loss": "dovetail.batch",
    "OptimSettings": "dovetail.optim.optimizer",
    "PackedBatch": "dovetail.batch",
    "Sequence": "dovetail.batch",
    "StepReport": "dovetail.engine.base",
    "Sum": "dovetail.batch",
    "TokenStats": "dovetail.tokenstats",
    "ensure_process_group": "dovetail.launch",
    "from_pretrained": "dovetail.build.engine",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'dovetail' has no attribute {name!r}; its public names: {', '.join(HOMES)}")
    return getattr(importlib.import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return [*HOMES, "__version__"]
