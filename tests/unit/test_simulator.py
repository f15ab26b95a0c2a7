"""The simulator of rollouts: closed forms, the bound on lag over seeds, and `dovetail plan`."""

import json
import random
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path

import pytest

from dovetail.cli.main import run_command
from dovetail_tools.cli.plan import lengths_of
from dovetail_tools.simulator import Setup, SimulatedServer, Simulation, lognormal, token_ms
from tests.helpers.tolerances import SUM_ORDER

DECODE = ((1, 100.0), (9, 300.0))  # 10 and 30 ms a token
PLAIN = Setup(
    engines=1,
    max_running=8,
    decode=DECODE,
    train_tokens_per_second=1000.0,
    push_ms=50.0,
    groups_per_step=4,
    samples=2,
    max_lag=0,
    steps=20,
)


def test_a_token_takes_longer_among_more() -> None:
    assert [token_ms(DECODE, running) for running in (1, 5, 9, 17)] == [10.0, 20.0, 30.0, 50.0]
    assert token_ms(((4, 100.0),), 1) == token_ms(((4, 100.0),), 99) == 40.0


@pytest.mark.parametrize("train_speed", [400.0, 100_000.0])
def test_constant_lengths_take_what_arithmetic_says(train_speed: float) -> None:
    """In turns a step takes rollout + training + push; asynchronously the longer one of the first two, and the push."""
    length = 100
    rollout, training = length * token_ms(DECODE, 8), 1000 * 8 * (length + 3) / train_speed
    setup = replace(PLAIN, train_tokens_per_second=train_speed, prompt_tokens=3)
    for max_lag, expected in ((0, rollout + training + 50), (1, max(rollout, training) + 50)):
        found = Simulation(replace(setup, max_lag=max_lag), [[length]]).run()
        assert found.step_ms == pytest.approx(expected, rel=SUM_ORDER)
        assert found.tokens_per_second == pytest.approx(8 * length / expected * 1000, rel=SUM_ORDER)
        assert found.trainer_idle == pytest.approx(1 - (training + 50) / expected, abs=SUM_ORDER)
        assert found.engine_idle == pytest.approx(1 - rollout / expected, abs=SUM_ORDER)


def test_engines_that_wait_for_the_trainer_sample_as_early_as_they_may() -> None:
    """Batch b is sampled whole by version b - N."""
    fast = replace(PLAIN, decode=((1, 1e9),), train_tokens_per_second=1.0, max_running=1000)
    for max_lag in range(4):
        lags = Simulation(replace(fast, max_lag=max_lag), [[10]]).run().lags
        assert lags == {
            lag: 80 * (20 - max_lag if lag == max_lag else 1) for lag in range(max_lag + 1)
        }


def test_prompts_are_prefilled_once_by_each_engine() -> None:
    for engines, prompts in (
        (1, 4),
        (2, 4),
        (8, 1),
    ):  # each takes the engine with the fewest samples
        setup = replace(PLAIN, engines=engines, prompt_tokens=30, prefill_tokens_per_second=1000.0)
        setup = replace(setup, train_tokens_per_second=inf, push_ms=0.0, decode=((1, 100.0),))
        found = Simulation(setup, [[10]]).run()
        assert found.step_ms == pytest.approx(10 * 10 + 30 * prompts, rel=SUM_ORDER), engines


def test_an_engine_is_a_queue_with_processor_sharing() -> None:
    """M/G/1-PS: the mean stay is E[S] / (1 - load), whatever the distribution of lengths (Kleinrock 1967)."""
    luck, speed, load, count = random.Random(0), 1000.0, 0.5, 40_000
    lengths = lognormal(100, 800)
    mean = sum(lengths) / len(lengths)
    engine, now, ended, stays = SimulatedServer(((1, speed), (1_000_000, speed))), 0.0, 0, 0.0
    while ended < count:
        arrival = now + luck.expovariate(load / mean)
        while engine.next_end <= arrival:
            engine.end()
            stays, ended = stays + engine.now, ended + 1
        engine.add(arrival, 0, luck.choice(lengths))
        now, stays = arrival, stays - arrival
    for _ in range(len(engine.running)):
        engine.end()
        stays, ended = stays + engine.now, ended + 1
    assert 0.97 < stays / ended / (mean / (1 - load)) < 1.03


def test_spans_of_a_sample_say_which_version_sampled_which_tokens() -> None:
    engine = SimulatedServer(((1, 1000.0),))
    engine.add(0.0, 7, 10)
    engine.push(3.0, 1, push_ms=5.0)
    engine.push(12.0, 2, push_ms=5.0)  # 3 + 4 tokens
    assert engine.next_end == 20.0
    assert engine.end() == (7, [(0, 3), (1, 4), (2, 3)])


@pytest.mark.parametrize(
    "seeds", [range(300), pytest.param(range(300, 10_300), marks=pytest.mark.soak)], ids=len
)
def test_no_lag_beyond_the_bound_and_every_group_in_its_turn(seeds: range) -> None:
    for seed in seeds:
        luck = random.Random(seed)
        setup = Setup(
            engines=luck.randint(1, 3),
            max_running=luck.randint(1, 8),
            decode=luck.choice((DECODE, ((1, 50.0),), ((2, 80.0), (4, 81.0)))),
            prefill_tokens_per_second=luck.choice((100.0, inf)),
            train_tokens_per_second=10 ** luck.uniform(1, 4),
            step_ms=luck.choice((0.0, 100.0)),
            push_ms=luck.choice((0.0, 30.0)),
            groups_per_step=luck.randint(1, 4),
            samples=luck.randint(1, 3),
            prompt_tokens=luck.choice((0, 20)),
            max_lag=luck.randint(0, 4),
            steps=8,
            warmup=luck.randint(0, 7),
        )
        lengths = [[luck.choice((1, 3, 10, 200)) for _ in range(setup.samples)] for _ in range(5)]
        found = Simulation(setup, lengths, seed).run()
        assert max(found.lags) <= setup.max_lag and min(found.lags) >= 0, seed
        assert [group for batch in found.batches for group in batch] == list(
            range(8 * setup.groups_per_step)
        ), seed
        assert 0 <= found.trainer_idle <= 1 and 0 <= found.engine_idle <= 1, seed
        again = Simulation(setup, lengths, seed)
        drawn = [
            length
            for group in range(8 * setup.groups_per_step)
            for length in again.group_lengths(group)
        ]
        assert sum(found.lags.values()) == sum(drawn), seed


def test_more_lag_is_faster_on_long_tails() -> None:
    lengths = [[length] for length in lognormal(200, 1600)]
    setup = replace(
        PLAIN,
        max_running=64,
        groups_per_step=8,
        samples=4,
        decode=((1, 100.0), (64, 3000.0)),
        steps=40,
    )
    speeds = [
        Simulation(replace(setup, max_lag=lag), lengths).run().tokens_per_second
        for lag in (0, 1, 2, 4)
    ]
    assert all(slower < faster for slower, faster in pairwise(speeds))


def test_log_normal_lengths_have_the_mean_and_the_tail_that_were_asked_for() -> None:
    for mean, longest in ((2000, 16_000), (300, 1000), (50, 50)):
        lengths = lognormal(mean, longest)
        assert 0.98 < sum(lengths) / len(lengths) / mean < 1.02
        assert 0.85 * longest <= max(lengths) <= longest


PLAN = [
    "plan",
    "--gpus",
    "4",
    "--decode",
    "1:100,8:700,64:3000",
    "--train",
    "2000",
    "--samples",
    "4",
    "--prompts",
    "8",
    "--push-seconds",
    "0.1",
]


def test_plan_compares_layouts_and_says_which_to_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lengths.json").write_text(json.dumps(lognormal(200, 1600)))
    outputs = []
    for lengths in ("200:1600", str(tmp_path / "lengths.json")):
        assert run_command([*PLAN, "--rollout", lengths, "--max-lag", "4,1"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    first, _, _, *rows, _, advice = outputs[0].splitlines()
    assert first == "8 prompts x 4 responses a step of 200 tokens, at most 1,600"
    cells = [
        row.replace("0, in turns", "turns").replace(" x ", " ").replace(" s ", " ").split()
        for row in rows
    ]
    assert [row[0] for row in cells] == ["turns", "0", "1", "4"]
    assert cells[0][1:4] == ["64", "4", "4"] and all(
        int(row[2]) + int(row[3]) == 4 for row in cells[1:]
    )
    assert {row[1] for row in cells} <= {"1", "8", "64"}
    speeds = [float(row[4].replace(",", "")) for row in cells]
    assert speeds[1] < speeds[2] < speeds[3]
    split, gain = f"trainer {cells[3][2]} and engines {cells[3][3]} of the 4 GPUs", cells[3][5]
    assert (
        advice
        == f"take max_lag 4, max_num_seqs {cells[3][1]}, {split}: {gain} times the tokens/s of the fastest synchronous layout"
    )


def test_plan_reads_the_lengths_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "rollouts").mkdir()
    rows = [{"id": i // 2, "completion": "", "token_ids": [0] * (10 + i % 2)} for i in range(8)]
    (tmp_path / "rollouts" / "step_000001.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in rows)
    )
    assert run_command([*PLAN, "--rollout", str(tmp_path)]) == 0
    assert "of 10 tokens, at most 11" in capsys.readouterr().out
    assert lengths_of(str(tmp_path)) == [[10, 11]] * 4


def test_plan_with_one_gpu_has_turns_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([*PLAN, "--gpus", "1", "--rollout", "20:30"]) == 0
    assert "take the synchronous loop with all GPUs in turns" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--rollout", "nowhere"],
            "--rollout 'nowhere': expected a run_dir, a JSON list of lengths, or MEAN:LONGEST",
        ),
        (
            ["--rollout", "9:3"],
            "--rollout 9:3: expected MEAN:LONGEST with LONGEST 1 to 100 times MEAN",
        ),
        (
            ["--rollout", "9:30", "--decode", "8:100,4:90"],
            "8:100,4:90: expected rising numbers of samples",
        ),
        (["--rollout", "9:30", "--decode", "0:100"], "0 is not more than 0"),
        (["--rollout", "9:30", "--max-lag", "1,-1"], "-1 is less than 0"),
        (["--rollout", "9:30", "--engine-gpus", "5"], "--engine-gpus 5: there are only --gpus 4"),
        (["--rollout", "LIST"], "expected a JSON list of lengths in tokens, such as [512, 2048]"),
    ],
)
def test_mistakes(
    given: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list.json").write_text("[3, 0]")
    given = [str(tmp_path / "list.json") if word == "LIST" else word for word in given]
    assert run_command([*PLAN, *given]) == 2
    assert message in capsys.readouterr().err
