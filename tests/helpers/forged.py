"""Checkpoints with wrong bytes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dovetail.checkpoint.manifest_body import checksum
from dovetail.weights.safe_paths import MANIFEST


def forge(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and make its checksum right again, as an attacker would."""
    body = json.loads((path / MANIFEST).read_text())
    del body["crc32"]
    change(body)
    (path / MANIFEST).write_text(json.dumps({**body, "crc32": checksum(body)}))
