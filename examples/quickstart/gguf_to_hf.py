"""Turns a Llama model from GGUF into a Hugging Face directory: python gguf_to_hf.py MODEL.gguf DIRECTORY.

The weights become the float32 values that the quantized ones stand for: not the original model's, but close to them.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging


def convert(gguf: Path, out: Path) -> None:
    """Write model, tokenizer, chat template and generation config."""
    source = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
        "local_files_only": True,
    }
    tokenizer = AutoTokenizer.from_pretrained(**source)
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # a model loaded from GGUF carries a quantizer that refuses to be saved, so a plain one takes its weights
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path", "_name_or_path"):
        settings.pop(key, None)
    plain = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config.eos_token_id = sorted(
        {tokenizer.eos_token_id, *_end_of_text(tokenizer)}, reverse=True
    )
    plain.generation_config.pad_token_id = tokenizer.pad_token_id
    plain.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _end_of_text(tokenizer: AutoTokenizer) -> list[int]:
    """The base model's own end of a text, where there is one beside the chat's end of a turn."""
    found = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    return [] if found is None else [found]


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
