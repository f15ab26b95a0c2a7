"""The largest numbers that a recipe or a call of the sampler may ask for. Imports nothing, so that both can use it."""

MOST_SAMPLES, MOST_NEW_TOKENS = 1 << 16, 1 << 22  # of a prompt, and of a completion
MOST_TOKENS = 1 << 30  # of a batch
LARGEST = 1e30  # of what bounds float32
