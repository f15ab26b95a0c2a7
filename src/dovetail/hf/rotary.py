"""Longrope of transformers, by each sequence's length instead of the longest one's."""

import torch
import transformers
from torch import Tensor, nn

from dovetail.arch.spec import BY_LENGTH
from dovetail.batch.packed import PackedBatch, to_device
from dovetail.errors import ModelError

BEYOND = 1 << 40  # marks positions of longer sequences


def length_limit(config: "transformers.PreTrainedConfig") -> tuple[str, int] | None:
    """Return rope_type, and the length up to which it does not change."""
    text = config.get_text_config()
    rope = vars(text).get("rope_parameters") or {}
    for options in (rope, *rope.values()):
        kind = options.get("rope_type") if isinstance(options, dict) else None
        if kind in BY_LENGTH:
            longest = text.max_position_embeddings
            original = options.get("original_max_position_embeddings", longest)
            return kind, longest if kind == "dynamic" else original
    return None


def marked(batch: PackedBatch, limit: int) -> Tensor:
    """Return positions [T], plus BEYOND in sequences that are longer than `limit`."""
    lengths = torch.tensor(batch.lengths)
    beyond = (lengths > limit).repeat_interleave(lengths)
    return batch.positions + BEYOND * to_device(beyond, batch.positions.device)


class LongRope(nn.Module):
    """A rotary embedding that chooses its frequencies for each position."""

    def __init__(self, inner: nn.Module, limit: int) -> None:
        super().__init__()
        self.inner = inner
        self.limit = limit

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of `marked` positions [1, t]; `inner` chooses by the largest one."""
        beyond = position_ids >= BEYOND
        positions = position_ids - BEYOND * beyond
        short = self.inner(x, positions.clamp(max=self.limit - 1))
        last = positions.new_full((1, 1), self.limit)
        long = self.inner(x, torch.cat((positions, last), dim=1))
        is_long = beyond[..., None]
        cos = torch.where(is_long, long[0][:, :-1], short[0])
        sin = torch.where(is_long, long[1][:, :-1], short[1])
        return cos, sin


def follow_lengths(model: nn.Module, config: "transformers.PreTrainedConfig") -> int | None:
    """Make longrope follow `marked` positions, and return its limit. ModelError."""
    by_length = length_limit(config)
    if by_length is None:
        return None
    kind, limit = by_length
    inner = model._modules.get("rotary_emb")
    if kind != "longrope" or inner is None or vars(inner).get("rope_type") != kind:
        raise ModelError(
            f"config.json: rope_type {kind!r} follows the longest sequence of a batch, so a "
            "sequence's "
            "log-probs would depend on its neighbors; the native engine computes it where it "
            "knows the "
            "family"
        )
    model.add_module("rotary_emb", LongRope(inner, limit))
    return limit


def check_sections(text: nn.Module) -> None:
    """Raise ModelError for sections of mrope that are not those of a head."""
    rotary = text._modules.get("rotary_emb")
    if rotary is None:
        return
    sections = vars(rotary).get("mrope_section")
    if sections is None:
        return
    half = len(rotary.get_buffer("inv_freq"))
    is_triple = isinstance(sections, (list, tuple)) and len(sections) == 3
    are_counts = is_triple and all(type(n) is int and n > 0 for n in sections)
    if not are_counts or sum(sections) != half:
        raise ModelError(
            f"config.json: mrope_section is {sections!r}; expected three whole numbers that add "
            "up to "
            f"{half}, half of the rotated channels of a head"
        )
