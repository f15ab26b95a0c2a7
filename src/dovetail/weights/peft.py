"""PEFT's directories of adapters: `adapter_config.json` and `adapter_model.safetensors`."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from dovetail.errors import CheckpointError, listing
from dovetail.jsonl import parse_json
from dovetail.nn.adapter_options import AdapterOptions
from dovetail.nn.model import StagedModel
from dovetail.parallel.consensus import agreed, of_all
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import as_index, checkpoint_shapes, whole
from dovetail.weights.adapters import DOWN, whole_adapters
from dovetail.weights.atomic import staged, write_auxiliary, write_file
from dovetail.weights.hf_reader import StoredRegion, StoredTensor, TensorSource
from dovetail.weights.safe_paths import (
    ADAPTER_CONFIG,
    AuxiliaryFiles,
    contained,
    refuse_without_adapter,
)
from dovetail.weights.safetensors import TensorFile, TensorFileWriter, TensorSpec, dump_json
from dovetail.weights.shards import LocalParam, adapter_params

T = TypeVar("T")
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
OF_THE_MODEL = ("config.json", "generation_config.json")
METADATA = (("format", "pt"),)
# Keys of PEFT's config that change what an adapter computes, and the only value that is read.
ONLY: Mapping[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "fan_in_fan_out": False,
    "layers_to_transform": None,
    "modules_to_save": None,
    "layer_replication": None,
    "trainable_token_indices": None,
    "lora_bias": False,
}


def adapter_weights(
    model: StagedModel, mesh: Mesh, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield PEFT's names and tensors, whole, on every rank. Collective.

    dtype: default: as they are trained.
    """
    assert model.adapter is not None
    stacked = model.adapter.experts == "stacked"
    for name, tensor in whole_adapters(model, mesh, dtype):
        yield from as_stored(name, tensor, stacked=stacked)


def as_stored(name: str, tensor: Tensor, *, stacked: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield PEFT's names and tensors of our `MODULE.lora_A`."""
    if tensor.dim() == 2:
        yield f"{PREFIX}{name}.weight", tensor
    elif stacked:
        yield stacked_name(name), to_stacked(name, tensor)
    else:
        for expert, matrix in enumerate(tensor):
            yield expert_name(name, expert), matrix


def expert_name(name: str, expert: int) -> str:
    """`mlp.experts.gate_proj.lora_A` -> PEFT's name of one expert's."""
    module, _, leaf = name.rpartition(".")
    stem, _, matrix = module.rpartition(".")
    return f"{PREFIX}{stem}.{expert}.{matrix}.{leaf}.weight"


def stacked_name(name: str) -> str:
    """`mlp.experts.gate_up_proj.lora_A` -> PEFT's name of a `target_parameters` adapter.

    PEFT wraps the module of the experts once for each of its tensors, the first one innermost.
    """
    module, _, leaf = name.rpartition(".")
    stem, _, tensor = module.rpartition(".")
    wrapped = f"{stem}.base_layer" if tensor == "gate_up_proj" else stem
    return f"{PREFIX}{wrapped}.{leaf}.weight"


def to_stacked(name: str, tensor: Tensor) -> Tensor:
    """[E, rank, in] -> [E rank, in], or [E, out, rank] -> [out, rank E]."""
    if name.endswith(DOWN):
        return tensor.flatten(0, 1)
    return tensor.permute(1, 2, 0).flatten(1)


def from_stacked(name: str, stored: Tensor, experts: int) -> Tensor:
    """Return the inverse of `to_stacked`."""
    if name.endswith(DOWN):
        return stored.unflatten(0, (experts, -1))
    return stored.unflatten(1, (-1, experts)).permute(2, 0, 1)


def save_adapter(
    model: StagedModel, path: Path, mesh: Mesh, base: str, auxiliary: AuxiliaryFiles
) -> None:
    """Write PEFT's directory of the adapter, atomically. Collective.

    base: the name of the base model. auxiliary: its files; those of its tokenizer are written too.
    """
    assert model.adapter is not None
    stacked = model.adapter.experts == "stacked"
    tensors = {}
    leaves = set()
    for name, whole_tensor in whole_adapters(model, mesh):
        *_, parent, leaf, _ = name.split(".")
        leaves.add(f"experts.{leaf}" if parent == "experts" and stacked else leaf)
        for stored, tensor in as_stored(name, whole_tensor, stacked=stacked):
            tensors[stored] = tensor.cpu().contiguous()
    config = peft_config(model.adapter, leaves, base)
    with staged(path, mesh) as stage, stage.verdict.catch():
        if not stage.lead:
            return
        kept = {name: file for name, file in auxiliary.items() if name not in OF_THE_MODEL}
        write_auxiliary(kept, stage.path)
        write_file(stage.path / ADAPTER_CONFIG, dump_json(config))
        specs = [TensorSpec(name, x.dtype, tuple(x.shape)) for name, x in tensors.items()]
        writer = TensorFileWriter(stage.path / WEIGHTS, specs, dict(METADATA))
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.close()


def peft_config(options: AdapterOptions, leaves: Collection[str], base: str) -> dict[str, Any]:
    """Return the content of `adapter_config.json`. leaves: the last names of adapted modules."""
    stacked = ("gate_up_proj", "down_proj") if options.experts == "stacked" else ()
    parameters = [f"experts.{leaf}" for leaf in stacked if f"experts.{leaf}" in leaves]
    targets = sorted(leaf for leaf in leaves if "." not in leaf)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": targets,
        "exclude_modules": [*options.exclude] or None,
        "modules_to_save": None,
        "use_rslora": options.rslora,
        "use_dora": False,
        "fan_in_fan_out": False,
        "rank_pattern": dict(options.rank_pattern),
        "alpha_pattern": dict(options.alpha_pattern),
        "layers_to_transform": None,
        "target_parameters": parameters or None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def read_options(path: Path) -> AdapterOptions:
    """Return the options of PEFT's directory. CheckpointError for what is not read."""
    refuse_without_adapter(path)
    file = path / ADAPTER_CONFIG
    config = parse_json(contained(path, ADAPTER_CONFIG).read_bytes(), str(file))
    for key, value in ONLY.items():
        if config.get(key, value) not in (value, None, []):
            found = json.dumps(config[key])
            raise CheckpointError(f"{file}: {key} is {found}; read are adapters with {value!r}")
    parameters = _names(config, "target_parameters", file)
    return AdapterOptions(
        rank=_rank(config.get("r"), "r", file),
        alpha=_number(config.get("lora_alpha"), "lora_alpha", file),
        targets=(*_names(config, "target_modules", file), *parameters),
        exclude=_names(config, "exclude_modules", file),
        rslora=config.get("use_rslora") is True,
        rank_pattern=_by_module(config, "rank_pattern", _rank, file),
        alpha_pattern=_by_module(config, "alpha_pattern", _number, file),
        experts="stacked" if parameters else "per_expert",
    )


def _number(value: Any, key: str, file: Path) -> float:
    if type(value) not in (int, float) or not value > 0:
        raise CheckpointError(f"{file}: {key} is {json.dumps(value)}; expected a positive number")
    return float(value)


def _rank(value: Any, key: str, file: Path) -> int:
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{file}: {key} is {json.dumps(value)}; expected a whole number")
    return value


def _by_module(
    config: Mapping[str, Any], key: str, read: Callable[[Any, str, Path], T], file: Path
) -> dict[str, T]:
    values = config.get(key) or {}
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: {key} is {json.dumps(values)}; expected names with numbers")
    return {name: read(value, f"{key}[{name}]", file) for name, value in values.items()}


def _names(config: Mapping[str, Any], key: str, file: Path) -> tuple[str, ...]:
    values = config.get(key) or []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise CheckpointError(f"{file}: {key} is {json.dumps(values)}; expected a list of names")
    return tuple(values)


def load_adapter(model: StagedModel, path: Path, mesh: Mesh) -> None:
    """Fill the adapters from PEFT's directory. CheckpointError on every rank. Collective."""
    assert model.adapter is not None
    with agreed(mesh):
        source = open_adapter(path)
    used: set[str] = set()
    problems = []
    for param in adapter_params(model, mesh):
        names = _stored_names(param, stacked=model.adapter.experts == "stacked")
        used.update(names)
        missing = [name for name in names if name not in source.names]
        problems += [f"missing: {name}" for name in missing]
        if missing:
            continue
        stored = _read(param, names, source)
        for region in param.regions:
            if stored.shape != region.checkpoint_shape:
                expected = list(region.checkpoint_shape)
                problems.append(f"mis-shaped: {names[0]}: {param.name} is {expected} here")
                break
            values = stored[as_index(region.checkpoint_slice)]
            target = param.local[as_index(region.local_slice)]
            target.copy_(values)
    merged: dict[str, None] = {}
    for their_problems, their_used in of_all([problems, sorted(used)], mesh):
        merged |= dict.fromkeys(their_problems)
        used.update(their_used)
    merged |= {f"extra: {name}": None for name in source.names if name not in used}
    if merged:
        question = "is it an adapter of this model?"
        raise CheckpointError(f"{path} does not fit the model; {question}\n{listing([*merged])}")


def _stored_names(param: LocalParam, *, stacked: bool) -> list[str]:
    if len(param.shape) == 2:
        return [f"{PREFIX}{param.name}.weight"]
    if stacked:
        return [stacked_name(param.name)]
    (count, *_) = checkpoint_shapes(param.name, param.placement, param.shape)[param.name]
    return [expert_name(param.name, expert) for expert in range(count)]


def _read(param: LocalParam, names: Sequence[str], source: TensorSource) -> Tensor:
    stored = [source.read(name) for name in names]
    if len(param.shape) == 2:
        return stored[0]
    if len(stored) > 1:
        return torch.stack(stored)
    (count, *_) = checkpoint_shapes(param.name, param.placement, param.shape)[param.name]
    return from_stacked(param.name, stored[0], count)


def open_adapter(path: Path) -> TensorSource:
    file = TensorFile(contained(path, WEIGHTS))
    tensors = {}
    for name, entry in file.entries.items():
        region = StoredRegion(WEIGHTS, name, whole(entry.shape))
        tensors[name] = StoredTensor(entry.dtype, entry.shape, (region,))
    return TensorSource(path, {WEIGHTS: file}, tensors)
