"""What the command line accepts: one parser a command, and what its flags mean for layouts and recipes. No torch."""

import argparse
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dovetail.errors import ConfigError, quoted, short_words, shortened
from dovetail.launch.progress import LIMITS
from dovetail.launch.streams import put
from dovetail.launch.supervisor import Watch
from dovetail.parallel.layout import DEGREES, Layout

if TYPE_CHECKING:
    from dovetail.recipe.schema import Recipe

EPILOG = "The commands, recipes and files that you can rely on: docs/contract.md"
KEYS = "Every key of a recipe, and how to write GRPO, DAPO, GSPO, PPO and others: docs/recipe.md. "


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are `ConfigError`s."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{short_words(message)}; see {self.prog} --help")

    def print_help(self, file: object = None) -> None:
        put(self.format_help())


@dataclass(frozen=True)
class Command:
    """A command: its one-line help, its arguments, and whether it runs on ranks."""

    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    runs_on_ranks: bool = True


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of one command line; `command` names the command. Prints help and exits where that is asked."""
    commands = "\n".join(f"  {name:<10}{command.help}" for name, command in COMMANDS.items())
    told = f"A parallel model engine for RL post-training.\n\ncommands:\n{commands}"
    raw = argparse.RawDescriptionHelpFormatter
    top = Parser(prog="dovetail", description=told, epilog=EPILOG, formatter_class=raw)
    top.add_argument("command", choices=list(COMMANDS), metavar="command", help="dovetail COMMAND --help says more")
    name = top.parse_args(argv[:1]).command
    command = COMMANDS[name]
    parser = Parser(
        prog=f"dovetail {name}", description=command.help, epilog=(KEYS if name == "train" else "") + EPILOG
    )
    command.arguments(parser)
    overrides, rest = _split_overrides(argv[1:]) if name == "train" else ([], list(argv[1:]))
    args = parser.parse_intermixed_args(rest)
    if name == "train":
        args.overrides = [*overrides, *args.overrides]
    args.command = name
    return args


def recipe_of(args: argparse.Namespace) -> "Recipe":
    """The recipe of `dovetail train`: flags beat overrides, which beat the file. Imported here: help needs no recipe, and
    pydantic takes longer than all else that it needs."""
    flags: dict[str, Any] = {}
    if args.layout is not None:
        degrees = Layout.parse(args.layout)
        flags = {f"layout.{name}": getattr(degrees, name) or "auto" for name in DEGREES}
    given = {"model.dtype": args.dtype, "model.engine": args.engine}
    flags |= {key: value for key, value in given.items() if value is not None}
    if args.trust_remote_code:
        flags["model.trust_remote_code"] = True
    recipe: Recipe = importlib.import_module("dovetail.recipe.schema").load_recipe(args.recipe, args.overrides, flags)
    return recipe


def layout_of(args: argparse.Namespace) -> Layout:
    """The layout that a command asks for; its dp may still be open."""
    return recipe_of(args).layout.to_layout() if args.command == "train" else Layout.parse(args.layout or "")


def check_model(args: argparse.Namespace, layout: Layout) -> None:
    """Refuse a layout that the model of a command cannot be cut by, before any rank starts, where its config shows it."""
    if args.command == "convert" and args.to == "hf":
        return  # the ranks share the work, whatever the layout
    given = vars(args)
    path, engine = given.get("model") or given.get("source"), given.get("engine", "auto")
    if args.command == "train":
        recipe = recipe_of(args)
        path, engine = recipe.model.path, recipe.model.engine
    check: Callable[..., None] = importlib.import_module("dovetail.factory.layouts").check_directory
    check(path, engine, layout, foreign=args.command != "generate")  # transformers' sampler is whole on every rank


def watch_of(args: argparse.Namespace) -> Watch:
    """How the ranks of a command are watched."""
    if args.command != "train":
        return Watch()
    recipe = recipe_of(args)
    limits = {**LIMITS, **recipe.trainer.timeouts}
    again = ("--resume", "auto")  # from what it saved itself, whatever it was asked to begin with
    return Watch(limits=limits, run_dir=Path(recipe.run_dir), restarts=args.restarts, again=again)


def _split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """`--key.path value` and `--key.path=value` as overrides `key.path=value`, apart from everything else."""
    overrides, rest, left = [], [], list(argv)
    while left:
        token = left.pop(0)
        name = token.partition("=")[0]
        if not (name.startswith("--") and ("." in name or name == "--run_dir")):
            rest.append(token)
        elif "=" in token:
            overrides.append(token.removeprefix("--"))
        elif left:
            overrides.append(f"{token.removeprefix('--')}={left.pop(0)}")
        else:
            raise ConfigError(f"{shortened(token)} has no value; expected {shortened(token)}=value")
    return overrides, rest


def _common(parser: argparse.ArgumentParser, *, dtype: str | None = "float32", engine: str | None = "auto") -> None:
    parser.add_argument("--layout", metavar="tp=2,dp=2", help="parallel degrees tp, pp, cp, dp, ep; unnamed ones are 1")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "npu"], default="auto")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default=dtype, help="compute type")
    parser.add_argument("--engine", choices=["auto", "native", "transformers"], default=engine)
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code of its tokenizer or processor")


def _train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE.yaml")
    parser.add_argument("overrides", metavar="key.path=value", nargs="*", default=[], help="change a key of the recipe")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, print the whole recipe, train nothing"
    )
    parser.add_argument("--resume", metavar="auto|never|step=N", default="auto", type=_resume, help="default: auto")
    parser.add_argument(
        "--restarts", metavar="N", default=0, type=_not_negative(int), help="start all ranks again after one has failed"
    )
    _common(parser, dtype=None, engine=None)


def _score(parser: argparse.ArgumentParser) -> None:
    _rows(parser, data="ROWS.jsonl")
    parser.add_argument("--head", choices=["lm", "value"], default="lm", help="log-probs and entropies, or values")
    parser.add_argument("--temperature", type=_positive(float), default=1.0, help="divides the logits")
    parser.add_argument("--tokens-per-batch", type=_positive(int), default=16384, metavar="N", help="default: 16384")
    _common(parser)


def _generate(parser: argparse.ArgumentParser) -> None:
    _rows(parser, data="PROMPTS.jsonl")
    parser.add_argument("--samples", type=_positive(int), default=1, metavar="N", help="completions of each prompt")
    parser.add_argument("--max-new-tokens", type=_positive(int), default=64, metavar="N", help="default: 64")
    parser.add_argument("--temperature", type=_not_negative(float), default=1.0, help="0: always the likeliest token")
    parser.add_argument("--top-p", type=_positive(float), default=1.0)
    parser.add_argument("--top-k", type=_not_negative(int), default=0, metavar="N", help="0: all tokens")
    parser.add_argument("--seed", type=_not_negative(int), default=0)
    _common(parser)


def _convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="HF directory or sharded checkpoint")
    parser.add_argument("destination", metavar="DST", help="a directory that does not exist yet")
    parser.add_argument("--to", choices=["sharded", "hf"], required=True)
    parser.add_argument("--layout", metavar="tp=2,dp=2", help="how to cut; as many ranks write the pieces")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "npu"], default="cpu", help="default: cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: as in SRC")


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument("--verify", action="store_true", help="read every piece and compare its checksum")


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "npu"], default="auto")


def _rows(parser: argparse.ArgumentParser, data: str) -> None:
    parser.add_argument(
        "--model", required=True, metavar="M", help="a directory, or a hub name pinned as name@revision"
    )
    parser.add_argument("--data", required=True, metavar=data)
    parser.add_argument("--out", required=True, metavar="OUT.jsonl", help="a file that is there is replaced")


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    return _number(kind, lambda value: value > 0, "is not more than 0")


def _not_negative(kind: type[int] | type[float]) -> Callable[[str], float]:
    return _number(kind, lambda value: value >= 0, "is less than 0")


def _number(kind: type[int] | type[float], fits: Callable[[float], bool], complaint: str) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = kind(text)
        if isinstance(value, float) and not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{shortened(text)} is not finite")
        if not fits(value):
            raise argparse.ArgumentTypeError(f"{shortened(text)} {complaint}")
        return value

    read.__name__ = "whole number" if kind is int else "number"  # what argparse calls it where `kind` refuses
    return read


def _resume(text: str) -> str:
    kind, _, step = text.partition("=")
    if text not in ("auto", "never") and not (kind == "step" and step.isdecimal()):
        raise argparse.ArgumentTypeError(f"{quoted(text)}; expected auto, never or step=N")
    return text


COMMANDS: Mapping[str, Command] = {
    "train": Command("train a model by RL or SFT, from an HF checkpoint to an HF checkpoint", _train),
    "score": Command("per-token log-probs and entropies, or values, of given token sequences", _score),
    "generate": Command("completions of prompts from the embedded sampler", _generate),
    "convert": Command("turn an HF checkpoint into a sharded one, or back, bit for bit", _convert),
    "inspect": Command("say what a sharded checkpoint holds, and whether it is whole", _inspect, runs_on_ranks=False),
    "doctor": Command("show versions, devices and kernels, and run a short self-test", _doctor, runs_on_ranks=False),
}
