"""A run whose samples come from a server: a stand-in with vLLM's wire, whose model takes the run's weights in place."""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bench import engine_gap
from dovetail.factory import remote
from dovetail.inference_servers.http import ServerError
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.parity_configs import moe_configs, save_tiny
from tests.helpers.program import VOCAB, here, read_rows, write_recipe, write_rows
from tests.helpers.tokenizers import make_tokenizer
from tests.helpers.tolerances import SAME_POLICY_FP32


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": "ab", "answer": "c"}, {"prompt": "hi", "answer": "h"}]
    )
    (tmp_path / "mine.py").write_text(
        "def length(data_source, solution_str, ground_truth):\n    return len(solution_str)\n"
    )
    return write_recipe(
        tmp_path / "r.yaml",
        model,
        rows,
        algorithm={"name": "grpo"},
        reward={"import": "mine:length"},
        rollout={"mismatch_metrics": True, "temperature": 0.9},
        trainer={"steps": 2},
    )


@contextmanager
def served(model: Path, **more: Any) -> Iterator[FakeEngine]:
    """Another implementation of the model, served."""
    brain: Any = AutoModelForCausalLM.from_pretrained(model).eval()

    @torch.no_grad()
    def logits(ids: Sequence[int]) -> list[float]:
        scores: list[float] = brain(torch.tensor([list(ids)])).logits[0, -1].tolist()
        return scores

    class InPlace:
        def __init__(self, clients: Sequence[object], push: object, **given: object) -> None:
            self.count = len(clients)

        def push(
            self, weights: Iterable[tuple[str, torch.Tensor]], version: int
        ) -> list[ServerError | None]:
            brain.load_state_dict({name: tensor.clone() for name, tensor in weights}, strict=False)
            fake.version = str(version)
            return [None] * self.count

        def close(self) -> None:
            pass

    @torch.no_grad()
    def experts(ids: Sequence[int]) -> Any:
        chosen = np.zeros(
            (len(ids), len(brain.model.layers), brain.config.num_experts_per_tok), np.uint8
        )
        sparse = [i for i, layer in enumerate(brain.model.layers) if hasattr(layer.mlp, "experts")]
        for i, z in zip(
            sparse,
            brain(torch.tensor([list(ids)]), output_router_logits=True).router_logits,
            strict=True,
        ):
            chosen[:, i] = z.topk(chosen.shape[2]).indices
        return chosen

    routes = experts if more.pop("routes", False) else None
    fake = FakeEngine(logits=logits, experts=routes, vocabulary=brain.config.vocab_size, **more)
    with fake, mock.patch.object(remote, "Pusher", InPlace):
        yield fake


def test_a_run_trains_on_what_a_server_samples_with_its_weights(
    model: Path, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_ENGINE_KEY", "sk-quite-secret")
    with served(model, key="sk-quite-secret") as fake:
        done = here("train", recipe, f"rollout.engines={fake.url}")
        assert done.code == 0, done
        rows = read_rows(tmp_path / "run" / "metrics.jsonl")
        assert len(rows) == 2 and all(row["mismatch_mean"] < SAME_POLICY_FP32 for row in rows)
        assert fake.version == "2"
        for file in (path for path in (tmp_path / "run").rglob("*") if path.is_file()):
            assert b"quite-secret" not in file.read_bytes(), file
        monkeypatch.delenv("DOVETAIL_ENGINE_KEY")
        refused = here(
            "train", recipe, f"rollout.engines={fake.url}", f"run_dir={tmp_path / 'other'}"
        )
    assert (
        refused.code == 2
        and "set the environment variable DOVETAIL_ENGINE_KEY to its key" in str(refused)
    )
    assert not (tmp_path / "other").exists()


def test_an_engine_holds_no_memory_while_ranks_load_and_train(
    model: Path, recipe: Path, tmp_path: Path
) -> None:
    with served(model) as fake:
        refused = here("train", recipe, f"rollout.engines={fake.url}", "rollout.sleep=true")
    assert refused.code == 2 and "start it with --enable-sleep-mode" in str(refused)
    assert not (tmp_path / "run").exists()
    with served(model, asleep=False) as fake:
        done = here("train", recipe, f"rollout.engines={fake.url}", "rollout.sleep=true")
    assert done.code == 0, done
    assert fake.calls == [*["/sleep", "/wake_up"] * 2, "/sleep"], (
        "before weights are loaded, and after each of two samplings"
    )


def test_the_update_replays_the_routes_of_a_server(recipe: Path, tmp_path: Path) -> None:
    config, mixture = (
        moe_configs()["qwen2_moe"],
        tmp_path / "moe",
    )  # experts in every other of four layers
    vars(config).update({"vocab_size": VOCAB, "eos_token_id": 3, "bos_token_id": None})
    save_tiny(config, mixture)
    make_tokenizer().save_pretrained(mixture)
    words = (f"model.path={mixture}", "rollout.router_replay=rollout", "trainer.steps=1")
    with served(mixture) as fake:
        refused = here("train", recipe, *words, f"rollout.engines={fake.url}")
    assert refused.code == 2 and "start it with --enable-return-routed-experts" in str(refused)
    assert not (tmp_path / "run").exists()
    with served(mixture, routes=True) as fake:
        done = here("train", recipe, *words, f"rollout.engines={fake.url}")
    assert done.code == 0, done
    (row,) = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert row["route_agreement"] == 1.0 and row["replayed_mismatch_mean"] < SAME_POLICY_FP32


def test_the_bench_of_engines_compares_log_probs_of_the_same_tokens(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--prompts", "3", "--new", "5", "--dtype", "float32", "--device", "cpu")
    with served(model, stream_interval=8) as fake:
        monkeypatch.setattr(sys, "argv", ["engine_gap", str(model), "--url", fake.url, *sizes])
        engine_gap.main()
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["tokens"] == 15 and len(row["gaps"]) == 6
    assert all(0 <= each["mean"] <= each["max"] < SAME_POLICY_FP32 for each in row["gaps"].values())


def test_all_that_engines_lack_is_reported_before_the_run(
    model: Path, recipe: Path, tmp_path: Path
) -> None:
    with served(model, log_probs="raw_logprobs") as cold, served(model, max_length=4) as short:
        refused = here(
            "train", recipe, f"rollout.engines=[{cold.url},{short.url},http://127.0.0.1:9]"
        )
    assert refused.code == 2 and "3 of the engines" in str(refused)
    assert "start it with --logprobs-mode processed_logprobs" in str(refused)
    assert "takes 4 tokens of prompt and completion together" in str(
        refused
    ) and "ConnectionRefused" in str(refused)
    assert not (tmp_path / "run").exists()
