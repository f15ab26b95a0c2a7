"""Commands and flags. Imports no torch."""

import argparse
import importlib
import importlib.util
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import dovetail
from dovetail.cli.header import chosen_device
from dovetail.cli.parser import (
    COUNT,
    RATE,
    SECONDS,
    Parser,
    number,
    share,
    words,
)
from dovetail.errors import ConfigError, quoted, shortened
from dovetail.launch.progress import LIMITS
from dovetail.launch.supervisor import Supervision
from dovetail.parallel.layout import DEGREES, Layout

if TYPE_CHECKING:
    from dovetail.recipe.schema import Recipe

EPILOG = "The commands, recipes and files that you can rely on: dovetail docs contract"
KEYS = "Every key of a recipe, and how to write GRPO, DAPO, GSPO, PPO and others: dovetail docs recipe\n"
EXAMPLE = "example:\n  dovetail "


class Command(NamedTuple):
    help: str
    add_arguments: Callable[[ArgumentParser], None]
    example: str


def all_commands() -> Mapping[str, Command]:
    """Returns the commands of this package, and of `dovetail_tools` where that is installed."""
    if importlib.util.find_spec("dovetail_tools") is None:
        return COMMANDS
    tools = importlib.import_module("dovetail_tools.cli.commands")
    return {**COMMANDS, **tools.COMMANDS}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    known = all_commands()
    commands = "\n".join(f"  {name:<15}{command.help}" for name, command in known.items())
    about = f"A parallel model engine for RL post-training.\n\ncommands:\n{commands}"
    top = Parser(
        prog="dovetail", description=about, epilog=f"{EXAMPLE}train RECIPE.yaml\n\n{EPILOG}"
    )
    top.add_argument(
        "command",
        nargs="?",
        choices=[*COMMANDS, *TOOLS],
        metavar="command",
        help="COMMAND --help says more",
    )
    top.add_argument("--version", action="version", version=f"dovetail {dovetail.__version__}")
    name = top.parse_args(argv[:1] or ["--help"]).command
    if name not in known:
        lacking = f"dovetail {name}: this command is in the package dovetail_tools"
        raise ConfigError(f"{lacking}, which is not installed here; reinstall dovetail-rl")
    command = known[name]
    is_train = name == "train"
    epilog = f"{EXAMPLE}{name} {command.example}\n\n{KEYS * is_train}{EPILOG}"
    parser = Parser(prog=f"dovetail {name}", description=command.help, epilog=epilog)
    command.add_arguments(parser)
    overrides, rest = _split_overrides(argv[1:]) if is_train else ([], list(argv[1:]))
    if name in OF_A_MODEL:
        args, unknown = _parse_with_model(parser, rest)
    else:
        args, unknown = parser.parse_known_intermixed_args(rest)
    if unknown:
        parser.error(
            f"unrecognized arguments: {' '.join(unknown)}{_hints(unknown) if is_train else ''}"
        )
    if is_train:
        args.overrides = [*overrides, *args.overrides]
    args.command = name
    return args


def _hints(unknown: Sequence[str]) -> str:
    """Returns the recipe's keys that unknown flags of `train` may stand for."""
    hint_of = _schema().hint_of
    hints = []
    for word in unknown:
        if word.startswith("--"):
            name = word[2:].partition("=")[0]
            hints.append(hint_of(name.replace("-", "_")))
    return "".join(f"; {hint}" for hint in hints if hint)


def _schema() -> ModuleType:
    """Returns the recipe's module, whose pydantic is too slow for --help."""
    return importlib.import_module("dovetail.recipe.schema")


def recipe_of(args: argparse.Namespace) -> "Recipe":
    """Returns the recipe, which is read once. Flags beat overrides, which beat the file."""
    if "recipe_read" not in args:
        flags: dict[str, Any] = {}
        for name in ("dtype", "engine", "trust_remote_code"):
            value = vars(args)[name]
            if value:
                flags[f"model.{name}"] = value
        if args.layout is not None:
            layout = Layout.parse(args.layout)
            for name in DEGREES:
                flags[f"layout.{name}"] = vars(layout)[name] or "auto"
        args.recipe_read = _schema().load_recipe(args.recipe, args.overrides, flags)
    return args.recipe_read


def layout_of(args: argparse.Namespace) -> Layout:
    if args.command == "train":
        return recipe_of(args).layout.to_layout()
    return Layout.parse(args.layout or "")


def supervision_of(args: argparse.Namespace) -> Supervision:
    if args.command != "train":
        return Supervision()
    recipe = recipe_of(args)
    servers = None
    limits = {**LIMITS, **recipe.trainer.timeouts}
    if recipe.rollout.start is not None and not args.dry_run:
        factory = importlib.import_module("dovetail.factory.inference_servers")
        on_gpus = chosen_device(args.device) == "cuda"
        servers = factory.server_start(recipe, ranks_on_gpus=on_gpus)
    return Supervision(
        limits=limits,
        run_dir=Path(recipe.run_dir),
        restarts=args.restarts,
        resume=("--resume", "auto"),
        servers=servers,
    )


def _split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Turns `--a.b value` and `--a.b=value` into `a.b=value`."""
    overrides = []
    rest = []
    tokens = iter(argv)
    for token in tokens:
        name, equals, value = token.partition("=")
        if not (name.startswith("--") and ("." in name or name == "--run_dir")):
            rest.append(token)
            continue
        given = value if equals else next(tokens, None)
        if given is None:
            raise ConfigError(f"{shortened(token)} has no value; expected {shortened(token)}=value")
        overrides.append(f"{name.removeprefix('--')}={given}")
    return overrides, rest


def _parse_with_model(parser: Parser, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Takes `--model MODEL` for the first positional argument."""
    flag = Parser(prog=parser.prog, add_help=False, allow_abbrev=False)
    flag.add_argument("--model", metavar="MODEL", nargs=1, default=[])
    given, others = flag.parse_known_args(words)
    args, unknown = parser.parse_known_args([*given.model, *others])
    if given.model and unknown and not unknown[0].startswith("-"):
        parser.error(f"--model {given.model[0]}: the model is given twice; give it once")
    return args, unknown


def add_device(parser: ArgumentParser, default: str = "auto") -> None:
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda", "npu"],
        default=default,
        help="what to compute on",
    )


def _add_compute(
    parser: ArgumentParser, dtype: str | None = "float32", engine: str | None = "auto"
) -> None:
    parser.add_argument(
        "--layout", metavar="tp=2,dp=2", help="degrees of tp, pp, cp, dp, ep; default: 1 each"
    )
    add_device(parser)
    recipe = "" if dtype else "; default: the recipe's"
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default=dtype, help="compute type" + recipe
    )
    engines = ["auto", "native", "transformers"]
    parser.add_argument(
        "--engine", choices=engines, default=engine, help="native if it knows the family" + recipe
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the code of its tokenizer or processor",
    )


def _add_model(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    added = "PEFT's directory of an adapter, added to the weights of MODEL"
    parser.add_argument("--adapter", metavar="DIR", help=added)


def _add_rows(parser: ArgumentParser, data: str) -> None:
    _add_model(parser)
    parser.add_argument(
        "--data", required=True, metavar=data, help="JSONL, parquet, CSV, a directory, or a glob"
    )
    parser.add_argument(
        "--out", required=True, metavar="OUT.jsonl", help="an existing file is replaced"
    )
    _add_compute(parser)


def _train(parser: ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE.yaml", help="a YAML file of keys")
    parser.add_argument(
        "overrides",
        metavar="key.path=value",
        nargs="*",
        default=[],
        help="change a key of the recipe",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, print the recipe, train nothing"
    )
    resume = "go on from a checkpoint of run_dir"
    parser.add_argument(
        "--resume", metavar="auto|never|step=N", default="auto", type=_resume, help=resume
    )
    parser.add_argument(
        "--restarts", metavar="N", default=0, type=number(int), help="start again after a failure"
    )
    _add_compute(parser, dtype=None, engine=None)


def _score(parser: ArgumentParser) -> None:
    _add_rows(parser, data="ROWS.jsonl")
    parser.add_argument(
        "--head", choices=["lm", "value"], default="lm", help="log-probs and entropies, or values"
    )
    parser.add_argument(
        "--temperature", type=RATE, default=1.0, metavar="X", help="divides the logits"
    )
    parser.add_argument(
        "--tokens-per-batch", type=COUNT, default=16384, metavar="N", help="of a micro-batch"
    )


def _generate(parser: ArgumentParser) -> None:
    _add_rows(parser, data="PROMPTS.jsonl")
    _add_sampling(parser, temperature=1.0)


def _eval(parser: ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument(
        "--data", required=True, metavar="PROMPTS.jsonl", help="rows as train takes them"
    )
    parser.add_argument(
        "--out", metavar="OUT.jsonl", help="completions with rewards; an existing file is replaced"
    )
    reward = "a built-in reward, or module:function in this directory; several are added; default: exact_match"
    parser.add_argument("--reward", action="append", metavar="NAME", help=reward)
    parser.add_argument(
        "--reward-timeout-seconds", type=SECONDS, default=10.0, metavar="X", help="default: 10"
    )
    metrics = "avg@K, pass@K, maj@K or module:function, with commas between; default: avg, pass and maj of all samples"
    parser.add_argument("--metrics", type=words, default=(), metavar="NAMES", help=metrics)
    _add_sampling(parser, temperature=0.0)
    _add_compute(parser)


def _add_sampling(parser: ArgumentParser, temperature: float) -> None:
    parser.add_argument(
        "--samples", type=COUNT, default=1, metavar="N", help="completions of each prompt"
    )
    parser.add_argument(
        "--max-new-tokens", type=COUNT, default=64, metavar="N", help="longest completion"
    )
    parser.add_argument(
        "--temperature",
        type=number(float),
        default=temperature,
        metavar="X",
        help="0: the likeliest",
    )
    parser.add_argument(
        "--top-p",
        type=share,
        default=1.0,
        metavar="X",
        help="sample the smallest set with this mass",
    )
    parser.add_argument(
        "--top-k",
        type=number(int),
        default=0,
        metavar="N",
        help="sample from the likeliest; 0: all",
    )
    parser.add_argument(
        "--seed", type=number(int), default=0, metavar="N", help="of the sampling noise"
    )


def _convert(parser: ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="HF directory or sharded checkpoint")
    parser.add_argument("destination", metavar="DST", help="a directory that does not exist yet")
    parser.add_argument("--to", choices=["sharded", "hf"], required=True, help="what DST becomes")
    parser.add_argument(
        "--layout", metavar="tp=2,dp=2", help="of the pieces, which as many ranks write"
    )
    add_device(parser, default="cpu")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="default: as in SRC"
    )


def _merge(parser: ArgumentParser) -> None:
    parser.add_argument("base", metavar="BASE", help="HF directory or sharded checkpoint")
    parser.add_argument("adapter", metavar="ADAPTER", help="PEFT's directory")
    parser.add_argument("destination", metavar="OUT", help="a directory that does not exist yet")
    parser.set_defaults(layout=None)
    add_device(parser, default="cpu")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="default: as in BASE"
    )


def _inspect(parser: ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", metavar="PATH", help="HF directory, sharded checkpoint, or run_dir"
    )
    parser.add_argument(
        "--verify", action="store_true", help="compare every checksum of a sharded checkpoint"
    )


def _rollouts(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run_dir of a recipe")
    parser.add_argument(
        "--step",
        type=number(int),
        metavar="N",
        help="default: the last, or all with --prompt or --search",
    )
    parser.add_argument("--prompt", metavar="ID", help="one prompt, old and new")
    parser.add_argument("--search", metavar="TEXT", help="in prompts, completions and answers")
    parser.add_argument(
        "--sort", choices=["best", "worst"], help="by reward; default: as they were written"
    )
    parser.add_argument("--limit", type=COUNT, default=8, metavar="N", help="samples to show")


def _serve(parser: ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="H", help="address to listen at; 0.0.0.0: all"
    )
    parser.add_argument("--port", type=number(int), default=8000, metavar="P", help="0: a free one")
    add_device(parser)
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="of weights and compute"
    )
    used = "of the GPU's memory, for weights, keys and values; at most 0.9 of what is free"
    parser.add_argument("--gpu-memory-utilization", type=share, default=0.8, metavar="X", help=used)
    pushed = "the only directory whose files a trainer may push (rollout.push.transport=file)"
    parser.add_argument("--push-dir", default=PUSH_DIRECTORY, metavar="DIR", help=pushed)


def _resume(text: str) -> str:
    kind, _, step = text.partition("=")
    if text not in ("auto", "never") and not (kind == "step" and step.isdecimal()):
        raise ArgumentTypeError(f"{quoted(text)}; expected auto, never or step=N")
    return text


MODEL = "a directory, or name@revision on the hub"
OF_A_MODEL = ("score", "generate", "eval", "convert", "inspect", "serve")
PUSH_DIRECTORY = "/dev/shm/dovetail"  # as rollout.push.directory
ON_RANKS = ("train", "score", "generate", "eval", "convert", "merge")
TOOLS = ("report", "plan", "docs", "import-config", "doctor")  # of the package dovetail_tools
COMMANDS: Mapping[str, Command] = {
    "train": Command("train a model by RL or SFT, from an HF checkpoint to an HF checkpoint", _train,
        "recipe.yaml layout.tp=2 optim.lr=1e-6"),
    "score": Command("per-token log-probs and entropies, or values, of given token sequences", _score,
        "Qwen2.5-0.5B --data rows.jsonl --out out.jsonl --layout tp=2"),
    "generate": Command("completions of prompts from the embedded sampler", _generate,
        "Qwen2.5-0.5B --data prompts.jsonl --out out.jsonl --samples 4 --max-new-tokens 256"),
    "eval": Command("metrics of a model on the prompts of a file: avg@k, pass@k, maj@k, or your own", _eval,
        "Qwen2.5-0.5B --data prompts.jsonl --samples 8 --temperature 1"),
    "convert": Command("turn an HF checkpoint into a sharded one, or back, bit for bit", _convert,
        "Qwen2.5-0.5B cut --to sharded --layout tp=2"),
    "merge": Command("add an adapter to its base model, as a new HF checkpoint", _merge, "Qwen2.5-0.5B runs/lora/hf merged"),
    "inspect": Command("show what a model, a checkpoint or a run holds, and whether it is whole", _inspect, "runs/first"),
    "rollouts": Command("show samples of a run with their rewards", _rollouts, "runs/first --sort worst"),
    "serve": Command("serve a model over HTTP: OpenAI's endpoints, and those by which trainers sample and push weights", _serve,
        "Qwen2.5-0.5B --port 8000 --dtype bfloat16"),
}  # fmt: skip
