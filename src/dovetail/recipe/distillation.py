"""Distillation. Names of GKD (Agarwal et al. 2024) and TRL's trainer."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import NonNegativeInt, PositiveFloat, model_validator

from dovetail.recipe.algorithms import AggregatedSection, RowKind
from dovetail.recipe.types import OwnLayout, PathText, Section, Share, key

if TYPE_CHECKING:
    from dovetail.recipe.schema import Recipe

SAMPLED = "sampled_reverse_kl"


class TeacherSection(Section):
    """The model that distillation learns from: any size, with the policy's tokenizer."""

    path: PathText | None = key(
        None, "HF directory, sharded checkpoint, or hub name pinned to a commit"
    )
    layout: OwnLayout = key(None, "empty: the policy's layout")


class DistillationSection(AggregatedSection):
    """Each token's distribution is pulled to a teacher's, on rows with completions or on the student's own samples."""

    needs_teacher: ClassVar[bool] = True
    name: Literal["distillation"] = "distillation"
    divergence: Literal["forward_kl", "reverse_kl", "jsd", "sampled_reverse_kl"] = key(
        "jsd",
        "of teacher and student; sampled_reverse_kl: a policy gradient of sampled tokens, by "
        "their log-probs alone",
    )
    beta: Share = key(0.5, "of jsd: 0 is forward_kl, 1 is reverse_kl")
    lmbda: Share = key(0.5, "share of steps on the student's own samples; sampled_reverse_kl: 1")
    loss_top_k: NonNegativeInt = key(
        0,
        "compare the teacher's k likeliest tokens only; 0, or more than there are: the whole "
        "vocabulary",
    )
    loss_add_tail: bool = key(
        True, "with loss_top_k: all others count as one; false: both are renormalized to the k"
    )
    temperature: PositiveFloat = key(
        1.0, "divides the logits of both in the divergence; samples: rollout.temperature"
    )

    @property
    def samples(self) -> bool:
        return self.lmbda > 0

    @property
    def rows(self) -> RowKind:
        return "completion" if self.lmbda < 1 else "prompt"

    @property
    def is_sampled(self) -> bool:
        """Whether the teacher scores sampled tokens alone, in place of whole distributions."""
        return self.divergence == SAMPLED

    def check(self, recipe: "Recipe") -> None:
        if recipe.teacher.path is None:
            raise ValueError(
                "teacher.path is missing: distillation learns from a teacher; give its path or "
                "hub name"
            )

    @model_validator(mode="before")
    @classmethod
    def _on_policy(cls, given: Any) -> Any:
        sampled = isinstance(given, Mapping) and given.get("divergence") == SAMPLED
        return {"lmbda": 1.0, **given} if sampled else given

    @model_validator(mode="after")
    def _fits(self) -> "DistillationSection":
        if self.divergence != "jsd" and "beta" in self.model_fields_set:
            raise ValueError(
                f"beta has no meaning for the divergence {self.divergence}; leave it out, or "
                "take jsd"
            )
        if not self.is_sampled:
            return self
        if self.lmbda < 1:
            raise ValueError(
                f"lmbda is {self.lmbda}, but {SAMPLED} learns from the student's own samples; "
                "omit it"
            )
        if self.loss_top_k or self.temperature != 1:
            raise ValueError(
                f"loss_top_k and temperature have no meaning for {SAMPLED}; leave them out"
            )
        return self
