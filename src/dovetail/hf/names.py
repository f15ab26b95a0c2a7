"""Names of tensors in checkpoints, and of the same tensors in transformers' modules, by transformers' own mapping."""

from collections.abc import Collection, Sequence

import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import MergeModulelist, WeightConverter, WeightRenaming

from dovetail.errors import ModelError
from dovetail.weights.hf_reader import TensorSource


class Names:
    """What transformers renames as it loads a model. What it computes besides is refused, but for merging experts."""

    def __init__(self, model: "transformers.PreTrainedModel") -> None:
        found = get_model_conversion_mapping(model, add_legacy=False)
        self._renamings: Sequence[WeightRenaming] = [each for each in found if isinstance(each, WeightRenaming)]
        self._converters = [each for each in found if isinstance(each, WeightConverter)]

    def in_module(self, name: str) -> str:
        """The module's name of a checkpoint's tensor."""
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    def in_checkpoint(self, source: TensorSource, known: Collection[str]) -> dict[str, str]:
        """By the modules' names `known`: the other names under which `source` lists tensors. Raises ModelError."""
        found: dict[str, str] = {}
        for name in source.names:
            own = self.in_module(name)
            if name not in known and own in known:
                found.setdefault(own, name)
            elif name not in known:
                self._refuse_converted(name, own, source)
        return {own: name for own, name in found.items() if own not in source.names}

    def _refuse_converted(self, name: str, own: str, source: TensorSource) -> None:
        for converter in self._converters:
            _, pattern = converter.rename_source_key(own)
            if pattern is not None and not any(isinstance(step, MergeModulelist) for step in converter.operations):
                raise ModelError(
                    f"{source.path}: transformers computes {converter.target_patterns[0]} from {name} as it loads this "
                    "family; load the model with transformers and write its state_dict() with "
                    "safetensors.torch.save_file, which keeps the names of the modules"
                )
