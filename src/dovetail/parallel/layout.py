"""Parallel degrees, without torch. Ranks = tp x pp x cp x dp; `ep` divides dp x cp."""

from dataclasses import dataclass, replace

from dovetail.errors import LayoutError, quoted

DEGREES = ("tp", "pp", "cp", "dp", "ep")
MAX_DIGITS = 9


@dataclass(frozen=True)
class Layout:
    """The degrees of parallelism. dp=None: the ranks that the other degrees leave over."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int | None = 1
    ep: int = 1
    virtual_stages: int = 1
    cp_mode: str = "auto"
    pp_split: str | tuple[int, ...] = "auto"
    schedule: str = "1f1b"

    def __post_init__(self) -> None:
        for name in (*DEGREES, "virtual_stages"):
            value = getattr(self, name)
            if name == "dp" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise LayoutError(
                    f"layout {name}={quoted(value)}: expected a whole number of 1 or more"
                )

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Parse "tp=2,dp=2", in any order; an unnamed dp is None. LayoutError."""
        degrees: dict[str, int | None] = {"dp": None}
        layout = f"layout {quoted(text)}"
        for part in text.split(","):
            item = part.strip()
            if not item:
                continue
            name, equals, value = item.partition("=")
            if degrees.get(name) is not None:
                raise LayoutError(f"{layout}: {name} is given twice; leave one out")
            if name not in DEGREES or not equals:
                known = ", ".join(f"{degree}=N" for degree in DEGREES)
                raise LayoutError(f"{layout}: {quoted(item)} is not one of {known}")
            if not value.isdecimal() or len(value) > MAX_DIGITS or int(value) < 1:
                raise LayoutError(
                    f"{layout}: {name} must be a whole number of 1 or more, not {quoted(value)}"
                )
            degrees[name] = int(value)
        return cls(**degrees)  # type: ignore[arg-type]  # names were checked against DEGREES

    @property
    def model_ranks(self) -> int:
        return self.tp * self.pp * self.cp

    @property
    def num_ranks(self) -> int:
        """The number of ranks; an unknown dp counts 1."""
        return self.model_ranks * (self.dp or 1)

    def resolve(self, world: int) -> "Layout":
        """Return the layout with dp, checked against `world` ranks. LayoutError."""
        fits = world % self.model_ranks == 0 if self.dp is None else world == self.num_ranks
        if not fits:
            n = self.num_ranks
            needs = f"{n} ranks (tp x pp x cp x dp)" if self.dp else f"a multiple of {n} ranks"
            change = "change the degrees or the number of ranks"
            raise LayoutError(f"layout {self} needs {needs}, but the job has {world}; {change}")
        dp = self.dp or world // self.model_ranks
        if (dp * self.cp) % self.ep:
            raise LayoutError(
                f"layout {self}: ep={self.ep} does not divide dp x cp = {dp * self.cp}; lower it"
            )
        return replace(self, dp=dp)

    def __str__(self) -> str:
        shown = []
        for name in DEGREES:
            degree = getattr(self, name)
            if degree != 1:
                shown.append(f"{name}={degree or 'auto'}")
        return ",".join(shown) or "tp=1"
