"""What a run starts from: a recipe on its ranks, and the policy's files."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dovetail.data.encode import Tokenizer
from dovetail.data.processor import Processor
from dovetail.errors import LayoutError
from dovetail.factory.custom import imported
from dovetail.factory.engine import make_mesh
from dovetail.factory.layouts import check_layout
from dovetail.factory.notes import check_experts, cpu_notes
from dovetail.factory.rows import read_template
from dovetail.factory.sampler import longest_row
from dovetail.factory.tokenizer import load_processor, load_tokenizer
from dovetail.kernels.reference import wide
from dovetail.launch.progress import Progress, collective_timeout
from dovetail.optim.groups import ParamGroup
from dovetail.optim.optimizer import OptimSettings
from dovetail.optim.rules import check_rule
from dovetail.parallel.consensus import agreed
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.process_group import num_ranks
from dovetail.recipe.schema import Recipe
from dovetail.recipe.types import LayoutSection
from dovetail.run.directory import POLICY
from dovetail.run.state import refuse_other_models
from dovetail.weights.hf_directory import Pretrained

TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class Start:
    """How a run was started.

    folder: of the recipe, where its functions are looked up first. resume: auto, never or step=N.
    stop_signal: of this rank; 0: none.
    """

    device: torch.device
    folder: Path
    stop_signal: Callable[[], int] = int
    resume: str = "auto"
    progress: Progress | None = None
    dry_run: bool = False


@dataclass(frozen=True)
class Setup:
    """A recipe whose policy can be built on the ranks. meshes: by layout. notes: for the user."""

    recipe: Recipe
    start: Start
    progress: Progress
    meshes: dict[Layout, Mesh]
    mesh: Mesh
    source: Pretrained
    tokenizer: Tokenizer
    processor: Processor | None
    notes: list[str]

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.recipe)

    @property
    def longest_row(self) -> int:
        """The most tokens of a row, padded for every mesh so far."""
        multiples = [mesh.token_multiple for mesh in self.meshes.values()]
        return longest_row(self.recipe.trainer.tokens_per_batch, multiples)

    def mesh_of(
        self,
        section: LayoutSection,
        name: str,
        change: Callable[[Layout], Layout] = lambda layout: layout,
    ) -> Mesh:
        """Returns the mesh of a layout, after `change`. Collective."""
        return find_mesh(self.meshes, self.recipe, self.start.device, section, name, change)


def prepare(recipe: Recipe, start: Start) -> Setup:
    """Opens the policy's files and checks them against the recipe. Collective."""
    meshes: dict[Layout, Mesh] = {}
    mesh = find_mesh(meshes, recipe, start.device, recipe.layout, "layout")
    notes = [*recipe.notes]
    if mesh.device.type == "cpu":
        notes += cpu_notes(recipe)
    trusts = recipe.model.trust_remote_code
    with agreed(mesh):
        source = Pretrained.open(recipe.model.path, recipe.model.engine)
        check_layout(source.spec, mesh.layout)
        notes += source.notes
        check_experts(recipe, source.spec)
        optim = optim_settings(recipe, start.folder, recipe.optim.lr, POLICY)
        check_rule(optim.name, optim.options, start.device, wide(dtype_of(recipe)))
        tokenizer: Tokenizer = load_tokenizer(source, trust_remote_code=trusts)
        template = recipe.data.chat_template
        if template is not None:
            tokenizer.chat_template = read_template(template)
            auxiliary = {**source.auxiliary, TEMPLATE: Path(template)}
            source = replace(source, auxiliary=auxiliary)
        processor = load_processor(source, trust_remote_code=trusts)
    refuse_other_models("model.path", source, mesh)
    progress = start.progress or Progress()
    return Setup(recipe, start, progress, meshes, mesh, source, tokenizer, processor, notes)


def dtype_of(recipe: Recipe) -> torch.dtype:
    return getattr(torch, recipe.model.dtype)


def find_mesh(
    meshes: dict[Layout, Mesh],
    recipe: Recipe,
    device: torch.device,
    section: LayoutSection,
    name: str,
    change: Callable[[Layout], Layout] = lambda layout: layout,
) -> Mesh:
    """Returns the mesh of a layout, which is made once. Collective. name: in messages."""
    try:
        layout = change(section.to_layout().resolve(num_ranks()))
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}") from error
    if layout not in meshes:
        limit = collective_timeout(recipe.trainer.timeouts)
        meshes[layout] = make_mesh(layout, device, timeout=limit)
    return meshes[layout]


def optim_settings(recipe: Recipe, folder: Path, lr: float, role: str) -> OptimSettings:
    """Returns the optimizer of a role, with recipe steps as optimizer steps.

    Parameter patterns hold for the policy alone.
    """
    optim = recipe.optim
    algorithm = recipe.algorithm
    steps = recipe.trainer.steps
    keys = {**optim.values_for(OptimSettings), "groups": (), "frozen": ()}
    if role == POLICY:
        steps = max(1, steps - algorithm.steps_without_policy)
        keys["groups"] = tuple(ParamGroup(**dict(group)) for group in optim.groups)
        keys["frozen"] = optim.frozen
    if optim.function is not None:
        keys["name"] = imported(optim.function, folder, "optim.name")
    decay = None if optim.decay_steps is None else optim.decay_steps * algorithm.updates
    return replace(
        OptimSettings(**keys),
        lr=lr,
        warmup_steps=optim.warmup_steps * algorithm.updates,
        total_steps=steps * algorithm.updates,
        decay_steps=decay,
    )
