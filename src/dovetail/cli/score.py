"""`dovetail score`: per-token log-probs and entropies, or values, of the rows of a file."""

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from dovetail.batch import PackedBatch, Sequence
from dovetail.build.engine import EngineOptions, make_engine, make_mesh
from dovetail.build.text import load_processor, load_tokenizer
from dovetail.cli.output import check_out, say, write_rows
from dovetail.data import Limits, Scored, load_score
from dovetail.engine.native import NativeEngine
from dovetail.launch import pick_device
from dovetail.layout import Layout
from dovetail.rows import needs_text
from dovetail.watch.progress import Progress
from dovetail.weights.agree import agreed
from dovetail.weights.pretrained import Pretrained


def run(args: argparse.Namespace, progress: Progress) -> None:
    """Score every row, on every layout alike."""
    mesh = make_mesh(Layout.parse(args.layout or ""), pick_device(args.device))
    dtype = getattr(torch, args.dtype)
    with agreed(mesh):
        check_out(args.out, args.data, mesh)
        source = Pretrained.open(args.model, args.engine, trust_remote_code=args.trust_remote_code)
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
    options = EngineOptions(master_dtype=dtype, tokens_per_batch=args.tokens_per_batch)
    engine = make_engine(source, mesh, dtype, args.head, options)
    say(source.notes, mesh)
    progress.phase("run")
    fields = {} if args.temperature == 1.0 else {"temperature": args.temperature}
    batch = PackedBatch.pack([Sequence(row.ids, fields=fields, media=row.media) for row in rows])
    write_rows(args.out, _values(engine, batch, rows) if args.head == "value" else _stats(engine, batch, rows), mesh)


def _stats(engine: NativeEngine, batch: PackedBatch, rows: list[Scored]) -> Iterator[dict[str, Any]]:
    stats = engine.score(batch)
    columns = zip(rows, stats.logprob.split(batch.lengths), stats.entropy.split(batch.lengths), strict=True)
    return ({"id": row.id, "log_probs": p[:-1].tolist(), "entropy": h[:-1].tolist()} for row, p, h in columns)


def _values(engine: NativeEngine, batch: PackedBatch, rows: list[Scored]) -> Iterator[dict[str, Any]]:
    columns = zip(rows, engine.values(batch).split(batch.lengths), strict=True)
    return ({"id": row.id, "values": v.tolist()} for row, v in columns)
