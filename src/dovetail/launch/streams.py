"""Standard output and error that are closed, full, or read by nobody: said in one line, as other Unix programs do."""

import contextlib
import os
import signal
import sys

from dovetail.errors import MachineError

CLOSED = ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY))  # how each is opened: writing to 1 fails, as it did


def open_closed_streams() -> None:
    """Where the caller has closed some of descriptors 0 to 2, open them and start this program anew: else files and sockets
    would get their numbers, and what libraries print."""
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
    """Write to standard output, at once. Ends the program quietly where its reader is gone, such as `| head`."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        raise MachineError(f"standard output cannot be written: {error.strerror}") from error


def complain(text: str) -> None:
    """Write to standard error; where that cannot be written either, the exit code has to say it."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
