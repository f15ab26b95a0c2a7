"""Rewards and evaluation sets of other projects' configs."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail_tools.translation.draft import Draft

OWN_REWARD = "reward: write one (docs/rewards.md) for {}; {}"


def own_reward(draft: Draft, path: Any, function: str, model: str, otherwise: str) -> None:
    if path:
        text = str(path)
        said = "put {} into the directory of the recipe; docs/rewards.md has its arguments"
        module = Path(text).stem if "/" in text else text.removesuffix(".py")
        package = text.partition("pkg://")[2]
        valid = re.sub(r"\W|^(?=\d)", "_", module)
        if all(part.isidentifier() for part in (package or module).split(".")):
            draft.set_key("reward.import", f"{package or module}:{function}")
            said = (
                f"{package} is imported as Python finds it; docs/rewards.md has its arguments"
                if package
                else said
            )
        elif isinstance(path, str) and "$" not in module:
            said = f"rename {{}} to {valid}.py and give {valid}:{function}; until then exact_match stands here"
        else:
            said = "{} is no path of a Python file; exact_match stands here"
        draft.to_decide.append(f"reward.import: {said.replace('{}', text)}")
    elif not draft.value_of(model) or model in draft.used:
        draft.to_decide.append(OWN_REWARD.format(otherwise, "exact_match stands here"))


def rewards(draft: Draft, prefix: str) -> None:
    functions = draft.use(f"{prefix}reward_funcs")
    weights = draft.use(f"{prefix}reward_weights")
    names = [functions] if functions else []
    if isinstance(functions, list):
        names = functions
    weights = (
        weights if isinstance(weights, list) and len(weights) == len(names) else [1.0] * len(names)
    )
    parts: list[dict[str, Any]] = []
    missing: list[str] = []
    for name, weight in zip(map(str, names), weights, strict=True):
        is_own = "." in name
        if not is_own and name != "accuracy_reward":
            missing.append(name)
        else:
            kind = {"import": ":".join(name.rsplit(".", 1))} if is_own else {"name": "math_verify"}
            parts.append(kind | ({"weight": weight} if weight != 1 else {}))
    if not names and not draft.value_of(f"{prefix}reward_model_name_or_path"):
        missing.append("those that the script gives")
    alone = "it is left out here" if parts else "exact_match stands here"
    draft.to_decide += [OWN_REWARD.format(name, alone) for name in missing]
    if len(parts) > 1:
        draft.set_key("reward.parts", parts)
    for key, value in parts[0].items() if len(parts) == 1 else ():
        draft.set_key(f"reward.{key}", value)


def eval_sets(draft: Draft, files: Mapping[str, Any], samples: Any, temperature: Any) -> None:
    same = {"samples": samples, "temperature": temperature}
    if sets := [{"name": name, "data": path, **same} for name, path in files.items() if path]:
        draft.set_key("eval.sets", sets)
