"""A stand-in for the Hugging Face hub: one model of one commit, over HTTP on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HUB_ID = "some-owner/some-model"
COMMIT = "a1" * 20


def digest_of(name: str, content: bytes) -> str:
    """As the hub has it: weights are large files, others are in git."""
    if name.endswith(".safetensors"):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(slots=True)
class Hub:
    url: str
    contents: dict[str, bytes]
    given: list[str] = field(default_factory=list)
    """Names of the files that were downloaded."""
    revisions: list[str] = field(default_factory=list)
    """Those that were asked for."""

    def environment(self, home: Path) -> dict[str, str]:
        """Of a process with a cache of its own."""
        off = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), **off}


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """As much of the hub's protocol as a snapshot takes."""

        def do_GET(self) -> None:
            if "/resolve/" in self.path:
                self._give(self.path.partition(f"/{COMMIT}/")[2])
            elif "/tree/" in self.path:
                self._send(json.dumps([*map(_entry, hub.contents.items())]).encode())
            else:
                hub.revisions.append(self.path.rpartition("/revision/")[2])
                self._send(json.dumps({"id": HUB_ID, "sha": COMMIT, "siblings": []}).encode())

        do_HEAD = do_GET  # noqa: N815

        def _give(self, name: str) -> None:
            content = hub.contents[name]
            if self.command == "GET":
                hub.given.append(name)
            self._send(content, ETag=f'"{digest_of(name, content)}"')

        def _send(self, content: bytes, **headers: str) -> None:
            self.send_response(200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def _entry(file: tuple[str, bytes]) -> dict[str, object]:
    name, content = file
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
    digest = digest_of(name, content)
    if name.endswith(".safetensors"):
        return entry | {"lfs": {"oid": digest, "size": len(content), "pointerSize": 1}}
    return entry | {"oid": digest}


@contextmanager
def hub_of(contents: dict[str, bytes]) -> Iterator[Hub]:
    hub = Hub("", contents)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def contents_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
