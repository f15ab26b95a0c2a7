"""A recipe made from another project's config."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dovetail.errors import shortened
from dovetail.recipe.keys import Key
from dovetail.recipe.names import Table

TRACKERS = ("wandb", "mlflow", "tensorboard", "trackio", "swanlab")
NO_TRACKERS = ("console", "file", "none", None)
OWNERS: Mapping[str, tuple[str, ...]] = {  # sections of some algorithms
    "critic": ("ppo",), "rollout": ("grpo", "rloo", "ppo"), "reward": ("grpo", "rloo", "ppo"),
}  # fmt: skip
LARGEST = 1e18  # of numbers that are converted


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


@dataclass
class Draft:
    """A recipe in the making. given: theirs. used: names done with. recipe, comments: ours. The rest: for the user."""

    table: Table
    kind: str
    keys: Mapping[str, Key]
    given: Mapping[str, Any]
    used: set[str] = field(default_factory=set)
    recipe: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    items: dict[str, dict[Any, Any]] = field(default_factory=dict)  # parts of a value, by our keys
    left_out: dict[str, list[str]] = field(default_factory=dict)  # by reason
    unneeded: list[str] = field(default_factory=list)
    to_decide: list[str] = field(default_factory=list)

    @property
    def algorithm(self) -> str:
        return str(self.recipe.get("algorithm.name", "grpo"))

    def value_of(self, name: str, default: Any = None) -> Any:
        """Returns their value or default."""
        return self.given.get(name, self.table.defaults.get(name, default))

    def use(self, name: str, default: Any = None) -> Any:
        """Returns their value or default, and marks the name as done with."""
        self.used.add(name)
        return self.value_of(name, default)

    def number(self, name: str, default: float = 0, *, keep: bool = False) -> Any:
        """keep: not done with. The user decides on other values."""
        value = self.value_of(name, default) if keep else self.use(name, default)
        if is_number(value):
            return value
        usual = self.table.defaults.get(name)
        usual = usual if is_number(usual) and value is not None else default
        if value is not None:
            self.reject(name, value, usual or None)
        return usual

    def reject(self, name: str, value: Any, stand_in: Any, why: str = "no number") -> None:
        stands = "it is left out" if stand_in is None else f"{stand_in} stands for it"
        self.to_decide.append(f"{name}={shortened(str(value))} is {why}; {stands}")

    def leave_out(self, reason: str, *what: str) -> None:
        self.left_out.setdefault(reason, []).extend(what)

    def set_key(self, key: str, value: Any, comment: str = "") -> None:
        """The first value of a key counts."""
        if key not in self.recipe:
            self.recipe[key] = self.whole(key, value)
            self.comments[key] = comment

    def set_item(self, key: str, item: Any, value: Any) -> None:
        """Adds an item of data.columns, optim.betas or trainer.loggers."""
        items = self.items.setdefault(key, {})
        if item == "name":
            names = value if isinstance(value, list) else [value]
            items["name"] = items.get("name", []) + [name for name in names if name in TRACKERS]
            others = [str(name) for name in names if name not in (*TRACKERS, *NO_TRACKERS, False)]
            if others:
                self.leave_out(f"trackers are {', '.join(TRACKERS)}", *others)
        elif value not in (None, item, ""):
            items[item] = value

    def set_items(self) -> None:
        for key, items in self.items.items():
            if key == "optim.betas":
                if (betas := [items[n] for n in sorted(items)]) != list(self.default_of(key)):
                    self.set_key(key, betas)
            elif key == "trainer.loggers":
                if names := dict.fromkeys(items.pop("name", [])):
                    self.set_key(
                        key,
                        [
                            {"name": name, **{part: str(v) for part, v in items.items()}}
                            for name in names
                        ],
                    )
            elif items:
                self.set_key(key, items)

    def set_rows(self, key: str, rows: Any) -> list[Mapping[str, Any]]:
        """rows: a path, a mapping of theirs, or a list of them. Returns those that name files."""
        parts: list[dict[str, Any]] = []
        taken: list[Mapping[str, Any]] = []
        for row in rows if isinstance(rows, list) else [rows]:
            given = row if isinstance(row, Mapping) else {"path": row}
            files = given.get("data_files")
            files = files if isinstance(files, str | list) and files else given.get("path")
            paths = [
                path
                for path in (files if isinstance(files, list) else [files])
                if path and isinstance(path, str)
            ]
            more = {
                ours: given[name]
                for ours, name in (("subset", "name"), ("split", "split"))
                if given.get(name)
            }
            more |= {"format": "alpaca"} if given.get("type") == "alpaca" else {}
            parts += [{"path": path, **more} for path in paths]
            taken += [given] * bool(paths)
            self.to_decide += [] if paths else [f"{key}: {row} names no path; it is left out"]
        if parts:
            self.set_key(key, parts)
        return taken

    def default_of(self, key: str) -> Any:
        defaults = self.keys[key].defaults if key in self.keys else {}
        return defaults.get("", defaults.get(self.algorithm))

    def whole(self, key: str, value: Any) -> Any:
        """3 for 3.0 where our key counts."""
        counts = isinstance(self.default_of(key), int) or key in (
            "data.epochs",
            "data.max_prompt_length",
        )
        return int(value) if counts and isinstance(value, float) and value.is_integer() else value

    def without_effect(self, key: str | None) -> bool:
        name = key or ""
        known = self.keys.get(name)
        owners = OWNERS.get(name.partition(".")[0]) or tuple(known.defaults if known else ())
        no_reference = name.startswith("reference.") and not self.recipe.get("algorithm.kl_coef")
        return no_reference or (bool(owners) and not {"", self.algorithm} & {*owners})
