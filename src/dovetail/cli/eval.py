"""`dovetail eval`."""

import argparse
import json
from contextlib import ExitStack
from pathlib import Path

from pydantic import ValidationError

from dovetail.cli.common import RowFile, say
from dovetail.cli.generate import Generation
from dovetail.cli.preflight import DEFAULT_REWARD, check_eval
from dovetail.errors import ConfigError
from dovetail.factory.rewards import custom_metrics, make_rewards
from dovetail.factory.rows import reads_answer
from dovetail.jsonl import json_line
from dovetail.launch.process import put
from dovetail.launch.progress import Progress
from dovetail.recipe.evaluation import default_metrics
from dovetail.recipe.reward import RewardPart, RewardSection
from dovetail.rl.evaluation import EvalSet, with_rewards
from dovetail.rl.samples import Sample, sample_row


def run(args: argparse.Namespace, progress: Progress) -> None:
    check_eval(args)
    folder = Path.cwd()
    seconds = args.reward_timeout_seconds
    names = args.reward or (DEFAULT_REWARD,)
    parts = [
        {"function" if ":" in name else "name": name, "timeout_seconds": seconds} for name in names
    ]
    try:
        rewarded = RewardSection(parts=tuple(map(RewardPart.model_validate, parts)))
    except ValidationError as error:
        raise ConfigError(
            f"--reward {error.errors()[0]['msg'].removeprefix('Value error, ')}"
        ) from None
    made = Generation(args, answers=reads_answer(rewarded))
    metrics = args.metrics or default_metrics(args.samples)
    with ExitStack() as stack:
        rewards = make_rewards(rewarded, made.mesh, folder, folder)
        stack.callback(rewards.close)
        custom = custom_metrics(
            metrics, made.mesh, folder, seconds, lambda note: say([note], made.mesh), stack
        )
        measured = EvalSet(
            name="", prompts=made.rows, samples=args.samples, metrics=metrics, custom=custom
        )
        out = None if args.out is None else stack.enter_context(RowFile(args.out, made.mesh))
        samples = list[Sample]()
        errors = 0
        for turns in made.portions(progress):
            asked = [made.rows[turn.id.row] for turn in turns]
            texts = [made.decode(turn.ids) for turn in turns]
            some, _, failed = with_rewards(asked, turns, texts, rewards, str(args.data))
            samples += some
            errors += failed["reward_errors"]
            if out is not None:
                rows = map(sample_row, some)
                out.write(
                    {name: value for name, value in row.items() if name != "routing"}
                    for row in rows
                )
        counts = {"prompts": len(made.rows), "samples": args.samples, "reward_errors": errors}
        numbers = {**counts, **measured.measure(samples)}
    if made.mesh["world"].rank == 0:
        put(json.dumps(json.loads(json_line(numbers)), indent=2) + "\n")
