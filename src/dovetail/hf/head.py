"""A trial whether a model's logits are a product times a constant, as in the fused head."""

from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from dovetail.errors import ModelError

TOKENS = 5
WORDS = 7
LARGEST_LOGIT = 30.0  # soft caps bend there
SAME = 1e-6


class _Output(SimpleNamespace):
    """What a base model returns, however the model around it reads that."""

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state, None)[index]

    def get(self, name: str, default: object = None) -> Any:
        return self.last_hidden_state if name == "last_hidden_state" else default


class _Base(nn.Module):
    """A base model that returns `hidden`, whatever it is given."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.output = _Output(last_hidden_state=hidden)

    def forward(self, *_: object, **__: object) -> _Output:
        return self.output


def logit_scale(model: "transformers.PreTrainedModel", width: int) -> float:
    """Return the constant factor of the logits.

    Replaces `model` and `lm_head` meanwhile. ModelError.
    """
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, TOKENS, width, generator=draw, dtype=torch.float64)
    head = nn.Linear(width, WORDS, bias=False, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        weight = torch.randn(WORDS, width, generator=draw)
        head.weight.copy_(weight * LARGEST_LOGIT / width**0.5)
        product = head(hidden)
        parts = {name: model.get_submodule(name) for name in ("model", "lm_head")}
        model.add_module("model", _Base(hidden))
        model.add_module("lm_head", head)
        try:
            tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
            logits = model(input_ids=tokens, use_cache=False).logits
        except (AttributeError, TypeError, KeyError, RuntimeError, ValueError) as error:
            name = type(model).__name__
            raise ModelError(
                f"{name} computes its logits from more than hidden states: {error}"
            ) from error
        finally:
            for name, part in parts.items():
                model.add_module(name, part)
    logits = logits.to(product.dtype)
    scale = 0.0
    if logits.shape == product.shape:
        covariance = (logits * product).sum()
        scale = float(covariance / product.square().sum())
    if not scale or (logits / scale - product).abs().max() > SAME * LARGEST_LOGIT:
        raise ModelError(
            f"{type(model).__name__}: {_logit_options(model)} changes the logits by more than "
            "a constant factor, which the fused head does not compute"
        )
    return 1.0 if abs(scale - 1.0) <= SAME else scale


def _logit_options(model: "transformers.PreTrainedModel") -> str:
    options = []
    for name, value in vars(model.config.get_text_config()).items():
        if value is not None and "logit" in name and "attn" not in name:
            options.append(f"{name}={value}")
    return ", ".join(options) or "its own code"
