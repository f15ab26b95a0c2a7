"""Names of tensors in checkpoints and in transformers' modules."""

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
    """How transformers renames the tensors of a checkpoint as it loads them."""

    def __init__(self, model: "transformers.PreTrainedModel") -> None:
        steps = get_model_conversion_mapping(model, add_legacy=False)
        self._renamings = [step for step in steps if isinstance(step, WeightRenaming)]
        self._converters = [step for step in steps if isinstance(step, WeightConverter)]

    def in_module(self, name: str) -> str:
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    def in_checkpoint(self, source: TensorSource, known: Collection[str]) -> dict[str, str]:
        """Return names of the modules, of `known` -> the source's, where they differ.

        ModelError.
        """
        checkpoint_names: dict[str, str] = {}
        for name in source.names:
            if name in known:
                continue
            in_module = self.in_module(name)
            if in_module not in known:
                self._refuse_converted(name, in_module, source)
            elif in_module not in source.names:
                checkpoint_names.setdefault(in_module, name)
        return checkpoint_names

    def _refuse_converted(self, name: str, in_module: str, source: TensorSource) -> None:
        for converter in self._converters:
            _, pattern = converter.rename_source_key(in_module)
            merges = any(isinstance(step, MergeModulelist) for step in converter.operations)
            if pattern is not None and not merges:
                raise ModelError(
                    f"{source.path}: transformers computes {converter.target_patterns[0]} from "
                    f"{name} "
                    "as it loads this family; load the model with transformers and write its "
                    "state_dict() with safetensors.torch.save_file, which keeps the names of the "
                    "modules"
                )
