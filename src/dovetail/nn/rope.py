"""Frequencies of rotary position embedding, by transformers' order of operations: positions multiply rounding."""

import math

import torch
from torch import Tensor

from dovetail.arch.spec import RopeSpec
from dovetail.errors import ModelError


def inverse_frequencies(spec: RopeSpec, dtype: torch.dtype, length: int = 0) -> Tensor:
    """Radians per position, [R / 2]. length: for the kinds `BY_LENGTH`."""
    channels = torch.arange(0, spec.rotary_dim, 2).to(dtype) / spec.rotary_dim
    plain = 1.0 / spec.theta**channels
    match spec.kind:
        case "default":
            return plain
        case "linear":
            return plain / spec.factor
        case "dynamic":
            if length <= spec.max_positions:
                return plain
            base = _dynamic_base(spec, dtype, length)
            return 1.0 / base**channels
        case "llama3":
            return _llama3(spec, plain)
        case "yarn":
            return _yarn(spec, spec.theta**channels)
        case "longrope":
            factors = spec.long_factor if length > spec.max_positions else spec.short_factor
            scaled = torch.tensor(factors, dtype=dtype) * spec.theta**channels
            return 1.0 / scaled
    raise ModelError(f"rotary embedding of kind {spec.kind!r} is not computed")


def _dynamic_base(spec: RopeSpec, dtype: torch.dtype, length: int) -> Tensor:
    scaled = spec.factor * torch.tensor(length, dtype=dtype) / spec.max_positions
    stretch = scaled - (spec.factor - 1)
    exponent = spec.rotary_dim / (spec.rotary_dim - 2)
    return spec.theta * stretch**exponent


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Long wavelengths are scaled, short ones kept, others interpolated."""
    wavelength = 2 * math.pi / plain
    turns = spec.max_positions / wavelength  # over the original length
    low = spec.low_freq_factor
    high = spec.high_freq_factor
    share = (turns - low) / (high - low)
    between = (1 - share) * plain / spec.factor + share * plain
    is_long = wavelength > spec.max_positions / low
    is_short = wavelength < spec.max_positions / high
    slowed = torch.where(is_long, plain / spec.factor, between)
    return torch.where(is_short, plain, slowed)


def _yarn(spec: RopeSpec, periods: Tensor) -> Tensor:
    """arXiv 2309.00071: from kept channels (many turns) to scaled ones."""

    def channel_of(turns: float) -> float:
        period = spec.max_positions / (turns * 2 * math.pi)
        return spec.rotary_dim * math.log(period) / (2 * math.log(spec.theta))

    low = channel_of(spec.beta_fast)
    high = channel_of(spec.beta_slow)
    if spec.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, spec.rotary_dim - 1)
    span = high - low if high != low else 0.001
    numbers = torch.arange(len(periods)).to(periods.dtype)
    ramp = ((numbers - low) / span).clamp(0, 1)
    kept = 1 - ramp
    scaled = 1.0 / (spec.factor * periods)
    plain = 1.0 / periods
    return scaled * (1 - kept) + plain * kept
