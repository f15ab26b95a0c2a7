"""`dovetail generate`: completions of the prompts of a file, from the embedded sampler."""

import argparse

import torch

from dovetail.arch.transformers_spec import TransformersSpec
from dovetail.cli.common import RowFile, mesh_of, open_inputs, portions, say
from dovetail.data.examples import Limits, load_prompts
from dovetail.factory.engine import make_mesh, open_weights
from dovetail.factory.layouts import Backend, check_positions
from dovetail.factory.sampler import backend_layout, make_sampler
from dovetail.factory.tokenizer import banned_ids, stop_ids, text_of
from dovetail.launch.progress import Progress
from dovetail.parallel.consensus import agreed
from dovetail.rollout.base import Prompt, SamplingParams
from dovetail.rollout.native import SamplerOptions
from dovetail.run.state import refuse_other_models

ON_CPU, ON_GPU = 128, 2048  # samples of a replica between two writes


def run(args: argparse.Namespace, progress: Progress) -> None:
    mesh = mesh_of(args)
    with agreed(mesh):
        source, tokenizer, processor = open_inputs(args, mesh, decodes=True)
        limits = Limits(source.spec.vocab_size)
        rows = load_prompts(args.data, tokenizer, limits, answers=False, processor=processor)
        backend: Backend = "transformers" if isinstance(source.spec, TransformersSpec) else "native"
        check_positions(source.config, backend, [len(row.ids) for row in rows], args.max_new_tokens, "--max-new-tokens")
        layout = backend_layout(source, mesh.layout, backend)
    if mesh["world"].size > 1:
        refuse_other_models("--model", source, mesh)
    sampler_mesh = mesh if layout == mesh.layout else make_mesh(layout, mesh.device)
    reader = open_weights(source, mesh)
    stops = stop_ids(source, tokenizer)
    params = SamplingParams(
        samples=args.samples,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        stop_ids=stops,
        banned_ids=banned_ids(source, tokenizer, processor, stops),
    )
    dtype = getattr(torch, args.dtype)
    with RowFile(args.out, mesh) as out:
        sampler = make_sampler(source, sampler_mesh, dtype, backend, SamplerOptions(keep_cache=True))
        sampler.load(reader)
        say(source.notes, mesh)
        progress.phase("run")
        prompts = [Prompt(i, row.ids, row.media) for i, row in enumerate(rows)]
        most = (ON_CPU if mesh.device.type == "cpu" else ON_GPU) * sampler_mesh["fsdp"].size
        for part in portions(prompts, lambda _: args.samples, most):
            completions = sampler.sample(part, params)
            out.write(
                {
                    "id": rows[c.row].id,
                    "sample": c.sample,
                    "completion": text_of(c.ids, stops, tokenizer),
                    "token_ids": list(c.ids),
                    "log_probs": list(c.log_probs),
                    "finish": c.finish,
                }
                for c in completions
            )
