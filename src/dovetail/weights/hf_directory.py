"""HF model directories, local or from the hub at a commit: config, head and auxiliary files."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download

from dovetail.arch.common import Config
from dovetail.arch.registry import choose_spec
from dovetail.arch.transformers_spec import AnySpec
from dovetail.errors import CheckpointError, ModelError, raise_disk_problem
from dovetail.nn.decoder import Head
from dovetail.weights.config_file import CONFIG, pinned, read_config, unmerged
from dovetail.weights.hf_reader import TensorSource
from dovetail.weights.safe_paths import TOKENIZER_FILES, AuxiliaryFiles, auxiliary_files
from dovetail.weights.safetensors import dump_json
from dovetail.weights.shards import Dtypes

ADAPTED = ("lora_", ".base_layer.", ".modules_to_save.")  # peft's
EngineName = Literal["auto", "native", "transformers"]
FETCHED = ("*.safetensors", "*.json")
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
    """An HF model directory, but for its weights."""

    path: Path
    config: Config
    spec: AnySpec
    auxiliary: Mapping[str, Path]
    adapter: Path | None = None  # PEFT's directory, whose products are added to the weights

    @classmethod
    def open(
        cls, name: str | Path, engine: EngineName = "auto", adapter: str | None = None
    ) -> "Pretrained":
        path = locate(name)
        config = read_config(path)
        added = None if adapter is None else Path(adapter)
        return cls(path, config, choose_spec(config, engine), auxiliary_files(path), added)

    @property
    def notes(self) -> list[str]:
        if not self.spec.missing_features:
            return []
        way = "so the transformers engine runs this model (--engine transformers)"
        return [f"{self.spec.missing_features}; {way}"]

    @property
    def has_tokenizer(self) -> bool:
        return any(name in self.auxiliary for name in TOKENIZER_FILES)


@dataclass(frozen=True)
class CheckpointSource:
    """What a saved model takes over from the checkpoint that it was loaded from."""

    dtype_of: Dtypes
    checkpoint_names: tuple[str, ...]
    auxiliary: AuxiliaryFiles
    name: str = ""  # the directory


@dataclass(frozen=True)
class StoredHead:
    """A checkpoint's head: our names -> its names, missing ones, ignored ones."""

    kind: Head
    aliases: Mapping[str, str]
    fresh: tuple[str, ...]
    ignore: tuple[str, ...] = ("lm_head.*", "language_model.lm_head.*")


LM_HEAD = StoredHead("lm", {}, (), ())


def locate(name: str | Path) -> Path:
    """Return the directory of a model, fetched from the hub where `name` says so.

    CheckpointError.
    """
    hub = pinned(name)
    if hub is None:
        return Path(name)
    repository, revision = hub
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(FETCHED)))
    except (OSError, ValueError) as error:
        if isinstance(error, OSError):
            raise_disk_problem(error)
        raise CheckpointError(f"{name} could not be fetched from the hub: {error}") from error


def refuse_adapters(source: TensorSource, path: Path) -> None:
    for name in source.names:
        if any(part in name for part in ADAPTED):
            raise unmerged(path, name)


def find_value_head(
    source: TensorSource, path: Path, *, fresh: bool, bias: bool = True
) -> StoredHead:
    """Return the value head of a checkpoint. ModelError.

    fresh: a new one where it has none. bias=False: the head of a reward model.
    """
    kind: Head = "value" if bias else "value_without_bias"
    for stem in HEAD_STEMS:
        weight = f"{stem}.weight"
        offset = f"{stem}.bias"
        if weight not in source.names:
            continue
        if stem == "lm_head" and source.shape(weight)[0] != 1:
            continue
        aliases = {"score.weight": weight}
        if offset in source.names:
            if not bias:
                raise ModelError(
                    f"{path}: its value head has a bias ({offset}), which transformers' models "
                    "ForSequenceClassification lack; start a reward model from a language model or "
                    "from a reward model"
                )
            return StoredHead("value", {**aliases, "score.bias": offset}, ())
        if stem == "score" or not bias:
            return StoredHead("value_without_bias", aliases, ())
        return StoredHead("value", aliases, ("score.bias",))
    if not fresh:
        known = ", ".join(f"{stem}.weight" for stem in HEAD_STEMS)
        raise ModelError(
            f"{path} has no value head: expected one of {known} (lm_head with one row); give a "
            "reward or "
            'value model, or --head lm (in the library head="lm", '
            "or EngineOptions(fresh_head_seed=0) for a new head)"
        )
    return StoredHead(kind, {}, HEAD_NAMES if bias else HEAD_NAMES[:1])


def stored_head(source: TensorSource, pretrained: Pretrained) -> StoredHead:
    head = find_value_head(source, pretrained.path, fresh=True)
    is_lm_head = head.aliases.get("score.weight") == "lm_head.weight"
    only_token = is_lm_head and pretrained.spec.vocab_size == 1
    return head if head.aliases and not only_token else LM_HEAD


def saved_config(config: Config, head: Head, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the config with the head and dtype of saved weights."""
    changed = dict(config)
    if dtype is not None:
        keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
        changed |= dict.fromkeys(keys, str(dtype).removeprefix("torch."))
    if head == "lm":
        return changed
    kind = "ForTokenClassification" if head == "value" else "ForSequenceClassification"
    words = str(config["model_type"]).split("_")
    family = "".join(word.capitalize() for word in words)  # as transformers names its classes
    first, *_ = config.get("architectures") or [f"{family}ForCausalLM"]
    if head == "value" or not first.endswith(kind):
        changed["architectures"] = [re.sub(r"(For\w+|Model)$", "", first) + kind]
        changed["num_labels"] = 1
        changed["id2label"] = {"0": "LABEL_0"}
        changed["label2id"] = {"LABEL_0": 0}
    return changed


def saved_auxiliary(
    pretrained: Pretrained, head: Head, dtype: torch.dtype | None
) -> AuxiliaryFiles:
    """Return the auxiliary files, with the config of saved weights."""
    changed = saved_config(pretrained.config, head, dtype)
    if changed == dict(pretrained.config):
        return pretrained.auxiliary
    return {**pretrained.auxiliary, CONFIG: dump_json(changed)}
