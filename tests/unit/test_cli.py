"""What the command line accepts, and what it says to mistakes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.cli.arguments import layout_of, parse, recipe_of, supervision_of
from dovetail.cli.main import run_command
from dovetail.launch.progress import LIMITS
from dovetail.parallel.layout import Layout

LONG = "x" * 100_000
SCORE = ["score", "--model", "M", "--data", "D", "--out", "O"]


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    given: dict[str, Any] = {
        "model": {"path": "M"},
        "data": {"train": "D"},
        "run_dir": "R",
        "layout": {"tp": 4, "pp": 2},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(given))
    return str(path)


def test_train_takes_overrides_anywhere_and_in_all_spellings(recipe: str) -> None:
    argv = [
        "train",
        "optim.lr=1e-5",
        "--trainer.steps",
        "7",
        recipe,
        "--dry-run",
        "data.eval=E",
        "--trainer.seed=3",
    ]
    args = parse([argv[0], recipe, *argv[1:4], *argv[5:]])
    made = recipe_of(args)
    assert args.dry_run
    assert (made.optim.lr, made.trainer.steps, made.trainer.seed, made.data.eval) == (
        1e-5,
        7,
        3,
        "E",
    )


def test_flags_beat_overrides_and_the_layout_flag_replaces_the_degrees(recipe: str) -> None:
    args = parse(
        [
            "train",
            recipe,
            "--layout",
            "tp=2",
            "--dtype",
            "bfloat16",
            "model.dtype=float32",
            "layout.tp=8",
        ]
    )
    assert layout_of(args) == Layout(tp=2, dp=None)
    assert recipe_of(args).model.dtype == "bfloat16"
    assert not recipe_of(args).model.trust_remote_code
    assert recipe_of(parse(["train", recipe, "--trust-remote-code"])).model.trust_remote_code
    assert layout_of(parse(["train", recipe])) == Layout(tp=4, pp=2, dp=None)


def test_a_run_that_died_goes_on_from_what_it_saved(recipe: str) -> None:
    argv = ["train", recipe, "--resume", "step=3", "--restarts", "2"]
    supervision = supervision_of(parse(argv))
    assert supervision.restarts == 2
    assert parse([*argv, *supervision.resume]).resume == "auto"


def test_a_run_is_watched_by_the_limits_of_its_recipe(recipe: str) -> None:
    supervision = supervision_of(parse(["train", recipe, "trainer.timeouts.reward=7200"]))
    assert supervision.limits == {**LIMITS, "reward": 7200.0}
    assert supervision.run_dir == Path("R")


def test_whole_numbers_may_be_larger_than_any_float() -> None:
    """What a seed may be; what else may not is refused by name later."""
    assert parse(["generate", *SCORE[1:], "--seed", "9" * 400]).seed == int("9" * 400)


def test_defaults_of_score_and_generate() -> None:
    args = parse(SCORE)
    assert (args.head, args.temperature, args.device, args.dtype, args.engine) == (
        "lm",
        1.0,
        "auto",
        "float32",
        "auto",
    )
    assert layout_of(args) == Layout(dp=None)
    args = parse(["generate", *SCORE[1:], "--samples", "3", "--top-k", "5"])
    assert (args.samples, args.max_new_tokens, args.top_p, args.top_k, args.seed) == (
        3,
        64,
        1.0,
        5,
        0,
    )


OF_A_MODEL = [
    ["score", "--data", "D", "--out", "O"],
    ["generate", "--data", "D", "--out", "O"],
    ["eval", "--data", "D"],
    ["convert", "DST", "--to", "sharded"],
    ["inspect"],
    ["serve", "--port", "0"],
]


@pytest.mark.parametrize("argv", OF_A_MODEL, ids=lambda argv: argv[0])
def test_every_command_takes_its_model_by_place_or_by_name_once(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    name, *others = argv
    by_place = parse([name, "M", *others])
    assert "M" in vars(by_place).values()
    for named in (["--model", "M"], ["--model=M"]):
        assert parse([name, *named, *others]) == by_place
        assert parse([name, *others, *named]) == by_place
    assert run_command([name, "M", *others, "--model", "N"]) == 2
    twice = "dovetail: --model N: the model is given twice; give it once"
    assert capsys.readouterr().err.startswith(twice)
    assert run_command([name]) == 2
    missing = "dovetail: the following arguments are required: "
    assert re.match(f"{missing}(MODEL|SRC, DST|PATH)", capsys.readouterr().err)
    assert run_command([name, "--help"]) == 0
    assert "--model" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["train"],
            "dovetail: the following arguments are required: RECIPE.yaml; see dovetail train --help",
        ),
        (["trian"], "argument command: invalid choice: 'trian'"),
        (
            ["score", "--model", "M"],
            "dovetail: the following arguments are required: --data, --out; see dovetail score --help",
        ),
        (
            ["train", "r.yaml", "--model", "M"],
            "unrecognized arguments: --model M; model: here model.path; see",
        ),
        (
            [*SCORE, "--layout", "tp=two"],
            "layout 'tp=two': tp must be a whole number of 1 or more, not 'two'",
        ),
        ([*SCORE, "--layout", "tp=\u00b2"], "tp must be a whole number of 1 or more, not '\u00b2'"),
        (
            [*SCORE, "--layout", "tp=2,dp=2,tp=4"],
            "layout 'tp=2,dp=2,tp=4': tp is given twice; leave one out",
        ),
        ([*SCORE, "--layout", "tp=2,ep=3"], "ep=3 does not divide dp x cp = 1"),
        ([*SCORE, "--temperature", "0"], "argument --temperature: 0 is not more than 0"),
        ([*SCORE, "--temperature", "inf"], "argument --temperature: inf is not finite"),
        ([*SCORE, "--temperature", "nan"], "argument --temperature: nan is not finite"),
        (
            [*SCORE, "--tokens-per-batch", "x"],
            "argument --tokens-per-batch: invalid whole number value: 'x'",
        ),
        (["train", "none.yaml"], "recipe 'none.yaml' cannot be read"),
        (["train", "r.yaml", "--optim.lr"], "--optim.lr has no value; expected --optim.lr=value"),
        (["train", "r.yaml", "--resume", "step"], "'step'; expected auto, never or step=N"),
        (
            ["train", "r.yaml", "--resume", "step=\u00b2"],
            "'step=\u00b2'; expected auto, never or step=N",
        ),
    ],
)
def test_mistakes_end_with_2_and_one_message(
    argv: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert run_command(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("dovetail: ")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "argv",
    [
        ["run_dir." + LONG],
        [f"model.path={LONG}\x00"],
        [f"trainer.steps={LONG}"],
        [f"trainer.steps={'9' * 4000}"],
        [f"trainer.steps=0x{'f' * 9000}"],
        [f"trainer.steps=[{'1, ' * 9000}]"],
        [f"trainer={{{', '.join(f'key{i}: {i}' for i in range(4000))}}}"],
        [f"{LONG}=1"],
        [f"trainer.{LONG}=1"],
        [".".join("a" * 5000) + "=1"],
        [LONG],
        [f"reward.import={LONG}"],
        [f"reward.options={LONG}"],
        [f"--trainer.{LONG}"],
        [f"--{LONG}"],
        ["--layout", LONG],
        ["--layout", f"tp={'9' * 5000}"],
        ["--dtype", LONG],
        ["--resume", LONG],
        ["--restarts", "-" + "9" * 4000],
        ["--restarts", LONG],
        ["--dtype", "a b " * 25_000],
    ],
)
def test_messages_repeat_no_more_of_what_was_given_than_a_little(
    argv: list[str], recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["train", recipe, *argv]) == 2
    told = capsys.readouterr().err
    assert told.startswith("dovetail: ")
    assert max(map(len, told.split("\n"))) < 2100
    assert max(map(len, re.findall("x+|9+|f+", told)), default=0) <= 200


CONVERT = ["convert", "M", "cut", "--layout", "tp=3", "--to"]
HEADS = "tp=3 does not fit this llama model: 4 attention heads are not a multiple of 3; "


@pytest.mark.parametrize(
    ("family", "argv", "message"),
    [
        ("llama", [*SCORE, "--layout", "tp=64"], "4 attention heads are not a multiple of 64"),
        (
            "llama",
            ["train", "r.yaml", "layout.dp=1000000000"],
            "1000000000 ranks need at least 268,435,456.0 GB of memory",
        ),
        ("llama", ["train", "r.yaml", "layout.tp=3"], HEADS),
        ("llama", ["train", "r.yaml", "layout.dp=2", "--restarts", "1"], None),
        (
            "llama",
            [*SCORE, "--layout", "pp=3"],
            "makes 3 stages, but the model has 2 layers; use pp=2",
        ),
        ("llama", ["generate", *SCORE[1:], "--layout", "tp=3"], HEADS),
        ("llama", [*CONVERT, "sharded"], HEADS),
        ("llama", [*CONVERT, "hf"], None),
        (
            "other",
            [*SCORE, "--layout", "tp=2"],
            "are cut by cp and dp alone; set tp=1, pp=1 and ep=1",
        ),
        ("other", ["generate", *SCORE[1:], "--layout", "tp=2"], None),
        ("llama", [*SCORE, "--layout", "tp=8"], "4 attention heads are not a multiple of 8"),
        ("llama", [*SCORE, "--layout", "dp=8"], None),
        (None, [*SCORE, "--layout", "tp=8"], "M has no config.json; give a directory"),
    ],
)
def test_a_layout_that_cannot_run_is_refused_before_a_rank_starts(
    family: str | None,
    argv: list[str],
    message: str | None,
    recipe: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its memory, or by the model's config; more ranks than cores are a note."""
    folder = Path(recipe).parent
    monkeypatch.chdir(folder)
    (folder / "r.yaml").write_text(
        yaml.safe_dump({"model": {"path": "M"}, "data": {"train": "D"}, "run_dir": "R"})
    )
    sizes = {"vocab_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    (folder / "M").mkdir()
    (folder / "M/model.safetensors").touch()
    (folder / "M/tokenizer.json").touch()
    (folder / "D").write_text('{"prompt": "a", "completion": "b", "answer": "b"}')
    if family is not None:
        (folder / "M/config.json").write_text(
            json.dumps({"model_type": family, "intermediate_size": 24, **sizes})
        )
    started: list[int] = []

    def start(_command: object, ranks: int, _supervision: object) -> int:
        started.append(ranks)
        return 0

    monkeypatch.setattr("dovetail.cli.main.run_ranks", start)
    monkeypatch.setattr("dovetail.system.cores", lambda: 2)
    monkeypatch.setattr("dovetail.system.free_memory", lambda: 1 << 33)
    monkeypatch.setattr("dovetail.system.gpu_memory", list)
    assert run_command(argv) == (0 if message is None else 2)
    told = capsys.readouterr().err
    assert (message or "") in told
    assert ("8 ranks share 2 CPU cores; fewer ranks may be faster" in told) == ("dp=8" in argv)
    assert bool(started) == (message is None)
