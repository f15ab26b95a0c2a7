"""The chart at the end of a run: its shape, and values that cannot be drawn."""

import math
import subprocess
import sys

from dovetail.log import WIDTH, curve


def test_a_rising_curve_rises() -> None:
    lines = curve([0.0, 0.5, 1.0], height=2).splitlines()
    assert lines[0] == "   1.000 |  \u2588" and lines[1] == "   0.000 | \u2588\u2588"


def test_many_values_are_averaged_into_one_width() -> None:
    lines = curve([float(i) for i in range(10 * WIDTH)]).splitlines()
    assert all(len(line) == len("   0.000 |") + WIDTH for line in lines)


def test_values_that_are_not_finite_are_left_out() -> None:
    """A skipped update has no finite loss; the run must still end well."""
    assert curve([1.0, math.nan, 2.0, math.inf]) == curve([1.0, 2.0])
    assert curve([math.nan]) == curve([]) == ""


def test_nobody_has_to_listen() -> None:
    """A pipe that nobody reads any more, and a disk that is full: neither ends a run."""
    code = "import sys; from dovetail.log import Console; c = Console(speaks=True, steps=1)\n"
    code += "for _ in range(9): c.say('x' * 9999)\nsys.stderr.write('through')"
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.communicate()[1].startswith("through")
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stdout=full, stderr=pipe, text=True).stderr.startswith("through")
