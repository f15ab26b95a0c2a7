"""The sampler of engines out of process, and the pool of an asynchronous run around it."""

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import lru_cache

import torch

from dovetail.arch.spec import ArchSpec
from dovetail.data.examples import Prompt as Row
from dovetail.errors import ConfigError
from dovetail.factory.engines import WIRES, push_settings
from dovetail.parallel.mesh import Mesh
from dovetail.recipe.schema import Recipe
from dovetail.rl.tasks import step_rows
from dovetail.rollout.base import Prompt, SamplingParams
from dovetail.rollout.feed import Feed
from dovetail.rollout.journal import Answer, Journal
from dovetail.rollout.pool import Pool
from dovetail.rollout.remote.fleet import Fleet, Replica
from dovetail.rollout.remote.http import EngineError
from dovetail.rollout.remote.push import Pusher
from dovetail.rollout.remote.sampler import RemoteSampler
from dovetail.rollout.stream import StreamSampler
from dovetail.run.directory import RunDirectory
from dovetail.run.paths import POOL
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


def check_media(recipe: Recipe, prompts: Sequence[Row]) -> None:
    """ConfigError for rows that an asynchronous run cannot send."""
    if recipe.trainer.max_lag is not None and any(prompt.media is not None for prompt in prompts):
        raise ConfigError(
            f"trainer.max_lag is {recipe.trainer.max_lag}, but rows of data.train have images or videos, which an asynchronous "
            "run does not send; leave max_lag out"
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
    """run: claimed. sampling: of training, prompts its rows. inputs: fingerprints of the first weights and of the rows."""
    trainer, first_row = recipe.trainer, run.first_row

    @lru_cache(maxsize=2)
    def rows(step: int) -> Sequence[int]:
        return step_rows(recipe, len(prompts), step, first_row, parts)

    def submit(group: int, sample: int) -> "Future[Answer]":
        step, row = divmod(group, trainer.prompts_per_step)
        ids = prompts[rows(step)[row]].ids
        return sampler.submit(Prompt(row, ids), sample, replace(sampling, step=step))

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
    return StreamSampler(sampler, make_feed if lead else None, run.mesh, sampling, trainer.prompts_per_step, step)
