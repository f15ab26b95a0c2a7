"""The rows of a run, as examples."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from dovetail.data.examples import Limits, sequences_of
from dovetail.data.files import Source
from dovetail.errors import ConfigError
from dovetail.factory.notes import rows_line
from dovetail.factory.opened import Opened
from dovetail.factory.rows import Given, listed, sources_of
from dovetail.factory.setup import Setup
from dovetail.parallel.consensus import agreed, refuse_different
from dovetail.recipe.data import DataSection
from dovetail.recipe.schema import Recipe
from dovetail.run.resume import ROWS, refuse_other
from dovetail.run.state import rows_fingerprint

Parts = tuple[tuple[int, float], ...]  # rows and weight of each part of a mixture
Example = TypeVar("Example")


@dataclass(frozen=True)
class Dataset(Generic[Example]):
    """Examples of data.train, data.eval and eval.sets.

    parts: rows and weight of each part of data.train. lengths: tokens of each of its rows.
    """

    train: list[Example]
    held_out: list[Example]
    eval_sets: dict[str, list[Example]]
    parts: Parts
    fingerprint: str
    lengths: list[int]


def load_dataset(
    opened: Opened, load: Callable[..., list[Example]]
) -> tuple[Dataset[Example], Opened]:
    """Returns the rows, and the run with the number of its steps. Collective.

    load: takes a source, options of the chat template, a tokenizer and a processor.
    """
    setup = opened.setup
    data = setup.recipe.data
    with agreed(setup.mesh):
        load = partial(
            load,
            template_options=data.chat_template_kwargs,
            tokenizer=setup.tokenizer,
            processor=setup.processor,
        )
        train, parts = load_parts(data, data.train, load)
        held_out, _ = load_parts(data, data.eval, load)
        sets = {each.name: load_parts(data, each.data, load)[0] for each in setup.recipe.eval.sets}
    recipe = with_epochs(setup.recipe, len(train))
    fingerprint = rows_fingerprint([*train, *parts])
    lengths = [len(x.ids) for row in train for x in sequences_of(row)]
    others = {"data.eval": held_out}
    others |= {f"eval.sets {name}": examples for name, examples in sets.items()}
    setup.notes.extend(note_known_rows(train, others))
    if not setup.start.dry_run:
        opened.directory.say(rows_line(lengths, sum(map(len, others.values()))))
    prints = {name: rows_fingerprint(examples) for name, examples in others.items()}
    refuse_different({"data.train": fingerprint, **prints}, setup.mesh)
    if opened.resumed is not None:
        remedy = ROWS[data.overlong_rows]
        known = opened.resumed.state.data
        refuse_other("the rows of data.train", known, fingerprint, remedy)
    dataset = Dataset(train, held_out, sets, parts, fingerprint, lengths)
    return dataset, replace(opened, setup=replace(setup, recipe=recipe))


def note_known_rows(train: Sequence[Any], others: dict[str, list[Example]]) -> list[str]:
    """Returns a note for each set that has rows of data.train."""
    if not any(others.values()):
        return []
    trained = {hash(tuple(x.ids)) for row in train for x in sequences_of(row)}
    notes = []
    for name, examples in others.items():
        known = 0
        for row in examples:
            known += any(hash(tuple(x.ids)) in trained for x in sequences_of(row))
        if known:
            notes.append(f"{known} of {len(examples)} rows of {name} are rows of data.train")
    return notes


def limits_of(
    setup: Setup, max_tokens: int, asked: int | None = None, key: str = "data.max_prompt_length"
) -> Limits:
    """Returns the limits of rows: `max_tokens`, or what the user asked for by `key`."""
    recipe = setup.recipe
    data = recipe.data
    if max_tokens < 1:
        budget = recipe.trainer.tokens_per_batch
        new = f"rollout.max_new_tokens={recipe.rollout.max_new_tokens}"
        raise ConfigError(
            f"trainer.tokens_per_batch={budget} leaves no room for a prompt next to {new}; raise "
            "the first or lower the second"
        )
    remedy = "raise trainer.tokens_per_batch, or set data.overlong_rows=drop"
    if max_tokens < setup.longest_row:
        remedy = f"lower rollout.max_new_tokens, which is kept free behind it, {remedy}"
    if asked is not None and asked < max_tokens:
        max_tokens = asked
        remedy = f"raise {key}, or set data.truncate=left or data.overlong_rows=drop"
    vocab_size = setup.source.spec.vocab_size
    say = setup.notes.append
    return Limits(vocab_size, max_tokens, data.overlong_rows, remedy, say, data.truncate)


def load_parts(
    data: DataSection, given: Given, load: Callable[[Source], list[Example]]
) -> tuple[list[Example], Parts]:
    """Returns all examples, and the parts if they have weights."""
    weights = [part.weight for part in listed(given) if part.weight is not None]  # all or none
    loaded = [load(source) for source in sources_of(data, given)]
    examples = [example for part in loaded for example in part]
    return examples, tuple(zip(map(len, loaded), weights, strict=True)) if weights else ()


def with_epochs(recipe: Recipe, num_rows: int) -> Recipe:
    """Returns the recipe with the steps of its epochs."""
    trainer = recipe.trainer
    steps = math.ceil(num_rows * (recipe.data.epochs or 0) / trainer.prompts_per_step)
    if not steps:
        return recipe
    return recipe.model_copy(update={"trainer": trainer.model_copy(update={"steps": steps})})
