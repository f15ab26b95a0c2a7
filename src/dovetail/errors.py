"""The mistakes a user can make, as exception kinds: each message says what was given, what was expected and what to do.

Everything raised on purpose for a user's mistake is a `UserError`; the command line prints its message once, without
a traceback, and exits with 2. Anything else that escapes is a defect of ours and exits with 1.
"""

from pathlib import Path


class UserError(ValueError):
    """A mistake that the user can mend; the message names the edit."""


class ConfigError(UserError):
    """A recipe, an override or a flag says something that cannot be done."""


class LayoutError(UserError):
    """Parallel degrees that do not fit the ranks or the model."""


class ModelError(UserError):
    """A model directory asks for something that this engine does not compute."""


class OptionError(ModelError):
    """An option of a known family that the native engine does not compute; transformers' own layers may."""


class CheckpointError(UserError):
    """Tensors that are missing, extra, mis-shaped or corrupt, all named together."""


class DamagedError(CheckpointError):
    """Bytes of the checkpoint at `path` that are not those that were written."""

    def __init__(self, message: str, path: Path) -> None:
        super().__init__(message)
        self.path = path


class DataError(UserError):
    """Rows that cannot be trained on or scored."""


class NumericsError(UserError):
    """Training whose numbers are no longer finite."""


class MachineError(RuntimeError):
    """Something that neither the user nor this program did: a defect of the machine. Exit 1, without a traceback."""


class SecondaryFailure(RuntimeError):
    """This rank failed after another one did; that one reports the cause, so this one is silent."""


def listing(items: list[str], limit: int = 20) -> str:
    """`items` for a message: one a line, the first `limit`, then how many more."""
    lines = [f"  - {item}" for item in items[:limit]]
    if len(items) > limit:
        lines.append(f"  ... and {len(items) - limit} more")
    return "\n".join(lines)
