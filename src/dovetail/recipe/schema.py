"""The recipe: every key, its default and its meaning. Imports no torch.

Precedence: flags, `key.path=value`, the file, defaults. All problems are reported together.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from dovetail.bounds import MAX_FLOAT, MAX_NEW_TOKENS, MAX_SAMPLES, MAX_TOKENS
from dovetail.errors import ConfigError, quoted
from dovetail.launch.progress import Phase
from dovetail.parallel.layout import Layout
from dovetail.recipe.data import DataSection
from dovetail.recipe.keys import Key, explain, keys_of, rename_keys
from dovetail.recipe.types import (
    Dtype,
    Listed,
    Momentum,
    NonNegativeFloat,
    Options,
    PathText,
    PositiveFloat,
    Section,
    Share,
)
from dovetail.recipe.yaml import dump_mapping, merge, parse_overrides, read_mapping


class MoeSection(Section):
    """What keeps the experts of a mixture evenly loaded in training."""

    aux_loss_coef: NonNegativeFloat = Field(0.0, description="weight of the balance loss of every sequence and layer")
    z_loss_coef: NonNegativeFloat = Field(0.0, description="weight of the squared log-sum-exp of router logits")
    bias_update_rate: NonNegativeFloat = Field(
        0.0, description="step of the biases of routing, where the family has them, towards even loads"
    )


class ModelSection(Section):
    """The policy."""

    path: PathText = Field(
        description="HF directory, sharded checkpoint, or hub name pinned to a commit (name@revision)"
    )
    engine: Literal["auto", "native", "transformers"] = Field(
        "auto", description="auto: native where it knows the family and its options"
    )
    dtype: Dtype = Field("float32", description="compute type; master weights are always float32")
    save_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="type of saved and streamed tensors; null: that of the source checkpoint"
    )
    trust_remote_code: bool = Field(
        False, description="run the code of a tokenizer or processor that comes with the model"
    )
    moe: MoeSection = Field(MoeSection(), description="balance of experts")


class LayoutSection(Section):
    """How a model is cut over ranks: ranks = tp x pp x cp x dp."""

    tp: PositiveInt = Field(1, description="tensor parallel degree")
    pp: PositiveInt = Field(1, description="pipeline stages")
    cp: PositiveInt = Field(1, description="context parallel degree")
    dp: PositiveInt | Literal["auto"] = Field(
        "auto", description="replicas; auto: what the number of ranks leaves over"
    )
    ep: PositiveInt = Field(1, description="expert parallel degree; divides dp x cp and adds no ranks")
    virtual_stages: PositiveInt = Field(1, description="pipeline chunks per rank")
    cp_mode: Literal["auto", "ulysses", "gather", "product"] = Field("auto", description="how context parallel works")
    pp_split: Annotated[tuple[PositiveInt, ...], Field(strict=False)] | Literal["auto"] = Field(
        "auto", description="layers of each stage; auto: balanced by cost"
    )
    schedule: Literal["1f1b", "interleaved", "gpipe", "zero_bubble"] = Field("1f1b", description="pipeline schedule")
    copy_engines: bool | None = Field(None, description="no effect; accepted so that older runs resume")

    def to_layout(self) -> Layout:
        """`dp: auto` becomes None."""
        return Layout(**self.model_dump(exclude={"copy_engines"}) | {"dp": None if self.dp == "auto" else self.dp})


class CriticSection(Section):
    """The value model of ppo."""

    path: PathText | None = Field(None, description="null: the policy's trunk weights with a fresh value head")
    layout: LayoutSection | None = Field(None, description="empty: the policy's layout")
    lr: PositiveFloat | None = Field(None, description="null: optim.lr")


class ReferenceSection(Section):
    """The model that a KL term holds the policy to."""

    path: PathText | None = Field(None, description="null: the starting policy")
    layout: LayoutSection | None = Field(None, description="empty: the policy's layout")


class Algorithm(Section):
    """Keys of every algorithm."""

    epochs: PositiveInt = Field(1, description="passes over the rows of a step")
    minibatches: PositiveInt = Field(1, description="optimizer steps in one pass")
    aggregation: Literal["token", "sequence", "sequence_sum"] = Field(
        "token",
        description="token: mean over all tokens; sequence: mean over sequences of the mean over tokens; sequence_sum: "
        "mean over sequences of the sum over tokens divided by a constant, the longest response (Dr. GRPO)",
    )


class SFT(Algorithm):
    """Supervised fine-tuning: the negative log-likelihood of the completions."""

    name: Literal["sft"] = "sft"


class PolicyGradient(Algorithm):
    """Keys of every RL algorithm."""

    clip_low: Share = Field(0.2, description="the ratio is clipped below 1 - clip_low")
    clip_high: Annotated[float, Field(ge=0, le=MAX_FLOAT)] = Field(
        0.2, description="the ratio is clipped above 1 + clip_high"
    )
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        None, description="bound of the loss for negative advantages"
    )
    ratio: Literal["token", "sequence"] = Field("token", description="sequence: one ratio for a response (GSPO)")
    entropy_coef: float = Field(0.0, description="weight of the entropy bonus")
    kl_coef: NonNegativeFloat = Field(0.0, description="weight of the KL term to the reference")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3", description="estimator of the KL term; default: k1 in the reward, k3 in the loss"
    )
    kl_in: Literal["reward", "loss"] = Field("loss", description="where the KL term is added")
    normalize_advantage: bool = Field(False, description="whiten advantages over all tokens of a step")

    @model_validator(mode="before")
    @classmethod
    def _estimator(cls, given: Any) -> Any:
        """By the place of the KL term, see `rl.losses.kl_estimate`."""
        if not isinstance(given, Mapping) or "kl_in" not in given:
            return given
        return {"kl_estimator": "k1" if given["kl_in"] == "reward" else "k3", **given}


class GRPO(PolicyGradient):
    """Group-relative advantages: a reward against the mean of its prompt's samples."""

    name: Literal["grpo"] = "grpo"
    scale_by_std: bool = Field(True, description="divide by the group's standard deviation; false: Dr. GRPO")
    skip_equal_groups: bool = Field(False, description="leave groups with all-equal rewards out of the loss (DAPO)")


class RLOO(PolicyGradient):
    """Leave-one-out advantages: a reward against the mean of its prompt's other samples."""

    name: Literal["rloo"] = "rloo"


class PPO(PolicyGradient):
    """Advantages from a critic by generalized advantage estimation."""

    name: Literal["ppo"] = "ppo"
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k1", description="estimator of the KL term")
    kl_in: Literal["reward", "loss"] = Field("reward", description="where the KL term is added")
    normalize_advantage: bool = Field(True, description="whiten advantages over all tokens of a step")
    gamma: Share = Field(1.0, description="discount of later rewards")
    lam: Share = Field(1.0, description="lambda of generalized advantage estimation")
    value_clip: Annotated[float, Field(gt=0, le=MAX_FLOAT)] | None = Field(
        0.2, description="how far a value may move in one step; null: no limit"
    )
    value_coef: PositiveFloat = Field(1.0, description="weight of the value loss")
    critic_warmup: NonNegativeInt = Field(0, description="first steps that train the critic alone")


class RolloutSection(Section):
    """How completions are sampled."""

    backend: Literal["native", "transformers"] = Field(
        "native",
        description="native: the embedded sampler; transformers: the model's own generate, whole on every rank",
    )
    layout: LayoutSection | None = Field(None, description="empty: tp 1, one sampler a rank")
    samples_per_prompt: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = Field(8, description="completions of each prompt")
    max_new_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] = Field(64, description="longest completion")
    temperature: PositiveFloat = Field(1.0, description="divides the logits, in sampling and in training")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="sample from the smallest set with this mass")
    top_k: NonNegativeInt = Field(0, description="sample from the k likeliest tokens; 0: all")
    router_replay: Literal["none", "trainer", "rollout"] = Field(
        "none",
        description="expert choices of the update: its own; those of the pass that scored old log-probs (R2); those of the "
        "sampler, in that pass too (R3)",
    )
    mismatch_metrics: bool = Field(
        False, description="report how far the policy's log-probs and routes are from the sampler's; costs a pass"
    )


class RewardSection(Section):
    """What a completion is worth."""

    model_config = ConfigDict(populate_by_name=True)

    name: str | None = Field(None, description="a built-in reward; exact_match where neither this nor import is given")
    function: str | None = Field(None, alias="import", description="a function of yours: module:function")
    options: Options = Field(default_factory=dict, description="keyword arguments for the reward")
    timeout_seconds: PositiveFloat = Field(10.0, description="a reward that takes longer drops its sample")
    workers: Annotated[int, Field(ge=1, le=256)] = Field(
        2, description="reward processes, all on the host of the first rank"
    )

    @model_validator(mode="before")
    @classmethod
    def _one_of_two(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            function = given.get("import")
            if given.get("name") is not None and function is not None:
                raise ValueError("give name or import, not both (drop the other with reward.name=null)")
            if function is not None and not (isinstance(function, str) and all(function.partition(":")[::2])):
                raise ValueError(f"import is {quoted(function)}; expected module:function")
            if given.get("name") is None and function is None:
                return {**given, "name": "exact_match"}
        return given


class OptimSection(Section):
    """AdamW and its learning rate."""

    lr: PositiveFloat = Field(1.0e-6, description="peak learning rate")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field("constant", description="after the warmup")
    warmup_steps: NonNegativeInt = Field(0, description="steps of linear warmup; the first step's rate is not 0")
    decay_steps: PositiveInt | None = Field(None, description="steps of decay; null: to the end (wsd: the last tenth)")
    min_lr_ratio: Share = Field(0.0, description="the rate at the end, as a share of lr")
    weight_decay: NonNegativeFloat = Field(0.0, description="decoupled weight decay; not for norms and biases")
    clip_norm: PositiveFloat | None = Field(1.0, description="largest global gradient norm; null: no limit")
    betas: Annotated[tuple[Momentum, Momentum], Field(strict=False)] = Field(
        (0.9, 0.999), description="decay of the moments"
    )
    eps: PositiveFloat = Field(1.0e-8, description="added to the root of the second moment")


class TrainerSection(Section):
    """The loop."""

    steps: PositiveInt = Field(100, description="steps of the run")
    seed: NonNegativeInt = Field(0, description="of data order, sampling and fresh weights")
    prompts_per_step: Annotated[int, Field(ge=1, le=1 << 20)] = Field(
        16, description="data rows of a step over all ranks"
    )
    tokens_per_batch: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = Field(
        16384, description="most tokens of one replica in one micro-batch, with padding"
    )
    save_every: NonNegativeInt = Field(50, description="steps between checkpoints; 0: only when the run is stopped")
    save_on_stop: bool = Field(True, description="SIGTERM and Ctrl-C save a checkpoint, whatever save_every is")
    keep: PositiveInt = Field(2, description="latest checkpoints to keep")
    keep_every: NonNegativeInt = Field(0, description="keep every checkpoint whose step this divides; 0: none for that")
    keep_best: NonNegativeInt = Field(0, description="best checkpoints to keep, by evaluation, else reward, else loss")
    async_save: bool = Field(True, description="write checkpoints while training goes on; needs host memory for one")
    eval_every: NonNegativeInt = Field(0, description="steps between evaluations; 0: only before and after the run")
    stop_at_reward: float | None = Field(None, description="stop when a step's mean reward reaches this")
    time_budget_seconds: PositiveFloat | None = Field(
        None,
        description="evaluations and steps together; a further step is done only if it is predicted to fit; null: no limit",
    )
    loggers: Annotated[tuple[Literal["wandb", "tensorboard"], ...], Listed, Field(strict=False)] = Field(
        (), description="besides metrics.jsonl"
    )
    max_skipped_steps: PositiveInt = Field(
        3, description="steps in a row whose update was skipped because a number was not finite; then the run stops"
    )
    deterministic: bool = Field(
        True, description="the same bits in every run on the same devices: deterministic kernels"
    )
    check_replicas_every: NonNegativeInt = Field(
        100, description="steps between comparisons of what several ranks hold copies of; 0: none"
    )
    timeouts: Mapping[Phase, PositiveFloat] = Field(
        default_factory=dict,
        description="seconds that a rank may stay in a phase, by phase: trainer.timeouts.rollout=7200",
    )
    activation_checkpointing: Literal["none", "light", "selective", "full"] = Field(
        "none",
        description="what backward recomputes: light all but products and attention, selective all but attention",
    )
    offload_activations: bool = Field(
        False, description="what is kept for recomputing waits in host memory, as far as the host has room"
    )
    offload_optimizer: bool = Field(
        False, description="moments of AdamW wait in host memory: 8 bytes a parameter, over the ranks"
    )
    mlp_tile_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = Field(
        0, description="tokens that an MLP computes at a time, keeping its input only; 0: all"
    )


AnyAlgorithm = SFT | GRPO | PPO | RLOO


class Recipe(Section):
    """One run."""

    model: ModelSection
    layout: LayoutSection = LayoutSection()
    critic: CriticSection = CriticSection()
    reference: ReferenceSection = ReferenceSection()
    algorithm: Annotated[AnyAlgorithm, Field(discriminator="name")] = GRPO()
    data: DataSection
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    optim: OptimSection = OptimSection()
    trainer: TrainerSection = TrainerSection()
    _notes: tuple[str, ...] = PrivateAttr(())
    run_dir: PathText = Field(description="where the run writes: new, or the directory of this run, which then goes on")

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        """The default algorithm is grpo; an empty layout is none."""
        if not isinstance(given, Mapping):
            return given
        full = dict(given)
        if isinstance(full.get("algorithm"), Mapping):
            full["algorithm"] = {"name": "grpo", **full["algorithm"]}
        for name in ("critic", "reference", "rollout"):
            section = full.get(name)
            if isinstance(section, Mapping) and section.get("layout") == {}:
                full[name] = {**section, "layout": None}
        return full

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        samples = self.rollout.samples_per_prompt
        if isinstance(self.algorithm, GRPO | RLOO) and samples < 2:
            raise ValueError(
                f"rollout.samples_per_prompt is {samples}; {self.algorithm.name} compares a prompt's samples with each "
                "other, so give 2 or more"
            )
        rows = self.trainer.prompts_per_step * (1 if isinstance(self.algorithm, SFT) else samples)
        if self.algorithm.minibatches > rows:
            raise ValueError(
                f"algorithm.minibatches is {self.algorithm.minibatches}, but a step has only {rows} rows; lower it, or raise "
                "trainer.prompts_per_step"
            )
        if self.rollout.router_replay == "rollout" and self.rollout.backend != "native":
            raise ValueError(
                f"rollout.router_replay is rollout, but rollout.backend={self.rollout.backend} returns no routes; "
                "set rollout.backend=native, or rollout.router_replay=trainer"
            )
        return self

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on keys given by an old name."""
        return self._notes

    def to_yaml(self) -> str:
        """With every default; `load_recipe` reads it back."""
        return dump_mapping(self.model_dump(mode="json", by_alias=True))


def load_recipe(path: Path | str, overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None) -> Recipe:
    """`overrides`: `key.path=value`; `flags`, by dotted key, beat them."""
    given = read_mapping(Path(path))
    for key, value in [*parse_overrides(overrides), *(flags or {}).items()]:
        merge(given, key, value)
    return make_recipe(given, str(path))


def make_recipe(given: Mapping[str, Any], source: str = "recipe") -> Recipe:
    """Raises one ConfigError with all problems."""
    renamed, notes = rename_keys(given)
    try:
        recipe = Recipe.model_validate(renamed)
    except ValidationError as error:
        raise ConfigError(explain(error, known_keys(), source)) from None
    recipe._notes = tuple(notes)
    return recipe


def known_keys() -> dict[str, Key]:
    """Every dotted key of a recipe."""
    return keys_of(Recipe)
