"""Kimi-VL, whose tower and projector are code in its own directory: run only where the user trusts that code.

Its text backbone is a DeepSeek-V3, for which transformers has a class that calls attention as we need it: that class
takes the place of the one in the directory. Names of weights are those of the directory's code.
"""

import contextlib
import fcntl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn
from transformers.utils.hub import HF_MODULES_CACHE

from dovetail.errors import ModelError, quoted

FAMILY, TEXT = "kimi_vl", "deepseek_v3"
CLASS = "AutoModelForCausalLM"  # under which the directory's config names its model
LOCK = ".dovetail.lock"


def is_foreign(config: Mapping[str, Any]) -> bool:
    """Whether transformers has no class for a raw config.json, which names code of its own."""
    return config.get("model_type") not in transformers.CONFIG_MAPPING and "auto_map" in config


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """One process of a host: transformers copies code into its cache to import it, and half a file does not import."""
    cache = Path(HF_MODULES_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / LOCK, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remote_config(config: Mapping[str, Any], code: Path | None) -> "transformers.PreTrainedConfig":
    """The config as the code in the directory `code` reads it; None: that code is not trusted. Raises ModelError."""
    named = config.get("model_type")
    if named != FAMILY or CLASS not in config["auto_map"]:
        raise ModelError(
            f"model_type {quoted(named)} is code that comes with the model; of such, {FAMILY} alone is run"
        )
    if code is None:
        raise ModelError(
            f"model_type {quoted(named)} is code that comes with the model; --trust-remote-code (model.trust_remote_code=true) "
            "lets it run"
        )
    with one_at_a_time():
        known: transformers.PreTrainedConfig = transformers.AutoConfig.from_pretrained(
            str(code), trust_remote_code=True, local_files_only=True
        )
    known.image_token_id, known.video_token_id = known.media_placeholder_token_id, -1
    return known


def remote_tower(known: "transformers.PreTrainedConfig") -> tuple[nn.Module, nn.Module]:
    """The tower and the projector of the directory's code, which runs."""
    with one_at_a_time():
        whole = transformers.AutoModelForCausalLM.from_config(known, trust_remote_code=True)
    return whole.get_submodule("vision_tower"), whole.get_submodule("multi_modal_projector")


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The raw config of the text backbone, as transformers' own class has it."""
    text = {**config["text_config"], "model_type": TEXT}
    text.pop("auto_map", None)
    return text


class Remote(nn.Module):
    """A base model as `Vision` expects it: transformers' text backbone beside a tower and a projector from elsewhere."""

    def __init__(
        self,
        config: "transformers.PreTrainedConfig",
        text: "transformers.PreTrainedModel",
        tower: nn.Module,
        projector: nn.Module,
    ) -> None:
        super().__init__()
        self.config = config
        self.language_model, self.vision_tower, self.multi_modal_projector = text, tower, projector

    def get_decoder(self) -> nn.Module:
        return self.language_model

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def get_video_features(self, pixels: Tensor, grids: Tensor, **_: object) -> Any:
        """Rows of features of images, each a grid (1, height, width) of patches."""
        rows = self.multi_modal_projector(self.vision_tower(pixels, grids[:, 1:]))
        return transformers.modeling_outputs.BaseModelOutputWithPooling(pooler_output=rows)
