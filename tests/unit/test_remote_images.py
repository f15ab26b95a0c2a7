"""Images for vLLM's token endpoint: the bytes that its own classes write, places that are checked, and what is refused."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dovetail.errors import ConfigError, DataError, MachineError
from dovetail.inference_servers.images import check_media, image_features
from dovetail.inference_servers.protocol import ServerInfo
from dovetail.inference_servers.remote_sampler import RemoteSampler
from dovetail.parallel.mesh import Mesh
from dovetail.sampler.base import SamplingParams, TokenPrompt
from tests.helpers.fake_engine import VOCABULARY, FakeEngine
from tests.helpers.fleets import fleet

RECORDED = json.loads((Path(__file__).parents[1] / "helpers" / "vllm_replies.json").read_text())
IMAGE = 20


def media_of(*grids: list[int], width: int = 3) -> dict[str, torch.Tensor]:
    patches = [torch.arange(h * w * width) % 50 / 16 for _, h, w in grids]
    return {
        "pixel_values": torch.cat(patches).view(-1, width),
        "image_grid_thw": torch.tensor(grids),
    }


@pytest.mark.parametrize(
    "image", RECORDED["images"], ids=lambda image: f"{image['dtype']}-{image['grid'][1]}"
)
def test_the_bytes_of_an_image_are_those_that_vllm_writes(image: Any) -> None:
    rows = image["grid"][1] * image["grid"][2] // 4
    ids, media = [1, *[IMAGE] * rows, 2], media_of(image["grid"], width=image["width"])
    features = image_features(ids, media, IMAGE, getattr(torch, image["dtype"]), "salt")
    (item,) = features["kwargs_data"]["image"]
    assert hashlib.sha256(item.encode()).hexdigest() == image["sha256"]
    assert features["mm_placeholders"]["image"] == [{"offset": 1, "length": rows}]


def test_images_lie_at_their_placeholders_and_are_known_by_weights_and_pixels() -> None:
    ids, media = (
        [1, *[IMAGE] * 6, *[IMAGE] * 1, 2, IMAGE],
        media_of([1, 4, 6], [1, 2, 2], [1, 2, 2]),
    )
    features = image_features(ids, media, IMAGE, torch.float32, "run-1")
    assert [(each["offset"], each["length"]) for each in features["mm_placeholders"]["image"]] == [
        (1, 6),
        (7, 1),
        (9, 1),
    ]
    first, second, third = features["mm_hashes"]["image"]
    assert second == third != first
    assert (
        first not in image_features(ids, media, IMAGE, torch.float32, "run-2")["mm_hashes"]["image"]
    )
    for wrong in (
        [*ids, IMAGE],
        ids[:-1],
        [1, 2],
        [1, *[IMAGE] * 3, 2, *[IMAGE] * 3, IMAGE, IMAGE],
    ):
        with pytest.raises(DataError, match="image tokens that are not the places of images"):
            image_features(wrong, media, IMAGE, torch.float32, "")
    with pytest.raises(DataError, match="has pixel_values_videos; engines"):
        image_features(
            ids, {**media, "pixel_values_videos": torch.zeros(1)}, IMAGE, torch.float32, ""
        )


def test_a_sampler_sends_the_images_of_a_prompt_with_its_ids() -> None:
    fake, ids, media = FakeEngine(), [1, IMAGE, 2], media_of([1, 2, 2])
    with fleet(fake) as (engines, _):
        assert engines.replicas[0].server.images and engines.replicas[0].server.normalizes
        sampler = RemoteSampler(
            Mesh.solo(torch.device("cpu")), torch.bfloat16, VOCABULARY, engines, None, None, IMAGE
        )
        assert sampler.servers is not None
        sampler.version = 7
        sampler.servers.version = 7
        prompts, params = (
            [TokenPrompt(0, ids, media), TokenPrompt(1, [5])],
            SamplingParams(samples=2, max_new_tokens=3),
        )
        assert len(sampler.sample(prompts, params)) == 4
        with mock.patch.object(FakeEngine, "expanded", lambda _, ids: [*ids, IMAGE]):
            with pytest.raises(MachineError, match="changed the ids of a prompt with images"):
                sampler.sample(prompts[:1], params)
        with pytest.raises(DataError, match="not the places of images"):
            sampler.sample([TokenPrompt(0, [1, 2], media)], params)
        sampler.servers.image_token = None
        with pytest.raises(DataError, match="row 0 has images or videos"):
            sampler.sample(prompts, params)
    sent = [each.get("features") for each in fake.requests[:4]]
    expected = image_features(ids, media, IMAGE, torch.bfloat16, fake.requests[0]["cache_salt"])
    assert sorted(map(str, sent)) == sorted(map(str, [expected, expected, None, None]))
    assert all(each["token_ids"] in (ids, [5]) for each in fake.requests)


def test_images_that_an_engine_cannot_be_given_are_refused_before_the_run() -> None:
    vllm = ServerInfo(
        kind="vllm",
        model="m",
        version="0.33.0",
        max_length=None,
        log_probs="processed",
        images=True,
    )
    again, instead = (
        "; start it with --no-mm-device-do-normalize",
        "; set rollout.backend=transformers",
    )
    wrong = {
        f"SGLang turns the ids .* tokenizes that again{instead}": (
            replace(vllm, kind="sglang"),
            "qwen2_vl",
            False,
        ),
        f"takes pixels of kimi_vl in another form.*{instead}": (vllm, "kimi_vl", False),
        f"of a video's frames.*{instead}": (vllm, "qwen2_vl", True),
        f"this version of vLLM.*{instead}": (replace(vllm, images=False), "qwen2_vl", False),
        f"which vLLM would normalize a second time{again}": (
            replace(vllm, normalizes=True),
            "qwen2_vl",
            False,
        ),
    }
    for message, (server, family, videos) in wrong.items():
        with pytest.raises(ConfigError, match=message):
            check_media(server, family, videos=videos)
    check_media(vllm, "qwen3_vl", videos=False)
