"""What `engine.generate` draws, and the first example of docs/library.md, on one rank."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dovetail as dt
from bench.models import one_rank
from dovetail.errors import DataError, ModelError
from tests.helpers.parity_configs import save_tiny, tiny_configs
from tests.helpers.tolerances import MODEL_FP32

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(tiny_configs()["llama"], folder)
    with one_rank():
        yield folder


def test_completions_have_the_log_probs_of_the_engines_own_weights(model: Path) -> None:
    """After an update, too; the same seed draws the same, and each argument arrives."""
    engine = dt.from_pretrained(
        model, device="cpu", options=dt.EngineOptions(optim=dt.OptimSettings(lr=0.05))
    )
    batch = dt.PackedBatch.pack([[1, 5, 7, 2], [1, 9, 2]])
    prompts: list[torch.Tensor | list[int]] = [torch.tensor([1, 5, 7]), [1, 9]]
    for _ in range(2):
        drawn = engine.generate(
            prompts, n=3, max_tokens=5, temperature=0.5, stop_token_ids=[4], seed=3
        )
        assert drawn == engine.generate(
            prompts, n=3, max_tokens=5, temperature=0.5, stop_token_ids=[4], seed=3
        )
        assert [(each.row, each.sample) for each in drawn] == [
            (row, sample) for row in range(2) for sample in range(3)
        ]
        rows = [
            dt.Sequence([*[[1, 5, 7], [1, 9]][d.row], *d.ids], fields={"temperature": 0.5})
            for d in drawn
        ]
        packed = dt.PackedBatch.pack(rows)
        scored = packed.unpack(engine.score(packed).logprob, by_token=True)
        for each, row in zip(drawn, scored, strict=True):
            assert row[-len(each.ids) :].tolist() == pytest.approx(each.log_probs, abs=MODEL_FP32)
            assert each.finish == ("stop" if each.ids[-1] == 4 else "length")
        engine.train_step(batch, lambda stats, part: dt.Loss(-stats.logprob.sum(), part.mask.sum()))
    greedy = engine.generate(prompts, n=2, max_tokens=3, temperature=0.0)
    assert greedy[0].ids == greedy[1].ids == engine.generate(prompts, max_tokens=3, top_k=1)[0].ids
    with pytest.raises(DataError, match="prompt of row 1 has no tokens"):
        engine.generate([[1], []])
    critic = dt.from_pretrained(
        model, head="value", device="cpu", options=dt.EngineOptions(fresh_head_seed=0)
    )
    with pytest.raises(ModelError, match="has a value head"):
        critic.generate([[1]])


@pytest.mark.usefixtures("model")
def test_the_example_of_the_page_runs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.DOTALL)
    assert len(blocks) == 2, "the other one runs in tests/commands/test_library_trainer.py"
    (tmp_path / "example.py").write_text(blocks[0].replace('"MODEL"', repr(str(model))))
    found = runpy.run_path("example.py")
    assert found["again"].updates == 3
    assert found["logprob"].shape == (3, 6)
