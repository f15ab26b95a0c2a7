"""The signed terms of divergences, by their definition in float64: what their errors are measured against."""

import torch
from torch import Tensor

from dovetail.kernels.divergence import Divergence


def terms_of(z: Tensor, w: Tensor, heat: Tensor | None, kind: Divergence) -> Tensor:
    """The terms [V, n] (jsd: [2 V, n]) of the definition whose sums are the divergences [n] of logits [n, V]."""
    scale = 1.0 if heat is None else heat.double()[:, None]
    a = (z.double() / scale).log_softmax(-1)
    b = (w.double() / scale).log_softmax(-1)
    p = a.exp()
    q = b.exp()
    if kind.kind == "forward_kl":
        terms = q * (b - a)
    elif kind.kind == "reverse_kl":
        terms = p * (a - b)
    else:
        middle = (kind.beta * q + (1.0 - kind.beta) * p).log()
        of_teacher = kind.beta * q * (b - middle)
        of_student = (1.0 - kind.beta) * p * (a - middle)
        terms = torch.cat([of_teacher, of_student], -1)
    return terms.nan_to_num().T  # 0 times -inf less -inf: a column that cannot occur
