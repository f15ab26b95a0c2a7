"""What every manifest of a checkpoint has, whatever tensors it lists. Imports no torch."""

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

from dovetail.errors import CheckpointError, quoted
from dovetail.jsonl import parse_json

FORMAT = "dovetail-sharded"
VERSION = 2
STEP = re.compile(r"step_(\d{6,})\.\w+")  # the directory of a saved step


def read_body(data: bytes, what: str) -> dict[str, Any]:
    """A manifest as it was written. CheckpointError where it is damaged, or of another format."""
    body = parse_json(data, what)
    if body.get("format") != FORMAT:
        raise CheckpointError(f"{what}: format {quoted(body.get('format'))}, expected {FORMAT!r}")
    if body.get("version") != VERSION:
        version = quoted(body.get("version"))
        known = f"this dovetail reads {VERSION}; use the release that wrote it"
        raise CheckpointError(f"{what}: format version {version}, {known}")
    if body.pop("crc32", None) != checksum(body):
        problem = "does not match its own checksum; it was changed after it was written"
        raise CheckpointError(f"{what} {problem}")
    return body


def checksum(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
