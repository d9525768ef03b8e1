"""A real daemon as a child process of a test: started, spoken to, stopped, and nothing left."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[1]
FAKE = (sys.executable, "-m", "tests.fakes.daemon")
REAL = (sys.executable, "-m", "mlx_isolate_supervisor.cli")
START_DEADLINE_S = 20.0
STOP_DEADLINE_S = 20.0


def fake_model(folder: Path, **faults: Any) -> Path:
    """A folder that the fake engine takes for a model, with start faults."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "fake.json").write_text(json.dumps(faults))
    return folder


def environment(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment with every folder of the user's moved below `home`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLX_ISOLATE_", "XDG_"))}
    folders = {
        "HOME": home,
        "XDG_CACHE_HOME": home / "cache",
        "XDG_STATE_HOME": home / "state",
        "XDG_CONFIG_HOME": home / "config",
        "MLX_ISOLATE_LOG_DIR": home / "logs",
        "MLX_ISOLATE_CACHE_DIR": home / "mlx-cache",
    }
    return kept | {name: str(path) for name, path in folders.items()} | dict(extra or {})


class Answer:
    """A whole response."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    def json(self) -> Any:
        return json.loads(self.body)


class RunningDaemon:
    """`mlx-isolate serve ARGUMENTS` on a free port, ready to be asked once entered.

    Args:
        home: an empty folder of the test.
        arguments: models and flags; `--port` and `--run-dir` are added.
        program: FAKE or REAL.
        port: 0 = a free one.
        run_dir: None = a short new one, removed at the end.
        variables: further environment.
        standby: spare engines; None = the daemon's own default. 0 unless a test asks for them:
            most count processes, and a spare imports for seconds beside what a test measures.
    """

    def __init__(
        self,
        home: Path,
        *arguments: str,
        program: Sequence[str] = FAKE,
        port: int = 0,
        run_dir: Path | None = None,
        variables: Mapping[str, str] | None = None,
        standby: int | None = 0,
    ) -> None:
        self._own_run_dir = run_dir is None
        self.run_dir = run_dir or Path(tempfile.mkdtemp(prefix="mi"))
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        self._number = len(list(home.glob("stdout*")))
        self._streams = [
            (home / f"{name}{self._number}").open("wb") for name in ("stdout", "stderr")
        ]
        flags = ["--port", str(port), "--run-dir", str(self.run_dir)]
        if standby is not None:
            flags += ["--standby", str(standby)]
        self.process = subprocess.Popen(
            [*program, "serve", *arguments, *flags],
            cwd=ROOT,
            env=environment(home, variables),
            stdin=subprocess.DEVNULL,
            stdout=self._streams[0],
            stderr=self._streams[1],
            start_new_session=True,
        )
        self.port = port
        self._clients: list[socket.socket] = []

    def __enter__(self) -> Self:
        try:
            self.wait_listening()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for client in self._clients:
            client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for stream in self._streams:
            stream.close()
        if self._own_run_dir:
            shutil.rmtree(self.run_dir, ignore_errors=True)

    @property
    def stdout(self) -> str:
        return (self.home / f"stdout{self._number}").read_text()

    @property
    def stderr(self) -> str:
        return (self.home / f"stderr{self._number}").read_text()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_listening(self) -> None:
        """Wait for the start-up line and learn the port from it."""

        def found() -> re.Match[str] | None:
            assert self.process.poll() is None, f"it ended: {self.stderr}"
            return re.search(r"on http://\S+:(\d+)", self.stdout)

        self.port = int(wait_for(found, START_DEADLINE_S, "the daemon listens")[1])  # type: ignore[index]

    def wait_state(self, state: str, model: int = 0, deadline_s: float = 10.0) -> dict[str, Any]:
        """Wait until a model is in `state`; its status."""

        def found() -> dict[str, Any] | None:
            status: dict[str, Any] = self.status()["models"][model]
            return status if status["state"] == state else None

        status = wait_for(found, deadline_s, f"state {state}")
        assert status is not None
        return status

    def wait_end(self, deadline_s: float) -> int:
        """The exit status; fails if it has not ended in time."""
        return self.process.wait(deadline_s)

    def connect(self) -> http.client.HTTPConnection:
        """A connection that the caller closes."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """One request on a connection of its own."""
        connection = self.connect()
        try:
            text = None if body is None else json.dumps(body)
            kind = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, text, {**kind, **(headers or {})})
            return Answer(connection.getresponse())
        finally:
            connection.close()

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Any:
        """The JSON of a GET that must succeed."""
        answer = self.ask("GET", path, headers=headers)
        assert answer.status == 200, answer.body
        return answer.json()

    def status(self) -> Any:
        return self.get("/status")

    def chat(self, model: str | None = None, **fields: Any) -> Answer:
        """One chat request; `fake=` tells the fake engine what to do."""
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], **fields}
        if model is not None:
            body["model"] = model
        return self.ask("POST", "/v1/chat/completions", body)

    def open_socket(self) -> socket.socket:
        """A bare connection; closed at the end."""
        client = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        self._clients.append(client)
        return client

    def stream(self, **fields: Any) -> socket.socket:
        """A streaming chat request whose headers have not been read yet; closed at the end."""
        body = json.dumps(
            {"messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
        ).encode()
        client = self.open_socket()
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        return client

    def engines(self) -> list[psutil.Process]:
        """Child processes of the daemon."""
        return psutil.Process(self.process.pid).children()

    def command(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """A client command against this daemon."""
        return run_command(
            self.home, *arguments, variables={"MLX_ISOLATE_URL": self.url, **variables}
        )


def run_command(
    home: Path,
    *arguments: str,
    program: Sequence[str] = REAL,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end, without a terminal."""
    return subprocess.run(
        [*program, *arguments],
        cwd=ROOT,
        env=environment(home, variables),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def read_all(client: socket.socket) -> bytes:
    """Everything until the other side closes."""
    parts: list[bytes] = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def read_until(client: socket.socket, mark: bytes) -> bytes:
    """Bytes up to and including the first that complete `mark`."""
    seen = b""
    while mark not in seen:
        part = client.recv(65536)
        assert part, f"closed before {mark!r}: {seen[-500:]!r}"
        seen += part
    return seen
