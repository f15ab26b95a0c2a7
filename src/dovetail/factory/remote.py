"""The samplers of inference servers: in turns with training, or asynchronous."""

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import lru_cache

import torch

from dovetail.data.examples import Prompt as Row
from dovetail.data.processor import FileMedia, Processor
from dovetail.errors import ConfigError
from dovetail.factory.engines import WIRES, check_lengths, push_settings
from dovetail.inference_servers.fleet import Fleet, Replica
from dovetail.inference_servers.images import check_media
from dovetail.inference_servers.push import Pusher
from dovetail.inference_servers.remote_sampler import RemoteSampler
from dovetail.parallel.mesh import Mesh
from dovetail.recipe.schema import Recipe
from dovetail.rl.asynchronous.buffer import Feed
from dovetail.rl.asynchronous.checkpoint import Journal
from dovetail.rl.asynchronous.sampler import StreamSampler
from dovetail.rl.asynchronous.staleness import Pool
from dovetail.rl.collect import step_rows
from dovetail.run.directory import RunDirectory
from dovetail.run.paths import POOL
from dovetail.sampler.base import Completion, Prompt, SamplingParams
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
        replicas, WIRES[rollout.backend], silence=rollout.request_timeout, max_num_seqs=rollout.max_num_seqs,
        on_loss=lambda error: say(f"note: {error}; {lost}"),
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


def make_stream(
    sampler: RemoteSampler,
    recipe: Recipe,
    run: RunDirectory,
    sampling: SamplingParams,
    prompts: Sequence[Row],
    parts: Sequence[tuple[int, float]],
    inputs: Sequence[str],
) -> StreamSampler:
    """inputs: fingerprints of first weights and rows."""
    trainer = recipe.trainer
    first_row = run.first_row

    @lru_cache(maxsize=2)
    def rows(step: int) -> Sequence[int]:
        return step_rows(recipe, len(prompts), step, first_row, parts)

    def submit(samples: Sequence[tuple[int, int]]) -> "list[Future[Completion]]":
        requests = []
        for group, sample in samples:
            step, row = divmod(group, trainer.prompts_per_step)
            requests.append(
                (Prompt(row, prompts[rows(step)[row]].ids), sample, replace(sampling, step=step))
            )
        return sampler.submit(requests)

    def make_feed() -> Feed:
        assert trainer.max_lag is not None
        drawn = [asdict(sampling), trainer.prompts_per_step, first_row, recipe.data.shuffle]
        key = hashlib.sha256(json.dumps([*inputs, *drawn]).encode()).hexdigest()
        pool = Pool(trainer.prompts_per_step, sampling.samples, trainer.max_lag, trainer.steps)
        feed = Feed(pool, Journal(run.path / POOL, key), submit, keeps=trainer.save_every > 0)
        feed.watch = sampler.watch
        return feed

    step = 0 if run.resumed is None else run.resumed.state.step
    lead = sampler.fleet is not None
    return StreamSampler(
        sampler, make_feed if lead else None, run.mesh, sampling, trainer.prompts_per_step, step
    )
