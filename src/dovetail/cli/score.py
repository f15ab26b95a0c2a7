"""`dovetail score`: per-token log-probs and entropies, or values, of the rows of a file."""

import argparse
from collections.abc import Iterator, Sequence as Seq
from typing import Any

import torch

from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.cli.output import RowFile, check_out, portions, say
from dovetail.data.examples import Limits, Scored, load_score
from dovetail.data.rows import needs_text
from dovetail.engine.native import NativeEngine
from dovetail.factory.engine import EngineOptions, make_engine, make_mesh
from dovetail.factory.tokenizer import load_processor, load_tokenizer
from dovetail.launch.progress import Progress
from dovetail.parallel.consensus import agreed
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.process_group import pick_device
from dovetail.run.state import refuse_other_models
from dovetail.weights.hf_directory import Pretrained

Rows = Seq[Scored]


def run(args: argparse.Namespace, progress: Progress) -> None:
    """Score every row, on every layout alike."""
    mesh = make_mesh(Layout.parse(args.layout or ""), pick_device(args.device))
    dtype = getattr(torch, args.dtype)
    with agreed(mesh):
        check_out(args.out, args.data, mesh)
        source = Pretrained.open(args.model, args.engine)
        tokenizer = None
        if needs_text(args.data):
            tokenizer = load_tokenizer(source, trust_remote_code=args.trust_remote_code)
        budget = args.tokens_per_batch // mesh.token_multiple * mesh.token_multiple
        rows = load_score(
            args.data,
            tokenizer,
            Limits(source.spec.vocab_size, max_tokens=budget, remedy="or raise --tokens-per-batch"),
            processor=load_processor(source, trust_remote_code=args.trust_remote_code),
        )
    if mesh["world"].size > 1:
        refuse_other_models("--model", source, mesh)
    options = EngineOptions(master_dtype=dtype, tokens_per_batch=args.tokens_per_batch)
    fields = {} if args.temperature == 1.0 else {"temperature": args.temperature}
    with RowFile(args.out, mesh) as out:
        engine = make_engine(source, mesh, dtype, args.head, options)
        say(source.notes, mesh)
        progress.phase("run")
        for part in portions(rows, lambda row: len(row.ids), args.tokens_per_batch * _micro_batches(mesh)):
            batch = PackedBatch.pack([Sequence(row.ids, fields=fields, media=row.media) for row in part])
            out.write((_values if args.head == "value" else _stats)(engine, batch, part))


def _micro_batches(mesh: Mesh) -> int:
    """How many are computed between two writes: enough to balance replicas and to fill a pipeline."""
    replicas, stages = mesh["dp"].size, mesh["pp"].size
    return 1 if replicas * stages == 1 else 4 * replicas * stages


def _stats(engine: NativeEngine, batch: PackedBatch, rows: Rows) -> Iterator[dict[str, Any]]:
    stats = engine.score(batch)
    columns = zip(rows, stats.logprob.split(batch.lengths), stats.entropy.split(batch.lengths), strict=True)
    return ({"id": row.id, "log_probs": p[:-1].tolist(), "entropy": h[:-1].tolist()} for row, p, h in columns)


def _values(engine: NativeEngine, batch: PackedBatch, rows: Rows) -> Iterator[dict[str, Any]]:
    columns = zip(rows, engine.values(batch).split(batch.lengths), strict=True)
    return ({"id": row.id, "values": v.tolist()} for row, v in columns)
