"""Profiles of single steps: how traces are summed up, what is recorded, and that no failure of one stops a run."""

import gzip
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.profiler import record_function

from dovetail.errors import ConfigError
from dovetail.launch.progress import Progress
from dovetail.parallel.mesh import Mesh
from dovetail.recipe.schema import make_recipe
from dovetail.recipe.tracking import ProfileSection
from dovetail.records.runs import read_runs
from dovetail.records.traces import read_events, summarize
from dovetail.run.profiler import Profiler
from dovetail_tools.report.page import page_data, render
from tests.helpers.report_runs import Page, make_run

RECIPE = {"model": {"path": "M"}, "data": {"train": "rows.jsonl"}, "run_dir": "run"}


def event(
    kind: str, name: str, start: float, stop: float, *, tid: int = 1, **arguments: Any
) -> dict[str, Any]:
    """As Kineto writes it (libkineto/src/output_json.cpp), in microseconds; times here are in milliseconds."""
    return {
        "ph": "X", "cat": kind, "name": name, "pid": 9, "tid": tid,
        "ts": 7e12 + 1000 * start, "dur": 1000 * (stop - start), "args": {"External id": 1, **arguments},
    }  # fmt: skip


def memory(at: float, total: int, device: int) -> dict[str, Any]:
    arguments = {
        "Total Reserved": 0,
        "Total Allocated": total,
        "Bytes": 1,
        "Device Id": 0,
        "Device Type": device,
    }
    return {
        "ph": "i",
        "cat": "cpu_instant_event",
        "name": "[memory]",
        "ts": 7e12 + 1000 * at,
        "args": arguments,
    }


PHASES = [
    event("user_annotation", "update", 0, 10),
    event("user_annotation", "forward", 1, 4),
    event("user_annotation", "backward", 4, 9),
    event("user_annotation", "FSDP::post_forward", 3, 4),
    event("user_annotation", "optimizer", 10, 20),
    event("user_annotation", "update", 20, 24),
]
OPERATORS = [
    event("cpu_op", "aten::linear", 1, 4),
    event("cpu_op", "aten::addmm", 1.5, 3.5),
    event("cpu_op", "aten::addmm", 4, 8, tid=2),
    event("cpu_op", "aten::mul", 12, 13),
]


def test_a_trace_of_a_gpu() -> None:
    """A kernel counts where it was launched, time where it passed, and a collective only while nothing else runs."""
    ran = [
        event("cuda_runtime", "cudaLaunchKernel", 2, 2.1, correlation=5),
        event("cuda_driver", "cuLaunchKernelEx", 5, 5.1, tid=2, correlation=6),
        event("cuda_runtime", "cudaMemcpyAsync", 12, 12.1, correlation=7),
        event("kernel", "gemm", 3, 12, tid=7, correlation=5, stream=7),
        event(
            "kernel",
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)",
            8,
            16,
            tid=20,
            correlation=6,
            stream=20,
        ),
        event("gpu_memcpy", "Memcpy DtoH", 17, 18, tid=7, correlation=7, stream=7),
        event("gpu_user_annotation", "update", 3, 16, tid=7),
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 5, "ts": 7e12, "pid": 9, "tid": 1},
    ]
    sizes = [memory(1, 5, 0), memory(2, 300, 1), memory(3, 100, 1), memory(11, 200, 1)]
    summary = summarize([*ran, *OPERATORS, *PHASES, *sizes], 3, 1, "cuda")
    assert (summary.step, summary.rank, summary.events) == (
        3,
        1,
        len(ran) + len(PHASES) + len(OPERATORS) + 4,
    )
    update, optimizer = summary.phases["update"], summary.phases["optimizer"]
    assert (update.seconds, optimizer.seconds) == pytest.approx((0.014, 0.010))
    assert (update.computing, update.collectives, update.waiting) == pytest.approx(
        (0.007, 0.002, 0)
    )
    assert (optimizer.computing, optimizer.collectives, optimizer.waiting) == pytest.approx(
        (0.003, 0.006, 0.004)
    )
    assert update.parts == pytest.approx({"forward": 0.003, "backward": 0.005})
    assert [(name[:6], round(seconds, 6), calls) for name, seconds, calls in update.kernels] == [
        ("gemm", 0.009, 1),
        ("ncclDe", 0.008, 1),
    ]
    assert [name for name, *_ in optimizer.kernels] == ["Memcpy DtoH"]
    assert [(name, round(own, 6), calls) for name, own, calls in update.operators] == [
        ("aten::addmm", 0.006, 2),
        ("aten::linear", 0.001, 1),
    ]
    assert (update.peak_bytes, optimizer.peak_bytes) == (300, 200)


def test_a_trace_of_a_cpu() -> None:
    sent = event("user_annotation", "gloo:all_reduce", 7, 12.5, tid=30)
    phases = summarize([*PHASES, *OPERATORS, sent, memory(1, 50, 0)], 1, 0, "cpu").phases
    assert (phases["update"].computing, phases["update"].waiting) == pytest.approx((0.007, 0.002))
    assert (phases["optimizer"].computing, phases["optimizer"].waiting) == pytest.approx(
        (0.001, 0.002)
    )
    assert (phases["update"].peak_bytes, phases["optimizer"].peak_bytes) == (50, None)
    assert phases["update"].kernels == []
    assert summarize([], 1, 0, "cpu").phases == {}


def recorded(profiler: Profiler, step: int = 3) -> None:
    """A step of two phases, in which a tensor of 4 MB is made."""
    progress = profiler.progress
    with profiler.around(step):
        progress.phase("update", step)
        with progress.mark("forward"):
            x = torch.ones(1000, 1000) @ torch.ones(1000, 10)
        progress.phase("save", step)
        x.sum()


def made(
    folder: Path, said: list[str], steps: tuple[int, ...] = (3,), *, memory: bool = True
) -> Profiler:
    return Profiler(
        ProfileSection(steps=steps, memory=memory), folder, Mesh.solo(), Progress(), said.append
    )


def test_a_step_is_recorded(tmp_path: Path) -> None:
    run, said = make_run(tmp_path / "run", 2), list[str]()
    profiler = made(run / "profile", said)
    recorded(profiler, 2)
    assert not said and not (run / "profile").exists()
    recorded(profiler)
    assert said == [f"profile of step 3: {run}/profile/step-3; dovetail report {run} shows it"]
    folder = run / "profile/step-3"
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0.json", "rank-0.trace.json.gz"]
    with gzip.open(folder / "rank-0.trace.json.gz", "rt", encoding="utf-8") as file:
        (tmp_path / "trace.json").write_text(text := file.read())
    events = json.loads(text)["traceEvents"]
    assert {"update", "forward", "save", "wait", "aten::mm"} <= {event["name"] for event in events}
    assert read_events(tmp_path / "trace.json") == events
    (tmp_path / "trace.json").write_text(text[: len(text) // 2])
    with pytest.raises(ValueError):
        read_events(tmp_path / "trace.json")
    profiler.wanted = True  # by a signal: the next step, whatever its number
    recorded(profiler, 7)
    recorded(profiler, 8)
    (run / "profile/step-7/rank-1.json").write_text('{"step": 7, "rank": 1, "pha')
    (data,) = Page(render(page_data(read_runs([run])))).data["runs"]
    assert [(row["step"], row["ranks"]) for row in data["profiles"]] == [(3, 1), (7, 1)]
    phases = {phase["name"]: phase for phase in data["profiles"][0]["phases"]}
    assert {"wait", "update", "save"} == phases.keys()
    assert phases["update"]["parts"].keys() == {"forward"}
    assert phases["update"]["peak_gib"] >= 4e6 / 2**30 > phases["wait"]["peak_gib"]
    assert "aten::mm" in [name for name, *_ in phases["update"]["longest"]["operators"]]
    assert phases["update"]["seconds"][0] >= phases["update"]["computing"][0] > 0


@pytest.mark.parametrize("what", ["folder", "start", "stop", "export"])
def test_a_profile_that_fails_is_a_warning(what: str, tmp_path: Path) -> None:
    said = list[str]()
    profiler = made(tmp_path / "run/profile", said, (3, 4))
    if what == "folder":
        (tmp_path / "run").touch()
        recorded(profiler)
    else:
        name = {"export": "export_chrome_trace"}.get(what, what)
        with mock.patch.object(
            torch.profiler.profile, name, side_effect=RuntimeError("odd\nerror")
        ):
            recorded(profiler)
        torch._C._autograd._disable_profiler() if what == "stop" else None
    cause = "NotADirectoryError: " if what == "folder" else "RuntimeError: odd error"
    assert len(said) == 1
    assert said[0].startswith(f"warning: 1 of 1 ranks wrote no profile of step 3: rank 0: {cause}")
    if what != "folder":
        recorded(profiler, 4)
        assert said[1].startswith("profile of step 4: ")
        assert not (tmp_path / "run/profile/step-3/rank-0.json").exists()


def test_a_failing_step_ends_its_profile(tmp_path: Path) -> None:
    said = list[str]()
    profiler = made(tmp_path / "profile", said, (3, 4))
    profiler.progress.listener = mock.Mock(side_effect=[None, None, KeyError("in update")])
    with pytest.raises(KeyError, match="in update"):
        recorded(profiler)
    profiler.progress.listener = None
    assert profiler.progress.state.phase == "update", "what a message about the failure names"
    recorded(profiler, 4)
    assert [line.partition(":")[0] for line in said] == ["profile of step 4"]


def test_marks_cost_nothing_without_a_profile() -> None:
    progress = Progress()
    with mock.patch.object(record_function, "__init__", side_effect=AssertionError):
        progress.phase("update", 1)
        with progress.mark("forward"):
            pass


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (0, "greater than 0"),
        ([3, -1], "greater than 0"),
        (["3"], "valid integer"),
        (True, "valid integer"),
        ([3, 101], r"trainer.profile.steps has 101, but trainer.steps is 100"),
    ],
)
def test_wrong_steps_are_refused(steps: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_recipe({**RECIPE, "trainer": {"profile": {"steps": steps}}})


def test_right_steps() -> None:
    data = {**RECIPE["data"], "epochs": 9}  # type: ignore[dict-item]
    assert make_recipe({**RECIPE, "trainer": {"profile": {"steps": 3}}}).trainer.profile.steps == (
        3,
    )
    assert make_recipe(
        {**RECIPE, "data": data, "trainer": {"profile": {"steps": [300]}}}
    ).trainer.profile.steps == (300,)
