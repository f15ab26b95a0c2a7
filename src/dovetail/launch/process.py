"""This process's standard streams (closed, full, without a reader) and its resource limits, as messages name them."""

import contextlib
import os
import resource
import signal
import sys

from dovetail.errors import MachineError

CLOSED = ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY))  # writing to 1 fails, as it did
OPEN_FILES = "too many open files"
OUT_OF_MEMORY = (
    "memoryerror",
    "allocate memory",
    "bad_alloc",
    "failed to map segment",
    "can't start new thread",
    "resource temporarily unavailable",  # of a thread whose stack has no room
    "error return without exception set",
)
FEW_FILES = 64
MAX_CAUSE = 200


def open_closed_streams() -> None:
    """Open those of descriptors 0 to 2 that the caller closed, and start this program anew: else files and sockets would get
    their numbers, and what libraries print."""
    opened = False
    for number, mode in CLOSED:
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, mode), True)  # the lowest free number, which is this one
            opened = True
    if opened:
        os.execv(sys.executable, sys.orig_argv)


def put(text: str) -> None:
    """Write to standard output. Exits quietly where the reader is gone, such as `| head`."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        raise MachineError(f"standard output cannot be written: {error.strerror}") from error


def complain(text: str) -> None:
    """Write to standard error, if that is possible."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def limit_behind(error: BaseException) -> str | None:
    """The message where `error`, or its cause, comes of a ulimit on open files or memory; None for other errors."""
    causes: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__ or cause.__context__
    limits = memory_limits()
    for signs, message in (
        (
            (OPEN_FILES,),
            f"{OPEN_FILES}: this process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} (ulimit -n); raise that "
            "limit, to 4096 for example",
        ),
        (
            OUT_OF_MEMORY if limits else (),
            f"memory ran out: this process is limited to {limits}; raise that limit or remove it (unlimited)",
        ),
    ):
        for text in causes:
            if any(sign in text.lower() for sign in signs):
                return f"{message} ({' '.join(text.split())[:MAX_CAUSE]})"
    return None


def memory_limits() -> str:
    """The limits of this process's memory; empty without any."""
    kinds = ((resource.RLIMIT_AS, "address space (ulimit -v)"), (resource.RLIMIT_DATA, "data (ulimit -d)"))
    values = [(resource.getrlimit(kind)[0], name) for kind, name in kinds]
    return " and ".join(f"{value / 1e9:.2g} GB of {name}" for value, name in values if value != resource.RLIM_INFINITY)


def narrow_limits() -> str:
    """For the message about a process that a library aborted: the limits that are narrow here."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    few = f"{files} open files (ulimit -n)" if 0 <= files < FEW_FILES else ""
    limits = " and ".join(filter(None, (few, memory_limits())))
    return f"; it was limited to {limits}: raise that" if limits else ""
