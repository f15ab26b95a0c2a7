"""Makes `python -m dovetail` the same as `dovetail`."""

from dovetail.cli.main import main

main()
