"""Random models, layouts and batches for the fuzz target: what is drawn, and what one rank does with it.

Most draws fit together, some do not: then every rank must refuse, in the same words and before any weight is read.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from dovetail.batch.packed import PackedBatch
from dovetail.engine.native import Engine
from dovetail.errors import CheckpointError, ConfigError, DataError, LayoutError, ModelError
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.nn.activation_checkpoint import Recompute
from dovetail.parallel.layout import Layout
from dovetail.pipeline.partition import SCHEDULES
from tests.helpers.checkpoints import assert_same_tensors
from tests.helpers.matrix import LOSSES, STEP, Figures, figures_of, measure, random_batch
from tests.helpers.parity_configs import tiny_model

FAMILIES: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
MAX_RANKS = 8
FITTING = 0.94  # the share of choices that look at what was chosen before
REFUSALS = (LayoutError, ModelError, ConfigError, DataError)
ALONE = "alone.pt"


@dataclass(frozen=True)
class Draw:
    """One try. `config`: what transformers' config class of `family` is given."""

    family: str
    config: dict[str, Any]
    layout: Layout
    lengths: tuple[int, ...]
    loss: str
    budget: int | None
    recompute: Recompute

    def __str__(self) -> str:
        """All of it, for whoever wants to try it again."""
        return f"{self.family} {json.dumps(self.config)} {self.layout!r} {self.lengths} {self.loss} {self.budget}"

    @property
    def head(self) -> Any:
        return "value" if self.loss == "value" else "lm"


def draw(seed: str) -> Draw:
    """A try that depends on `seed` alone."""
    rng = Random(seed)
    tp, pp, cp, dp = _degrees(rng)
    depth = rng.randint(1, 9)
    layout = _layout(rng, tp, pp, cp, dp, depth)
    if rng.random() < FITTING:
        depth = max(depth, layout.pp * layout.virtual_stages)
    family = rng.choice(list(FAMILIES))
    config = _config(rng, family, tp, depth)
    while not _transformers_takes(family, config):
        config = _config(rng, family, tp, depth)
    lengths = _lengths(rng)
    return Draw(
        family,
        config,
        layout,
        lengths,
        loss=rng.choice(list(LOSSES)),
        budget=_budget(rng, lengths, tp * (2 * cp if cp > 1 else 1)),
        recompute=rng.choice(["none", "none", "full", "selective"]),
    )


def write(given: Draw, folder: Path, *, weights: bool) -> None:
    """The model's directory: whole, or with a file of weights that nobody can read."""
    config = FAMILIES[given.family](**given.config)
    if weights:
        tiny_model(config, values=given.head == "value").save_pretrained(folder)
        return
    config.architectures = ["Anything"]
    config.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"not weights")


def refusal(folder: str, given: Draw) -> str:
    """What this rank says to a model without readable weights: why it refuses, or "" where it would read them."""
    try:
        _engine(folder, given, given.layout)
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}"
    except CheckpointError as error:
        if "model.safetensors" not in str(error):
            raise
        return ""
    raise AssertionError("nobody noticed that the weights are none")


def outcome(folder: str, given: Draw) -> str | Figures:
    """How far this rank of the layout is from one rank; or why it refuses the batch.

    Before it learns, its weights are streamed as they came: names, order and bytes.
    """
    engine = _engine(folder, given, given.layout)
    expected = load_file(Path(folder) / "model.safetensors")
    streamed = dict(engine.weights())
    assert list(streamed) == list(engine.origin.checkpoint_names)
    assert_same_tensors(streamed, expected)
    try:
        found, stray = measure(engine, _batch(given), given.loss)
    except DataError as error:
        return f"DataError: {error}"
    return figures_of(found, stray, torch.load(Path(folder) / ALONE, weights_only=False))


def write_alone(folder: str, given: Draw) -> None:
    """What one rank gives, all tokens at once."""
    torch.save(
        measure(_engine(folder, given, Layout()), _batch(given), given.loss)[0],
        Path(folder) / ALONE,
    )


def _batch(given: Draw) -> PackedBatch:
    return random_batch(given.lengths, given.loss, torch.float64, given.config["vocab_size"])


def _engine(folder: str, given: Draw, layout: Layout) -> Engine:
    alone = layout == Layout()
    options = EngineOptions(
        optim=STEP,
        tokens_per_batch=None if alone else given.budget,
        recompute="none" if alone else given.recompute,
    )
    return from_pretrained(
        folder, layout=layout, dtype=torch.float64, head=given.head, device="cpu", options=options
    )


def _degrees(rng: Random) -> tuple[int, ...]:
    """tp, pp, cp and dp of at most `MAX_RANKS` ranks, three and more of something among them."""
    while True:
        degrees = tuple(rng.choice([1, 1, 2, 2, 3, 4, 5, 8]) for _ in range(4))
        if torch.tensor(degrees).prod() <= MAX_RANKS:
            return degrees


def _layout(rng: Random, tp: int, pp: int, cp: int, dp: int, depth: int) -> Layout:
    """Any schedule, split and mode; most of the time those that belong together."""
    fits = rng.random() < FITTING
    schedule = rng.choice(SCHEDULES)
    virtual = rng.choice([1, 2, 3]) if pp <= 3 else 1
    if fits and pp == 1:
        schedule, virtual = "1f1b", 1
    if fits and schedule == "zero_bubble":
        virtual = 1
    if fits and schedule == "interleaved" and virtual == 1:
        schedule = "1f1b"
    split: str | tuple[int, ...] = "auto"
    stages = pp * virtual
    if pp > 1 and rng.random() < 0.3 and depth >= stages:
        cuts = sorted(rng.sample(range(1, depth), stages - 1))
        split = tuple(b - a for a, b in zip((0, *cuts), (*cuts, depth), strict=True))
        if rng.random() > FITTING:
            split = (*split[:-1], split[-1] + 1)
    mode = (
        rng.choice(["auto", "auto", "gather", "ulysses", "product"])
        if cp > 1 or not fits
        else "auto"
    )
    ep = 2 if rng.random() > FITTING else 1
    return Layout(tp, pp, cp, dp, ep, virtual, mode, split, schedule)


def _transformers_takes(family: str, config: dict[str, Any]) -> bool:
    try:
        FAMILIES[family](**config)
    except StrictDataclassError:
        return False
    return True


def _config(rng: Random, family: str, tp: int, depth: int) -> dict[str, Any]:
    """A config of transformers, of odd sizes wherever that is allowed."""
    unit = tp if rng.random() < FITTING else 1
    heads = unit * rng.choice([1, 1, 2, 3, 4] if unit < 5 else [1, 2])
    sharing = [
        n for n in range(1, heads + 1) if heads % n == 0 and (n % unit == 0 or unit % n == 0)
    ]
    kv_heads = rng.choice(sharing) if rng.random() < FITTING else rng.randint(1, heads + 1)
    head_dim = rng.choice([4, 6, 8, 10, 12]) if rng.random() < FITTING else rng.randint(1, 9)
    derived = family != "qwen3" and rng.random() < 0.4
    config: dict[str, Any] = {
        "vocab_size": rng.randint(5, 150),
        "hidden_size": heads * (head_dim if derived else rng.randint(1, 1 + 32 // heads)),
        "intermediate_size": unit * rng.randint(1, 40 // unit),
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": rng.choice([8, 16, 64]),
        "tie_word_embeddings": rng.random() < 0.4,
        "rms_norm_eps": rng.choice([1e-6, 1e-5]),
        "bos_token_id": None,
        "eos_token_id": 2,
        "rope_parameters": _rope(rng, head_dim),
        **({} if derived else {"head_dim": head_dim}),
        **_windows(rng, family, depth),
    }
    if family in ("llama", "qwen3"):
        config["attention_bias"] = rng.random() < 0.4
    if family == "llama":
        config["mlp_bias"] = rng.random() < 0.4
    return config


def _rope(rng: Random, head_dim: int) -> dict[str, Any]:
    kind = rng.choice(["default", "default", "linear", "dynamic", "llama3", "yarn"])
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": rng.choice([1e4, 1e6])}
    if kind != "default":
        rope["factor"] = rng.choice([1.0, 2.0, 4.5])
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = rng.choice([4, 8])
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "linear" and head_dim % 4 == 0:
        rope["partial_rotary_factor"] = 0.5
    return rope


def _windows(rng: Random, family: str, depth: int) -> dict[str, Any]:
    window = rng.choice([None, 1, 3, 8])
    if family == "mistral":
        return {"sliding_window": window}
    if family == "llama" or window is None:
        return {}
    options: dict[str, Any] = {"use_sliding_window": True, "sliding_window": window}
    if rng.random() < 0.5:
        return {**options, "max_window_layers": rng.randint(0, depth)}
    return {
        **options,
        "layer_types": [rng.choice(["sliding_attention", "full_attention"]) for _ in range(depth)],
    }


def _lengths(rng: Random) -> tuple[int, ...]:
    kind = rng.choice(["ragged", "ragged", "ones", "one", "few"])
    if kind == "one":
        return (rng.randint(2, 70),)
    if kind == "ones":
        return (*[1] * rng.randint(0, 6), 2)  # no fewer than one counted token
    count = rng.randint(2, 4) if kind == "few" else rng.randint(5, 12)
    return (*(rng.randint(1, 30) for _ in range(count)), 3)


def _budget(rng: Random, lengths: Sequence[int], multiple: int) -> int | None:
    """None, or what the longest sequence needs and up to twice as much; too little now and then."""
    if rng.random() < 0.3:
        return None
    least = -(-max(lengths) // multiple) * multiple
    return rng.randint(least, 2 * least) if rng.random() < FITTING else rng.randint(1, least)
