"""Records the signatures of vLLM that the stand-in copies, in vllm_signatures.json.

`python -m tests.helpers.record_vllm_signatures VERSION=DIRECTORY ...`
"""

import ast
import json
import sys
from pathlib import Path
from typing import Any

BASE, FACTORY, RELOAD, ROUTER = (
    "distributed/weight_transfer/base.py",
    "distributed/weight_transfer/factory.py",
    "model_executor/model_loader/reload/layerwise.py",
    "entrypoints/rl/online/api_router.py",
)
WANTED = {
    BASE: [
        f"WeightTransferEngine.{name}"
        for name in (
            "__init__", "parse_init_info", "parse_update_info", "init_transfer_engine", "start_weight_update",
            "finish_weight_update", "update_weights", "receive_weights", "shutdown",
        )
    ],
    FACTORY: ["WeightTransferEngineFactory.register_engine"],
    RELOAD: ["initialize_layerwise_reload", "finalize_layerwise_reload"],
}  # fmt: skip


def recorded(package: Path) -> dict[str, Any]:
    functions = {}
    for file, names in WANTED.items():
        tree = ast.parse((package / file).read_text())
        for name in names:
            body: Any = tree.body
            for part in name.split("."):
                node = next(
                    n
                    for n in body
                    if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == part
                )
                body = node.body
            assert isinstance(node, ast.FunctionDef)
            arguments = [a.arg for a in node.args.args]
            functions[name] = arguments + [a.arg for a in (node.args.vararg, node.args.kwarg) if a]
    calls = [
        n
        for n in ast.walk(ast.parse((package / ROUTER).read_text()))
        if isinstance(n, ast.Call) and n.args
    ]
    made = [
        n.args[0]
        for n in calls
        if isinstance(n.func, ast.Attribute) and n.func.attr in ("get", "post")
    ]
    routes = [n.value for n in made if isinstance(n, ast.Constant)]
    return {
        "functions": functions,
        "routes": sorted(r for r in routes if isinstance(r, str) and r.startswith("/")),
    }


if __name__ == "__main__":
    found = {
        version: recorded(Path(place))
        for version, _, place in (text.partition("=") for text in sys.argv[1:])
    }
    Path(__file__).with_name("vllm_signatures.json").write_text(json.dumps(found, indent=1) + "\n")
