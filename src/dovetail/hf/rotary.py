"""Rotary tables of transformers' modules that follow the longest sequence of a batch: of each sequence's own length here."""

import torch
import transformers
from torch import Tensor, nn

from dovetail.arch.spec import BY_LENGTH
from dovetail.batch.packed import PackedBatch, to_device
from dovetail.errors import ModelError

BEYOND = 1 << 40  # added to the positions of a sequence that is longer than the limit


def length_limit(config: "transformers.PreTrainedConfig") -> tuple[str, int] | None:
    """A rotary embedding whose tables follow the length of a sequence, and up to which length they are the same."""
    text = config.get_text_config()
    given = text.rope_parameters if "rope_parameters" in vars(text) else None
    ropes = [rope for rope in (given, *(given or {}).values()) if isinstance(rope, dict)]
    for rope in ropes:
        if rope.get("rope_type") in BY_LENGTH:
            found = rope.get("original_max_position_embeddings", text.max_position_embeddings)
            return rope["rope_type"], text.max_position_embeddings if rope["rope_type"] == "dynamic" else found
    return None


def marked(batch: PackedBatch, limit: int) -> Tensor:
    """[T]: the positions of a batch, from BEYOND on in sequences longer than the limit."""
    lengths = torch.tensor(batch.lengths)
    beyond = (lengths > limit).repeat_interleave(lengths)
    return batch.positions + BEYOND * to_device(beyond, batch.positions.device)


class LongRope(nn.Module):
    """`inner`, a module of kind longrope, asked once as for short sequences and once as for long ones."""

    def __init__(self, inner: nn.Module, limit: int) -> None:
        super().__init__()
        self.inner, self.limit = inner, limit

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of `marked` positions [1, t]. `inner` goes by the largest position that it is given."""
        beyond = position_ids >= BEYOND
        positions = position_ids - BEYOND * beyond
        short = self.inner(x, positions.clamp(max=self.limit - 1))
        long = self.inner(x, torch.cat((positions, positions.new_full((1, 1), self.limit)), dim=1))
        cos, sin = (torch.where(beyond[..., None], b[:, :-1], a) for a, b in zip(short, long, strict=True))
        return cos, sin


def follow_lengths(model: nn.Module, config: "transformers.PreTrainedConfig") -> int | None:
    """Have a base model's tables of kind longrope follow each sequence's own length, if it is given `marked` positions.

    Returns the limit; None where tables follow no length. Raises ModelError where this model's cannot be made to.
    """
    found = length_limit(config)
    if found is None:
        return None
    kind, limit = found
    inner = model._modules.get("rotary_emb")
    if kind != "longrope" or inner is None or vars(inner).get("rope_type") != kind:
        raise ModelError(
            f"config.json: rope_type {kind!r} follows the longest sequence of a batch, so a sequence's "
            "log-probs would depend on its neighbors; the native engine computes it where it knows the family"
        )
    model.add_module("rotary_emb", LongRope(inner, limit))
    return limit


def check_sections(text: nn.Module) -> None:
    """Refuse shares of rotated channels (of time, height and width) that are not those of the model's heads."""
    rotary = text._modules.get("rotary_emb")
    sections = None if rotary is None else vars(rotary).get("mrope_section")
    if rotary is None or sections is None:
        return
    half = len(rotary.get_buffer("inv_freq"))
    counts = (
        isinstance(sections, (list, tuple)) and len(sections) == 3 and all(type(n) is int and n > 0 for n in sections)
    )
    if not counts or sum(sections) != half:
        raise ModelError(
            f"config.json: mrope_section is {sections!r}; expected three whole numbers that add up to {half}, half of the "
            "rotated channels of a head"
        )
