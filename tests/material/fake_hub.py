"""A hub on the loopback, with the few answers that huggingface_hub asks for."""

import hashlib
import json
import threading
import urllib.parse
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Repos by id, each a folder; `refuse` answers every API call with that status.

    Attributes:
        refuse: an HTTP status, with the X-Error-Code that the real hub sends along.
        requests: method and path of every request, in order.
    """

    repos: dict[str, Path] = field(default_factory=dict[str, Path])
    refuse: tuple[int, str] | None = None
    requests: list[str] = field(default_factory=list[str])
    url: str = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a GET."""
        if self.refuse is not None:
            status, code = self.refuse
            return status, {"X-Error-Code": code, "X-Error-Message": "refused"}, b"{}"
        parts = urllib.parse.unquote(path).split("?")[0].strip("/").split("/")
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        folder = self.repos.get(name)
        if folder is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if parts[0] != "api":
            return self._file(folder / "/".join(parts[4:]))
        files = sorted(path for path in folder.iterdir() if path.is_file())
        if "tree" in parts:
            listing: object = [
                {
                    "type": "file",
                    "path": file.name,
                    "size": file.stat().st_size,
                    "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
                }
                for file in files
            ]
        else:
            siblings = [{"rfilename": file.name} for file in files]
            listing = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}
        return 200, {"Content-Type": "application/json"}, json.dumps(listing).encode()

    def _file(self, path: Path) -> tuple[int, dict[str, str], bytes]:
        if not path.is_file():
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        content = path.read_bytes()
        tag = hashlib.sha1(content).hexdigest()
        return 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{tag}"'}, content


@contextmanager
def fake_hub(hub: FakeHub) -> Generator[FakeHub]:
    """Serve `hub` on a free port of the loopback; its address is in `hub.url`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._send(with_body=False)

        def do_GET(self) -> None:
            self._send(with_body=True)

        def _send(self, with_body: bool) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
