"""Results of TRL's own code."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def of_trl(program: str) -> Mapping[str, Any]:
    """The numbers of the installed TRL (pip install '.[peers]'), else the recorded ones.

    `python -m tests.helpers.PROGRAM > tests/helpers/PROGRAM.json` records them.
    """
    if importlib.util.find_spec("trl") is None:
        written: Mapping[str, Any] = json.loads(
            Path(__file__).with_name(f"{program}.json").read_text()
        )
        return written
    command = [sys.executable, "-m", f"tests.helpers.{program}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    results: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results
