"""What TRL makes of the rows of `row_shapes`: its trainers' preparation of a dataset, then its collator. One JSON line."""

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from trl import DPOTrainer, KTOTrainer, SFTTrainer
from trl.data_utils import extract_prompt, maybe_apply_chat_template
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tests.helpers.row_shapes import SHAPES, TEMPLATE
from tests.helpers.tokenizers import make_tokenizer

TOKENIZER = make_tokenizer(template=TEMPLATE)
IGNORED = -100


class Rows(list[dict[str, Any]]):
    """The part of an iterable dataset that TRL's preparation uses."""

    @property
    def column_names(self) -> list[str]:
        return list(self[0])

    def map(self, make: Callable[..., dict[str, Any]], **options: Any) -> "Rows":
        gone = options.get("remove_columns") or []
        gone = [gone] if isinstance(gone, str) else gone
        made = [{**row, **make(dict(row), **options.get("fn_kwargs", {}))} for row in self]
        return Rows([{key: value for key, value in row.items() if key not in gone} for row in made])

    def filter(self, keeps: Callable[..., bool], **_: Any) -> "Rows":
        return Rows([row for row in self if keeps(row)])


def trained_by_sft(row: dict[str, Any]) -> list[Any]:
    own = SimpleNamespace(_tokenizer=TOKENIZER, completion_only_loss=True, chat_template=None)
    args = SimpleNamespace(
        dataset_num_proc=None,
        dataset_text_field="text",
        assistant_only_loss="messages" in row,
        max_length=None,
        shuffle_dataset=False,
        packing=False,
    )
    prepared = SFTTrainer._prepare_dataset(own, Rows([row]), TOKENIZER, args, False, None, "train")
    batch = DataCollatorForLanguageModeling(pad_token_id=0)(list(prepared))
    (ids,), (labels,) = batch["input_ids"].tolist(), batch["labels"].tolist()
    return [[ids, [label != IGNORED for label in labels]]]


def compared_by_dpo(row: dict[str, Any]) -> list[Any]:
    own, args = (
        SimpleNamespace(_tokenizer=TOKENIZER),
        SimpleNamespace(dataset_num_proc=None, max_length=None),
    )
    row = row if "prompt" in row else extract_prompt(row)
    (done,) = DPOTrainer._prepare_dataset(own, Rows([row]), TOKENIZER, args, "train")
    start = done["prompt_ids"]
    pairs = [done["chosen_ids"], done["rejected_ids"]]
    return [[start + end, [False] * len(start) + [True] * len(end)] for end in pairs]


def judged_by_kto(row: dict[str, Any]) -> list[Any]:
    own = SimpleNamespace(_tokenizer=TOKENIZER, calculate_KL=False)
    args = SimpleNamespace(dataset_num_proc=None, max_length=None)
    (done,) = KTOTrainer._prepare_dataset(own, Rows([row]), TOKENIZER, args, "train")
    start, end = done["prompt_ids"], done["completion_ids"]
    trained = [start + end, [False] * len(start) + [True] * len(end)]
    return [trained, None] if done["label"] else [None, trained]


def sampled_from(row: dict[str, Any]) -> list[Any]:
    text = maybe_apply_chat_template(row, TOKENIZER)["prompt"]
    return [[TOKENIZER(text, add_special_tokens=False)["input_ids"], []]]


if __name__ == "__main__":
    made = {
        "sft": trained_by_sft,
        "dpo": compared_by_dpo,
        "kto": judged_by_kto,
        "prompt": sampled_from,
    }
    results = {shape.name: made[shape.trl](dict(shape.row)) for shape in SHAPES if shape.trl}
    sys.stdout.write(json.dumps(results) + "\n")
