"""Experts of each token, as vLLM 0.33.0 and SGLang 0.5.10 return them."""

import base64
import io
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.arch.spec import MoeSpec
from dovetail.batch.routing import RoutingTrace, narrow_dtype
from dovetail.errors import MachineError
from dovetail.inference_servers.protocol import RETURNS_ROUTES
from dovetail.parallel.collectives import sum_over
from dovetail.parallel.mesh import Mesh

NPY = b"\x93NUMPY"


def read_experts(text: str, tokens: int, moe: MoeSpec) -> Tensor:
    """[tokens - 1, M, K] in the layers of `moe`; the last token was not routed. MachineError if they are of another model.

    text: base64 of an array of all layers, as a file of NumPy (vLLM) or bare int32 (SGLang).
    """
    if not text:
        raise MachineError(
            f"an engine returned no routes of experts; start it with {RETURNS_ROUTES}"
        )
    expected = (tokens - 1, len(moe.layers), moe.top_k)
    try:
        data = base64.b64decode(text, validate=True)
        named = data.startswith(NPY)
        every = (
            np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
            if named
            else np.frombuffer(data, "<i4")
        )
    except ValueError as error:
        raise MachineError(f"an engine returned routes that cannot be read: {error}") from None
    fits = every.shape == expected if named else every.size == math.prod(expected)
    if every.dtype.kind not in "iu" or not fits:
        raise MachineError(
            f"an engine returned routes of shape {every.shape} and type {every.dtype}, expected "
            f"{expected}: tokens without the last one, layers, experts of a token"
        )
    experts = every.reshape(expected)[:, list(moe.numbers)]
    outside = experts.size and not 0 <= experts.min() <= experts.max() < moe.num_experts
    if outside or (moe.top_k > 1 and (experts[..., 0] == experts[..., 1]).any()):
        raise MachineError(
            f"an engine returned routes that are no choice of {moe.top_k} out of "
            f"{moe.num_experts} experts: it did not record all layers"
        )
    return torch.from_numpy(experts.astype(np.int32)).to(narrow_dtype(moe.num_experts))


def read_trace(text: str, tokens: int, moe: MoeSpec) -> RoutingTrace:
    """Returns the trace of a prompt with its turn, from what `read_experts` reads."""
    experts = F.pad(read_experts(text, tokens, moe), (0, 0, 0, 0, 0, 1))
    return RoutingTrace(moe.numbers, experts, torch.arange(tokens) < tokens - 1)


def share_trace(trace: RoutingTrace | None, tokens: int, moe: MoeSpec, mesh: Mesh) -> RoutingTrace:
    """Returns the first rank's trace on every rank. Collective."""
    shape = (tokens, len(moe.numbers), moe.top_k)
    own = (
        torch.zeros(shape, dtype=narrow_dtype(moe.num_experts)) if trace is None else trace.indices
    )
    whole = sum_over(own.to(mesh.device), mesh["world"]).cpu().to(torch.int32)
    return RoutingTrace(moe.numbers, whole, torch.arange(tokens) < tokens - 1)
