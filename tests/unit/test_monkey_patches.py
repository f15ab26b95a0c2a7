"""The public-seam rule: nothing in the package assigns to what it imports, and every way of doing so would be found."""

import ast
from pathlib import Path

import pytest

from tools.monkey_patches import find_patches

PACKAGES = Path(__file__).parents[2] / "src"
PLANTED = (
    "import torch\ntorch.nn.Linear.forward = f\n",
    "import torch.nn as nn\nnn.Linear.forward = f\n",
    "from torch.nn import Linear\nLinear.forward = f\n",
    "from torch.nn import Linear as L\nL.scale += 1\n",
    "from torch.nn import Linear\nLinear.scale: int = 1\n",
    "from torch.nn import Linear\ndel Linear.forward\n",
    "import torch\nc = torch.nn.Linear\nc.forward = f\n",
    "import torch\na = torch.nn\nb = a.Linear\nb.forward = f\n",
    "import torch\nc: type = torch.nn.Linear\nc.forward = f\n",
    "import torch\nif (c := torch.nn.Linear):\n    c.forward = f\n",
    "import torch\nfor c in (torch.nn.Linear, torch.nn.Conv2d):\n    c.forward = f\n",
    "import torch\nfor torch.nn.Linear.forward in (f,):\n    pass\n",
    "import torch\nwith open(x) as torch.x:\n    pass\n",
    "import torch\ntorch.a, b = 1, 2\n",
    "import torch\nc = torch.nn if wide else torch.special\nc.forward = f\n",
    "def g():\n    import torch\n    torch.x = 1\n",
    "import torch\ndef g():\n    c = torch.nn.Linear\n    def h():\n        c.forward = f\n",
    "import torch\nclass A:\n    torch.x = 1\n",
    "import torch\nsetattr(torch.nn.Linear, 'forward', f)\n",
    "import torch\nsetattr(torch.nn.Linear, name, f)\n",
    "import torch\ndelattr(torch, 'x')\n",
    "import torch\ntype.__setattr__(torch.nn.Linear, 'forward', f)\n",
    "import torch\nvars(torch)['x'] = 1\n",
    "import torch\ntorch.nn.Linear.__dict__['x'] = 1\n",
    "import torch\ntorch.nn.__dict__.update(x=1)\n",
    "import sys\nsys.modules['torch'] = None\n",
    "import sys\nsys.modules['torch'].x = None\n",
    "import sys\ndel sys.modules['torch']\n",
    "import sys\nsys.modules.setdefault('torch', None)\n",
    "from sys import modules\nmodules['torch'] = None\n",
    "import torch\ngetattr(torch, 'nn').x = 1\n",
    "import importlib\nimportlib.import_module('torch').x = 1\n",
    "def g(model):\n    type(model).forward = f\n",
    "def g(model):\n    model.__class__.forward = f\n",
    "def g(model):\n    c = type(model)\n    c.forward = f\n",
    "def g(model):\n    model.__class__ = Other\n",
)
ALLOWED = (
    "import torch\nx = torch.zeros(1)\nx.grad = None\nx[0] = 1\n",
    "import torch\nclass A(torch.nn.Module):\n    def __init__(self):\n        self.lm_head = torch.nn.Linear\n",
    "import batch\ndef g(batch):\n    batch.x = 1\n",
    "import os\nos.environ['A'] = '1'\n",
    "def g(model, name):\n    setattr(model, name, 1)\n",
    "import torch\nmodel = torch.nn.Linear(1, 1)\nmodel.weight.data = x\n",
    "import torch\nfor p in torch.nn.Linear(1, 1).parameters():\n    p.data = x\n",
)


@pytest.mark.parametrize("code", PLANTED)
def test_planted_patch_is_found(code: str) -> None:
    assert list(find_patches(ast.parse(code)))


@pytest.mark.parametrize("code", ALLOWED)
def test_own_objects_are_ours(code: str) -> None:
    assert not list(find_patches(ast.parse(code)))


def test_the_package_patches_nothing() -> None:
    files = sorted(PACKAGES.rglob("*.py"))
    assert len(files) > 80
    found = [
        f"{f}:{n}: {text}"
        for f in files
        for n, text in find_patches(ast.parse(f.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)
