"""Peak memory of head and loss at a large vocabulary, as a process of its own: `python -m tests.helpers.head_memory T V`.

Writes one line of JSON: the bytes of tensors alive at once (every storage that an op returns, until it is freed), and
how far the process's resident memory grew, both beyond the inputs.
"""

import json
import resource
import sys
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.batch.loss import Loss, TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.kernels.registry import KernelSet
from dovetail.nn.heads import VocabShard, fused_loss
from dovetail.nn.products import Products
from dovetail.parallel.axes import Axis

WIDTH = 16


class Storages(TorchDispatchMode):
    """Bytes of storages that were made in here and are alive. Those of `inputs` are not counted."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.alive = {x.untyped_storage()._cdata: 0 for x in inputs}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self._saw(tensor)
        return result

    def _saw(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.now -= self.alive.pop(key)


class Policy:
    """A policy gradient with an entropy bonus: needs both statistics and both of their gradients."""

    separable = True

    def __call__(self, stats: TokenStats, batch: PackedBatch) -> Loss:
        return Loss(
            -(stats.logprob * batch.fields["advantage"] + 0.01 * stats.entropy).sum(),
            batch.mask.sum(),
        )


def measure(tokens: int, vocab: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    batch = PackedBatch.pack([torch.randint(vocab, (tokens + 1,), generator=draw)])
    batch = batch.with_fields(advantage=torch.randn(tokens + 1, generator=draw)).compact(
        torch.arange(tokens)
    )
    x = torch.randn(tokens, WIDTH, generator=draw).requires_grad_()
    weight = (0.1 * torch.randn(vocab, WIDTH, generator=draw)).requires_grad_()
    torch.mm(
        x.detach()[:8], weight.detach()[:8].T
    )  # what the first product loads is not the head's
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Storages(x, weight, batch.targets, batch.fields["advantage"]) as seen:
        fused_loss(
            x, VocabShard(weight, 0, Axis("tp"), Products(KernelSet())), batch, Policy()
        ).total.backward()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {"tensors": seen.peak, "resident": grown, "dx": x.nbytes, "dw": weight.nbytes}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(*map(int, sys.argv[1:]))) + "\n")
