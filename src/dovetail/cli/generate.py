"""`dovetail generate`."""

import argparse
from collections.abc import Iterator
from functools import partial

import torch

from dovetail.cli.common import RowFile, fingerprint_of, mesh_of, open_inputs, portions, say
from dovetail.data.examples import Limits, load_prompts
from dovetail.factory.engine import make_mesh, open_weights
from dovetail.factory.layouts import Backend, check_positions
from dovetail.factory.sampler import backend_layout, make_sampler
from dovetail.factory.tokenizer import banned_ids, stop_ids, text_of
from dovetail.launch.progress import Progress
from dovetail.parallel.consensus import agreed
from dovetail.run.state import refuse_other_models
from dovetail.sampler.base import SamplingParams, TokenPrompt
from dovetail.sampler.native import SamplerOptions
from dovetail.sampler.turn import Turn

ON_CPU = 128
ON_GPU = 2048  # samples of a replica between two writes


def run(args: argparse.Namespace, progress: Progress) -> None:
    made = Generation(args)
    with agreed(made.mesh):
        job = fingerprint_of(args, made.source, made.rows)
    with RowFile(args.out, made.mesh, job, len(made.rows) * args.samples) as out:
        for completions in made.portions(progress, out):
            out.write(
                {"id": made.rows[c.row].id, "sample": c.sample, "completion": made.decode(c.ids)}
                | {"token_ids": list(c.ids), "log_probs": list(c.log_probs), "finish": c.finish}
                for c in completions
            )


class Generation:
    """Collective."""

    def __init__(self, args: argparse.Namespace, *, answers: bool = False) -> None:
        self.args = args
        self.mesh = mesh = mesh_of(args)
        notes = list[str]()
        with agreed(mesh):
            source, tokenizer, processor = open_inputs(args, mesh, decodes=True)
            limits = Limits(source.spec.vocab_size, warn=notes.append)
            self.rows = rows = load_prompts(
                args.data, tokenizer, limits, answers=answers, processor=processor
            )
            self.backend: Backend = source.spec.engine
            lengths = [len(row.ids) for row in rows]
            check_positions(
                source.config, self.backend, lengths, args.max_new_tokens, "--max-new-tokens"
            )
            layout = backend_layout(source, mesh.layout, self.backend)
        say([*notes, *source.notes], mesh)
        if mesh["world"].size > 1:
            refuse_other_models("--model", source, mesh)
        self.sampler_mesh = mesh if layout == mesh.layout else make_mesh(layout, mesh.device)
        self.source = source
        self.reader = open_weights(source, mesh)
        stops = stop_ids(source, tokenizer)
        names = ("samples", "max_new_tokens", "temperature", "top_p", "top_k", "seed")
        given = {name: vars(args)[name] for name in names}
        banned = banned_ids(source, tokenizer, processor, stops)
        self.params = SamplingParams(**given, stop_ids=stops, banned_ids=banned)
        self.decode = partial(text_of, stops=stops, tokenizer=tokenizer)

    def portions(self, progress: Progress, out: RowFile | None = None) -> Iterator[list[Turn]]:
        """Loads the weights first."""
        options = SamplerOptions(keep_cache=True)
        dtype = getattr(torch, self.args.dtype)
        sampler = make_sampler(self.source, self.sampler_mesh, dtype, self.backend, options)
        sampler.load(self.reader)
        progress.phase("run")
        prompts = [TokenPrompt(i, row.ids, row.media) for i, row in enumerate(self.rows)]
        most = (ON_CPU if self.mesh.device.type == "cpu" else ON_GPU) * self.sampler_mesh[
            "data"
        ].size
        parts = portions(prompts, lambda _: self.args.samples, most)
        if out is not None:
            parts = out.missing(parts, self.args.samples)
            sampler.watch = out.advance if out.is_shown else None
        for part in parts:
            yield sampler.sample(part, self.params)
