"""Warnings of libraries that tell a user nothing, silenced by their message."""

import logging
import warnings

COMPILING = (
    r"Argument aux_data .* cannot be converted to a JitArgument"  # FlashAttention-4, for every kernel it compiles
)
CLEAN_UP = "Ignoring clean_up_tokenization_spaces=True for BPE tokenizer"  # transformers, for every rank
TOKENIZERS = ("transformers.tokenization_utils_tokenizers", "transformers.tokenization_utils_base")


def silence() -> None:
    """Silence exactly these, in this process."""
    warnings.filterwarnings("ignore", COMPILING, UserWarning)
    for name in TOKENIZERS:
        logging.getLogger(name).addFilter(_says_more)


def _says_more(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(CLEAN_UP)
