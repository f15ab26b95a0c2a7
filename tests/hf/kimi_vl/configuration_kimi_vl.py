"""The config: a tower's, a text backbone's, and the id that stands for a part of an image."""

from typing import Any

from transformers import DeepseekV3Config, PreTrainedConfig


class MoonViTConfig(PreTrainedConfig):  # type: ignore[misc]
    model_type = "moonvit"

    def __init__(
        self,
        patch_size: int = 4,
        init_pos_emb_height: int = 6,
        init_pos_emb_width: int = 7,
        num_attention_heads: int = 2,
        num_hidden_layers: int = 2,
        hidden_size: int = 32,
        intermediate_size: int = 48,
        merge_kernel_size: tuple[int, int] = (2, 2),
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.patch_size, self.merge_kernel_size = patch_size, list(merge_kernel_size)
        self.init_pos_emb_height, self.init_pos_emb_width = init_pos_emb_height, init_pos_emb_width
        self.num_attention_heads, self.num_hidden_layers = num_attention_heads, num_hidden_layers
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size


class KimiVLConfig(PreTrainedConfig):  # type: ignore[misc]
    model_type = "kimi_vl"

    def __init__(
        self,
        vision_config: dict[str, Any] | MoonViTConfig | None = None,
        text_config: dict[str, Any] | DeepseekV3Config | None = None,
        media_placeholder_token_id: int = 100,
        **options: Any,
    ) -> None:
        tower = (
            vision_config
            if isinstance(vision_config, MoonViTConfig)
            else MoonViTConfig(**(vision_config or {}))
        )
        text = (
            text_config
            if isinstance(text_config, DeepseekV3Config)
            else DeepseekV3Config(**(text_config or {}))
        )
        self.vision_config, self.text_config = tower, text
        self.media_placeholder_token_id = media_placeholder_token_id
        super().__init__(**options)
