"""A recipe made from another project's config."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dovetail.recipe.keys import Key
from dovetail.recipe.names import Table

TRACKERS = ("wandb", "mlflow", "tensorboard", "trackio", "swanlab")
NO_TRACKERS = ("console", "file", "none", None)
OWNERS: Mapping[str, tuple[str, ...]] = {  # sections of some algorithms
    "critic": ("ppo",), "rollout": ("grpo", "rloo", "ppo"), "reward": ("grpo", "rloo", "ppo"),
}  # fmt: skip


@dataclass
class Draft:
    """given: theirs. taken: names done with. recipe, comments: ours. The rest: for the user."""

    table: Table
    kind: str
    keys: Mapping[str, Key]
    given: Mapping[str, Any]
    taken: set[str] = field(default_factory=set)
    recipe: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    items: dict[str, dict[Any, Any]] = field(default_factory=dict)  # parts of a value, by our keys
    lost: dict[str, list[str]] = field(default_factory=dict)  # by reason
    unneeded: list[str] = field(default_factory=list)
    decide: list[str] = field(default_factory=list)

    @property
    def algorithm(self) -> str:
        return str(self.recipe.get("algorithm.name", "grpo"))

    def look(self, name: str, default: Any = None) -> Any:
        """Their value or default."""
        return self.given.get(name, self.table.defaults.get(name, default))

    def take(self, name: str, default: Any = None) -> Any:
        """`look`, and done with."""
        self.taken.add(name)
        return self.look(name, default)

    def number(self, name: str, default: float = 0, *, keep: bool = False) -> Any:
        """keep: not done with. The user decides on other values."""
        value = self.look(name, default) if keep else self.take(name, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
        if value is not None:
            self.decide.append(f"{name}={value} is no number; {default:g} stands for it")
        return default

    def lose(self, reason: str, *what: str) -> None:
        self.lost.setdefault(reason, []).extend(what)

    def put(self, key: str, value: Any, comment: str = "") -> None:
        """The first value of a key counts."""
        if key not in self.recipe:
            self.recipe[key] = self.whole(key, value)
            self.comments[key] = comment

    def put_item(self, key: str, item: Any, value: Any) -> None:
        """Of data.columns, optim.betas or trainer.loggers."""
        items = self.items.setdefault(key, {})
        if item == "name":
            names = value if isinstance(value, list) else [value]
            items["name"] = items.get("name", []) + [name for name in names if name in TRACKERS]
            others = [str(name) for name in names if name not in (*TRACKERS, *NO_TRACKERS, False)]
            if others:
                self.lose(f"trackers are {', '.join(TRACKERS)}", *others)
        elif value not in (None, item, ""):
            items[item] = value

    def put_items(self) -> None:
        for key, items in self.items.items():
            if key == "optim.betas":
                if (betas := [items[n] for n in sorted(items)]) != list(self.default_of(key)):
                    self.put(key, betas)
            elif key == "trainer.loggers":
                if names := dict.fromkeys(items.pop("name", [])):
                    self.put(key, [{"name": name, **{part: str(v) for part, v in items.items()}} for name in names])
            elif items:
                self.put(key, items)

    def default_of(self, key: str) -> Any:
        defaults = self.keys[key].defaults if key in self.keys else {}
        return defaults.get("", defaults.get(self.algorithm))

    def whole(self, key: str, value: Any) -> Any:
        """3 for 3.0 where our key counts."""
        counts = isinstance(self.default_of(key), int) or key in ("data.epochs", "data.max_prompt_length")
        return int(value) if counts and isinstance(value, float) and value.is_integer() else value

    def without_effect(self, key: str | None) -> bool:
        name = key or ""
        known = self.keys.get(name)
        owners = OWNERS.get(name.partition(".")[0]) or tuple(known.defaults if known else ())
        no_reference = name.startswith("reference.") and not self.recipe.get("algorithm.kl_coef")
        return no_reference or (bool(owners) and not {"", self.algorithm} & {*owners})
