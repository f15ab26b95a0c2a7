"""Standard streams, resource limits, worker processes."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence

from dovetail import system
from dovetail.errors import MachineError, one_line

CLOSED = ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY))  # writing to 1 fails, as it did
OPEN_FILES = "too many open files"
OUT_OF_MEMORY = (
    "memoryerror", "allocate memory", "bad_alloc", "failed to map segment", "can't start new thread",
    "resource temporarily unavailable", "error return without exception set",
)  # fmt: skip
DEVICE_FULL = (
    "the device ran out of memory; lower trainer.tokens_per_batch (--tokens-per-batch), set "
    "trainer.activation_checkpointing=selective, or use more ranks: `dovetail docs "
    "when-something-goes-wrong`"
)
FEW_FILES = 64
SECRETS = ("KEY", "TOKEN", "PASSWORD", "SECRET")
MIN_SECRET = 6  # ends of names, and characters
MAX_CAUSE = 200


def open_closed_streams() -> None:
    """Opens closed descriptors 0 to 2, which files would take, and restarts the program."""
    opened = False
    for number, mode in CLOSED:
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, mode), True)  # takes this number
            opened = True
    if opened:
        os.execv(sys.executable, sys.orig_argv)


def end_with_launcher() -> None:
    """Under torchrun the kernel kills this process when torchrun's agent ends.

    The kernel watches the thread that started the process: the agent's main thread, which starts
    ranks and waits for them (`LocalElasticAgent._invoke_run`).
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    system.die_with_parent()
    if os.getppid() != launcher:  # it ended before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def put(text: str) -> None:
    """Write to stdout; exit quietly without a reader."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        raise MachineError(f"standard output cannot be written: {error.strerror}") from error


def from_environment(name: str) -> str | None:
    return os.environ.get(name)


def without_secrets(text: str) -> str:
    for name, value in os.environ.items():
        if name.upper().endswith(SECRETS) and len(value) >= MIN_SECRET:
            text = text.replace(value, "***")
    return text


def tell(text: str) -> None:
    """Write to stdout, if anybody reads it."""
    with contextlib.suppress(OSError):
        sys.stdout.write(text)
        sys.stdout.flush()


def complain(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def python_module(name: str) -> list[str]:
    """Plain -m would import from the working directory, which may be a model's."""
    safe_path = [] if os.getcwd() in map(os.path.abspath, sys.path) else ["-P"]
    return [sys.executable, *safe_path, "-m", name]


def start_worker(
    module: str, *arguments: str, files: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """A process of `module.main` in its own session, with pipes and this sys.path."""
    boot = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; main()"
    command = [sys.executable, "-P", "-c", boot, json.dumps(sys.path), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, pass_fds=files, start_new_session=True
    )


def limit_behind(error: BaseException | None) -> str | None:
    """The message for an error caused by a ulimit or a full device."""
    limits = _memory_limits()
    cause = error
    while cause is not None:
        text = one_line(cause)
        message = ""
        if (
            isinstance(cause, RuntimeError) and type(cause).__name__ == "OutOfMemoryError"
        ):  # torch's
            message = DEVICE_FULL
        elif OPEN_FILES in text.lower():
            files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            message = f"{OPEN_FILES}: this process may have {files} (ulimit -n); raise that limit, to 4096 for example"
        elif limits and any(sign in text.lower() for sign in OUT_OF_MEMORY):
            message = f"memory ran out: this process is limited to {limits}; raise that limit or remove it (unlimited)"
        if message:
            return f"{message} ({text[:MAX_CAUSE]})"
        cause = cause.__cause__ or cause.__context__
    return None


def _memory_limits() -> str:
    kinds = (
        (resource.RLIMIT_AS, "address space (ulimit -v)"),
        (resource.RLIMIT_DATA, "data (ulimit -d)"),
    )
    values = [(resource.getrlimit(kind)[0], name) for kind, name in kinds]
    return " and ".join(
        f"{value / 1e9:.2g} GB of {name}"
        for value, name in values
        if value != resource.RLIM_INFINITY
    )


def narrow_limits() -> str:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    few = f"{files} open files (ulimit -n)" if 0 <= files < FEW_FILES else ""
    limits = " and ".join(filter(None, (few, _memory_limits())))
    return f"; it was limited to {limits}: raise that" if limits else ""
