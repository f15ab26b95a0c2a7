"""The plugin's receiving code, in process: whatever is not as announced is refused by name, and the next update is whole.

vLLM's classes are a stand-in, checked against signatures recorded from its source.
"""

import importlib
import inspect
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.inference_servers.transports import FileTransport, WeightBucket, fill
from tests.helpers import vllm_stand_in as stand_in
from tests.helpers.plugin_weights import WEIGHTS

SIGNATURES = json.loads(
    (Path(__file__).parents[1] / "helpers" / "vllm_signatures.json").read_text()
)
BUCKET = 4096


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(stand_in.PLUGIN))
    stand_in.install(monkeypatch.setitem)
    for name in ("dovetail_vllm.engines", "dovetail_vllm"):  # made anew on this test's stand-in
        monkeypatch.delitem(importlib.import_module("sys").modules, name, raising=False)
    monkeypatch.setattr(stand_in.WeightTransferEngineFactory, "_registry", {})
    return stand_in.Worker(
        "dovetail_file", stand_in.Model({name: tuple(t.shape) for name, t in WEIGHTS.items()})
    )


class Sender:
    """Writes every bucket and keeps what would be sent."""

    def __init__(self, directory: Path) -> None:
        self.files, self.updates = [], []
        transport = FileTransport(directory)
        for bucket in fill(WEIGHTS.items(), transport, BUCKET, alignment=64):
            path = directory / f"{bucket.number}"
            path.write_bytes(bucket.data.numpy().tobytes())
            self.files.append(path)
            self.updates.append(self.update(bucket, path))
        self.manifest = [[*row[:3], row[4]] for update in self.updates for row in update["tensors"]]

    @staticmethod
    def update(bucket: WeightBucket, path: Path) -> dict[str, Any]:
        rows = [list(row) for row in bucket.entries]
        return {
            "bucket": bucket.number,
            "num_bytes": len(bucket.data),
            "tensors": rows,
            "file": str(path),
        }

    def send(
        self, worker: Any, updates: list[dict[str, Any]] | None = None, manifest: Any = None
    ) -> None:
        worker.start()
        for update in self.updates if updates is None else updates:
            worker.update(update)
        worker.update({"manifest": manifest or self.manifest})
        worker.finish("1")


def check(worker: Any) -> None:
    for whole, parts in worker.model.parts.items():
        got = worker.model.values[whole]
        assert torch.equal(
            got.view(torch.uint8), torch.cat([WEIGHTS[part] for part in parts]).view(torch.uint8)
        ), whole


def test_flipped_bytes(engine: Any, tmp_path: Path) -> None:
    sender, draw = Sender(tmp_path), random.Random(1)
    assert len(sender.files) > 5
    for _ in range(100):
        number = draw.randrange(len(sender.files))
        row = draw.choice(sender.updates[number]["tensors"])
        place = row[3] + draw.randrange(WEIGHTS[row[0]].numel() * WEIGHTS[row[0]].element_size())
        right = sender.files[number].read_bytes()
        wrong = bytearray(right)
        wrong[place] ^= 1 << draw.randrange(8)
        sender.files[number].write_bytes(wrong)
        with pytest.raises(ValueError, match=re.escape(row[0]) + ": its bytes have the sum"):
            sender.send(engine)
        sender.files[number].write_bytes(right)
    sender.send(engine)
    check(engine)


def test_swapped_missing_and_repeated_buckets(engine: Any, tmp_path: Path) -> None:
    """In transit, where their numbers show it; with numbers to match, where names do; and of their bytes alone."""
    sender, draw = Sender(tmp_path), random.Random(2)
    count = len(sender.updates)
    for attempt in range(20):
        i, j = sorted(draw.sample(range(count), 2))
        swapped, missing, repeated = (list(sender.updates) for _ in range(3))
        swapped[i], swapped[j] = swapped[j], swapped[i]
        missing.pop(i)
        repeated.insert(j, repeated[i])
        bytes_swapped = [{**update} for update in sender.updates]
        bytes_swapped[i]["file"], bytes_swapped[j]["file"] = (
            bytes_swapped[j]["file"],
            bytes_swapped[i]["file"],
        )
        for updates in (swapped, missing, repeated, bytes_swapped):
            renumbered = [{**update, "bucket": n} for n, update in enumerate(updates)]
            if attempt % 2 and updates in (missing, repeated):
                updates = renumbered
            with pytest.raises(ValueError, match=r"model\.layers\.\d") as refused:
                sender.send(engine, updates)
            if updates == renumbered and updates != bytes_swapped:
                assert sender.updates[i]["tensors"][0][0] in str(refused.value)
    sender.send(engine)
    check(engine)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda rows: rows.pop(3), "v_proj.weight: not announced"),
        (lambda rows: rows[3].__setitem__(1, "float16"), "v_proj.weight: not as announced"),
        (lambda rows: rows[3].__setitem__(2, [37, 8]), "v_proj.weight: not as announced"),
        (
            lambda rows: rows.append(["model.extra", "float32", [1], "0" * 16]),
            "model.extra: missing",
        ),
        (lambda rows: rows.append(rows[0]), "repeats a name"),
    ],
)
def test_manifests(engine: Any, tmp_path: Path, change: Any, says: str) -> None:
    sender = Sender(tmp_path)
    manifest = [list(row) for row in sender.manifest]
    change(manifest)
    with pytest.raises(ValueError, match=re.escape(says)):
        sender.send(engine, manifest=manifest)


def test_entries_that_do_not_fit_their_bucket(engine: Any, tmp_path: Path) -> None:
    sender = Sender(tmp_path)
    for column, value in ((1, "complex64"), (2, [1 << 40]), (2, [-1]), (3, -8), (3, 1)):
        update = {
            **sender.updates[0],
            "tensors": [list(row) for row in sender.updates[0]["tensors"]],
        }
        update["tensors"][1][column] = value
        with pytest.raises(ValueError, match=r"q_proj\.weight: "):
            sender.send(engine, [update])
    with pytest.raises(ValueError, match=r"has \d+ bytes, announced were 7"):
        sender.send(engine, [{**sender.updates[0], "num_bytes": 7}])


def test_parameters_that_nothing_fills(engine: Any, tmp_path: Path) -> None:
    engine.model.values["model.norm.weight"] = torch.zeros(3)
    engine.model.parts["model.norm.weight"] = ["model.norm.weight"]
    with pytest.raises(ValueError, match=r"model\.norm\.weight: parameters .* no tensor"):
        Sender(tmp_path).send(engine)


def test_an_update_without_its_manifest_does_not_end_and_can_be_left(
    engine: Any, tmp_path: Path
) -> None:
    sender = Sender(tmp_path)
    engine.start()
    engine.update(sender.updates[0])
    with pytest.raises(ValueError, match="after 1 buckets without a manifest"):
        engine.finish("1")
    with pytest.raises(RuntimeError, match="already active"):
        engine.start()
    with pytest.raises(ValueError, match="abandoned"):
        engine.update({"abort": True})
    sender.send(engine)
    check(engine)


@pytest.mark.parametrize("version", SIGNATURES)
def test_the_stand_in_has_vllm_s_signatures(version: str) -> None:
    for name, parameters in SIGNATURES[version]["functions"].items():
        owner, _, method = name.rpartition(".")
        found = vars(vars(stand_in)[owner])[method] if owner else vars(stand_in)[name]
        ours = inspect.signature(found.__func__ if isinstance(found, classmethod) else found)
        assert list(ours.parameters) == parameters, name
    routes = inspect.getsource(stand_in._Handler._route)
    for path in re.findall(r'"(/\w+)"', routes):
        assert path in SIGNATURES[version]["routes"], path
