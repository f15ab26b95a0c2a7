"""The style checker finds every planted violation, and only those."""

import pytest

from tools.style_check import check_source, check_text

SRC = "src/dovetail/nn/attention.py"


@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        (SRC, "x = 1\n" * 501, "file of 501 lines; at most 500"),
        (SRC, "def f():\n" + "    x = 1\n" * 100, "f has 101 lines; at most 100"),
        (SRC, "def f(a, b, c, d, e, g, h, i, j): ...\n", "f has 9 parameters"),
        (
            SRC,
            "def f():\n    from dovetail.layout import Layout\n",
            "first-party import inside a function",
        ),
        (SRC, "def f():\n    global x\n", "global: pass the value"),
        (SRC, "CACHE = {}\n", "a mutable value of a module or class"),
        (SRC, "CACHE: dict[str, int] = dict()\n", "a mutable value of a module or class"),
        (SRC, "class A:\n    names = []\n", "a mutable value of a module or class"),
        (SRC, "print(1)\n", "print: use log"),
        (SRC, "try:\n    x = 1\nexcept Exception:\n    pass\n", "a blind except"),
        (SRC, "try:\n    x = 1\nexcept:\n    pass\n", "a blind except"),
        (SRC, "getattr(a, 'b', None)\n", "getattr with a default"),
        (SRC, "import os\nos.environ['A']\n", "reads the environment"),
        (SRC, "import os\nos.getenv('A')\n", "reads the environment"),
        (SRC, "import torch.distributed as dist\n", "torch.distributed belongs to"),
        (SRC, "from torch import distributed\n", "torch.distributed belongs to"),
        (SRC, "def f(axis):\n    return axis.rank\n", "rank: model files name roles"),
        (SRC, "def f(axis):\n    return axis.size == 1\n", "a comparison with size"),
        (SRC, "y = x.float()\n", ".float(): use"),
        (
            SRC,
            "import torch\nclass F(torch.autograd.Function):\n    '''Adds.'''\n",
            "algebra of forward and of backward",
        ),
        (SRC, "x = 1  # TO" + "DO later\n", "a marker without its issue"),
        (SRC, "x = 'caf\u00e9'\n", "outside ASCII"),
        (SRC, "def maybe_add(): ...\n", "maybe_add: say what it does"),
        (SRC, "from __future__ import annotations\n", "from __future__ import"),
        (SRC, "if config.model_type == 'llama':\n    x = 1\n", "a comparison with model_type"),
        ("src/dovetail/nn/utils.py", "x = 1\n", "named after nothing"),
        ("src/dovetail/rl/losses.py", "x.mean()\n", "losses return sums and counts"),
        (
            "tests/unit/test_a.py",
            "assert_close(a, b, rtol=1e-3)\n",
            "use a name of tests/helpers/tolerances.py",
        ),
        (
            "tests/unit/test_a.py",
            "assert error < 1e-5\n",
            "use a name of tests/helpers/tolerances.py",
        ),
    ],
)
def test_planted_violation_is_found(path: str, code: str, message: str) -> None:
    assert any(message in str(found) for found in check_source(path, code))


@pytest.mark.parametrize(
    ("path", "code"),
    [
        (SRC, "from collections.abc import Mapping\nTABLE: Mapping[str, int] = {'a': 1}\n"),
        (SRC, "NAMES = ('a', 'b')\n"),
        (SRC, "try:\n    x = 1\nexcept BaseException:\n    x = 2\n    raise\n"),
        (SRC, "from torch.distributed.fsdp import fully_shard\n"),
        (SRC, "x = 1  # TO" + "DO(#12): later\n"),
        (SRC, "class A:\n    def __init__(self):\n        self.names = []\n"),
        (
            "src/dovetail/parallel/process_group.py",
            "import os\nimport torch.distributed as dist\nos.environ['RANK']\n",
        ),
        ("src/dovetail/cli/main.py", "import os\nos.environ['RANK']\n"),
        ("src/dovetail/arch/registry.py", "if model_type == 'llama':\n    x = 1\n"),
        ("tests/unit/test_a.py", "assert error <= SUM_ORDER\nassert seconds < 0.5\n"),
        ("tests/helpers/tolerances.py", "assert error <= 1e-9\n"),
    ],
)
def test_good_code_passes(path: str, code: str) -> None:
    assert check_source(path, code) == []


def test_machine_paths_are_found_in_any_file() -> None:
    assert [str(v) for v in check_text("a.md", "see /ro" + "ot/x\nand /tmp/x\n")] == [
        "a.md:1: a path of one machine"
    ]
    assert not check_text("a.md", "https://example.com/home/x and ./home/x and src/work/y\n")
