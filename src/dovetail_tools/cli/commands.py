"""The commands of this package and their flags. Imports no torch."""

from argparse import ArgumentParser
from collections.abc import Mapping

from dovetail.cli.arguments import Command, add_device
from dovetail.cli.parser import COUNT, RATE, SECONDS, counts, decode_speeds, number


def _report(parser: ArgumentParser) -> None:
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="run_dir of a recipe; several are compared"
    )
    parser.add_argument("--out", metavar="FILE.html", help="default: report.html in the first RUN")
    parser.add_argument(
        "--watch",
        type=SECONDS,
        default=0,
        metavar="SECONDS",
        help="write it anew until the runs end",
    )


def _plan(parser: ArgumentParser) -> None:
    lengths = "of responses: a run_dir, a JSON list, or MEAN:LONGEST"
    parser.add_argument("--rollout", required=True, metavar="LENGTHS", help=lengths)
    parser.add_argument(
        "--gpus", required=True, type=COUNT, metavar="N", help="of trainer and engines together"
    )
    decode = "measured tokens a second of an engine by its running samples; it runs at most the last number"
    parser.add_argument(
        "--decode", required=True, type=decode_speeds, metavar="1:205,64:12850,...", help=decode
    )
    train = "tokens a second that a GPU trains, prompts and all passes of a step included"
    parser.add_argument("--train", required=True, type=RATE, metavar="X", help=train)
    parser.add_argument("--engine-gpus", type=COUNT, default=1, metavar="N", help="of one engine")
    parser.add_argument(
        "--max-lag",
        type=counts,
        default=(1, 2, 4),
        metavar="1,2,4",
        help="versions; default: 1,2,4",
    )
    parser.add_argument("--prompts", type=COUNT, default=32, metavar="N", help="of a step")
    parser.add_argument("--samples", type=COUNT, default=8, metavar="N", help="of a prompt")
    parser.add_argument(
        "--prompt-tokens", type=number(int), default=256, metavar="N", help="of a prompt"
    )
    parser.add_argument(
        "--prefill", type=RATE, default=20000.0, metavar="X", help="tokens a second of an engine"
    )
    parser.add_argument(
        "--push-seconds", type=number(float), default=1.0, metavar="X", help="of weights to engines"
    )


def _docs(parser: ArgumentParser) -> None:
    parser.add_argument("page", metavar="PAGE", nargs="?", help="default: list the pages")


def _import_config(parser: ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="a YAML file, or a shell script that starts a training"
    )
    whose = "verl, trl (trl-sft, trl-grpo), openrlhf, axolotl or slime; default: by its names"
    parser.add_argument("--from", dest="project", default="", metavar="PROJECT", help=whose)
    parser.add_argument(
        "-o", "--out", metavar="RECIPE.yaml", help="replaced if it exists; default: standard output"
    )


COMMANDS: Mapping[str, Command] = {
    "report": Command(
        "write curves, times, samples, events and config of runs as one HTML file",
        _report,
        "runs/first runs/second --out both.html",
    ),
    "plan": Command(
        "say how many GPUs the trainer and the engines of an RL run take, "
        "synchronous or asynchronous",
        _plan,
        "--rollout 2000:16000 --gpus 8 --decode 1:205,64:12850,256:38000 --train 12000",
    ),
    "docs": Command(
        "show a page of the documentation, or list the pages",
        _docs,
        "rewards",
    ),
    "import-config": Command(
        "turn a config of verl, TRL, OpenRLHF, axolotl or slime into a recipe",
        _import_config,
        "run_grpo.sh -o recipe.yaml",
    ),
    "doctor": Command(
        "show versions, devices and kernels, and run a self-test",
        add_device,
        "--device cpu",
    ),
}
