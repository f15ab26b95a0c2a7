"""Rotary position embedding: tables [T, R / 2], R rotated channels a head, channel i paired with i + R / 2.

Operations are in transformers' order, since positions multiply a frequency's rounding.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from dovetail.arch.spec import BY_LENGTH, RopeSpec
from dovetail.batch.packed import to_device
from dovetail.errors import ModelError
from dovetail.kernels.reference import wide


def rope_tables(
    spec: RopeSpec, positions: Tensor, lengths: Sequence[int], dtype: torch.dtype, at: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin, [T, R / 2] in `dtype`, for packed positions [T].

    lengths: of the sequences, for the kinds `BY_LENGTH`. at [t]: only these tokens.
    """
    if at is not None:
        positions = positions[at]
    frequencies = _frequencies_on(spec, wide(dtype), positions.device)
    if spec.kind in BY_LENGTH and max(lengths, default=0) > spec.max_positions:
        rows = torch.stack([inverse_frequencies(spec, wide(dtype), length) for length in lengths])
        by_token = rows.repeat_interleave(torch.tensor(lengths), dim=0)
        frequencies = to_device(by_token, positions.device)
        if at is not None:
            frequencies = frequencies[at]
    angles = positions.to(wide(dtype))[:, None] * frequencies
    return (angles.cos() * spec.attention_factor).to(dtype), (angles.sin() * spec.attention_factor).to(dtype)


@lru_cache(maxsize=64)
def _frequencies_on(spec: RopeSpec, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cached: sending them in every forward pass would wait for the device."""
    return to_device(inverse_frequencies(spec, dtype), device)


def inverse_frequencies(spec: RopeSpec, dtype: torch.dtype, length: int = 0) -> Tensor:
    """Radians per position, [R / 2]. length: of the sequence, for the kinds `BY_LENGTH`."""
    channels = torch.arange(0, spec.rotary_dim, 2).to(dtype) / spec.rotary_dim
    plain = 1.0 / spec.theta**channels
    match spec.kind:
        case "default":
            return plain
        case "linear":
            return plain / spec.factor
        case "dynamic":
            return 1.0 / _dynamic_base(spec, dtype, length) ** channels if length > spec.max_positions else plain
        case "llama3":
            return _llama3(spec, plain)
        case "yarn":
            return _yarn(spec, spec.theta**channels)
        case "longrope":
            factors = spec.long_factor if length > spec.max_positions else spec.short_factor
            return 1.0 / (torch.tensor(factors, dtype=dtype) * spec.theta**channels)
    raise ModelError(f"rotary embedding of kind {spec.kind!r} is not computed")


def _dynamic_base(spec: RopeSpec, dtype: torch.dtype, length: int) -> Tensor:
    """NTK-aware scaling, rounded in `dtype`."""
    stretch = spec.factor * torch.tensor(length, dtype=dtype) / spec.max_positions - (spec.factor - 1)
    return spec.theta * stretch ** (spec.rotary_dim / (spec.rotary_dim - 2))


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are scaled by `factor`, short ones kept, those between interpolated."""
    wavelength = 2 * math.pi / plain
    turns = spec.max_positions / wavelength  # over the original length
    share = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    between = (1 - share) * plain / spec.factor + share * plain
    slowed = torch.where(wavelength > spec.max_positions / spec.low_freq_factor, plain / spec.factor, between)
    return torch.where(wavelength < spec.max_positions / spec.high_freq_factor, plain, slowed)


def _yarn(spec: RopeSpec, periods: Tensor) -> Tensor:
    """YaRN (arXiv 2309.00071): a ramp over the channels from kept (many turns) to scaled by `factor` (few turns)."""

    def channel_of(turns: float) -> float:
        """The channel, as a real number, with that many turns over the original length."""
        return spec.rotary_dim * math.log(spec.max_positions / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = channel_of(spec.beta_fast), channel_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(len(periods)).to(periods.dtype) - low) / span).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (spec.factor * periods) * (1 - kept) + 1.0 / periods * kept
