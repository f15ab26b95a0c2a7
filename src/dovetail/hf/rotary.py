"""transformers' longrope by each sequence's length instead of the longest one's."""

import torch
import transformers
from torch import Tensor, nn

from dovetail.arch.spec import BY_LENGTH
from dovetail.batch.packed import PackedBatch, to_device
from dovetail.errors import ModelError

BEYOND = 1 << 40  # marks positions of longer sequences


def length_limit(config: "transformers.PreTrainedConfig") -> tuple[str, int] | None:
    """rope_type, and the length up to which it does not change."""
    text = config.get_text_config()
    rope = text.rope_parameters if "rope_parameters" in vars(text) else None
    for options in (rope, *(rope or {}).values()):
        if isinstance(options, dict) and options.get("rope_type") in BY_LENGTH:
            kind = options["rope_type"]
            longest = text.max_position_embeddings
            original = options.get("original_max_position_embeddings", longest)
            return kind, longest if kind == "dynamic" else original
    return None


def marked(batch: PackedBatch, limit: int) -> Tensor:
    """Positions [T], plus BEYOND in longer sequences."""
    lengths = torch.tensor(batch.lengths)
    beyond = (lengths > limit).repeat_interleave(lengths)
    return batch.positions + BEYOND * to_device(beyond, batch.positions.device)


class LongRope(nn.Module):
    def __init__(self, inner: nn.Module, limit: int) -> None:
        super().__init__()
        self.inner = inner
        self.limit = limit

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of `marked` positions [1, t]; `inner` chooses by the largest one."""
        beyond = position_ids >= BEYOND
        positions = position_ids - BEYOND * beyond
        short = self.inner(x, positions.clamp(max=self.limit - 1))
        long = self.inner(x, torch.cat((positions, positions.new_full((1, 1), self.limit)), dim=1))
        cos, sin = (
            torch.where(beyond[..., None], b[:, :-1], a) for a, b in zip(short, long, strict=True)
        )
        return cos, sin


def follow_lengths(model: nn.Module, config: "transformers.PreTrainedConfig") -> int | None:
    """Make longrope follow `marked` positions; returns its limit. ModelError."""
    by_length = length_limit(config)
    if by_length is None:
        return None
    kind, limit = by_length
    inner = model._modules.get("rotary_emb")
    if kind != "longrope" or inner is None or vars(inner).get("rope_type") != kind:
        raise ModelError(
            f"config.json: rope_type {kind!r} follows the longest sequence of a batch, so a sequence's "
            "log-probs would depend on its neighbors; the native engine computes it where it knows the family"
        )
    model.add_module("rotary_emb", LongRope(inner, limit))
    return limit


def check_sections(text: nn.Module) -> None:
    rotary = text._modules.get("rotary_emb")
    sections = None if rotary is None else vars(rotary).get("mrope_section")
    if rotary is None or sections is None:
        return
    half = len(rotary.get_buffer("inv_freq"))
    listed = isinstance(sections, (list, tuple)) and len(sections) == 3
    if not listed or not all(type(n) is int and n > 0 for n in sections) or sum(sections) != half:
        raise ModelError(
            f"config.json: mrope_section is {sections!r}; expected three whole numbers that add up to {half}, half of the "
            "rotated channels of a head"
        )
