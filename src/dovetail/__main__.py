"""Makes `python -m dovetail` the same as `dovetail`."""

import signal

signal.signal(
    signal.SIGINT, signal.SIG_DFL
)  # or a Ctrl-C would show a traceback of half-done imports

from dovetail.cli.main import main  # noqa: E402

main()
