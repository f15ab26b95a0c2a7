"""HF model directories, local or from the hub at a commit: config, head and side files."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download

from dovetail.arch.registry import choose_spec
from dovetail.arch.transformers_spec import AnySpec, TransformersSpec
from dovetail.errors import CheckpointError, ModelError
from dovetail.nn.decoder import Head
from dovetail.weights.config_file import CONFIG, pinned, read_config, unmerged
from dovetail.weights.hf_reader import TensorSource
from dovetail.weights.safe_paths import SideFiles, side_files
from dovetail.weights.safetensors import dump_json
from dovetail.weights.shards import Dtypes

ADAPTED = ("lora_", ".base_layer.", ".modules_to_save.")  # peft's
EngineName = Literal["auto", "native", "transformers"]
FETCHED = ("*.safetensors", "*.json")
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "tiktoken.model")
# value heads: ours, TRL's, OpenRLHF's
HEAD_STEMS = (
    "score",
    "v_head.summary",
    "v_head",
    "value_head.summary",
    "value_head",
    "classifier",
    "lm_head",
)
HEAD_NAMES = ("score.weight", "score.bias")


@dataclass(frozen=True)
class Pretrained:
    path: Path
    config: Mapping[str, Any]
    spec: AnySpec
    sides: Mapping[str, Path]

    @classmethod
    def open(cls, name: str | Path, engine: EngineName = "auto") -> "Pretrained":
        path = locate(name)
        config = read_config(path)
        return cls(path, config, choose_spec(config, engine), side_files(path))

    @property
    def notes(self) -> list[str]:
        lacking = self.spec.lacking if isinstance(self.spec, TransformersSpec) else ""
        return (
            [f"{lacking}; so the transformers engine runs this model (--engine transformers)"]
            if lacking
            else []
        )

    @property
    def has_tokenizer(self) -> bool:
        return any(name in self.sides for name in TOKENIZER_FILES)


@dataclass(frozen=True)
class CheckpointSource:
    dtype_of: Dtypes
    listed: tuple[str, ...]
    sides: SideFiles


@dataclass(frozen=True)
class StoredHead:
    """Our names -> the checkpoint's, missing ones, ignored ones."""

    kind: Head
    aliases: Mapping[str, str]
    fresh: tuple[str, ...]
    ignore: tuple[str, ...] = ("lm_head.*", "language_model.lm_head.*")


LM_HEAD = StoredHead("lm", {}, (), ())


def locate(name: str | Path) -> Path:
    if (hub := pinned(name)) is None:
        return Path(name)
    repository, revision = hub
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(FETCHED)))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{name} could not be fetched from the hub: {error}") from error


def refuse_adapters(source: TensorSource, path: Path) -> None:
    adapter = next((name for name in source.names if any(part in name for part in ADAPTED)), None)
    if adapter is not None:
        raise unmerged(path, adapter)


def find_value_head(
    source: TensorSource, path: Path, *, fresh: bool, bias: bool = True
) -> StoredHead:
    """fresh: a new one where it has none. bias=False: of a reward model."""
    for stem in HEAD_STEMS:
        weight = f"{stem}.weight"
        offset = f"{stem}.bias"
        if weight not in source.names or (stem == "lm_head" and source.shape(weight)[0] != 1):
            continue
        aliases = {"score.weight": weight}
        if offset in source.names:
            if not bias:
                raise ModelError(
                    f"{path}: its value head has a bias ({offset}), which transformers' models ForSequenceClassification lack; "
                    "start a reward model from a language model or from a reward model"
                )
            return StoredHead("value", {**aliases, "score.bias": offset}, ())
        if stem == "score" or not bias:
            return StoredHead("value_without_bias", aliases, ())
        return StoredHead("value", aliases, ("score.bias",))
    if not fresh:
        known = ", ".join(f"{stem}.weight" for stem in HEAD_STEMS)
        raise ModelError(
            f"{path} has no value head: expected one of {known} (lm_head with one row); give a reward or "
            'value model, or --head lm (in the library head="lm", or EngineOptions(fresh_head_seed=0) for a new head)'
        )
    return (
        StoredHead("value", {}, HEAD_NAMES)
        if bias
        else StoredHead("value_without_bias", {}, HEAD_NAMES[:1])
    )


def stored_head(source: TensorSource, pretrained: Pretrained) -> StoredHead:
    head = find_value_head(source, pretrained.path, fresh=True)
    only_token = (
        head.aliases.get("score.weight") == "lm_head.weight" and pretrained.spec.vocab_size == 1
    )
    return head if head.aliases and not only_token else LM_HEAD


def saved_config(
    config: Mapping[str, Any], head: Head, dtype: torch.dtype | None
) -> dict[str, Any]:
    """The config with the head and dtype of saved weights."""
    changed = dict(config)
    if dtype is not None:
        name = str(dtype).removeprefix("torch.")
        changed |= {key: name for key in ("dtype", "torch_dtype") if key in config} or {
            "dtype": name
        }
    if head == "lm":
        return changed
    kind = "ForTokenClassification" if head == "value" else "ForSequenceClassification"
    named = "".join(
        word.capitalize() for word in str(config["model_type"]).split("_")
    )  # transformers' class names
    (first, *_) = config.get("architectures") or [f"{named}ForCausalLM"]
    if head == "value" or not first.endswith(kind):
        changed |= {
            "architectures": [re.sub(r"(For\w+|Model)$", "", first) + kind],
            "num_labels": 1,
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
        }
    return changed


def saved_sides(pretrained: Pretrained, head: Head, dtype: torch.dtype | None) -> SideFiles:
    changed = saved_config(pretrained.config, head, dtype)
    if changed == dict(pretrained.config):
        return pretrained.sides
    return {**pretrained.sides, CONFIG: dump_json(changed)}
