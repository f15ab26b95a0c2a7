"""The recipe. Imports no torch. Flags beat overrides, which beat the file, which beats defaults."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic_core import ValidationError

from dovetail.bounds import MAX_LAG, MAX_TOKENS
from dovetail.errors import ConfigError
from dovetail.launch.progress import Phase
from dovetail.recipe.algorithms import AnyRL, CorrectionSection, GRPOSection, SFTSection
from dovetail.recipe.data import DataSection
from dovetail.recipe.distillation import DistillationSection, TeacherSection
from dovetail.recipe.evaluation import EvalSection, EvalSetSection
from dovetail.recipe.keys import RENAMED, Key, keys_of, rename_keys, renamed_note
from dovetail.recipe.messages import explain, nearest
from dovetail.recipe.names import all_meanings
from dovetail.recipe.optim import OptimSection
from dovetail.recipe.preferences import AnyPreference
from dovetail.recipe.reward import Rewards, RewardSection
from dovetail.recipe.rollout import EMBEDDED, RolloutSection
from dovetail.recipe.tracking import Loggers, ProfileSection
from dovetail.recipe.types import LayoutSection, OwnLayout, PathText, Section, key
from dovetail.recipe.yaml import dump_mapping, merge, parse_overrides, read_mapping

UNCUT: Mapping[str, float] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


class MoeSection(Section):
    """What keeps the experts of a mixture evenly loaded in training."""

    aux_loss_coef: NonNegativeFloat = key(
        0.0, "weight of the balance loss of every sequence and layer"
    )
    z_loss_coef: NonNegativeFloat = key(0.0, "weight of the squared log-sum-exp of router logits")
    bias_update_rate: NonNegativeFloat = key(
        0.0, "step of routing biases towards even loads, if the family has them"
    )


class ModelSection(Section):
    """The policy."""

    path: PathText = Field(
        description="HF directory, sharded checkpoint, or hub name at a commit (name@revision)"
    )
    engine: Literal["auto", "native", "transformers"] = key(
        "auto", "auto: native if it knows family and options"
    )
    dtype: Literal["float32", "bfloat16"] = key(
        "float32", "compute type; master weights are always float32"
    )
    save_dtype: Literal["float32", "bfloat16", "float16"] | None = key(
        None, "of saved tensors; null: as in the source"
    )
    trust_remote_code: bool = key(False, "run the code of the model's tokenizer or processor")
    moe: MoeSection = key(MoeSection(), "balance of experts")


class CriticSection(Section):
    """The value model of ppo."""

    path: PathText | None = key(None, "null: the policy's trunk weights with a fresh value head")
    layout: OwnLayout = key(None, "empty: the policy's layout")
    lr: PositiveFloat | None = key(None, "null: optim.lr")


class ReferenceSection(Section):
    """The model that a KL term holds the policy to."""

    path: PathText | None = key(None, "null: the starting policy")
    layout: OwnLayout = key(None, "empty: the policy's layout")


class TrainerSection(Section):
    """The loop."""

    steps: PositiveInt = key(100, "steps of the run")
    seed: NonNegativeInt = key(0, "of data order, sampling and fresh weights")
    prompts_per_step: Annotated[int, Field(ge=1, le=1 << 20)] = key(
        16, "data rows of a step over all ranks"
    )
    tokens_per_batch: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = key(
        16384, "tokens of a micro-batch at most, padded"
    )
    save_every: NonNegativeInt = key(
        50, "steps between checkpoints; 0: only when the run is stopped"
    )
    save_on_stop: bool = key(True, "SIGTERM and Ctrl-C save a checkpoint, whatever save_every is")
    keep_last: PositiveInt = key(2, "latest checkpoints to keep")
    keep_every: NonNegativeInt = key(
        0, "keep every checkpoint whose step this divides; 0: none for that"
    )
    keep_best: NonNegativeInt = key(
        0, "best checkpoints to keep, by evaluation, else reward, else loss"
    )
    async_save: bool = key(
        True, "write checkpoints while training goes on; needs host memory for one"
    )
    max_lag: Annotated[int, Field(ge=0, le=MAX_LAG)] | None = key(
        None,
        "engines sample while the trainer trains, with weights at most this many steps old "
        "(async.md); null: in turns",
    )
    eval_every: NonNegativeInt = key(
        0, "steps between evaluations; 0: only before and after the run"
    )
    stop_at_reward: float | None = key(None, "stop when a step's mean reward reaches this")
    time_budget_seconds: PositiveFloat | None = key(
        None, "with evaluations; later steps run only if they fit"
    )
    loggers: Loggers = key((), "beyond metrics.jsonl: names, or {name, project, ...}")
    profile: ProfileSection = key(ProfileSection(), "steps to profile")
    max_skipped_steps: PositiveInt = key(3, "skipped (non-finite) steps in a row that stop the run")
    deterministic: bool = key(
        True, "deterministic kernels: the same bits in every run on the same devices"
    )
    check_replicas_every: NonNegativeInt = key(
        100, "steps between comparisons of replicated weights; 0: none"
    )
    timeouts: Mapping[Phase, PositiveFloat] = key(
        {}, "seconds that a rank may stay in a phase, by phase"
    )
    activation_checkpointing: Literal["none", "light", "selective", "full"] = key(
        "none",
        "recomputed in backward: light all but products and attention, selective all but attention",
    )
    offload_activations: bool = key(
        False, "keep the inputs of recomputed blocks in host memory, while it has room"
    )
    offload_optimizer: bool = key(
        False, "keep adamw's moments in host memory: 8 bytes a parameter over the ranks"
    )
    mlp_tile_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = key(
        0, "tokens of an MLP at a time; 0: all"
    )


AnyAlgorithm = SFTSection | AnyRL | AnyPreference | DistillationSection
SPELLINGS: Mapping[str, str] = {"reward_model": "reward", "distill": "distillation"}  # contract.md


class Recipe(Section):
    """One run."""

    model: ModelSection
    layout: LayoutSection = LayoutSection()
    critic: CriticSection = CriticSection()
    reference: ReferenceSection = ReferenceSection()
    teacher: TeacherSection = TeacherSection()
    algorithm: Annotated[AnyAlgorithm, Field(discriminator="name")] = GRPOSection()
    data: DataSection
    rollout: RolloutSection = RolloutSection()
    reward: Rewards = RewardSection()
    eval: EvalSection = EvalSection()
    optim: OptimSection = OptimSection()
    trainer: TrainerSection = TrainerSection()
    _notes: tuple[str, ...] = ()
    run_dir: PathText = Field(
        description="where the run writes: new, or the directory of this run, which then goes on"
    )

    @model_validator(mode="before")
    @classmethod
    def _name_algorithm(cls, given: Any) -> Any:
        """Gives the algorithm its default name, and its first spelling where it has two."""
        if not isinstance(given, Mapping) or not isinstance(given.get("algorithm"), Mapping):
            return given
        algorithm = {"name": "grpo", **given["algorithm"]}
        name = algorithm["name"]
        if isinstance(name, str):
            algorithm["name"] = SPELLINGS.get(name, name)
        return {**given, "algorithm": algorithm}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        rows = self.trainer.prompts_per_step
        if self.algorithm.rewarded:
            rows *= self.rollout.samples_per_prompt
        if self.algorithm.num_mini_batches > rows:
            most = f"a step has only {rows} rows; lower it, or raise trainer.prompts_per_step"
            raise ValueError(
                f"algorithm.num_mini_batches is {self.algorithm.num_mini_batches}, but {most}"
            )
        self.algorithm.check(self)
        if self.data.eval and any(each.name == "eval" for each in self.eval.sets):
            raise ValueError(
                "data.eval is the set named eval; give another name to that of eval.sets, or "
                "drop one"
            )
        if not self.algorithm.rewarded:
            for each in self.eval.sets:
                if each != EvalSetSection(name=each.name, data=each.data):
                    raise ValueError(
                        f"eval.sets: the set {each.name} has samples, temperature or metrics, "
                        "but algorithm "
                        f"{self.algorithm.name} samples nothing; it evaluates the loss of a "
                        "set's rows, so leave these keys out"
                    )
        inside = self.rollout.inside
        rollout = self.rollout
        if rollout.router_replay == "rollout" and (
            rollout.backend == "transformers" or (rollout.backend == "native") != inside
        ):
            raise ValueError(
                f"rollout.router_replay is rollout, but rollout.backend={rollout.backend} "
                "returns no routes"
                f"{'' if inside else ' from engines'}; set vllm or sglang, native without "
                "engines, or router_replay=trainer"
            )
        if self.correction is not None:
            check_correction(self.correction, self.rollout)
        return self

    @model_validator(mode="after")
    def _asynchronous(self) -> Self:
        if self.trainer.max_lag is None:
            return self
        name = f"trainer.max_lag is {self.trainer.max_lag}"
        if not self.algorithm.rewarded:
            raise ValueError(
                f"{name}, which is of RL, not of algorithm {self.algorithm.name}; leave it out"
            )
        if self.rollout.inside:
            inside = f"rollout.backend={self.rollout.backend} samples inside the trainer"
            edit = "give rollout.engines or rollout.start, or leave max_lag out"
            raise ValueError(
                f"{name}: engines sample while the trainer trains, but {inside}; {edit}"
            )
        if self.rollout.sleep:
            raise ValueError(
                f"{name}: engines sample while the trainer trains; set rollout.sleep=false"
            )
        if self.rollout.router_replay == "rollout":
            edit = "set rollout.router_replay=trainer or none"
            raise ValueError(
                f"{name}, but an asynchronous run keeps no routes of the sampler; {edit}"
            )
        return self

    @model_validator(mode="after")
    def _trainer(self) -> Self:
        if self.trainer.offload_optimizer and self.optim.name != "adamw":
            other = self.optim.name or self.optim.function
            moves = "trainer.offload_optimizer moves the moments of adamw"
            raise ValueError(f"{moves}, but optim has {other}; leave one of them out")
        if self.data.epochs is None and (
            late := [n for n in self.trainer.profile.steps if n > self.trainer.steps]
        ):
            raise ValueError(
                f"trainer.profile.steps has {late[0]}, but trainer.steps is {self.trainer.steps}"
            )
        return self

    @property
    def correction(self) -> CorrectionSection | None:
        """The importance weights of samples, with the default of backend and lag."""
        off_policy = self.rollout.backend not in EMBEDDED or bool(self.trainer.max_lag)
        return self.algorithm.correction_of(by_default=off_policy)

    @property
    def notes(self) -> tuple[str, ...]:
        return self._notes

    def to_yaml(self) -> str:
        """Writes the recipe with every default."""
        return dump_mapping(self.model_dump(mode="json", by_alias=True))


def check_correction(correction: CorrectionSection, rollout: RolloutSection) -> None:
    if correction.old == "sampler" and rollout.router_replay == "trainer":
        replay = "rollout.router_replay=trainer takes the routes of the pass for old log-probs"
        edit = "set old: recomputed, or rollout.router_replay=none"
        raise ValueError(f"algorithm.correction.old is sampler, but {replay}; {edit}")
    cuts = [
        f"rollout.{name}={value}"
        for name, value in rollout
        if name in UNCUT and value != UNCUT[name]
    ]
    if rollout.backend not in EMBEDDED and cuts:
        raise ValueError(
            f"rollout.backend={rollout.backend} samples from the distribution as changed by "
            f"{', '.join(cuts)}, which the ratios "
            "of algorithm.correction leave out of account; leave that out, or set "
            "algorithm.correction: {ratio: none}"
        )


def load_recipe(
    path: Path | str, overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None
) -> Recipe:
    """Reads a recipe. Flags, by dotted key, beat overrides `key.path=value`. ConfigError."""
    given, notes = rename_keys(read_mapping(Path(path)))
    typed: list[str] = []
    for name, value in [*parse_overrides(overrides), *(flags or {}).items()]:
        if name in RENAMED:
            notes.append(renamed_note(name))
        typed.append(RENAMED.get(name, name))
        merge(given, typed[-1], value)
    recipe = make_recipe(given, str(path), typed)
    recipe._notes = (*notes, *recipe.notes)
    return recipe


def make_recipe(
    given: Mapping[str, Any], source: str = "recipe", typed: Sequence[str] = ()
) -> Recipe:
    """Makes a recipe; one ConfigError names all problems. typed: keys of the command line."""
    renamed, notes = rename_keys(given)
    try:
        recipe = Recipe.model_validate(renamed)
    except ValidationError as error:
        raise ConfigError(explain(error, known_keys(), source, typed)) from None
    recipe._notes = tuple(notes)
    return recipe


def hint_of(name: str) -> str:
    return nearest(name, known_keys(), all_meanings())


def known_keys() -> dict[str, Key]:
    return keys_of(Recipe)
