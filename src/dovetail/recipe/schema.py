"""The recipe: every key, its default and its meaning. Imports no torch.

Precedence: flags, `key.path=value`, the file, defaults. All problems are reported together.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

from dovetail.bounds import MAX_FLOAT, MAX_NEW_TOKENS, MAX_SAMPLES, MAX_TOKENS
from dovetail.errors import ConfigError
from dovetail.launch.progress import Phase
from dovetail.recipe.data import DataSection
from dovetail.recipe.evaluation import EvalSection, EvalSetSection
from dovetail.recipe.functions import LossSection, OwnFunction, PolicyTerm
from dovetail.recipe.keys import RENAMED, Key, explain, keys_of, nearest, rename_keys, renamed_note
from dovetail.recipe.names import all_meanings
from dovetail.recipe.preferences import KTO, AnyPreference
from dovetail.recipe.reward import Rewards, RewardSection
from dovetail.recipe.tracking import Loggers, ProfileSection
from dovetail.recipe.types import (
    Dtype,
    Estimator,
    LayoutSection,
    Listed,
    Momentum,
    NonNegativeFloat,
    NotStrict,
    OneOrMore,
    OwnLayout,
    PathText,
    PositiveFloat,
    Section,
    Share,
    Updates,
    key,
)
from dovetail.recipe.yaml import dump_mapping, merge, parse_overrides, read_mapping


class MoeSection(Section):
    """What keeps the experts of a mixture evenly loaded in training."""

    aux_loss_coef: NonNegativeFloat = key(0.0, "weight of the balance loss of every sequence and layer")
    z_loss_coef: NonNegativeFloat = key(0.0, "weight of the squared log-sum-exp of router logits")
    bias_update_rate: NonNegativeFloat = key(0.0, "step of routing biases towards even loads, if the family has them")


class ModelSection(Section):
    """The policy."""

    path: PathText = Field(
        description="HF directory, sharded checkpoint, or hub name pinned to a commit (name@revision)"
    )
    engine: Literal["auto", "native", "transformers"] = key("auto", "auto: native if it knows family and options")
    dtype: Dtype = key("float32", "compute type; master weights are always float32")
    save_dtype: Literal["float32", "bfloat16", "float16"] | None = key(None, "of saved tensors; null: as in the source")
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


class Algorithm(Updates):
    """Keys of SFT and RL."""

    aggregation: Literal["token", "sequence", "sequence_sum"] = key(
        "token",
        "token: mean over all tokens; sequence: mean over sequences of their means; sequence_sum: mean over sequences "
        "of the sum over tokens divided by a constant, the longest response (Dr. GRPO)",
    )


class SFT(Algorithm):
    """Supervised fine-tuning: the negative log-likelihood of the completions."""

    name: Literal["sft"] = "sft"
    loss: OwnFunction = key(
        None, "ppo, cispo, gmpo, sapo, or a function of yours {import, options}; of sft a function alone"
    )


class PolicyGradient(Algorithm):
    """Keys of every RL algorithm."""

    samples: ClassVar[bool] = True
    loss: PolicyTerm = key(
        LossSection(), "ppo, cispo, gmpo, sapo, or a function of yours {import, options}; of sft a function alone"
    )
    clip_low: Share = key(0.2, "the ratio is clipped below 1 - clip_low")
    clip_high: Annotated[float, Field(ge=0, le=MAX_FLOAT)] = key(0.2, "the ratio is clipped above 1 + clip_high")
    dual_clip: Annotated[float, Field(gt=1)] | None = key(None, "bound of the loss for negative advantages")
    ratio: Literal["token", "sequence"] = key("token", "sequence: one ratio for a response (GSPO)")
    entropy_coef: float = key(0.0, "weight of the entropy bonus")
    kl_coef: NonNegativeFloat = key(0.0, "weight of the KL term to the reference")
    kl_estimator: Estimator = key("k3", "of the KL term; default: k1 in the reward, k3 in the loss")
    kl_in: Literal["reward", "loss"] = key("loss", "where the KL term is added")
    normalize_advantage: bool = key(False, "whiten advantages over all tokens of a step")
    overlong_buffer: NonNegativeInt = key(0, "last tokens of rollout.max_new_tokens that are punished (DAPO); 0: none")
    overlong_penalty: PositiveFloat = key(
        1.0, "taken from the reward of the longest completion, less from shorter ones"
    )

    @property
    def wants_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def needs_old_logprobs(self) -> bool:
        """False if they are the update's own."""
        return (self.kl_in == "reward" and self.kl_coef > 0) or self.epochs * self.num_mini_batches > 1

    @model_validator(mode="after")
    def _terms(self) -> "PolicyGradient":
        term = self.loss.function or self.loss.name or "ppo"
        if term != "ppo" and self.dual_clip is not None:
            raise ValueError(f"dual_clip is a bound of the loss ppo; drop it, or loss ({term})")
        if (term == "gmpo" or self.loss.function is not None) and self.ratio != "token":
            raise ValueError(f"the loss {term} has a ratio of its own; drop ratio={self.ratio}")
        return self

    @model_validator(mode="before")
    @classmethod
    def _estimator(cls, given: Any) -> Any:  # see `rl.losses.kl_estimate`
        if not isinstance(given, Mapping) or "kl_in" not in given:
            return given
        return {"kl_estimator": "k1" if given["kl_in"] == "reward" else "k3", **given}


class CriticFree(PolicyGradient):
    """Keys of algorithms without a critic."""

    advantage: OwnFunction = key(None, "a function of yours: f(rewards, groups, batch) -> a number a response or token")


class GRPO(CriticFree):
    """Group-relative advantages: a reward against the mean of its prompt's samples."""

    name: Literal["grpo"] = "grpo"
    scale_by_std: bool = key(True, "divide by the group's standard deviation; false: Dr. GRPO")
    drop_zero_std_groups: bool = key(False, "leave groups with all-equal rewards out of the loss (DAPO)")
    max_num_gen_batches: Annotated[int, Field(ge=1, le=1 << 10)] = key(
        1, "with drop_zero_std_groups: sample more prompts until a step is full, as many times as this in all (DAPO)"
    )


class RLOO(CriticFree):
    """Leave-one-out advantages: a reward against the mean of its prompt's other samples."""

    name: Literal["rloo"] = "rloo"


class ReinforcePlusPlus(CriticFree):
    """REINFORCE++: rewards to go with the KL penalty of each token, whitened over all tokens of a step."""

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    kl_estimator: Estimator = key("k1", "of the KL term; with group_baseline k2")
    kl_in: Literal["reward", "loss"] = key("reward", "where the KL term is added; with group_baseline loss")
    normalize_advantage: bool = key(True, "whiten advantages over all tokens of a step")
    gamma: Share = key(1.0, "discount of later rewards")
    group_baseline: bool = key(False, "subtract the mean reward of a prompt's samples (REINFORCE++-baseline)")

    @model_validator(mode="before")
    @classmethod
    def _baseline(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("group_baseline") is True:
            return {"kl_in": "loss", **({} if "kl_in" in given else {"kl_estimator": "k2"}), **given}
        return given


class PPO(PolicyGradient):
    """Advantages from a critic by generalized advantage estimation."""

    name: Literal["ppo"] = "ppo"
    kl_estimator: Estimator = key("k1", "estimator of the KL term")
    kl_in: Literal["reward", "loss"] = key("reward", "where the KL term is added")
    normalize_advantage: bool = key(True, "whiten advantages over all tokens of a step")
    gamma: Share = key(1.0, "discount of later rewards")
    lam: Share = key(1.0, "lambda of generalized advantage estimation")
    value_clip: Annotated[float, Field(gt=0, le=MAX_FLOAT)] | None = key(0.2, "largest move of a value; null: no limit")
    value_coef: PositiveFloat = key(1.0, "weight of the value loss")
    critic_warmup: NonNegativeInt = key(0, "first steps that train the critic alone")


class RolloutSection(Section):
    """How completions are sampled."""

    backend: Literal["native", "transformers"] = key("native", "the embedded sampler, or the model's generate per rank")
    layout: OwnLayout = key(None, "empty: tp 1, one sampler a rank")
    samples_per_prompt: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = key(8, "completions of each prompt")
    max_new_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] = key(64, "longest completion")
    temperature: PositiveFloat = key(1.0, "divides the logits, in sampling and in training")
    top_p: Annotated[float, Field(gt=0, le=1)] = key(1.0, "sample from the smallest set with this mass")
    top_k: NonNegativeInt = key(0, "sample from the k likeliest tokens; 0: all")
    router_replay: Literal["none", "trainer", "rollout"] = key(
        "none", "experts of the update: its own; those of the pass for old log-probs (R2); the sampler's (R3)"
    )
    mismatch_metrics: bool = key(False, "compare the policy's log-probs and routes with the sampler's; costs a pass")


class ParamGroupSection(Section):
    """Parameters of the policy with a learning rate or weight decay of their own."""

    pattern: str = Field(
        description="of the group's parameter names: `*.layers.0.*`; the first group that matches wins"
    )
    lr: PositiveFloat | None = key(None, "its peak learning rate; null: optim.lr")
    weight_decay: NonNegativeFloat | None = key(
        None, "for norms and biases, too; null: optim.weight_decay, not for those"
    )


class OptimSection(Section):
    """AdamW and its learning rate."""

    lr: PositiveFloat = key(1.0e-6, "peak learning rate")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = key("constant", "after the warmup")
    warmup_steps: NonNegativeInt = key(0, "steps of linear warmup; the first step's rate is not 0")
    decay_steps: PositiveInt | None = key(None, "steps of decay; null: to the end (wsd: the last tenth)")
    min_lr_ratio: Share = key(0.0, "the rate at the end, as a share of lr")
    weight_decay: NonNegativeFloat = key(0.0, "decoupled weight decay; not for norms and biases")
    clip_norm: PositiveFloat | None = key(1.0, "largest global gradient norm; null: no limit")
    betas: Annotated[tuple[Momentum, Momentum], NotStrict] = key((0.9, 0.999), "decay of the moments")
    eps: PositiveFloat = key(1.0e-8, "added to the root of the second moment")
    groups: Annotated[tuple[ParamGroupSection, ...], OneOrMore, NotStrict] = key(
        (), "parameters of the policy with their own lr or weight_decay, by patterns of their names"
    )
    frozen: Annotated[tuple[str, ...], Listed, NotStrict] = key((), "of the policy: patterns of names not to train")


class TrainerSection(Section):
    """The loop."""

    steps: PositiveInt = key(100, "steps of the run")
    seed: NonNegativeInt = key(0, "of data order, sampling and fresh weights")
    prompts_per_step: Annotated[int, Field(ge=1, le=1 << 20)] = key(16, "data rows of a step over all ranks")
    tokens_per_batch: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = key(16384, "tokens of a micro-batch at most, padded")
    save_every: NonNegativeInt = key(50, "steps between checkpoints; 0: only when the run is stopped")
    save_on_stop: bool = key(True, "SIGTERM and Ctrl-C save a checkpoint, whatever save_every is")
    keep_last: PositiveInt = key(2, "latest checkpoints to keep")
    keep_every: NonNegativeInt = key(0, "keep every checkpoint whose step this divides; 0: none for that")
    keep_best: NonNegativeInt = key(0, "best checkpoints to keep, by evaluation, else reward, else loss")
    async_save: bool = key(True, "write checkpoints while training goes on; needs host memory for one")
    eval_every: NonNegativeInt = key(0, "steps between evaluations; 0: only before and after the run")
    stop_at_reward: float | None = key(None, "stop when a step's mean reward reaches this")
    time_budget_seconds: PositiveFloat | None = key(
        None, "with evaluations; after the first, a step runs only if predicted to fit"
    )
    loggers: Loggers = key((), "beyond metrics.jsonl: names, or {name, project, ...}")
    profile: ProfileSection = key(ProfileSection(), "steps to profile")
    max_skipped_steps: PositiveInt = key(3, "skipped (non-finite) steps in a row that stop the run")
    deterministic: bool = key(True, "deterministic kernels: the same bits in every run on the same devices")
    check_replicas_every: NonNegativeInt = key(100, "steps between comparisons of replicated weights; 0: none")
    timeouts: Mapping[Phase, PositiveFloat] = key({}, "seconds that a rank may stay in a phase, by phase")
    activation_checkpointing: Literal["none", "light", "selective", "full"] = key(
        "none", "recomputed in backward: light all but products and attention, selective all but attention"
    )
    offload_activations: bool = key(False, "keep the inputs of recomputed blocks in host memory, while it has room")
    offload_optimizer: bool = key(False, "keep AdamW's moments in host memory: 8 bytes a parameter over the ranks")
    mlp_tile_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = key(0, "tokens of an MLP at a time; 0: all")


AnyRL = GRPO | PPO | RLOO | ReinforcePlusPlus
AnyAlgorithm = SFT | AnyRL | AnyPreference


class Recipe(Section):
    """One run."""

    model: ModelSection
    layout: LayoutSection = LayoutSection()
    critic: CriticSection = CriticSection()
    reference: ReferenceSection = ReferenceSection()
    algorithm: Annotated[AnyAlgorithm, Field(discriminator="name")] = GRPO()
    data: DataSection
    rollout: RolloutSection = RolloutSection()
    reward: Rewards = RewardSection()
    eval: EvalSection = EvalSection()
    optim: OptimSection = OptimSection()
    trainer: TrainerSection = TrainerSection()
    _notes: tuple[str, ...] = ()
    run_dir: PathText = Field(description="where the run writes: new, or the directory of this run, which then goes on")

    @model_validator(mode="before")
    @classmethod
    def _default_algorithm(cls, given: Any) -> Any:
        algorithm = given.get("algorithm") if isinstance(given, Mapping) else None
        return {**given, "algorithm": {"name": "grpo", **algorithm}} if isinstance(algorithm, Mapping) else given

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        samples = self.rollout.samples_per_prompt
        baseline = isinstance(self.algorithm, ReinforcePlusPlus) and self.algorithm.group_baseline
        if (isinstance(self.algorithm, GRPO | RLOO) or baseline) and samples < 2:
            raise ValueError(
                f"rollout.samples_per_prompt is {samples}; {self.algorithm.name} compares a prompt's samples with each "
                "other, so give 2 or more"
            )
        buffer = self.algorithm.overlong_buffer if isinstance(self.algorithm, PolicyGradient) else 0
        if buffer > self.rollout.max_new_tokens:
            raise ValueError(
                f"algorithm.overlong_buffer is {buffer}, more than rollout.max_new_tokens={self.rollout.max_new_tokens}"
            )
        rows = self.trainer.prompts_per_step * (samples if isinstance(self.algorithm, PolicyGradient) else 1)
        if self.algorithm.num_mini_batches > rows:
            raise ValueError(
                f"algorithm.num_mini_batches is {self.algorithm.num_mini_batches}, but a step has only {rows} rows; lower it, or "
                "raise trainer.prompts_per_step"
            )
        if isinstance(self.algorithm, KTO) and rows < 2 * self.algorithm.num_mini_batches:
            raise ValueError(
                f"trainer.prompts_per_step is {rows}; kto compares the rows of an optimizer step with each other, so give 2 or "
                "more for each of algorithm.num_mini_batches"
            )
        if self.data.eval and any(each.name == "eval" for each in self.eval.sets):
            raise ValueError(
                "data.eval is the set named eval; give another name to that of eval.sets, or leave one out"
            )
        if not isinstance(self.algorithm, PolicyGradient):
            for each in self.eval.sets:
                if each != EvalSetSection(name=each.name, data=each.data):
                    raise ValueError(
                        f"eval.sets: the set {each.name} has samples, temperature or metrics, but algorithm "
                        f"{self.algorithm.name} samples nothing; it evaluates the loss of a set's rows, so leave these keys out"
                    )
        if self.rollout.router_replay == "rollout" and self.rollout.backend != "native":
            raise ValueError(
                f"rollout.router_replay is rollout, but rollout.backend={self.rollout.backend} returns no routes; "
                "set rollout.backend=native, or rollout.router_replay=trainer"
            )
        return self

    @model_validator(mode="after")
    def _profiled(self) -> Self:
        if self.data.epochs is None and (late := [n for n in self.trainer.profile.steps if n > self.trainer.steps]):
            raise ValueError(
                f"trainer.profile.steps has {late[0]}, but trainer.steps is {self.trainer.steps}; give steps of the run"
            )
        return self

    @property
    def notes(self) -> tuple[str, ...]:
        """On keys given by an old name."""
        return self._notes

    def to_yaml(self) -> str:
        """With every default; `load_recipe` reads it back."""
        return dump_mapping(self.model_dump(mode="json", by_alias=True))


def load_recipe(path: Path | str, overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None) -> Recipe:
    """overrides: `key.path=value`. flags, by dotted key, beat them."""
    given, notes = rename_keys(read_mapping(Path(path)))
    for name, value in [*parse_overrides(overrides), *(flags or {}).items()]:
        if name in RENAMED:
            notes.append(renamed_note(name))
        merge(given, RENAMED.get(name, name), value)
    recipe = make_recipe(given, str(path))
    recipe._notes = (*notes, *recipe.notes)
    return recipe


def make_recipe(given: Mapping[str, Any], source: str = "recipe") -> Recipe:
    """Raises one ConfigError with all problems."""
    renamed, notes = rename_keys(given)
    try:
        recipe = Recipe.model_validate(renamed)
    except ValidationError as error:
        raise ConfigError(explain(error, known_keys(), source)) from None
    recipe._notes = tuple(notes)
    return recipe


def hint_of(name: str) -> str:
    """What a name that is no key most likely means."""
    return nearest(name, known_keys(), all_meanings())


def known_keys() -> dict[str, Key]:
    """Every dotted key of a recipe."""
    return keys_of(Recipe)
