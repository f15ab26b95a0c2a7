"""`dovetail report` and `dovetail rollouts`, also of a real run; the report in a browser."""

import json
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.helpers.program import here, read_rows, refusal, write_recipe, write_rows
from tests.helpers.report_runs import HOSTILE, Page, make_run

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BLUE, LIGHT_BLUE, ORANGE = (
    (0x25, 0x63, 0xEB),
    (0x6E, 0xA8, 0xFE),
    (0xD9, 0x77, 0x06),
)  # of runs; of the first in the dark
OPEN_MILLISECONDS = 2000


def test_a_real_run(model: Path, tmp_path: Path) -> None:
    rows = write_rows(
        tmp_path / "rows.jsonl",
        [{"prompt": f"say {n}", "answer": str(n), "id": f"r{n}"} for n in range(2)],
    )
    (tmp_path / "marks.py").write_text(
        "def f(prompts, completions, **_):\n    return [float(len(completions[0]))]\n"
    )
    recipe = write_recipe(
        tmp_path / "r.yaml",
        model,
        rows,
        algorithm={"name": "grpo"},
        reward={"import": "marks:f"},
        data={"eval": str(rows)},
    )
    assert here("train", recipe).code == 0
    run = tmp_path / "run"
    ended = here("report", run, "--watch", "1")  # it is finished, so it is not watched
    assert (ended.code, ended.out) == (0, f"wrote {run / 'report.html'}\n"), ended
    data = Page((run / "report.html").read_bytes()).data
    (shown,) = data["runs"]
    assert (shown["state"], shown["x"]["step"]) == ("finished", [0, 1, 2])
    assert {
        "reward_mean",
        "loss",
        "lr",
        "entropy_mean",
        "peak_memory_gib",
        "eval_reward_mean",
    } <= shown["series"].keys()
    assert shown["series"]["eval_reward_mean"]["v"][0] is not None
    assert {row["id"] for row in data["samples"]} == {"r0", "r1"}
    assert {(row["step"], row["kind"]) for row in data["samples"]} == {
        (0, "eval"), (1, "rollout"), (2, "eval"), (2, "rollout"),
    }  # fmt: skip
    changed = {key for key, (value, default) in data["config"] if value != default}
    assert {"model.path", "reward.import", "optim.lr", "trainer.steps"} <= changed
    assert not {"algorithm.name", "trainer.seed"} & changed
    ended = here("rollouts", run, "--prompt", "r1")
    assert ended.code == 0, ended
    assert ended.out.count("prompt     say 1\n") == 6
    steps = [line.split("  ")[0] for line in ended.out.splitlines() if line.startswith("step ")]
    assert steps == ["step 0", *["step 1"] * 2, *["step 2"] * 3]
    assert here("train", recipe).code == 0  # the report is no obstacle


def test_a_run_that_ends_by_its_time_budget_says_so(model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}] * 4)
    recipe = write_recipe(tmp_path / "r.yaml", model, rows)
    budget = ["trainer.steps=99", "trainer.time_budget_seconds=0.001"]
    ended = here("train", recipe, *budget)
    cause = "trainer.time_budget_seconds=0.001 is spent"
    assert ended.code == 0, ended
    assert f"ended early        after 1 of 99 steps: {cause}" in ended.out
    (event,) = read_rows(tmp_path / "run/events.jsonl")
    assert (event["kind"], event["step"], event["cause"]) == ("ended_early", 1, cause)
    assert here("report", tmp_path / "run").code == 0
    (shown,) = Page((tmp_path / "run/report.html").read_bytes()).data["runs"]
    assert shown["facts"]["ended early"] == cause
    assert shown["facts"]["layout"] == "one rank"


def test_watching_ends_with_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2)
    finish = threading.Timer(1.0, (run / "hf").mkdir)
    finish.start()
    assert here("report", run, "--out", tmp_path / "r.html", "--watch", "0.2").code == 0
    assert Page((tmp_path / "r.html").read_bytes()).data["runs"][0]["state"] == "finished"


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for command in ("report", "rollouts"):
        message = refusal(here(command, tmp_path / "none"))
        assert (
            message
            == f"{tmp_path / 'none'} is not the directory of a run: there is no such directory; give the run_dir of a recipe\n"
        )
    make_run(tmp_path / "a", 1)
    message = refusal(here("report", tmp_path))
    assert message.endswith(
        f"it has neither config.yaml nor metrics.jsonl; the runs in it: {tmp_path / 'a'}\n"
    )
    message = refusal(here("rollouts", tmp_path / "a", "--step", "9"))
    assert message == f"{tmp_path / 'a'} has no such sample; it has samples of steps 1 to 1\n"
    shutil.rmtree(tmp_path / "a" / "rollouts")
    assert "it has none yet; sft draws none" in refusal(here("rollouts", tmp_path / "a"))
    assert "cannot be written" in refusal(
        here("report", tmp_path / "a", "--out", tmp_path / "no" / "r.html")
    )


def test_only_text_reaches_the_terminal(tmp_path: Path) -> None:
    ended = here("rollouts", make_run(tmp_path / "run", 1), "--prompt", "p7")
    assert ended.out.startswith(
        "step 1  prompt p7  sample 0  reward 0  format 0.5  3 tokens  stop\n"
    )
    ended = here("rollouts", make_run(tmp_path / "other", 4), "--search", "owned", "--limit", "1")
    assert HOSTILE[:20] in ended.out
    assert "\u2028" not in ended.out


def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium on this machine (apt install chromium)")
    return found


def browse(page: Path, profile: Path, *flags: str) -> str:
    command = [
        browser(),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
    ]
    done = subprocess.run(
        [*command, *flags, page.as_uri()], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.soak
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """It draws every curve, runs nothing that a completion holds, opens soon, and fits both widths in light and dark."""
    paths = [make_run(tmp_path / "long", 200), make_run(tmp_path / "short", 30)]
    phase: dict[str, Any] = {
        "seconds": 1.0,
        "computing": 0.5,
        "collectives": 0.3,
        "waiting": 0.2,
        "parts": {"forward": 0.4},
    }
    phase |= {"operators": [["aten::mm", 0.5, 3]], "kernels": [], "peak_bytes": 1 << 30}
    (paths[0] / "profile/step-5").mkdir(parents=True)
    for rank in (0, 1):
        profile = {
            "step": 5,
            "rank": rank,
            "device": "cpu",
            "events": 9,
            "phases": {"update": phase},
        }
        (paths[0] / f"profile/step-5/rank-{rank}.json").write_text(json.dumps(profile))
    page = tmp_path / "report.html"
    assert here("report", *paths, "--out", page).code == 0
    times = []
    for _ in range(3):  # the least of a few: others share the cores
        html = browse(page, tmp_path / "profile", "--dump-dom")
        times.append(int(html.partition('data-milliseconds="')[2].partition('"')[0]))
    assert min(times) < OPEN_MILLISECONDS
    names = {name for run in Page(page.read_bytes()).data["runs"] for name in run["series"]}
    assert html.count("<svg") == len(names) + len(paths)  # and the phases of each run
    assert "<td>update</td><td>1</td><td>50 %</td><td>20 %</td><td>30 %</td><td>1</td>" in html
    assert "<title>long, short - dovetail report</title>" in html  # not "owned"
    assert "<img" not in html
    pictures = {}
    for name, flags in {
        "wide": ("--window-size=1200,3000",),
        "narrow": ("--window-size=500,3000",),
        "dark": ("--window-size=1200,3000", "--blink-settings=preferredColorScheme=0"),
    }.items():
        file = tmp_path / f"{name}.png"
        browse(page, tmp_path / "profile", f"--screenshot={file}", *flags)
        with Image.open(file) as image:
            colors = image.convert("RGB").getcolors(1 << 24) or []
        pictures[name] = {color: count for count, color in colors if isinstance(color, tuple)}
    for name, run_colors in {
        "wide": (BLUE, ORANGE),
        "narrow": (BLUE, ORANGE),
        "dark": (LIGHT_BLUE,),
    }.items():
        assert all(pictures[name].get(color, 0) > 1000 for color in run_colors), name
    assert max(pictures["wide"], key=pictures["wide"].__getitem__) > (0xF0, 0xF0, 0xF0)
    assert max(pictures["dark"], key=pictures["dark"].__getitem__) < (0x30, 0x30, 0x30)
