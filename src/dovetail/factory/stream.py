"""The sample pool of an asynchronous run."""

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import lru_cache

from dovetail.data.examples import Prompt as Row
from dovetail.errors import ConfigError
from dovetail.recipe.schema import Recipe
from dovetail.rl.tasks import step_rows
from dovetail.rollout.base import Prompt, SamplingParams
from dovetail.rollout.feed import Feed
from dovetail.rollout.journal import Answer, Journal
from dovetail.rollout.pool import Pool
from dovetail.rollout.remote.sampler import RemoteSampler
from dovetail.rollout.stream import StreamSampler
from dovetail.run.directory import RunDirectory
from dovetail.run.paths import POOL


def check_sent(recipe: Recipe, prompts: Sequence[Row]) -> None:
    if recipe.trainer.max_lag is not None and any(prompt.media is not None for prompt in prompts):
        why = "rows of data.train have images or videos, which an asynchronous run does not send"
        raise ConfigError(f"trainer.max_lag is {recipe.trainer.max_lag}, but {why}; leave max_lag out")


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
    trainer, first_row = recipe.trainer, run.first_row

    @lru_cache(maxsize=2)
    def rows(step: int) -> Sequence[int]:
        return step_rows(recipe, len(prompts), step, first_row, parts)

    def submit(samples: Sequence[tuple[int, int]]) -> "list[Future[Answer]]":
        requests = []
        for group, sample in samples:
            step, row = divmod(group, trainer.prompts_per_step)
            requests.append((Prompt(row, prompts[rows(step)[row]].ids), sample, replace(sampling, step=step)))
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
    return StreamSampler(sampler, make_feed if lead else None, run.mesh, sampling, trainer.prompts_per_step, step)
