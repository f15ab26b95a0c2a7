"""`dovetail score`."""

import argparse
from collections.abc import Iterator, Sequence as Seq
from typing import Any

import torch

from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.cli.common import RowFile, fingerprint_of, mesh_of, open_inputs, portions, say
from dovetail.data.examples import Limits, Prompt, load_score
from dovetail.engine.native import Engine
from dovetail.factory.engine import EngineOptions, make_engine
from dovetail.launch.progress import Progress
from dovetail.parallel.consensus import agreed
from dovetail.run.state import refuse_other_models


def run(args: argparse.Namespace, progress: Progress) -> None:
    mesh = mesh_of(args)
    notes = list[str]()
    with agreed(mesh):
        source, tokenizer, processor = open_inputs(args, mesh)
        budget = args.tokens_per_batch // mesh.token_multiple * mesh.token_multiple
        remedy = "or raise --tokens-per-batch"
        limits = Limits(source.spec.vocab_size, max_tokens=budget, remedy=remedy, warn=notes.append)
        rows = load_score(args.data, tokenizer, limits, processor=processor)
    say([*notes, *source.notes], mesh)
    if mesh["world"].size > 1:
        refuse_other_models("--model", source, mesh)
    dtype = getattr(torch, args.dtype)
    options = EngineOptions(master_dtype=dtype, tokens_per_batch=args.tokens_per_batch)
    fields = {} if args.temperature == 1.0 else {"temperature": args.temperature}
    replicas = mesh["dp"].size
    stages = mesh["pp"].size
    micros = (
        1 if replicas * stages == 1 else 4 * replicas * stages
    )  # to balance replicas and to fill a pipeline
    with agreed(mesh):
        job = fingerprint_of(args, source, rows)
    with RowFile(args.out, mesh, job, len(rows)) as out:
        engine = make_engine(source, mesh, dtype, args.head, options)
        progress.phase("run")
        for part in out.missing(
            portions(rows, lambda row: len(row.ids), args.tokens_per_batch * micros)
        ):
            batch = PackedBatch.pack(
                [Sequence(row.ids, fields=fields, media=row.media) for row in part]
            )
            out.write((_values if args.head == "value" else _stats)(engine, batch, part))


def _stats(engine: Engine, batch: PackedBatch, rows: Seq[Prompt]) -> Iterator[dict[str, Any]]:
    stats = engine.score(batch)
    columns = zip(
        rows, stats.logprob.split(batch.lengths), stats.entropy.split(batch.lengths), strict=True
    )
    return (
        {"id": row.id, "log_probs": p[:-1].tolist(), "entropy": h[:-1].tolist()}
        for row, p, h in columns
    )


def _values(engine: Engine, batch: PackedBatch, rows: Seq[Prompt]) -> Iterator[dict[str, Any]]:
    columns = zip(rows, engine.values(batch).split(batch.lengths), strict=True)
    return ({"id": row.id, "values": v.tolist()} for row, v in columns)
