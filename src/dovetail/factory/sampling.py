"""What samples in a run: the embedded sampler or inference servers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from dovetail.data.examples import Prompt
from dovetail.errors import ConfigError
from dovetail.factory.dataset import Dataset
from dovetail.factory.inference_servers import connect
from dovetail.factory.layouts import Backend
from dovetail.factory.opened import Opened
from dovetail.factory.remote import make_async_sampler, make_remote_sampler
from dovetail.factory.sampler import backend_layout, make_sampler
from dovetail.factory.setup import Setup
from dovetail.factory.tokenizer import banned_ids, stop_ids, text_of
from dovetail.inference_servers.fleet import Replica
from dovetail.inference_servers.remote_sampler import RemoteSampler
from dovetail.launch.inference_servers import server_key, started_servers
from dovetail.parallel.consensus import agreed
from dovetail.parallel.mesh import Mesh
from dovetail.recipe.schema import Recipe
from dovetail.recipe.types import LayoutSection
from dovetail.rl.asynchronous.sampler import AsyncSampler
from dovetail.sampler.base import Sampler, SamplingParams
from dovetail.sampler.native import SamplerOptions


@dataclass(frozen=True)
class SamplingRanks:
    """Which ranks sample. replicas: servers that do it instead, on rank 0."""

    mesh: Mesh
    replicas: Sequence[Replica] = ()


@dataclass(frozen=True)
class Sampling:
    """What draws completions, and how."""

    sampler: Sampler
    sampling: SamplingParams
    decode: Callable[[Sequence[int]], str]


def backend_of(recipe: Recipe) -> Backend:
    return "native" if recipe.rollout.backend == "native" else "transformers"


def sampling_ranks(setup: Setup) -> SamplingRanks:
    """Makes the sampler's mesh, or finds the servers. Collective."""
    rollout = setup.recipe.rollout
    if not rollout.inside:
        return SamplingRanks(setup.mesh, find_servers(setup))
    fold = partial(backend_layout, setup.source, backend=backend_of(setup.recipe))
    mesh = setup.mesh_of(rollout.layout or LayoutSection(), "rollout.layout", fold)
    return SamplingRanks(mesh)


def find_servers(setup: Setup) -> list[Replica]:
    """Probes the servers of a recipe, on rank 0. Collective."""
    rollout = setup.recipe.rollout
    dry_run = setup.start.dry_run
    urls = rollout.engines or started_servers()
    with agreed(setup.mesh):
        if not urls and not dry_run:
            edit = "start them yourself, and give their URLs as rollout.engines"
            raise ConfigError(
                f"rollout.start: only `dovetail train` without a launcher starts engines; {edit}"
            )
        if setup.mesh["world"].rank != 0:
            return []
        asleep = rollout.sleep and not dry_run  # until weights are loaded
        vocab_size = setup.source.spec.vocab_size
        return connect(setup.recipe, urls, server_key(), vocab_size, asleep=asleep)


def make_sampling(opened: Opened, ranks: SamplingRanks) -> Sampling:
    """Builds the sampler. Collective."""
    setup = opened.setup
    recipe = setup.recipe
    rollout = recipe.rollout
    stops = stop_ids(setup.source, setup.tokenizer)
    sampler: Sampler
    if rollout.inside:
        options = SamplerOptions(max_num_seqs=rollout.max_num_seqs)
        backend = backend_of(recipe)
        sampler = make_sampler(setup.source, ranks.mesh, setup.dtype, backend, options)
    else:
        say = setup.notes.append if setup.start.dry_run else opened.directory.say
        sampler = make_remote_sampler(
            setup.source, recipe, ranks.mesh, setup.dtype, ranks.replicas, say, setup.processor
        )
        opened.at_close.callback(sampler.close)
    sampler.watch = setup.progress.advance
    compares = rollout.mismatch_metrics and rollout.backend == "native" and rollout.inside
    params = SamplingParams(
        **rollout.values_for(SamplingParams),
        samples=rollout.samples_per_prompt,
        seed=recipe.trainer.seed,
        stop_ids=() if rollout.ignore_eos else stops,
        trace=rollout.router_replay == "rollout" or compares,
        banned_ids=banned_ids(setup.source, setup.tokenizer, setup.processor, stops),
    )
    return Sampling(sampler, params, partial(text_of, stops=stops, tokenizer=setup.tokenizer))


def open_stream(opened: Opened, sampling: Sampling, rows: Dataset[Prompt]) -> AsyncSampler:
    """Builds the sampler of an asynchronous run. Collective."""
    assert isinstance(sampling.sampler, RemoteSampler)
    stream = make_async_sampler(
        sampling.sampler,
        opened.setup.recipe,
        opened.directory,
        sampling.sampling,
        rows.train,
        rows.parts,
        [opened.weights, rows.fingerprint],
    )
    opened.at_close.callback(stream.close)
    return stream
