"""`dovetail inspect`."""

import argparse
from collections.abc import Mapping
from math import prod
from pathlib import Path

from dovetail.arch.registry import choose_spec
from dovetail.checkpoint.manifest import TRAINING, Manifest
from dovetail.checkpoint.reader import ShardedReader
from dovetail.errors import CheckpointError
from dovetail.factory.layouts import max_positions
from dovetail.launch.process import put
from dovetail.records.runs import METRICS, read_runs
from dovetail.run.paths import CHECKPOINTS, CONFIG as RUN_CONFIG, HF
from dovetail.weights.config_file import CONFIG, read_config
from dovetail.weights.hf_reader import HFReader, StoredTensor
from dovetail.weights.safe_paths import MANIFEST, auxiliary_files

SHOWN = ("loss", "reward_mean", "grad_norm", "tokens_per_second")


def run(args: argparse.Namespace) -> None:
    path = Path(args.checkpoint)
    if (path / MANIFEST).is_file():
        _show_sharded(path, args.verify)
    elif any((path / name).is_file() for name in (RUN_CONFIG, METRICS)):
        put(_run_summary(path))
        if args.verify:
            for step in _steps(path):
                _show_sharded(step, verify=True)
    elif (path / CONFIG).is_file():
        put(_model_summary(path))
        put(
            "no checksums: files of Hugging Face have none; headers and sizes agree\n"
            if args.verify
            else ""
        )
    else:
        holds = (
            f"holds no {MANIFEST}, {CONFIG} or {RUN_CONFIG}" if path.is_dir() else "is no directory"
        )
        problem = holds if path.exists() else "does not exist"
        raise CheckpointError(
            f"{path} {problem}; give a sharded checkpoint, an HF directory, or a run_dir"
        )


def _show_sharded(path: Path, verify: bool) -> None:
    reader = ShardedReader(path)
    put(_summary(path, reader.manifest))
    if verify:
        reader.verify()
        put("verified: every piece matches its checksum\n")


def _steps(run: Path) -> list[Path]:
    return sorted(path for path in (run / CHECKPOINTS).glob("step_*") if path.is_symlink())


def _run_summary(path: Path) -> str:
    (run,) = read_runs([path])
    steps = run.rows[-1]["step"] if run.rows else 0
    numbers = [
        f"{key} {run.rows[-1][key]:.4g}"
        for key in SHOWN
        if run.rows and run.rows[-1].get(key) is not None
    ]
    state = (
        "finished" if run.finished else "not finished; the same `dovetail train` command goes on"
    )
    fields = {
        "run": str(path),
        "state": state,
        "steps": f"{steps} of {run.config.get('trainer.steps', '?')}",
        "last step": ", ".join(numbers) or "none",
        "algorithm": str(run.config.get("algorithm.name", "?")),
        "model": str(run.config.get("model.path", "?")),
        "checkpoints": ", ".join(step.name for step in _steps(path)) or "none",
        "final model": str(path / HF) if run.finished else "none yet",
        "problems": "; ".join(run.problems) or "none",
    }
    return _lines(fields)


def _model_summary(path: Path) -> str:
    config = read_config(path)
    spec = choose_spec(config, "auto")
    reader = HFReader(path)
    attention = spec.attention
    experts = spec.moe.num_experts if spec.moe else 0
    fields = {
        "model": str(path),
        "family": f"{spec.family}, run by the {spec.engine} engine",
        "sizes": f"{spec.depth} layers, {attention.num_heads} attention and {attention.num_kv_heads} key-value heads"
        + f", {experts} experts" * bool(experts)
        + f", {spec.vocab_size:,} words",
        "positions": str(max_positions(config) or "unknown"),
        "tensors": _sizes(reader.tensors),
        "files": ", ".join(auxiliary_files(path)) or "none",
    }
    return _lines(fields)


def _lines(fields: Mapping[str, str]) -> str:
    return "".join(f"{name:<11} {value}\n" for name, value in fields.items())


def _summary(path: Path, manifest: Manifest) -> str:
    training = {
        name: tensor for name, tensor in manifest.tensors.items() if name.startswith(TRAINING)
    }
    model = {name: tensor for name, tensor in manifest.tensors.items() if name not in training}
    fields = {
        "checkpoint": str(path),
        "step": "none" if manifest.step is None else str(manifest.step),
        "layout": ",".join(f"{name}={degree}" for name, degree in manifest.layout.items()),
        "tensors": _sizes(model),
        "training": "none" if manifest.state is None else _sizes(training),
        "pieces": f"{len(manifest.pieces)} files, {sum(file.size for file in manifest.pieces.values()):,} bytes",
        "files": ", ".join(manifest.auxiliary) or "none",
    }
    details: dict[str, object] = {}
    for role in sorted({name.removeprefix(TRAINING).rpartition("/")[0] for name in training}):
        details[role] = _sizes(
            {n: tensor for n, tensor in training.items() if n.startswith(f"{TRAINING}{role}/")}
        )
    details |= {
        name: x for name, x in (manifest.state or {}).items() if isinstance(x, str | int | float)
    }
    return _lines(fields) + "".join(f"  {name:<20} {value}\n" for name, value in details.items())


def _sizes(tensors: Mapping[str, StoredTensor]) -> str:
    values = sum(prod(tensor.shape) for tensor in tensors.values())
    size = sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    return f"{len(tensors)} ({values:,} values, {', '.join(dtypes)}, {size:,} bytes)"
