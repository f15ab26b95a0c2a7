"""The sampler of inference servers."""

from collections.abc import Callable, Sequence

import torch

from dovetail.arch.spec import ArchSpec
from dovetail.data.examples import Prompt
from dovetail.data.processor import FileMedia, Processor
from dovetail.factory.engines import WIRES, check_lengths, push_settings
from dovetail.parallel.mesh import Mesh
from dovetail.recipe.schema import Recipe
from dovetail.rollout.remote.fleet import Fleet, Replica
from dovetail.rollout.remote.http import EngineError
from dovetail.rollout.remote.images import check_media
from dovetail.rollout.remote.push import Pusher
from dovetail.rollout.remote.sampler import RemoteSampler
from dovetail.weights.hf_directory import Pretrained

Say = Callable[[str], None]


def make_remote_sampler(
    source: Pretrained,
    recipe: Recipe,
    mesh: Mesh,
    dtype: torch.dtype,
    replicas: Sequence[Replica],
    say: Say,
    processor: Processor | None = None,
) -> RemoteSampler:
    """replicas: empty except on rank 0."""
    vocab_size, rollout = source.spec.vocab_size, recipe.rollout
    moe = source.spec.moe if isinstance(source.spec, ArchSpec) else None
    image_token = None if processor is None or rollout.backend != "vllm" else processor.image_token
    if not replicas:
        return RemoteSampler(mesh, dtype, vocab_size, None, None, moe, image_token)

    def lost(error: EngineError) -> None:
        say(f"note: {error}; the run goes on without this engine until it takes the next weights")

    wire, silence = WIRES[rollout.backend], rollout.request_timeout
    fleet = Fleet(replicas, wire, silence=silence, on_loss=lost, max_num_seqs=rollout.max_num_seqs)
    push, clients = push_settings(rollout, replicas), [replica.client for replica in replicas]
    kv_heads = source.spec.attention.num_kv_heads if isinstance(source.spec, ArchSpec) else None
    pusher = Pusher(clients, push, kind=replicas[0].server.kind, device=mesh.device, kv_heads=kv_heads)
    return RemoteSampler(mesh, dtype, vocab_size, fleet, pusher, moe, image_token)


def check_prompts(source: Pretrained, replicas: Sequence[Replica], prompts: Sequence[Prompt], new_tokens: int) -> None:
    check_lengths(replicas, max(len(prompt.ids) for prompt in prompts) + new_tokens)
    media = [prompt.media for prompt in prompts if prompt.media is not None]
    videos = any(isinstance(each, FileMedia) and each.shown.videos for each in media)
    for server in (replica.server for replica in replicas if media):
        model_type = str(source.config.get("model_type"))
        check_media(server.kind, model_type, takes_features=server.images, videos=videos)
