"""Checks of layouts by a config alone. Imports no torch."""

import json
from pathlib import Path
from typing import Any

from dovetail.arch.registry import FAMILIES, choose_spec, ulysses_degree, validate_layout
from dovetail.arch.spec import ArchSpec
from dovetail.arch.transformers_spec import AnySpec, TransformersSpec
from dovetail.errors import LayoutError
from dovetail.parallel.layout import Layout
from dovetail.pipeline.partition import check_pipeline


def check_layout(spec: AnySpec, layout: Layout) -> Layout:
    """Raises LayoutError if the model or engine does not support the layout."""
    if isinstance(spec, TransformersSpec) and (layout.tp, layout.pp, layout.ep) != (1, 1, 1):
        known = f"model_type is {spec.family!r}; known families: {', '.join(FAMILIES)}; others, and those with "
        reason = f"{known}engine=transformers, are cut"
        if spec.lacking:
            reason = f"{spec.lacking}; --engine transformers may run it, but cuts"
        raise LayoutError(f"layout {layout}: {reason} by cp and dp alone; set tp=1, pp=1 and ep=1")
    if layout.cp_mode != "auto" and layout.cp == 1:
        raise LayoutError(f"layout: cp_mode={layout.cp_mode} says how to cut by cp; leave it out at cp=1")
    check_pipeline(spec, layout)
    if isinstance(spec, ArchSpec):
        validate_layout(spec, layout)
    ulysses_degree(spec, layout)  # refuses a cp_mode that does not fit
    return layout


def check_directory(path: str, engine: str, layout: Layout, *, foreign: bool = True) -> None:
    """Raises LayoutError by config.json in `path`, if it can be read.

    foreign: check models that transformers runs, too.
    """
    try:
        config: Any = json.loads((Path(path) / "config.json").read_bytes())
        if not isinstance(config, dict):
            return
        spec = choose_spec(config, engine)
    except (OSError, ValueError, RecursionError):
        return
    if foreign or isinstance(spec, ArchSpec):
        check_layout(spec, layout)
