"""What every pipeline rank does, in which order: schedules as plain data, made and checked without torch or processes."""

from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "input", "weight"]


class Action(NamedTuple):
    """One stage computes one micro-batch.

    backward: both gradients at once; input, then weight later: the same in two halves, of which only the first is
    waited for by the stage before. Stages count through the whole model: rank r of P holds r, r + P, r + 2 P, ...
    """

    kind: Kind
    stage: int
    micro: int


Plan = tuple[tuple[Action, ...], ...]  # what each pipeline rank does, in order
