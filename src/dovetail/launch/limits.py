"""The limit of this process (ulimit) that is behind a failure: Python, torch and gloo name none."""

import resource

OPEN_FILES = "too many open files"
MEMORY = (
    "memoryerror",
    "allocate memory",
    "bad_alloc",
    "failed to map segment",
    "can't start new thread",
    "resource temporarily unavailable",  # of a thread whose stack has no room
    "error return without exception set",
)
FEW_FILES = 64
LONGEST_CAUSE = 200


def limit_behind(error: BaseException) -> str | None:
    """What to raise where `error`, or what it came from, is for want of open files or of memory; None for other errors.

    Want of memory without a limit is the machine's own, and none of these.
    """
    causes: list[str] = []
    last: BaseException | None = error
    while last is not None:
        causes.append(f"{type(last).__name__}: {last}")
        last = last.__cause__ or last.__context__
    told = next((cause for cause in causes if OPEN_FILES in cause.lower()), None)
    if told is not None:
        reason = (
            f"too many open files: this process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} (ulimit -n); raise that "
            "limit, to 4096 for example"
        )
    else:
        told = next((cause for cause in causes if any(sign in cause.lower() for sign in MEMORY)), None)
        if told is None or not (limits := memory_limits()):
            return None
        reason = f"memory ran out: this process is limited to {limits}; raise that limit or remove it (unlimited)"
    return f"{reason} ({' '.join(told.split())[:LONGEST_CAUSE]})"


def memory_limits() -> str:
    """The limits of this process's memory, empty where it has none."""
    kinds = ((resource.RLIMIT_AS, "address space (ulimit -v)"), (resource.RLIMIT_DATA, "data (ulimit -d)"))
    values = [(resource.getrlimit(kind)[0], name) for kind, name in kinds]
    return " and ".join(f"{value / 1e9:.2g} GB of {name}" for value, name in values if value != resource.RLIM_INFINITY)


def narrow_limits() -> str:
    """What to add of a process that a library aborted: the limits that are narrow here."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    few = f"{files} open files (ulimit -n)" if 0 <= files < FEW_FILES else ""
    told = " and ".join(filter(None, (few, memory_limits())))
    return f"; it was limited to {told}: raise that" if told else ""
