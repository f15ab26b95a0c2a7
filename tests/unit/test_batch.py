"""Packing, padding, compaction and planning: properties over many random batches."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from dovetail.arch.registry import spec_from_config
from dovetail.batch.balancing import plan_microbatches, split_units
from dovetail.batch.micro import ContextShard, MicroBatch
from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.errors import DataError
from dovetail.kernels.registry import KernelSet
from dovetail.nn.decoder import Decoder
from dovetail.parallel.mesh import Mesh
from dovetail.rl.experience import minibatches

LENGTHS = st.lists(st.integers(1, 40), max_size=24)
MULTIPLES = st.sampled_from([1, 2, 3, 8])


@given(lengths=LENGTHS, replicas=st.integers(1, 5), room=st.integers(0, 60), multiple=MULTIPLES)
@settings(max_examples=200, deadline=None)
def test_plans_keep_the_budget_and_lose_nothing(
    lengths: list[int], replicas: int, room: int, multiple: int
) -> None:
    budget = -(-max(lengths, default=1) // multiple) * multiple + room
    plan = plan_microbatches(lengths, replicas, budget, multiple)
    assert len(plan) == replicas
    assert len({len(mine) for mine in plan}) == 1, "replicas have unequal numbers of micro-batches"
    seen = [i for mine in plan for micro in mine for i in micro]
    assert sorted(seen) == list(range(len(lengths)))
    for mine in plan:
        for micro in mine:
            assert -(-sum(lengths[i] for i in micro) // multiple) * multiple <= budget
    assert not lengths or any(plan[r][-1] for r in range(replicas)), (
        "the last round is empty everywhere"
    )


@given(lengths=LENGTHS, replicas=st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_plans_balance_replicas(lengths: list[int], replicas: int) -> None:
    """No replica has more than the average and one sequence."""
    plan = plan_microbatches(lengths, replicas, None)
    loads = [sum(lengths[i] for micro in mine for i in micro) for mine in plan]
    assert max(loads) <= sum(lengths) / replicas + max(lengths, default=0)
    assert all(len(mine) <= 1 for mine in plan)


def test_attention_weighs_in_what_replicas_are_dealt() -> None:
    """The narrower the model, the more: 24 tokens at a width of 1 cost more than 13 and 12."""
    assert plan_microbatches([24, 13, 12, 6], 2, None) == [[[0, 3]], [[1, 2]]]
    assert plan_microbatches([24, 13, 12, 6], 2, None, width=1) == [[[0]], [[1, 2, 3]]]


def test_a_sequence_above_the_budget_is_refused_by_number() -> None:
    with pytest.raises(
        DataError,
        match=r"sequence 1 has 9 tokens \(12 with padding\), more than tokens_per_batch=10",
    ):
        plan_microbatches([4, 9], 2, 10, multiple=4)


GROUPED = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from([None, 0, 3, 7, 2**40])), max_size=24
)


@given(rows=GROUPED, replicas=st.integers(1, 5), room=st.integers(0, 60), multiple=MULTIPLES)
@settings(max_examples=200, deadline=None)
def test_plans_keep_groups_in_one_micro_batch_in_order(
    rows: list[tuple[int, int | None]], replicas: int, room: int, multiple: int
) -> None:
    lengths, groups = [n for n, _ in rows], [group for _, group in rows]
    units = split_units(len(rows), groups)
    sizes = [sum(lengths[i] for i in unit) for unit in units]
    budget = -(-max(sizes, default=1) // multiple) * multiple + room
    plan = plan_microbatches(lengths, replicas, budget, multiple, groups=groups)
    micros = [micro for mine in plan for micro in mine]
    assert sorted(i for micro in micros for i in micro) == list(range(len(rows)))
    assert len({len(mine) for mine in plan}) == 1
    assert all(
        -(-sum(lengths[i] for i in micro) // multiple) * multiple <= budget for micro in micros
    )
    for group in {*groups} - {None}:
        members = [i for i, other in enumerate(groups) if other == group]
        together = next(micro for micro in micros if members[0] in micro)
        start = together.index(members[0])
        assert together[start : start + len(members)] == members


@given(lengths=LENGTHS, replicas=st.integers(1, 5), multiple=MULTIPLES)
@settings(max_examples=50, deadline=None)
def test_groups_of_one_are_no_groups(lengths: list[int], replicas: int, multiple: int) -> None:
    plan = plan_microbatches(lengths, replicas, 48, multiple)
    for groups in ([None] * len(lengths), range(len(lengths))):
        assert plan_microbatches(lengths, replicas, 48, multiple, groups=groups) == plan


def test_a_group_above_the_budget_is_refused_by_name() -> None:
    message = (
        r"group 7 \(sequences 0, 2\) has 15 tokens \(16 with padding\), more than tokens_per_batch=12; raise that to 16 or "
        r"more \(in a recipe trainer.tokens_per_batch\) or leave the group out"
    )
    with pytest.raises(DataError, match=message):
        plan_microbatches([6, 3, 9], 2, 12, multiple=4, groups=[7, None, 7])


@pytest.mark.parametrize("group", [-1, 2**63, 1.5, "a"])
def test_groups_that_are_no_ids_are_refused(group: Any) -> None:
    with pytest.raises(
        DataError,
        match=r"sequence 1 has the group .*; give a whole number from 0 to 2\*\*63 - 1, or None",
    ):
        PackedBatch.pack([Sequence([1]), Sequence([2], group=group)])


def test_groups_travel_with_their_sequences() -> None:
    group: Any = np.int64(5)
    batch = PackedBatch.pack([[1, 2], Sequence([3], group=group), Sequence([4, 5, 6], group=0)])
    assert batch.groups == (None, 5, 0) and batch.group_ids.tolist() == [-1, 5, 0]
    assert batch.select([2, 0]).groups == (0, None)
    micro = MicroBatch.of(batch, 4)
    for part in (micro.batch, micro.counted, micro.all_counted):
        assert part.group_ids.tolist() == [-1, 5, 0, -1]
    halved = MicroBatch.halved(batch, 1, 2, ContextShard(), 1)
    assert halved.counted.groups == (None, 5, 0) and halved.halves[1].batch.groups == (5, 0)
    empty = MicroBatch.of(batch.select([]), 4)
    assert empty.counted.group_ids.tolist() == [-1]
    assert PackedBatch.pack([[1]]).groups == ()


@given(groups=st.lists(st.sampled_from([None, 0, 1, 2]), max_size=12), count=st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_minibatches_keep_groups(groups: list[int | None], count: int) -> None:
    rows = [Sequence([i + 1, 50], group=group) for i, group in enumerate(groups)]
    parts = minibatches(PackedBatch.pack(rows), count, "seed")
    assert sorted(token for part in parts for token in part.tokens.tolist()[::2]) == [
        i + 1 for i in range(len(rows))
    ]
    for group in {*groups} - {None}:
        assert sum(group in part.groups for part in parts) == 1


def test_packing_shifts_targets_masks_and_fields_inside_each_sequence() -> None:
    rows = [
        Sequence(
            [3, 4, 5],
            mask=[True, False, True],
            fields={"advantage": [9.0, 1.0, 2.0], "temperature": [9.0, 0.5, 2.0]},
        ),
        Sequence([7], fields={"advantage": 8.0, "temperature": 3.0}),
        Sequence([1, 2], fields={"advantage": 4.0, "temperature": 1.0}),
    ]
    batch = PackedBatch.pack(rows)
    assert batch.tokens.tolist() == [3, 4, 5, 7, 1, 2]
    assert batch.targets.tolist() == [4, 5, 0, 0, 2, 0]
    assert batch.mask.tolist() == [False, True, False, False, True, False]
    assert batch.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert batch.fields["advantage"].tolist() == [1.0, 2.0, 0.0, 8.0, 4.0, 4.0]
    assert batch.fields["temperature"].tolist() == [0.5, 2.0, 1.0, 3.0, 1.0, 1.0]
    assert batch.fields["advantage"].dtype == torch.float32
    assert batch.sequence_ids.tolist() == [0, 0, 0, 1, 2, 2]


@given(lengths=LENGTHS, multiple=MULTIPLES, seed=st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_micro_batches_keep_counted_tokens_and_only_those(
    lengths: list[int], multiple: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    batch = PackedBatch.pack([torch.randint(50, (n,), generator=draw) for n in lengths])
    batch = batch.with_mask(batch.mask & (torch.rand(len(batch), generator=draw) < 0.6))
    batch = batch.with_fields(
        number=torch.arange(len(batch), dtype=torch.float32),
        temperature=torch.full((len(batch),), 2.0),
    )
    micro = MicroBatch.of(batch, multiple)
    padded, counted = micro.batch, micro.counted
    assert len(padded) % multiple == 0
    assert len(padded) > 0
    assert len(padded) - len(batch) < multiple or not len(batch)
    assert sum(padded.lengths) == len(padded)
    assert int(padded.cu_seqlens[-1]) == len(padded)
    assert not padded.mask[len(batch) :].any()
    assert (padded.fields["temperature"] > 0).all(), "padding would divide by 0"
    numbers = counted.fields["number"].long()
    assert numbers.tolist() == batch.mask.nonzero()[:, 0].tolist() == micro.index.tolist()
    assert torch.equal(counted.targets, batch.targets[numbers])
    assert torch.equal(counted.sequence_ids, padded.sequence_ids[micro.index])
    assert counted.mask.all()


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), data=st.data())
@settings(max_examples=50, deadline=None)
def test_selecting_is_packing_again(lengths: list[int], data: st.DataObject) -> None:
    rows = [list(range(100 * i + 1, 100 * i + 1 + n)) for i, n in enumerate(lengths)]
    chosen = data.draw(st.lists(st.sampled_from(range(len(rows))), unique=True))
    found, expected = (
        PackedBatch.pack(rows).select(chosen),
        PackedBatch.pack([rows[i] for i in chosen]),
    )
    assert found.lengths == expected.lengths
    for name in ("tokens", "targets", "mask", "positions", "cu_seqlens"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize(
    ("found", "what"), [(None, "a NoneType"), ([0.0, "b"], "a list"), ("bc", "a str")]
)
def test_fields_that_are_no_numbers_are_refused_by_name(found: Any, what: str) -> None:
    message = f"sequence 0: field 'a' is {what} .*; give a number, or one for each of 2 tokens"
    with pytest.raises(DataError, match=message):
        PackedBatch.pack([Sequence([1, 2], fields={"a": found})])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Sequence([]), "sequence 1 has no tokens"),
        (Sequence([1, 2], mask=[True]), "sequence 1 has 2 tokens but a mask of 1"),
        (
            Sequence([1, 2], fields={"a": [1.0]}),
            "sequence 1 has 2 tokens but 1 entries in field 'a'",
        ),
        (Sequence([1, 2]), "sequence 1 has no field 'a'"),
    ],
)
def test_rows_that_do_not_fit_are_named(row: Sequence, message: str) -> None:
    with pytest.raises(DataError, match=message):
        PackedBatch.pack([Sequence([1, 2, 3], fields={"a": 1.0}), row])


@pytest.mark.parametrize("number", [3, 3.0, np.float32(3), np.int64(3), torch.tensor(3.0)])
def test_a_number_as_a_field_may_be_of_any_library(number: Any) -> None:
    assert PackedBatch.pack([Sequence([1, 2], fields={"a": number})]).fields["a"].tolist() == [
        3.0,
        3.0,
    ]


def test_media_travel_with_their_sequences() -> None:
    image, video = {"pixel_values": torch.ones(4, 3)}, {"pixel_values_videos": torch.zeros(8, 3)}
    batch = PackedBatch.pack([[1, 2], Sequence([3], media=image), Sequence([4, 5, 6], media=video)])
    assert batch.media == (None, image, video)
    assert batch.select([2, 0]).media == (video, None)
    assert batch.select([0]).media == (), "text alone carries nothing"
    assert batch.pad_to_multiple(4).media == (None, image, video, None)
    assert batch.with_mask(batch.mask).to("cpu").media == batch.media
    micro = MicroBatch.of(batch, 4)
    assert micro.batch.media == (None, image, video, None)
    assert micro.counted.media == (), "heads and losses do not see"
    assert PackedBatch.pack([[1, 2], [3]]).pad_to_multiple(4).media == ()


def test_ids_that_a_model_does_not_have_are_refused_before_anything_runs() -> None:
    """A table that is cut over tp would give zeros for them."""
    spec = spec_from_config(
        {"model_type": "llama", "vocab_size": 10, "hidden_size": 8, "num_attention_heads": 2}
    )
    with torch.device("meta"):
        model = Decoder(spec, Mesh.solo(), KernelSet())
    for ids, told in (([1, 10], "1 to 10"), ([1, -1, 2], "-1 to 3"), ([2, 99], "2 to 99")):
        with pytest.raises(
            DataError, match=f"has ids {told}, but this llama model has ids 0 to 9; tokenize with"
        ):
            model.check(PackedBatch.pack([[3], ids]))
    good = PackedBatch.pack([[0, 9, 4]])
    model.check(good)
    model.check(PackedBatch.pack([]))
    unread = torch.tensor([-100, 4, -100])
    model.check(replace(good, targets=unread, mask=good.mask & (unread >= 0)))


def test_temperatures_that_divide_nothing_are_refused_where_tokens_count() -> None:
    """Log-probs would be no numbers, or those of another distribution. Nothing divides a critic's values."""
    spec = spec_from_config(
        {"model_type": "llama", "vocab_size": 10, "hidden_size": 8, "num_attention_heads": 2}
    )
    with torch.device("meta"):
        actor, critic = (
            Decoder(spec, Mesh.solo(), KernelSet()),
            Decoder(spec, Mesh.solo(), KernelSet(), "value"),
        )
    for divisor, told in (
        (0.0, "0"),
        (1e-46, "0"),
        (1e-39, "1e-39"),
        (-2.0, "-2"),
        (1e39, "inf"),
        (float("nan"), "nan"),
    ):
        batch = PackedBatch.pack([Sequence([4, 4, 4], fields={"temperature": divisor})])
        with pytest.raises(DataError, match=f"a token of temperature {told}; expected 1e-30 to"):
            actor.check(batch)
        critic.check(batch)
        actor.check(batch.with_mask(torch.zeros_like(batch.mask)))
    for divisor in (1e-30, 1e30):
        actor.check(PackedBatch.pack([Sequence([4, 4], fields={"temperature": divisor})]))


@pytest.mark.parametrize(
    "ids",
    [
        torch.ones(2, 3, dtype=torch.int64),
        torch.ones(2, 3, dtype=torch.int64).numpy(),
        torch.ones(3),
    ],
)
def test_pack_refuses_rows_that_may_have_padding(ids: Any) -> None:
    with pytest.raises(
        DataError, match="takes a list with the ids of each sequence, without padding"
    ):
        PackedBatch.pack(ids)


IDS = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 8], [9, 8, 7, 0, 0]])
ATTENTION = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
LABELS = torch.tensor([[-100, -100, -100, 6, 7], [1, -100, 3, 4, 8], [-100, 8, -100, -100, -100]])


def test_padded_rows_are_packed_and_come_back() -> None:
    """Padded on either side. A value belongs to the prediction made at its token, or by_token to predicting it."""
    weights = torch.where(ATTENTION == 1, torch.arange(15.0).view(3, 5), torch.nan)
    batch: Any = PackedBatch.from_padded(
        IDS, ATTENTION, LABELS, fields={"w": weights}, groups=[4, None, 4]
    )
    rows = [
        Sequence([5, 6, 7], [False, True, True], {"w": [2, 3, 4]}, group=4),
        Sequence([1, 2, 3, 4, 8], [True, False, True, True, True], {"w": [5, 6, 7, 8, 9]}),
        Sequence([9, 8, 7], [False, True, False], {"w": [10, 11, 12]}, group=4),
    ]
    packed = PackedBatch.pack(rows)
    for column in ("tokens", "targets", "mask", "positions", "cu_seqlens"):
        assert torch.equal(getattr(batch, column), getattr(packed, column)), column
    assert torch.equal(batch.fields["w"], packed.fields["w"])
    assert (batch.lengths, batch.groups) == (packed.lengths, packed.groups)
    assert torch.equal(batch.unpack(batch.tokens), IDS * ATTENTION)
    first = torch.tensor([[0, 0, 1, 0, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0]]) == 1
    back = batch.unpack(batch.fields["w"], by_token=True)
    assert torch.equal(back, weights.nan_to_num().masked_fill(first, 0.0))
    targets = batch.unpack(torch.where(batch.mask, batch.targets, -100))
    assert torch.equal(
        targets[0], torch.tensor([0, 0, 6, 7, -100])
    )  # as HF's labels[1:] against logits[:-1]
    chosen = batch.select([2, 0])
    assert torch.equal(chosen.unpack(chosen.tokens), (IDS * ATTENTION)[[2, 0]])
    assert [x.tolist() for x in packed.unpack(packed.tokens)] == [list(row.ids) for row in rows]
    everything = PackedBatch.from_padded(IDS, ATTENTION.bool())
    assert int(everything.mask.sum()) == int(ATTENTION.sum()) - 3


HOLE = torch.tensor([[1, 0, 1, 1, 0]] * 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            (IDS[0], ATTENTION[0]),
            r"input_ids is a tensor \[5\] .*; expected whole ids \[sequences, tokens\]",
        ),
        ((IDS.double(), ATTENTION), "expected whole ids"),
        (
            (IDS, ATTENTION[:, 1:]),
            r"attention_mask is a tensor \[3, 4\] .*; expected a tensor \[3, 5\], as input_ids",
        ),
        (
            (IDS, HOLE),
            r"attention_mask\[0\] has a hole at 1; a sequence's tokens follow each other",
        ),
        ((IDS, ATTENTION * 2), r"attention_mask\[0\] has other values than 0 and 1"),
        ((IDS, ATTENTION * 0), r"attention_mask\[0\] is all 0; leave out rows"),
        (
            (IDS, ATTENTION, LABELS.roll(-1, 1)),
            r"labels\[0\] differs from input_ids\[0\]; a label is the token itself",
        ),
        ((IDS, ATTENTION, LABELS[:2]), r"labels is a tensor \[2, 5\]"),
    ],
)
def test_padded_rows_of_a_wrong_form_are_refused(given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        PackedBatch.from_padded(*given)


@pytest.mark.parametrize(
    "given", [IDS, IDS.numpy(), {"input_ids": IDS, "attention_mask": ATTENTION}]
)
def test_pack_says_which_call_takes_padded_rows(given: Any) -> None:
    with pytest.raises(
        DataError,
        match=r"are for PackedBatch.from_padded\(input_ids, attention_mask\), and pack takes",
    ):
        PackedBatch.pack(given)


def test_values_to_unpack_have_an_entry_for_every_token() -> None:
    with pytest.raises(DataError, match=r"values is a tensor \[3\]"):
        PackedBatch.pack([[1, 2]]).unpack(torch.zeros(3))


def test_three_rows_of_positions_travel_with_their_tokens() -> None:
    batch = PackedBatch.pack([[1, 2, 3], [4, 5], [6, 7, 8, 9]])
    rows = torch.stack([batch.positions, 10 + batch.positions, 20 + batch.positions])
    triple = replace(batch, positions=rows)
    for change in (
        lambda given: given.select([2, 0]),
        lambda given: given.compact(torch.tensor([0, 3, 4])),
        lambda given: given.to("cpu", non_blocking=True),
    ):
        plain = change(batch).positions
        assert torch.equal(change(triple).positions, torch.stack([plain, 10 + plain, 20 + plain]))
    padded = triple.pad_to_multiple(8).positions
    assert torch.equal(padded[:, 9:], torch.arange(7).expand(3, 7))
    assert torch.equal(padded[:, :9], rows)
