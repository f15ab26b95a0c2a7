"""Images for the real vLLM on a CPU, where DOVETAIL_VLLM_PYTHON names the Python of an environment with it and torchvision."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dovetail.batch.packed import PackedBatch, Sequence as Row
from dovetail.factory.engine import from_pretrained
from dovetail.inference_servers.fleet import Fleet, Replica
from dovetail.inference_servers.http import Client
from dovetail.inference_servers.images import PIXELS
from dovetail.inference_servers.remote_sampler import RemoteSampler
from dovetail.inference_servers.vllm import Vllm
from dovetail.launch.inference_servers import URLS, ServerStart, running
from dovetail.parallel.mesh import Mesh
from dovetail.sampler.base import SamplingParams, TokenPrompt
from dovetail.sampler.turn import Turn
from tests.helpers.families import END, IMAGE, START
from tests.helpers.sights import SMALL, TALL, WIDE, layout_of, media_of
from tests.helpers.tolerances import ENGINE_LOGPROB
from tests.helpers.torchvision_rows import save_watching, torchvision_works
from tests.helpers.vllm_runs import (
    CPU,
    PYTHON,
    VersionPusher,
    free_port,
    process_group as process_group,
)

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        PYTHON is None or not torchvision_works(),
        reason="DOVETAIL_VLLM_PYTHON or torchvision is not here",
    ),
]
FLAGS = (
    "--enable-scale-out", "--max-model-len", "256", "--max-num-seqs", "16", "--max-num-batched-tokens", "2048", "--enforce-eager",
    "--logprobs-mode", "processed_logprobs", "--weight-transfer-config", '{"backend": "nccl"}', "--served-model-name", "policy",
    "--dtype", "float32", "--generation-config", "vllm",
    "--no-mm-device-do-normalize", "--limit-mm-per-prompt", '{"image": 2, "video": 0}',
)  # fmt: skip
TEXT = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "initializer_range": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
}  # fmt: skip
TOWER = {
    "depth": 2, "hidden_size": 128, "num_heads": 2, "patch_size": 4, "out_hidden_size": 256, "intermediate_size": 128,
    "window_size": 16, "fullatt_block_indexes": [1],
}  # fmt: skip


def save(folder: Path) -> dict[str, int]:
    """A model that is large enough for vLLM's kernels, with a whole processor. Its special ids."""
    save_watching("qwen2_5_vl", folder)
    old = transformers.AutoConfig.from_pretrained(folder).to_dict()
    ids = {
        name: old[name] for name in old if name.endswith("_token_id") and isinstance(old[name], int)
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config=TEXT, vision_config=TOWER, tie_word_embeddings=False, **ids
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    model.save_pretrained(folder)
    return ids


def difference(policy: Any, asked: Sequence[TokenPrompt], drawn: Sequence[Turn]) -> list[float]:
    """Mean |log-prob of the server - ours| of each prompt."""
    found = []
    for prompt in asked:
        rows = [
            Row(
                [*prompt.ids, *c.ids],
                [False] * len(prompt.ids) + [True] * len(c.ids),
                media=prompt.media,
            )
            for c in drawn
            if c.row == prompt.row
        ]
        theirs = torch.tensor([each for c in drawn if c.row == prompt.row for each in c.log_probs])
        batch = PackedBatch.pack(rows)
        found.append(float((policy.score(batch).logprob[batch.mask] - theirs).abs().mean()))
    return found


@pytest.mark.usefixtures("process_group")
def test_a_server_sees_the_images_of_a_prompt(tmp_path: Path) -> None:
    ids = save(tmp_path)
    drawing = torch.Generator().manual_seed(1)
    marks = {
        IMAGE: ids["image_token_id"],
        START: ids["vision_start_token_id"],
        END: ids["vision_end_token_id"],
    }
    asked = []
    for row, parts in enumerate(((3, SMALL, 5), (2, TALL, 3, WIDE, 2), (7,))):
        media = media_of("qwen2_5_vl", parts, drawing)
        asked.append(
            TokenPrompt(
                row, [marks.get(i, i) for i in layout_of("qwen2_5_vl", parts, drawing)[0]], media
            )
        )
    command = [
        str(PYTHON),
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(tmp_path),
        "--port",
        "PORT",
        *FLAGS,
    ]
    start = ServerStart(
        commands=[command],
        gpus_each=0,
        ranks_on_gpus=False,
        logs=tmp_path / "logs",
        timeout=900.0,
        environment=CPU,
    )
    with running(start, 1, free_port, lambda: False) as engines:
        variables = engines.start_ended()
        clients = [Client(url) for url in variables[URLS].split(",")]
        replicas = [Replica(client, Vllm().probe(client, 512)) for client in clients]
        assert replicas[0].server.images and not replicas[0].server.normalizes
        fleet, mesh = (
            Fleet(replicas, Vllm(), timeout=300.0, on_server_lost=print),
            Mesh.solo(torch.device("cpu")),
        )
        sampler = RemoteSampler(
            mesh,
            torch.float32,
            512,
            fleet,
            VersionPusher(clients),
            image_token=ids["image_token_id"],
        )
        sampler.refill([("weights", torch.zeros(1))])  # those that it loaded
        drawn = sampler.sample(asked, SamplingParams(samples=8, max_new_tokens=12, seed=3))
        sampler.close()
    drawn = [
        each for each in drawn if not {*ids.values()} & {*each.ids}
    ]  # placeholders of no image
    assert {each.row for each in drawn} == {0, 1, 2} and len(drawn) > 12
    policy = from_pretrained(tmp_path, dtype="float32", device="cpu")
    found = difference(policy, asked, drawn)
    assert max(found) <= ENGINE_LOGPROB
    mirrored = [
        replace(each, media=each.media and {**each.media, PIXELS: -each.media[PIXELS]})
        for each in asked
    ]
    *unlike, text = difference(policy, mirrored, drawn)
    assert min(unlike) > 100 * ENGINE_LOGPROB and text <= ENGINE_LOGPROB
