"""Tensors' names in checkpoints and modules."""

from collections.abc import Collection

import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import MergeModulelist, WeightConverter, WeightRenaming

from dovetail.errors import ModelError
from dovetail.weights.hf_reader import TensorSource

# (modules, older checkpoints); Kimi's on the hub and of transformers 5.23
OLD_STEMS = (
    ("model.language_model.layers.", "language_model.model.blocks."),
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.vision_tower.patch_embed.proj.", "vision_tower.encoder.patch_embed.proj."),
    ("model.vision_tower.", "vision_tower."),
    ("model.mm_projector.pre_norm.", "mm_projector.pre_norm."),
    ("model.mm_projector.in_proj.", "mm_projector.proj.0."),
    ("model.mm_projector.out_proj.", "mm_projector.proj.2."),
    ("model.mm_projector.pre_norm.", "multi_modal_projector.pre_norm."),
    ("model.mm_projector.in_proj.", "multi_modal_projector.linear_1."),
    ("model.mm_projector.out_proj.", "multi_modal_projector.linear_2."),
    ("model.language_model.", "model."),
    ("model.visual.", "visual."),
)


class Names:
    def __init__(self, model: "transformers.PreTrainedModel") -> None:
        steps = get_model_conversion_mapping(model, add_legacy=False)
        self._renamings = [step for step in steps if isinstance(step, WeightRenaming)]
        self._converters = [step for step in steps if isinstance(step, WeightConverter)]

    def in_module(self, name: str) -> str:
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    def in_checkpoint(self, source: TensorSource, known: Collection[str]) -> dict[str, str]:
        """Modules' names `known` -> the source's, where they differ. ModelError."""
        listed: dict[str, str] = {}
        for name in source.names:
            if name in known:
                continue
            own = self.in_module(name)
            if own in known:
                listed.setdefault(own, name)
            else:
                self._refuse_converted(name, own, source)
        return {own: name for own, name in listed.items() if own not in source.names}

    def _refuse_converted(self, name: str, own: str, source: TensorSource) -> None:
        for converter in self._converters:
            _, pattern = converter.rename_source_key(own)
            if pattern is not None and not any(
                isinstance(step, MergeModulelist) for step in converter.operations
            ):
                raise ModelError(
                    f"{source.path}: transformers computes {converter.target_patterns[0]} from {name} as it loads this "
                    "family; load the model with transformers and write its state_dict() with "
                    "safetensors.torch.save_file, which keeps the names of the modules"
                )
