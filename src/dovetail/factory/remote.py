"""The samplers of inference servers: synchronous, or asynchronous."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from dovetail.data.examples import Prompt as Row
from dovetail.data.processor import FileMedia, Processor
from dovetail.errors import ConfigError
from dovetail.factory.inference_servers import SERVER_CLIENTS, check_lengths, push_settings
from dovetail.inference_servers.fleet import Fleet, Replica
from dovetail.inference_servers.generator import ServerGenerator
from dovetail.inference_servers.images import check_media
from dovetail.inference_servers.push import Pusher
from dovetail.inference_servers.remote_sampler import RemoteSampler
from dovetail.parallel.mesh import Mesh
from dovetail.recipe.schema import Recipe
from dovetail.rl.asynchronous.buffer import RolloutBuffer
from dovetail.rl.asynchronous.checkpoint import RolloutCheckpoint
from dovetail.rl.asynchronous.sampler import AsyncSampler
from dovetail.rl.asynchronous.staleness import StalenessController
from dovetail.rl.collect import step_requests
from dovetail.run.directory import RunDirectory
from dovetail.run.paths import POOL
from dovetail.sampler.base import SamplingParams, Watch
from dovetail.sampler.turn import GenerationRequest
from dovetail.weights.hf_directory import Pretrained


def make_remote_sampler(
    source: Pretrained,
    recipe: Recipe,
    mesh: Mesh,
    dtype: torch.dtype,
    replicas: Sequence[Replica],
    say: Callable[[str], None],
    processor: Processor | None = None,
) -> RemoteSampler:
    """replicas: empty except on rank 0."""
    vocab_size = source.spec.vocab_size
    rollout = recipe.rollout
    moe = source.spec.moe
    image_token = None if processor is None or rollout.backend != "vllm" else processor.image_token
    if not replicas:
        return RemoteSampler(
            mesh, dtype, vocab_size, None, None, moe, image_token, sleeps=rollout.sleep
        )
    lost = "the run goes on without this engine until it takes the next weights"
    fleet = Fleet(
        replicas, SERVER_CLIENTS[rollout.backend], timeout=rollout.request_timeout, max_num_seqs=rollout.max_num_seqs,
        on_server_lost=lambda error: say(f"note: {error}; {lost}"),
    )  # fmt: skip
    push = push_settings(rollout, replicas)
    clients = [replica.client for replica in replicas]
    kv_heads = source.spec.attention.num_kv_heads if source.spec.native else None
    pusher = Pusher(
        clients, push, kind=replicas[0].server.kind, device=mesh.device, kv_heads=kv_heads
    )
    return RemoteSampler(
        mesh, dtype, vocab_size, fleet, pusher, moe, image_token, sleeps=rollout.sleep
    )


def check_prompts(
    source: Pretrained, replicas: Sequence[Replica], prompts: Sequence[Row], new_tokens: int
) -> None:
    check_lengths(replicas, max(len(prompt.ids) for prompt in prompts) + new_tokens)
    media = [prompt.media for prompt in prompts if prompt.media is not None]
    videos = any(isinstance(each, FileMedia) and each.shown.videos for each in media)
    for server in (replica.server for replica in replicas if media):
        check_media(server, str(source.config.get("model_type")), videos=videos)


def check_sent(recipe: Recipe, prompts: Sequence[Row]) -> None:
    if recipe.trainer.max_lag is not None and any(prompt.media is not None for prompt in prompts):
        why = "rows of data.train have images or videos, which an asynchronous run does not send"
        raise ConfigError(
            f"trainer.max_lag is {recipe.trainer.max_lag}, but {why}; leave max_lag out"
        )


def make_async_sampler(
    remote: RemoteSampler,
    recipe: Recipe,
    run: RunDirectory,
    sampling: SamplingParams,
    prompts: Sequence[Row],
    parts: Sequence[tuple[int, float]],
    inputs: Sequence[str],
) -> AsyncSampler:
    """inputs: fingerprints of first weights and rows. parts: as for `step_rows`."""
    first_row = run.first_row
    step = 0 if run.resumed is None else run.resumed.state.step
    if remote.servers is None:
        return AsyncSampler(remote, None, step)
    requests = partial(
        step_requests,
        recipe=recipe,
        prompts=prompts,
        sampling=sampling,
        first_row=first_row,
        parts=parts,
    )
    per_step = recipe.trainer.prompts_per_step
    facts = [*inputs, asdict(sampling), per_step, first_row, recipe.data.shuffle]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    make_buffer = partial(
        _make_buffer, remote.servers, recipe, requests, run.path / POOL, key, remote.watch
    )
    return AsyncSampler(remote, make_buffer, step)


def _make_buffer(
    servers: ServerGenerator,
    recipe: Recipe,
    requests: Callable[[int], Sequence[GenerationRequest]],
    path: Path,
    key: str,
    watch: Watch | None,
) -> RolloutBuffer:
    """Returns the buffer with its files below `path`, once the run has a directory."""
    trainer = recipe.trainer
    assert trainer.max_lag is not None
    samples = recipe.rollout.samples_per_prompt
    return RolloutBuffer(
        StalenessController(trainer.prompts_per_step, samples, trainer.max_lag, trainer.steps),
        RolloutCheckpoint(path, key),
        servers,
        requests,
        keeps=trainer.save_every > 0,
        watch=watch,
    )
