"""Makes `python -m dovetail` the same as `dovetail`."""

import signal

from dovetail.launch.process import end_with_launcher

end_with_launcher()  # before imports that take long
signal.signal(
    signal.SIGINT, signal.SIG_DFL
)  # or a Ctrl-C would show a traceback of half-done imports

from dovetail.cli.main import main  # noqa: E402

main()
