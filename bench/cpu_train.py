"""Training speed on a CPU: one AdamW step on the mean token loss, our engine against transformers with sdpa."""

from collections.abc import Sequence

import torch

from bench.harness import Case
from bench.models import LR, Padded, Pair, pad, ragged_lengths, sequences, smollm2_pair
from dovetail.batch.loss import Loss, TokenStats
from dovetail.batch.packed import PackedBatch


def cases(dtype: torch.dtype, tokens: int, depth: int) -> list[Case]:
    """Equal lengths and ragged ones; master weights are float32, `dtype` is computed in (autocast for the peer)."""
    equal, ragged = [256] * max(1, tokens // 256), ragged_lengths(tokens)
    pair = smollm2_pair(dtype, master=torch.float32, depth=depth)
    return [
        case("train, equal lengths (256)", pair, equal),
        case("train, ragged lengths (32-1024)", pair, ragged),
    ]


def case(name: str, pair: Pair, lengths: Sequence[int]) -> Case:
    """One optimizer step on all tokens."""
    rows = sequences(lengths)
    batch, padded = PackedBatch.pack(rows), pad(rows)
    optimizer = torch.optim.AdamW(
        pair.hf.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    label = f"{name}, {str(pair.dtype).removeprefix('torch.')}"
    return Case(
        label,
        len(batch),
        lambda: pair.engine.train_step(batch, NegativeLogLikelihood()),
        lambda: transformers_step(pair, padded, optimizer),
    )


class NegativeLogLikelihood:
    """The sum of -log p over the counted tokens."""

    separable = True

    def __call__(self, stats: TokenStats, batch: PackedBatch) -> Loss:
        return Loss(-stats.logprob.sum(), batch.mask.sum(), {})


def transformers_step(pair: Pair, padded: Padded, optimizer: torch.optim.Optimizer) -> None:
    """Micro-batches of 8 sequences, summed gradients divided by the number of tokens, clipped."""
    count = padded.mask[:, 1:].sum()
    for ids, mask in zip(padded.ids.split(8), padded.mask.split(8), strict=True):
        with torch.autocast("cpu", pair.dtype, enabled=pair.dtype != torch.float32):
            logits = pair.hf(input_ids=ids, attention_mask=mask).logits[:, :-1]
        labels = torch.where(mask[:, 1:], ids[:, 1:], -100)
        wide = torch.promote_types(logits.dtype, torch.float32)
        loss = torch.nn.functional.cross_entropy(
            logits.to(wide).flatten(0, 1), labels.flatten(), reduction="sum"
        )
        (loss / count).backward()
    torch.nn.utils.clip_grad_norm_(pair.hf.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
