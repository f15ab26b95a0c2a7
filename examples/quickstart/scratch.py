"""Makes a language model of 1.7M random parameters that reads single characters, as a Hugging Face directory.

    python -m examples.quickstart.scratch DIRECTORY [SEED]

Qwen2's architecture with 6 heads on 2 KV heads, so tp = 2 divides it. It knows nothing: first `scratch_sft.yaml`.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHARACTERS = "0123456789+-*/=<>()?., \n:;!%^_"
PAD, EOS = (
    "<|endoftext|>",
    "<|im_end|>",
)  # names that transformers adds to a Qwen2 tokenizer unless they are there


def make(out: Path, seed: int = 0) -> None:
    """Write model and tokenizer; the same seed gives the same weights."""
    tokenizer = character_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Every character a token: byte-pair encoding without any pairs. 32 ids, all of which can be written.

    Byte-level, since transformers reads any tokenizer beside a Qwen2 config as one of Qwen2's.
    """
    by_bytes = {" ": "\u0120", "\n": "\u010a"}  # how byte-level vocabularies write these two
    vocab = {by_bytes.get(token, token): i for i, token in enumerate([*CHARACTERS, PAD, EOS])}
    characters = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    characters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    characters.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    make(Path(sys.argv[1]), *map(int, sys.argv[2:]))
