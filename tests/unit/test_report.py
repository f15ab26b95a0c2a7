"""The data of reports, and samples in the terminal, of runs that are whole, empty, torn or hostile."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dovetail.errors import ConfigError
from dovetail.records.runs import read_runs, text_of
from dovetail.records.samples import describe, select, sort
from dovetail_tools.report.page import MAX_POINTS, SAMPLE_BYTES, page_data, render, write_report
from dovetail_tools.report.samples import choose
from tests.helpers.report_runs import HOSTILE, SHOWN, Page, make_run, metrics, sample, write_lines

MAX_BYTES = 5_000_000  # of the report of 200 steps


def page_of(*paths: Path) -> Page:
    return Page(render(page_data(read_runs(paths))))


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "long", 200)


@pytest.fixture(scope="module")
def page(long: Path) -> Page:
    return page_of(long)


def test_curves(page: Page) -> None:
    (run,) = page.data["runs"]
    assert run["x"]["step"] == list(range(201))  # from the evaluation before training
    assert run["x"]["tokens"][-1] == 200_000
    reward = run["series"]["reward_mean"]
    assert (reward["v"][0], len(reward["v"])) == (None, 201)
    assert (reward["lo"][1], reward["hi"][1]) == (
        0.0,
        1.0,
    )  # reward_min and reward_max, which have no curves of their own
    groups = dict(page.data["groups"])
    assert groups["Reward"] == ["reward_mean", "reward/format"]
    assert groups["Evaluation"] == ["eval_reward_mean"]
    assert groups["Memory"] == ["peak_memory_gib"]
    assert run["series"]["eval_reward_mean"]["v"][0] == 0.25
    assert run["series"]["kl_mean"]["v"][3] is None
    assert run["phases"]["push"] == [None, *[0.2] * 200]
    assert run["facts"]["updates skipped"] == "1"
    assert run["facts"]["steps"] == "200 of 200"


def test_a_run_that_ended_early_says_why(tmp_path: Path) -> None:
    run = make_run(tmp_path / "short", 20)
    cause = "trainer.time_budget_seconds=75 is spent"
    event = {"kind": "ended_early", "step": 20, "cause": cause}
    write_lines(run / "events.jsonl", [event])
    facts = page_of(run).data["runs"][0]["facts"]
    assert (facts["steps"], facts["ended early"]) == ("20 of 200", cause)
    write_lines(run / "events.jsonl", [{**event, "step": 10}])  # the run went on since then
    assert "ended early" not in page_of(run).data["runs"][0]["facts"]


def test_events_and_config(page: Page) -> None:
    kinds = [(event["kind"], event["step"]) for event in page.data["runs"][0]["events"]]
    assert kinds == [("death", "2"), ("update skipped", "3")]
    config = {key: values for key, *values in page.data["config"]}
    assert config["algorithm.clip_high"] == [["0.28", "0.2"]]
    assert config["trainer.seed"] == [[None, "0"]]
    assert config["model.path"] == [["M", None]]


def test_it_is_small_and_needs_nothing_else(long: Path, tmp_path: Path) -> None:
    html = render(page_data(read_runs([long])))
    assert len(html) < MAX_BYTES
    for tag, attributes in Page(html).elements:
        assert tag in (
            "html",
            "head",
            "meta",
            "link",
            "title",
            "style",
            "body",
            "main",
            "noscript",
            "script",
        )
        assert not attributes.keys() - {
            "lang",
            "charset",
            "http-equiv",
            "content",
            "name",
            "rel",
            "href",
            "id",
            "type",
        }
        assert attributes.get("href", "data:,") == "data:,"
    rows = [{**sample(i, 0, 1), "completion": HOSTILE * 1000} for i in range(1000)]
    write_lines(make_run(tmp_path / "large", 1) / "rollouts" / "step_000001.jsonl", rows)
    assert SAMPLE_BYTES / 2 < len(render(page_data(read_runs([tmp_path / "large"])))) < MAX_BYTES


def test_text_of_a_run_is_only_text(page: Page) -> None:
    assert page.scripts == 2
    assert page.data["runs"][0]["events"][0]["cause"] == SHOWN
    assert any(row["completion"].endswith(SHOWN) for row in page.data["samples"])
    other = Page(
        render({**page.data, "runs": [{**page.data["runs"][0], "name": HOSTILE}]})
    )  # in the title, too
    assert (other.scripts, other.data["runs"][0]["name"]) == (2, SHOWN)


def test_samples_are_of_all_steps_and_of_the_same_prompts(long: Path, page: Page) -> None:
    samples = page.data["samples"]
    assert {row["step"] for row in samples} == set(range(1, 201))
    assert {row["step"] for row in samples if row["id"] == "p4"} == set(range(1, 201, 4))
    first = samples[0]
    assert (first["prompt"], first["parts"], first["tokens"]) == (
        "[user] What is 4?",
        {"format": 0.5},
        3,
    )
    few = choose(long, 400, 10**6)
    assert [(row["step"], row["reward"]) for row in few[:2]] == [
        (1, 1.0),
        (1, 0.0),
    ]  # the best one, and the worst
    assert few[0]["id"] == few[1]["id"]
    assert choose(long, 10, 10) == []


def test_large_runs_are_read_in_part(long: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail_tools.report.samples.READ_BYTES", 100_000)
    steps = {row["step"] for row in choose(long, 800, 10**6)}
    assert {1, 200} <= steps
    assert len(steps) == 40


def test_an_empty_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    data = page_of(tmp_path).data
    assert (data["groups"], data["samples"], data["runs"][0]["state"]) == ([], [], "no step yet")
    assert data["runs"][0]["events"][0]["kind"] == "not read"  # there is no config


def test_torn_and_odd_lines(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            '{"ste\n[1]\n{"step": "x"}\n{"step": 3, "loss": Infinity, "tokens": 1e999, "kl_mean": '
            + "9" * 400
            + '}\n{"step": 4, "lo'
        )
    (run / "config.yaml").write_text("model: {path: M}\nnew_section: {key: 1}\ntrainer: {st")
    data = page_of(run).data
    assert data["runs"][0]["x"]["step"] == [0, 1, 2, 3]
    assert data["runs"][0]["series"]["loss"]["v"] == [None, 0.1, 0.05, None]
    assert "not valid YAML" in data["runs"][0]["events"][0]["cause"]
    shutil.rmtree(run / "rollouts")
    (run / "events.jsonl").unlink()
    assert page_of(run).data["samples"] == []


def test_two_runs_of_different_lengths_and_one_name(long: Path, tmp_path: Path) -> None:
    short = make_run(tmp_path / "long", 5)
    (short / "config.yaml").write_text((short / "config.yaml").read_text().replace("0.28", "0.3"))
    data = page_of(long, short).data
    assert [run["name"] for run in data["runs"]] == [str(long), str(short)]
    assert [len(run["series"]["loss"]["v"]) for run in data["runs"]] == [201, 6]
    assert {row["run"] for row in data["samples"]} == {0, 1}
    assert ["algorithm.clip_high", ["0.28", "0.2"], ["0.3", "0.2"]] in data["config"]


def test_long_runs_keep_their_peaks(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1)
    write_lines(run / "metrics.jsonl", [metrics(step, 3001) for step in range(1, 3002)])
    (data,) = page_of(run).data["runs"]
    assert (
        len(data["x"]["step"])
        == len(data["series"]["loss"]["v"])
        == len(data["phases"]["push"])
        <= MAX_POINTS
    )
    assert data["x"]["step"][-1] == 3001
    assert max(data["series"]["grad_norm"]["hi"]) == 50.0
    assert max(data["series"]["grad_norm"]["v"]) < 50.0


def test_a_report_is_written_anew_until_the_run_is_finished(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "run", 2), tmp_path / "report.html"
    assert not write_report([run], out, 5.0)
    assert Page(out.read_bytes()).data["reload"] == 5.0
    (run / "hf").mkdir()
    assert write_report([run], out, 5.0)
    assert Page(out.read_bytes()).data["reload"] == 0
    assert [path.name for path in tmp_path.iterdir() if path.name != "run"] == ["report.html"]
    with pytest.raises(
        ConfigError, match="cannot be written: No such file or directory; give the path of a file"
    ):
        write_report([run], tmp_path / "none" / "report.html")


def test_samples_in_the_terminal(long: Path) -> None:
    assert {row["step"] for row in select(long, None, None, None)} == {200}
    steps = [row["step"] for row in select(long, None, "p4", None)]
    assert (steps[0], steps[-1], sorted(steps)) == (1, 197, steps)
    assert {row["id"] for row in select(long, None, None, "WHAT IS 3?")} == {"p3"}
    assert [row["reward"] for row in sort(select(long, 9, None, None), "worst", 5)] == [0.0] * 4 + [
        1.0
    ]
    text = describe(
        next(select(long, None, "p3", None))
        | {"completion": "one\ntwo \x1b[31m\u202e", "reward": None}
    )
    assert "\x1b" not in text
    assert "completion one\n             two \\x1b[31m\\u202e\n" in text
    assert "reward none" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]}],
            "[user] Hi <image>",
        ),
        ([{"role": "tool", "content": None}], "[tool] null"),
        ({"a": 1}, '{"a": 1}'),
        ([], "[]"),
    ],
)
def test_text_of(value: Any, text: str) -> None:
    assert text_of(value) == text


def test_evaluations_are_named_by_their_files(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1)
    for name in ("step_000010.jsonl", "gsm8k/step_000010.jsonl", "math.step_000020.jsonl"):
        (run / "eval" / name).parent.mkdir(parents=True, exist_ok=True)
        (run / "eval" / name).write_text(
            json.dumps({"id": 1, "completion": "x", "reward": 1}) + "\n"
        )
    found = {(row["kind"], row["step"]) for row in page_of(run).data["samples"]}
    assert found == {("rollout", 1), ("eval", 10), ("eval gsm8k", 10), ("eval math", 20)}


def test_bands_are_quartiles_and_have_a_legend(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 20)
    quartiles = {"reward_p25": 0.25, "reward_p75": 0.75}
    lengths = {f"response_length_{name}": 5.0 for name in ("mean", "p10", "p90")}
    rows = [{**metrics(step, 20), **quartiles, **lengths} for step in range(1, 21)]
    write_lines(run / "metrics.jsonl", rows)
    series = page_of(run).data["runs"][0]["series"]
    reward = series["reward_mean"]
    assert (reward["lo"][1], reward["hi"][1]) == (0.25, 0.75)
    assert reward["band"] == "quartiles of the samples"
    assert series["response_length_mean"]["band"] == "10 % to 90 %"
    assert not {"reward_min", "reward_p25", "response_length_p90"} & series.keys()
    assert "band" not in series["loss"]


def test_counts_and_shares_begin_at_zero_and_evaluations_are_joined(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 4)
    more = {"reward_errors": 0, "rewards_none": 2, "clip_fraction": 0.0, "eval_solved": 0.5}
    write_lines(run / "metrics.jsonl", [{**metrics(step, 4), **more} for step in range(1, 5)])
    data = page_of(run).data
    assert set(data["zero"]) == {*more, "tokens"}
    assert set(data["joined"]) == {"eval_reward_mean", "eval_solved"}


@pytest.mark.parametrize(
    ("ranks", "layout"), [(8, "tp=2,dp=4"), (2, "tp=2"), (None, "tp=2,dp=auto")]
)
def test_the_layout_is_the_resolved_one(ranks: int | None, layout: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 4)
    (run / "config.yaml").write_text("layout: {tp: 2, dp: auto}\nrun_dir: run\n")
    if ranks is not None:
        (run / "logs").mkdir()
        started = "2026-11-22T10:00:00+00:00: rank 0 of {} on host, pid 7\n"
        (run / "logs/rank-0.log").write_text(started.format(3) + started.format(ranks))
    assert page_of(run).data["runs"][0]["facts"]["layout"] == layout
