"""A hub of one dataset on this machine: what huggingface_hub and datasets ask for, from memory."""

import hashlib
import json
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

NAME, COMMIT = "team/sums", "0123456789abcdef0123456789abcdef01234567"


def serve(files: Mapping[str, bytes]) -> ThreadingHTTPServer:
    """A server of `files`, which the caller starts and ends."""
    listing = [
        {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        for name, data in files.items()
    ]
    info = {
        "id": NAME, "sha": COMMIT, "private": False, "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": [],
        "lastModified": "2026-01-01T00:00:00.000Z", "siblings": [{"rfilename": name} for name in files],
    }  # fmt: skip

    class Handler(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True

        def reply(self, data: bytes, status: int = 200, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def reply_json(self, value: Any) -> None:
            self.reply(json.dumps(value).encode(), Content_Type="application/json")

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            name = path.partition(f"/resolve/{COMMIT}/")[2]
            folder = path.partition(f"/tree/{COMMIT}")[2].strip("/")
            if name in files:
                tag = f'"{hashlib.sha1(files[name]).hexdigest()}"'
                self.reply(files[name], ETag=tag, X_Repo_Commit=COMMIT)
            elif path.startswith(f"/api/datasets/{NAME}/tree/"):
                self.reply_json(
                    [entry for entry in listing if str(entry["path"]).startswith(folder)]
                )
            elif path in (f"/api/datasets/{NAME}", f"/api/datasets/{NAME}/revision/{COMMIT}"):
                self.reply_json(info)
            else:
                self.reply(b"{}", 404, X_Error_Code="EntryNotFound")

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
            self.reply_json([entry for entry in listing if entry["path"] in asked.get("paths", [])])

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)
