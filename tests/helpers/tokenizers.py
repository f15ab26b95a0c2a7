"""A tiny byte-level tokenizer with its chat templates, and rows in a file."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dovetail.data.examples import Limits

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SEEING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<|vision_start|>"
    "{{ '<|image_pad|>' if part['type'] == 'image' else '<|video_pad|>' }}<|vision_end|>{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Says more about the last turn than about the others, as reasoning models do.
FORGETFUL = CHATML.replace(
    "{{ m['content'] }}",
    "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}{{ m['content'] }}",
)
STRICT = (
    "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}" + CHATML
)
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
USER, ASSISTANT = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is 4"}


def make_tokenizer(
    *, bos: bool = False, template: str | None = CHATML, eos: str | None = "<|im_end|>"
) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate([*SPECIAL, *alphabet])}, merges=[])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    if bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>" if bos else None, eos_token=eos
    )
    tokenizer.chat_template = template
    return tokenizer


PLAIN = make_tokenizer()
LIMITS = Limits(vocab_size=260)


def write(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def spelled(ids: Any, mask: Any = None) -> str:
    """The text of ids, or of those that the mask trains."""
    return str(PLAIN.decode([i for i, m in zip(ids, mask or [True] * len(ids), strict=True) if m]))
