"""Mistakes found before any rank starts. Imports no torch."""

import argparse
import ast
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, TypeVar

from dovetail import system
from dovetail.arch.registry import FAMILIES, choose_spec
from dovetail.arch.transformers_spec import AnySpec
from dovetail.cli.arguments import recipe_of
from dovetail.cli.header import (
    MOMENT_BYTES,
    TRAINED_BYTES,
    chosen_device,
    count_parameters,
    visible_gpus,
)
from dovetail.data.columns import prompt_column, score_column
from dovetail.data.files import Source
from dovetail.data.rows import JsonRow
from dovetail.errors import CheckpointError, ConfigError, LayoutError, UserError, listing, quoted
from dovetail.factory.inference_servers import connect
from dovetail.factory.layouts import check_layout, check_positions, sampling_layout
from dovetail.factory.reward_trial import try_reward
from dovetail.factory.rows import Columns, RowCheck, Template, columns_of, read_answer, sources_of
from dovetail.launch.inference_servers import server_key
from dovetail.launch.process import complain
from dovetail.parallel.devices import check_count, has_npu, refuse_absent
from dovetail.parallel.layout import Layout
from dovetail.recipe.evaluation import check_metrics
from dovetail.recipe.optimizers import require_torchao
from dovetail.recipe.schema import Recipe
from dovetail.recipe.types import LayoutSection
from dovetail.rewards.custom_modules import refuse_names, search_path
from dovetail.rewards.runner import refuse_unknown
from dovetail.run.changes import check_going_on
from dovetail.run.paths import FinishedError, check_run_dir
from dovetail.serving.extra import require_serve
from dovetail.weights.config_file import pinned, read_config
from dovetail.weights.safe_paths import (
    INDEX,
    MANIFEST,
    SINGLE,
    auxiliary_files,
    refuse_occupied,
    refuse_unwritable,
    refuse_without_adapter,
    refuse_without_safetensors,
    refuse_without_tokenizer,
)

DEFAULT_REWARD = "exact_match"  # of `dovetail eval`
RANK_BYTES = 1 << 28  # of a Python process with torch, at least
Result = TypeVar("Result")


@dataclass(frozen=True)
class Model:
    path: Path
    config: Mapping[str, Any]
    spec: AnySpec

    @cached_property
    def parameters(self) -> int:
        return count_parameters(self.path)


class Mistakes:
    """What was found: errors by their text, and notes."""

    def __init__(self) -> None:
        self.errors: dict[str, UserError] = {}
        self.notes: list[str] = []

    def of(self, check: Callable[..., Result], *given: Any) -> Result | None:
        try:
            return check(*given)
        except UserError as error:
            self.errors.setdefault(str(error), error)
            return None

    def tell_notes(self) -> None:
        for note in self.notes:
            complain(f"dovetail: note: {note}\n")

    def raise_all(self) -> None:
        if len(self.errors) > 1:
            raise ConfigError(f"{len(self.errors)} mistakes:\n{listing(list(self.errors))}")
        for error in self.errors.values():
            raise error


def preflight(args: argparse.Namespace, layout: Layout) -> bool:
    """One UserError names all mistakes. False: nothing to do."""
    mistakes = Mistakes()
    device = chosen_device(args.device)
    mistakes.of(_check_device, args.device, layout)
    if args.command == "train":
        try:
            needed = _train(args, layout, mistakes, device)
        except FinishedError as finished:
            complain(f"dovetail: {finished}\n")
            return False
    elif args.command == "convert":
        mistakes.of(refuse_occupied, Path(args.destination))
        mistakes.of(refuse_unwritable, Path(args.destination), "the directory")
        if args.to == "hf":  # the ranks share the work, whatever the layout
            mistakes.of(pinned, args.source)
        elif (model := mistakes.of(read_model, args.source)) is not None:
            mistakes.of(check_layout, model.spec, layout)
        needed = 0
    elif args.command == "merge":
        mistakes.of(refuse_occupied, Path(args.destination))
        mistakes.of(refuse_unwritable, Path(args.destination), "the directory")
        mistakes.of(read_model, args.base)
        mistakes.of(refuse_without_adapter, Path(args.adapter))
        needed = 0
    else:
        needed = _rows(args, layout, mistakes)
    mistakes.of(_check_memory, needed, layout, device)
    mistakes.raise_all()
    cores = system.cores()
    ranks = layout.num_ranks
    if ranks > cores and device == "cpu":
        mistakes.notes.append(f"{ranks} ranks share {cores} CPU cores; fewer ranks may be faster")
    mistakes.tell_notes()
    return True


def tell_notes_on_rows(recipe: Recipe) -> None:
    """Tells what is odd in the first rows, and leaves what is wrong to the ranks."""
    mistakes = Mistakes()
    policy = mistakes.of(read_model, recipe.model.path, recipe.model.engine)
    _check_rows(recipe, policy, mistakes)
    mistakes.tell_notes()


def read_model(name: str, engine: str = "auto") -> Model | None:
    """None for a hub name."""
    if pinned(name) is not None:
        return None
    path = Path(name)
    config = read_config(path)
    if not any((path / file).exists() for file in (SINGLE, INDEX, MANIFEST)):
        refuse_without_safetensors(path)
    return Model(path, config, choose_spec(config, engine))


def check_out(path: Path | str, data: Path | str) -> None:
    path = Path(path)
    if path.exists() and not path.is_file():
        kind = "a directory" if path.is_dir() else "a device or a pipe, which a file would replace"
        raise ConfigError(f"--out {path} is {kind}; give the path of a file")
    if path.exists() and Path(data).exists() and path.samefile(data):
        raise ConfigError(
            f"--out {path} is the file that --data names, and would replace it; give another path"
        )
    refuse_unwritable(Path(os.path.realpath(path)), "--out")


def check_eval(args: argparse.Namespace) -> None:
    """Raises ConfigError for rewards and metrics of `eval` that cannot be."""
    for reward in args.reward or ():
        if ":" not in reward:
            refuse_unknown(reward, "--reward ")
        elif not all(reward.partition(":")[::2]):
            expected = "expected a built-in reward, or module:function"
            raise ConfigError(f"--reward {quoted(reward)}: {expected}")
    try:
        check_metrics(args.metrics, args.samples, args.temperature)
    except ValueError as error:
        raise ConfigError(f"eval: {error}") from error


def _rows(args: argparse.Namespace, layout: Layout, mistakes: Mistakes) -> int:
    """-> bytes needed by all ranks."""
    if args.command == "eval":
        mistakes.of(check_eval, args)
    if args.out is not None:
        mistakes.of(check_out, args.out, args.data)
    model = mistakes.of(read_model, args.model, args.engine)
    if args.adapter is not None:
        mistakes.of(refuse_without_adapter, Path(args.adapter))
    check = RowCheck(_columns(args), Template.unknown())
    if model is not None:
        check = replace(check, template=Template.of(model.path, None))
    mistakes.of(check.first_of, Source(path=args.data), mistakes.notes.append)
    if model is None:
        return 0
    if args.command == "score":
        mistakes.of(check_layout, model.spec, layout)
    else:
        mistakes.of(_check_sampler, model.spec, layout)
        mistakes.of(_check_positions, model, args.max_new_tokens, "--max-new-tokens")
    return model.parameters * (2 if args.dtype == "bfloat16" else 4)


def _columns(args: argparse.Namespace) -> Columns:
    """Which columns the rows of `score`, `generate` or `eval` need."""
    if args.command == "score":
        return score_column
    rewards = (args.reward or (DEFAULT_REWARD,)) if args.command == "eval" else ()
    return partial(prompt_column, answers=read_answer(rewards))


def _train(args: argparse.Namespace, layout: Layout, mistakes: Mistakes, device: str) -> int:
    recipe = recipe_of(args)
    run_dir = Path(recipe.run_dir)
    if (
        mistakes.of(check_run_dir, run_dir, args.resume)
        and args.resume == "auto"
        and not args.dry_run
    ):
        mistakes.of(check_going_on, run_dir, recipe.model_dump(mode="json", by_alias=True))
    policy = mistakes.of(read_model, recipe.model.path, recipe.model.engine)
    if policy is not None:
        mistakes.of(check_layout, policy.spec, layout)
    firsts = _check_rows(recipe, policy, mistakes)
    trained = [policy]
    folder = Path(args.recipe).parent
    algorithm = recipe.algorithm
    for what, section in (
        ("loss", algorithm.custom_loss),
        ("advantage", algorithm.custom_advantage),
    ):
        if section is not None and section.function is not None:
            mistakes.of(_check_function, f"algorithm.{what}", section.function, folder)
    if recipe.optim.function is not None:
        mistakes.of(_check_function, "optim.name", recipe.optim.function, folder)
    if recipe.optim.name == "adamw8bit":
        mistakes.of(require_torchao)
    for key, path, cut in _others(recipe):
        model = policy if path is None else mistakes.of(read_model, path, recipe.model.engine)
        own = (
            None
            if cut is None
            else mistakes.of(_named, key, cut.to_layout().resolve, layout.num_ranks)
        )
        if model is not None and own is not None:
            mistakes.of(_named, key, check_layout, model.spec, own)
        trained += [model] if key == "critic" else []
    if algorithm.samples:
        _check_rl(recipe, folder, policy, layout, mistakes)
    if algorithm.rewarded:
        _check_rewards(recipe, folder, firsts, mistakes)
    offloads = recipe.trainer.offload_optimizer and device != "cpu"
    each = TRAINED_BYTES - (MOMENT_BYTES if offloads or recipe.optim.name != "adamw" else 0)
    return sum(model.parameters * each for model in trained if model is not None)


def _check_rows(recipe: Recipe, policy: Model | None, mistakes: Mistakes) -> list[list[JsonRow]]:
    """The first rows of each source, those of data.train first; none where they are not known."""
    data = recipe.data
    template = Template.unknown()
    if policy is not None:
        mistakes.of(refuse_without_tokenizer, policy.path, auxiliary_files(policy.path))
        template = mistakes.of(Template.of, policy.path, data.chat_template) or template
    check = RowCheck(columns_of(recipe), template, recipe.algorithm.samples)
    named = (data.train, data.eval, *(each.data for each in recipe.eval.sets))
    sources = [source for given in named for source in sources_of(data, given)]
    note = mistakes.notes.append
    return [mistakes.of(check.first_of, source, note) or [] for source in sources]


def _check_rl(
    recipe: Recipe, folder: Path, policy: Model | None, layout: Layout, mistakes: Mistakes
) -> None:
    rollout = recipe.rollout
    own = mistakes.of(
        _named, "rollout", (rollout.layout or LayoutSection()).to_layout().resolve, layout.num_ranks
    )
    if policy is not None:
        mistakes.of(_check_positions, policy, rollout.max_new_tokens, "rollout.max_new_tokens")
        embedded = rollout.backend == "native" and rollout.inside
        if own is not None and embedded and policy.config.get("model_type") in FAMILIES:
            mistakes.of(_named, "rollout", _check_sampler, policy.spec, own)
    if not rollout.inside and rollout.push.transport == "file":
        mistakes.of(
            refuse_unwritable, Path(rollout.push.directory) / "push", "rollout.push.directory"
        )
    if rollout.start is not None and rollout.backend == "native" and not rollout.start.command:
        mistakes.of(require_serve, "rollout.start with backend native")
    if rollout.engines:
        mistakes.of(
            connect,
            recipe,
            rollout.engines,
            server_key(),
            None if policy is None else policy.spec.vocab_size,
        )
    for metric in [metric for each in recipe.eval.sets for metric in each.metrics if ":" in metric]:
        mistakes.of(_check_function, "eval.sets: metric", metric, folder)


def _check_rewards(
    recipe: Recipe, folder: Path, firsts: Sequence[Sequence[JsonRow]], mistakes: Mistakes
) -> None:
    """Try them, if nothing else is wrong. firsts: rows of each source, none where unknown."""
    parts = recipe.reward.labelled().values()
    for part in parts:
        if part.function is not None:
            mistakes.of(_check_function, "reward", part.function, folder)
        elif part.name is not None:
            mistakes.of(refuse_unknown, part.name, "reward.name=")
    samples = recipe.rollout.samples_per_prompt
    for part in parts if not mistakes.errors else ():
        if part.function is not None or part.name is not None:
            mistakes.of(try_reward, part, folder, firsts if all(firsts) else [], samples)


def _others(recipe: Recipe) -> Iterator[tuple[str, str | None, LayoutSection | None]]:
    if recipe.algorithm.needs_critic:
        yield "critic", recipe.critic.path, recipe.critic.layout
    if recipe.algorithm.needs_teacher:
        yield "teacher", recipe.teacher.path, recipe.teacher.layout
    if recipe.algorithm.rewarded or recipe.algorithm.needs_reference:
        yield "reference", recipe.reference.path, recipe.reference.layout
    for part in recipe.reward.labelled().values() if recipe.algorithm.rewarded else ():
        if part.model is not None and part.model.path is not None:
            yield "reward.model", part.model.path, part.model.layout


def _named(key: str, check: Callable[..., Result], *given: Any) -> Result:
    try:
        return check(*given)
    except LayoutError as error:
        raise LayoutError(f"{key}.layout: {error}") from error


def _check_sampler(spec: AnySpec, layout: Layout) -> None:
    if spec.native:
        sampling_layout(spec, layout)
    elif spec.missing_features:  # else every rank has the whole model
        check_layout(spec, layout)


def _check_positions(model: Model, new_tokens: int, key: str) -> None:
    check_positions(model.config, model.spec.engine, (), new_tokens, key)


def _check_function(what: str, function: str, folder: Path) -> None:
    """Refuses a function that cannot be found, without importing it."""
    module, _, name = function.partition(":")
    top = module.partition(".")[0]
    file = folder / f"{module.replace('.', '/')}.py"
    where = f"{what} {function!r} (looked up from {folder.resolve()}) cannot be loaded: "
    refuse_names(folder, module)
    here = (folder / top).is_dir() or any(folder.glob(f"{top}.*"))
    if not here and top not in sys.modules and importlib.util.find_spec(top) is None:
        cause = f"ModuleNotFoundError: No module named {top!r}"
        raise ConfigError(
            f"{where}{cause}; put {top}.py into the directory of the recipe, or install it"
        )
    spec = PathFinder.find_spec(top, search_path(folder))
    elsewhere = spec and spec.origin and not Path(spec.origin).is_relative_to(folder.resolve())
    if not file.is_file() or elsewhere:  # on PYTHONPATH
        return
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{where}{type(error).__name__}: {error}") from error
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    functions = [node.name for node in tree.body if isinstance(node, definitions)]
    others = [ast.unparse(node) for node in tree.body if not isinstance(node, definitions)]
    if name not in functions and not any(name in text for text in others):
        known = ", ".join(functions) or "none"
        raise ConfigError(f"{where}{file} has no function {name!r}; it has {known}")


def _check_device(name: str, layout: Layout) -> None:
    count = visible_gpus()
    if (name == "cuda" and count == 0) or (name == "npu" and not has_npu()):
        refuse_absent(name)
    if name == "cuda" and count is not None:
        check_count(name, layout.num_ranks, count)


def _check_memory(needed: int, layout: Layout, device: str) -> None:
    ranks = layout.num_ranks
    free = system.free_memory()
    host = ranks * RANK_BYTES + (needed if device == "cpu" else 0)
    if free is not None and host > free:
        need = f"{ranks} {'ranks need' if ranks > 1 else 'rank needs'} at least {host / 1e9:,.1f} GB of memory"
        room = f"{free / 1e9:,.1f} GB are free on this machine"
        edit = "use fewer ranks, a smaller model, or several machines (torchrun)"
        raise CheckpointError(f"layout {layout}: {need}, but {room}; {edit}")
    if (
        device == "cuda"
        and needed
        and (sizes := system.gpu_memory())
        and needed > max(sizes) * ranks
    ):
        need = f"at least {needed / ranks / 1e9:,.1f} GB on each of {ranks} GPUs, which have {max(sizes) / 1e9:,.1f} GB"
        raise CheckpointError(
            f"layout {layout}: the weights need {need}; use more GPUs (fsdp: dp), or a smaller "
            "model"
        )
