"""The sampler of engines out of process."""

from collections.abc import Callable, Sequence

import torch

from dovetail.arch.spec import ArchSpec
from dovetail.factory.engines import WIRES, push_settings
from dovetail.parallel.mesh import Mesh
from dovetail.recipe.schema import Recipe
from dovetail.rollout.remote.fleet import Fleet, Replica
from dovetail.rollout.remote.http import EngineError
from dovetail.rollout.remote.push import Pusher
from dovetail.rollout.remote.sampler import RemoteSampler
from dovetail.weights.hf_directory import Pretrained

Say = Callable[[str], None]


def make_remote_sampler(
    source: Pretrained, recipe: Recipe, mesh: Mesh, dtype: torch.dtype, replicas: Sequence[Replica], say: Say
) -> RemoteSampler:
    """replicas: of the first rank; others have none."""
    vocab_size, rollout = source.spec.vocab_size, recipe.rollout
    if not replicas:
        return RemoteSampler(mesh, dtype, vocab_size, None, None)

    def lost(error: EngineError) -> None:
        say(f"note: {error}; the run goes on without this engine until it takes the next weights")

    fleet = Fleet(replicas, WIRES[rollout.backend], silence=rollout.request_timeout, on_loss=lost)
    push, clients = push_settings(rollout, replicas), [replica.client for replica in replicas]
    kv_heads = source.spec.attention.num_kv_heads if isinstance(source.spec, ArchSpec) else None
    pusher = Pusher(clients, push, kind=replicas[0].server.kind, device=mesh.device, kv_heads=kv_heads)
    return RemoteSampler(mesh, dtype, vocab_size, fleet, pusher)
