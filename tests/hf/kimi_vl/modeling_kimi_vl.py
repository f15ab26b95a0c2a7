"""The model: a tower of native resolution, whose rows go through a projector into a DeepSeek-V3."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DeepseekV3ForCausalLM, PreTrainedModel

from .configuration_kimi_vl import KimiVLConfig, MoonViTConfig  # noqa: TID252  # of the directory, as its own code does


class PositionEmbedding(nn.Module):
    """A learned table, stretched to each image."""

    def __init__(self, height: int, width: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(height, width, dim))
        nn.init.normal_(self.weight)

    def forward(self, x: Tensor, grids: Tensor) -> Tensor:
        table = self.weight.permute(2, 0, 1)[None]
        found = [
            F.interpolate(table, size=(h, w), mode="bicubic")[0].permute(1, 2, 0).flatten(0, 1)
            for h, w in grids.tolist()
        ]
        return x + torch.cat(found)


class PatchEmbed(nn.Module):
    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        size, dim = config.patch_size, config.hidden_size
        self.proj = nn.Conv2d(3, dim, kernel_size=size, stride=size)
        self.pos_emb = PositionEmbedding(config.init_pos_emb_height, config.init_pos_emb_width, dim)

    def forward(self, x: Tensor, grids: Tensor) -> Tensor:
        found: Tensor = self.pos_emb(self.proj(x).flatten(1), grids)
        return found


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc0, self.fc1 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc1(F.gelu(self.fc0(x), approximate="tanh"))
        return found


class Layer(nn.Module):
    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        width, self.heads = config.hidden_size, config.num_attention_heads
        self.norm0, self.norm1 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = Mlp(width, config.intermediate_size)
        self.wqkv, self.wo = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, turns: Tensor, counts: list[int]) -> Tensor:
        """Attention inside each image of `counts` patches; `turns` [n, channels / 2] are complex."""
        q, k, v = self.wqkv(self.norm0(x)).unflatten(1, (3, self.heads, -1)).unbind(1)
        q, k = (
            torch.view_as_real(
                torch.view_as_complex(y.unflatten(-1, (-1, 2))) * turns[:, None]
            ).flatten(-2)
            for y in (q, k)
        )
        parts = zip(*(y.transpose(0, 1).split(counts, dim=1) for y in (q, k, v)), strict=True)
        mixed = torch.cat([F.scaled_dot_product_attention(*part) for part in parts], dim=1)
        x = x + self.wo(mixed.transpose(0, 1).flatten(1))
        return x + self.mlp(self.norm1(x))


class Encoder(nn.Module):
    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        self.channels = config.hidden_size // config.num_attention_heads
        self.blocks = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.final_layernorm = nn.LayerNorm(config.hidden_size)

    def forward(self, x: Tensor, grids: Tensor) -> Tensor:
        sizes = [(h, w) for h, w in grids.tolist()]
        turns = torch.cat([self.turns(h, w, x.device) for h, w in sizes])
        for block in self.blocks:
            x = block(x, turns, [h * w for h, w in sizes])
        found: Tensor = self.final_layernorm(x)
        return found

    def turns(self, height: int, width: int, device: torch.device) -> Tensor:
        """Columns and rows turn every other pair of channels."""
        speed = 10000.0 ** -(torch.arange(0, self.channels, 4, device=device) / self.channels)
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        angles = [at.flatten().to(device)[:, None] * speed for at in (columns, rows)]
        turned = torch.stack(
            [torch.polar(torch.ones_like(angle), angle) for angle in angles], dim=-1
        )
        return turned.flatten(1)


class MoonVitPretrainedModel(PreTrainedModel):  # type: ignore[misc]
    config_class = MoonViTConfig

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__(config)
        self.merge_kernel_size = config.merge_kernel_size
        self.patch_embed, self.encoder = PatchEmbed(config), Encoder(config)

    def forward(self, pixel_values: Tensor, grid_hws: Tensor) -> list[Tensor]:
        """[L, 3, patch, patch] -> for each image [rows, patches a row, D]."""
        x = self.encoder(self.patch_embed(pixel_values, grid_hws), grid_hws)
        (a, b), found = self.merge_kernel_size, []
        for part, (h, w) in zip(
            x.split(grid_hws.prod(dim=1).tolist()), grid_hws.tolist(), strict=True
        ):
            found.append(
                part.view(h // a, a, w // b, b, -1)
                .transpose(1, 2)
                .reshape(h * w // (a * b), a * b, -1)
            )
        return found


class KimiVLMultiModalProjector(nn.Module):
    def __init__(self, config: KimiVLConfig) -> None:
        super().__init__()
        (a, b), width = config.vision_config.merge_kernel_size, config.vision_config.hidden_size
        self.inner = a * b * width
        self.pre_norm = nn.LayerNorm(width, eps=1e-5)
        self.linear_1 = nn.Linear(self.inner, self.inner)
        self.linear_2 = nn.Linear(self.inner, config.text_config.hidden_size)

    def forward(self, image_features: list[Tensor]) -> Tensor:
        x = self.pre_norm(torch.cat(image_features)).view(-1, self.inner)
        found: Tensor = self.linear_2(F.gelu(self.linear_1(x)))
        return found


class KimiVLForConditionalGeneration(PreTrainedModel):  # type: ignore[misc]
    config_class = KimiVLConfig

    def __init__(self, config: KimiVLConfig) -> None:
        super().__init__(config)
        self.vision_tower = MoonVitPretrainedModel(config.vision_config)
        self.multi_modal_projector = KimiVLMultiModalProjector(config)
        self.language_model = DeepseekV3ForCausalLM(config.text_config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        image_grid_hws: Tensor | None = None,
        **options: Any,
    ) -> Any:
        words = self.language_model.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            seen = self.multi_modal_projector(self.vision_tower(pixel_values, image_grid_hws))
            places = (input_ids == self.config.media_placeholder_token_id)[..., None].expand_as(
                words
            )
            words = words.masked_scatter(places, seen.to(words.dtype))
        return self.language_model(inputs_embeds=words, **options)
