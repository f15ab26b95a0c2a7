"""Scoring speed on a CPU: log-prob and entropy of every token, our engine against transformers with sdpa."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.harness import Case
from bench.models import Padded, Pair, pad, ragged_lengths, sequences, smollm2_pair
from dovetail.batch.packed import PackedBatch


def cases(dtype: torch.dtype, tokens: int, depth: int) -> list[Case]:
    """Equal lengths, which padding does not hurt, and ragged ones."""
    pair = smollm2_pair(dtype, master=dtype, depth=depth)
    equal, ragged = [256] * max(1, tokens // 256), ragged_lengths(tokens)
    return [
        case("score, equal lengths (256)", pair, equal),
        case("score, ragged lengths (32-1024)", pair, ragged),
    ]


def case(name: str, pair: Pair, lengths: Sequence[int]) -> Case:
    """Both results are compared before anything is measured."""
    rows = sequences(lengths)
    batch, padded = PackedBatch.pack(rows), pad(rows)
    stats = pair.engine.score(batch)
    logprob, entropy = transformers_score(pair, padded)
    counted = batch.mask
    real = padded.mask[:, 1:]
    off = max(
        (logprob[real] - stats.logprob[counted]).abs().max(),
        (entropy[real] - stats.entropy[counted]).abs().max(),
    )
    limit = 1e-4 if pair.dtype == torch.float32 else 0.5
    assert off <= limit, (
        f"{name}: ours and the peer's differ by {off}; the comparison would mean nothing"
    )
    label = f"{name}, {str(pair.dtype).removeprefix('torch.')}"
    return Case(
        label,
        len(batch),
        lambda: pair.engine.score(batch),
        lambda: transformers_score(pair, padded),
    )


@torch.no_grad()
def transformers_score(pair: Pair, padded: Padded) -> tuple[Tensor, Tensor]:
    """[S, L - 1] twice: as one writes it with full logits, a micro-batch of 8 sequences at a time."""
    logprobs, entropies = [], []
    for ids, mask in zip(padded.ids.split(8), padded.mask.split(8), strict=True):
        logits = pair.hf(input_ids=ids, attention_mask=mask).logits[:, :-1].to(torch.float32)
        every = logits.log_softmax(-1)
        logprobs.append(every.gather(-1, ids[:, 1:, None])[..., 0])
        entropies.append(-(every.exp() * every).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)
