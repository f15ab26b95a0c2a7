"""The hostile programs of hostile_programs.txt.

One that gets what it is after calls `escaped` of PRELUDE. Those of the kind "verdict" want to
pass `TESTS`. Replaced in each: TRAINER (its process), OWNER (its user), PORT, SOCKET, ABSTRACT,
SECRET_FILE, OPEN_FILE, VICTIM and FOLDER, all the trainer's; NR_name, a system call's number.
"""

import re
from pathlib import Path

HEADING = re.compile(r"^=== ([\w ]+): (.+)\n", re.MULTILINE)
VERDICT = "verdict"
TESTS = "assert f(2) == 4\nassert f(3) == 6"
PRELUDE = """
import ctypes, mmap, os, resource, signal, socket, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def escaped():
    print("ESCAPED", flush=True)
def call(*arguments):
    if libc.syscall(*arguments) >= 0:
        escaped()
def wrote(path):
    with open(path, "w") as file:
        file.write("theirs")
    escaped()
def holds(path, mode="rb"):
    with open(path, mode) as file:
        text = file.read(1 << 20)
    if b"sk-trainer" in text:
        escaped()
"""


def hostile_programs() -> dict[str, dict[str, str]]:
    """By kind and name."""
    text = Path(__file__).with_name("hostile_programs.txt").read_text()
    parts = HEADING.split(text)[1:]
    programs: dict[str, dict[str, str]] = {}
    for kind, name, source in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        programs.setdefault(kind, {})[name] = source
    return programs
