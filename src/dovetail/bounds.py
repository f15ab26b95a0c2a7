"""Bounds of recipe keys and sampling parameters."""

MAX_SAMPLES = 1 << 16
MAX_NEW_TOKENS = 1 << 22  # of a prompt, and of a completion
MAX_TOKENS = 1 << 30  # of a batch
MAX_LAG = 1 << 10  # steps
MAX_FLOAT = 1e30  # of float32 settings
MIN_TEMPERATURE = 1e-30
MAX_TEMPERATURE = 1e30  # logits over it stay finite and distinct
