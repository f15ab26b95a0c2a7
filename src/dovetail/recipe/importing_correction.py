"""Importance sampling of other projects as `algorithm.correction`."""

from collections.abc import Mapping
from typing import Any

from dovetail.recipe.draft import Draft

KEY = "algorithm.correction"
VERL, TRL, OPENRLHF = "algorithm.rollout_correction.", "vllm_importance_sampling_", "algo.advantage.is_correction_"
OLDER_VERL = "actor_rollout_ref.actor.tis_imp_ratio_cap"
REJECTED: Mapping[str, tuple[str, str]] = {  # of verl's rollout_rs, those that are a ratio here
    "seq_sum_k1": ("sequence", "drop"),
    "seq_mean_k1": ("geometric", "drop"),
    "token_k1": ("token", "mask"),
}


def put_correction(draft: Draft) -> None:
    projects = {"verl": _verl, "TRL": _trl, "OpenRLHF": _openrlhf, "slime": _slime}
    if draft.table.title in projects and draft.algorithm in ("grpo", "rloo", "ppo", "reinforce_plus_plus"):
        try:
            projects[draft.table.title](draft)
        except (ArithmeticError, TypeError, ValueError) as error:  # bounds that are none
            draft.decide.append(f"{KEY}: {error}")


def _put(draft: Draft, ratio: str, low: float, high: float, outside: str) -> None:
    draft.put(KEY, {"ratio": ratio, "bounds": [low, high], "outside": outside})


def _verl(draft: Draft) -> None:
    level, threshold = draft.take(f"{VERL}rollout_is"), draft.take(f"{VERL}rollout_is_threshold", 2.0)
    rejected, limits = draft.take(f"{VERL}rollout_rs"), draft.take(f"{VERL}rollout_rs_threshold")
    if draft.take(f"{VERL}bypass_mode"):
        draft.put(KEY, {"old": "sampler"})
        if rejected or draft.look(f"{VERL}loss_type", "ppo_clip") != "ppo_clip":
            draft.decide.append(f"{KEY}: bypass_mode also rejects, or has a loss without clip; here old: sampler alone")
    elif rejected in REJECTED:
        ratio, outside = REJECTED[rejected]
        low, high = _bounds(limits)
        _put(draft, ratio, 1 / high, 1 / (low or 1 / high), outside)  # theirs are of the inverse ratio
        draft.decide.append(
            f"{KEY}: rollout_rs={rejected} there rejects, with weights by rollout_is={level}; here the ratio that is bounded "
            "is the weight, too" + (", and masked tokens count" if outside == "mask" else "")
        )
    elif rejected:
        draft.decide.append(f"{KEY}: rollout_rs={rejected} is not one of ours; token, sequence and geometric are")
    elif level:
        low, high = _bounds(threshold)
        _put(draft, level, low or 0.0, high, "clamp" if low is None else "mask")
    elif (cap := draft.take(OLDER_VERL, -1)) and cap > 0:
        _put(draft, "token", 0.0, cap, "clamp")


def _bounds(threshold: Any) -> tuple[float | None, float]:
    """Of verl's 2.0, "2.0" or "0.5_5.0"."""
    low, _, high = str(threshold).rpartition("_")
    return float(low) if low else None, float(high)


def _trl(draft: Draft) -> None:
    given = [name for name in draft.given if name.startswith(TRL)]
    level, _, limit = str(draft.take(f"{TRL}mode", "sequence_mask")).partition("_")
    low, high = draft.take(f"{TRL}clip_min"), draft.take(f"{TRL}clip_max", 3.0)
    is_on = draft.take(f"{TRL}correction", True)
    if not (given and draft.look("use_vllm")):
        return
    if not is_on:
        draft.put(KEY, {"ratio": "none"})
    elif high is None:
        draft.decide.append(f"{KEY}: {TRL}clip_max=null is no bound there; give bounds")
    else:
        _put(draft, level, low or 0.0, high, "mask" if limit == "mask" else "clamp")


def _openrlhf(draft: Draft) -> None:
    (low, high), kind = draft.take(f"{OPENRLHF}threshold", [0.5, 5.0]), draft.take(f"{OPENRLHF}type", "tis")
    if draft.take(f"{OPENRLHF}enable"):
        _put(draft, "token", low, high, "clamp" if kind == "tis" else "mask")
        if kind == "seq-mask-tis":
            draft.decide.append(f"{KEY}: {kind} masks responses by their geometric mean, tokens by their ratio here")


def _slime(draft: Draft) -> None:
    low, high = draft.take("tis_clip_low", 0.0), draft.take("tis_clip", 2.0)
    if draft.take("use_tis"):
        _put(draft, "token", low, high, "clamp")
    elif draft.take("use_rollout_logprobs"):
        draft.put(KEY, {"old": "sampler"})
    draft.taken.add("use_rollout_logprobs")
