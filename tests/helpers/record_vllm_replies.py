"""Records what vLLM's own classes write, as vllm_replies.json: `python -m tests.helpers.record_vllm_replies` beside vLLM."""

import ast
import hashlib
import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

FACTORY = "_create_qwen2vl_field_factory"
ROUTES: dict[str, tuple[str, int, list[bool]]] = {
    "routes": ("uint8", 8, [False, True, True]),
    "routes of many experts": ("uint16", 384, [True, True]),
}


def routes(dtype: str, num_experts: int, sparse: list[bool]) -> dict[str, Any]:
    """The last event of a stream, with the experts of 5 tokens."""
    protocol = import_module("vllm.entrypoints.scale_out.token_in_token_out.protocol")
    encode = import_module("vllm.utils.serial_utils").numpy2base64
    random = np.random.default_rng(7)
    experts = np.zeros((5, len(sparse), 3), dtype)
    for token in experts:
        for layer in np.flatnonzero(sparse):
            token[layer] = random.choice(num_experts, 3, replace=False)
    choice = protocol.GenerateTokensStreamChoice(
        index=0, finish_reason="length", token_ids=[5, 6], routed_experts=encode(experts)
    )
    event = protocol.GenerateTokensStreamResponse(
        request_id="r", choices=[choice]
    ).model_dump_json()
    shown = {
        "num_experts": num_experts,
        "dtype": dtype,
        "sparse": sparse,
        "experts": experts.tolist(),
    }
    return {**shown, "event": event}


def image(dtype: str, grid: list[int], width: int) -> dict[str, Any]:
    """The tensors of one image of Qwen-VL or GLM-4V: the fields are those of vLLM's own factory for them."""
    torch = import_module("torch")
    inputs = import_module("vllm.multimodal.inputs")
    encode = import_module(
        "vllm.entrypoints.scale_out.token_in_token_out.mm_serde"
    ).encode_mm_kwargs_item
    model = (
        Path(str(import_module("vllm").__file__)).parent
        / "model_executor"
        / "models"
        / "qwen2_vl.py"
    )
    factory = next(
        each for each in ast.parse(model.read_text()).body if getattr(each, "name", "") == FACTORY
    )
    known = {
        "torch": torch,
        "MultiModalFieldConfig": inputs.MultiModalFieldConfig,
        "Mapping": Mapping,
        "Callable": Callable,
    }
    exec(
        compile(ast.Module([factory], []), str(model), "exec"), known
    )  # the module itself needs torchvision
    pixels = (
        (torch.arange(grid[1] * grid[2] * width) % 50 / 16)
        .view(-1, width)
        .to(getattr(torch, dtype))
    )
    given = {"pixel_values": pixels, "image_grid_thw": torch.tensor([grid])}
    config = known[FACTORY](2)(given)
    (item,) = inputs.MultiModalKwargsItems.from_hf_inputs(
        given, {name: config[name] for name in given}
    )["image"]
    ordered = inputs.MultiModalKwargsItem(
        {name: item[name] for name in given}
    )  # vLLM goes through a set
    return {
        "dtype": dtype,
        "grid": grid,
        "width": width,
        "sha256": hashlib.sha256(encode(ordered).encode()).hexdigest(),
    }


if __name__ == "__main__":
    recorded = {
        "version": import_module("vllm").__version__,
        **{name: routes(*how) for name, how in ROUTES.items()},
    }
    recorded["images"] = [
        image("float32", [1, 4, 6], 3),
        image("bfloat16", [1, 2, 2], 2),
        image("float32", [1, 20, 10], 100),
    ]
    Path(__file__).with_name("vllm_replies.json").write_text(json.dumps(recorded) + "\n")
