"""Ragged batches of text, images and videos for every vision-language family, and what transformers makes of them.

A sequence is written as its parts: a number of words, or the grid (frames, height, width) in patches of an image or a
video. The reference runs each sequence by itself, with the model's own attention and its own forward pass.
"""

import inspect
from collections.abc import Sequence as Seq
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedModel

from dovetail.batch.packed import PackedBatch, Sequence
from tests.helpers.families import END, IMAGE, START, VIDEO, VIDEO_END, VIDEO_START, VISION, WORDS
from tests.helpers.parity_reference import GRAD, outputs_of

Part = int | tuple[str, int, int, int]
Rows = tuple[tuple[Part, ...], ...]
MERGED = 4  # patches a feature
GLM, QWEN3 = ("glm4v", "glm4v_moe"), ("qwen3_vl", "qwen3_vl_moe")
PATCH = {"kimi_k25": (3, 4, 4)}
TOWER_HEADS = 2
SAVED_KIMI = (  # what `save_pretrained` writes, in the order in which names change
    ("model.language_model.layers.", "language_model.model.blocks."),
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.vision_tower.layers.", "vision_tower.encoder.blocks."),
    (
        "model.vision_tower.patch_embed.pos_emb.position_embeddings",
        "vision_tower.patch_embed.pos_emb.weight",
    ),
    ("model.vision_tower.", "vision_tower.encoder."),
    *(
        (".norm1.", ".norm0."),
        (".norm2.", ".norm1."),
        (".fc1.", ".fc0."),
        (".fc2.", ".fc1."),
        (".attn.proj.", ".wo."),
    ),
    ("model.mm_projector.in_proj.", "mm_projector.proj.0."),
    ("model.mm_projector.out_proj.", "mm_projector.proj.2."),
)
FLAT = (3 * 2 * 4 * 4,)

SMALL: Part = ("image", 1, 4, 4)
TALL: Part = ("image", 1, 8, 4)
WIDE: Part = ("image", 1, 4, 8)
STILL: Part = ("video", 1, 4, 4)
CLIP: Part = ("video", 2, 4, 4)
FILM: Part = ("video", 3, 4, 8)
TEXT: Rows = ((1,), (7,), (12,))
# Text, images and videos, several of a kind in one sequence, in either order; the longest covers every rank's tokens.
MIXED: Rows = (
    (3, SMALL, 5),
    (1,),
    (7,),
    (2, CLIP, 3, TALL, 2),
    (4, WIDE, 1, SMALL, 2),
    (12,),
    (2, FILM, 1, STILL, 2),
)


def layout_of(family: str, parts: Seq[Part], draw: torch.Generator) -> tuple[list[int], list[int]]:
    """The tokens of a sequence and which of them stand for what: text 0, image 1, video 2, as processors say it."""
    ids: list[int] = []
    kinds: list[int] = []

    def add(tokens: list[int], kind: int = 0) -> None:
        ids.extend(tokens)
        kinds.extend([kind] * len(tokens))

    for part in parts:
        if isinstance(part, int):
            add(torch.randint(WORDS, (part,), generator=draw).tolist())
            continue
        name, frames, height, width = part
        area = height * width // MERGED
        if name == "image":
            add([START])
            add([IMAGE] * area, 1)
            add([END])
        elif family in GLM:
            add([VIDEO_START])
            for _ in range(frames):
                add([START])
                add([IMAGE] * area, 2)
                add(
                    [END, *torch.randint(WORDS, (2,), generator=draw).tolist()]
                )  # the frame's timestamp
            add([VIDEO_END])
        elif family in QWEN3:
            for _ in range(frames):
                add([*torch.randint(WORDS, (2,), generator=draw).tolist(), START])
                add([VIDEO] * area, 2)
                add([END])
        else:
            add([START])
            add([VIDEO] * (frames * area), 2)
            add([END])
    return ids, kinds


def media_of(family: str, parts: Seq[Part], draw: torch.Generator) -> dict[str, Tensor] | None:
    """What a processor makes of the images and videos among the parts."""
    found: dict[str, Tensor] = {}
    for kind, pixels, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        grids = [part[1:] for part in parts if not isinstance(part, int) and part[0] == kind]
        if grids:
            patches = sum(t * h * w for t, h, w in grids)
            found[pixels] = torch.randn((patches, *PATCH.get(family, FLAT)), generator=draw)
            found[grid] = torch.tensor(grids)
            if kind == "video" and family == "qwen2_5_vl":
                found["second_per_grid_ts"] = 0.5 + torch.arange(len(grids)) / 4
    return found or None


def for_family(family: str, rows: Seq[Seq[Part]]) -> list[Seq[Part]]:
    """What transformers itself can run: no clips for Kimi, no images beside videos in a sequence of GLM-4V's."""
    if family == "kimi_k25":
        return [[SMALL if part in (CLIP, FILM) else part for part in row] for row in rows]
    if family in GLM:
        return [[part for part in row if part != TALL or CLIP not in row] for row in rows] + [
            (1, TALL, 2)
        ]
    return list(rows)


def sights(family: str, rows: Rows = MIXED) -> PackedBatch:
    """The batch of a reference, with temperatures and the weights of the objective as fields."""
    draw = torch.Generator().manual_seed(2)
    sequences = [
        Sequence(layout_of(family, row, draw)[0], media=media_of(family, row, draw))
        for row in for_family(family, rows)
    ]
    batch = PackedBatch.pack(sequences)
    mask = batch.mask.clone()
    mask[3::7] = False
    w0, w1 = torch.randn(2, len(batch), generator=draw)
    temperature = 0.5 + torch.rand(len(batch), generator=draw)
    return batch.with_mask(mask).with_fields(w0=w0, w1=w1, temperature=temperature)


class Critic(nn.Module):
    """A vision-language model with a value head in the place of its language head."""

    def __init__(self, whole: PreTrainedModel) -> None:
        super().__init__()
        self.model = whole.get_submodule("model")
        self.score = nn.Linear(whole.config.get_text_config().hidden_size, 1)


def tiny_sighted(family: str) -> PreTrainedModel:
    """A random float32 model in evaluation mode, no parameter at its initial zeros or ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(
            VISION[family](), dtype=torch.float32
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def stored_name(family: str, name: str) -> str:
    """Under which name a family's checkpoint lists a parameter."""
    if family in ("qwen2_vl", "qwen2_5_vl"):
        return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
    if family == "kimi_k25":
        for ours, theirs in SAVED_KIMI:
            name = name.replace(ours, theirs)
    return name


def published(family: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names of a model's parameters as its checkpoint has them: Kimi's queries, keys and values in one."""
    found = {}
    for name, x in tensors.items():
        if family == "kimi_k25" and ".attn.q_proj." in name:
            q, k, v = (
                tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")
            )
            halves = (
                y.unflatten(0, (TOWER_HEADS, 2, -1)).transpose(1, 2).flatten(0, 2) for y in (q, k)
            )
            found[stored_name(family, name.replace("attn.q_proj", "wqkv"))] = torch.cat(
                (*halves, v)
            )
        elif family != "kimi_k25" or (".attn.k_proj." not in name and ".attn.v_proj." not in name):
            found[stored_name(family, name)] = x.detach().contiguous()
    return found


def save_sighted(family: str, path: Path) -> PreTrainedModel:
    """Write `tiny_sighted(family)` as a directory and return it."""
    model = tiny_sighted(family)
    model.save_pretrained(path)
    return model


def write_sights(family: str, folder: Path, rows: Rows = MIXED, *, values: bool = False) -> Path:
    """Write a tiny model and what transformers makes of `sights(family, rows)`, as `read_reference` reads it."""
    whole = save_sighted(family, folder / "model")
    file = folder / "model" / "model.safetensors"
    model: nn.Module = whole
    if values:
        model = Critic(whole)
        stored = {name: x for name, x in load_file(file).items() if name != "lm_head.weight"}
        head = {name: x for name, x in model.state_dict().items() if name.startswith("score.")}
        save_file({**stored, **head}, file, metadata={"format": "pt"})
    batch = sights(family, rows)
    logits = torch.cat([logits_of(model, parts) for parts in alone(family, rows)])
    found = outputs_of(model, logits, batch)
    grads = {name.removeprefix(GRAD): x for name, x in found.items() if name.startswith(GRAD)}
    outputs = {
        name: x.detach().contiguous() for name, x in found.items() if not name.startswith(GRAD)
    }
    stored = {GRAD + name: x for name, x in published(family, grads).items()}
    save_file(outputs | stored, folder / "expected.safetensors")
    return folder


def alone(family: str, rows: Rows = MIXED) -> list[dict[str, Tensor]]:
    """What transformers is given for each sequence of `sights(family, rows)`."""
    batch = sights(family, rows)
    draw = torch.Generator()
    kinds = [layout_of(family, row, draw)[1] for row in for_family(family, rows)]
    return [
        {"input_ids": ids[None], "mm_token_type_ids": torch.tensor([kind]), **(media or {})}
        for ids, kind, media in zip(
            batch.tokens.split(list(batch.lengths)),
            kinds,
            batch.media or [None] * len(kinds),
            strict=True,
        )
    ]


def logits_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """[n, V] of one sequence; a critic's values [n, 1]."""
    base = model.get_submodule("model")
    known = inspect.signature(base.forward).parameters
    hidden: Tensor = base(
        **{k: v for k, v in inputs.items() if k in known}, use_cache=False
    ).last_hidden_state[0]
    head = model.get_submodule("score" if isinstance(model, Critic) else "lm_head")
    logits: Tensor = head(hidden)
    return logits
