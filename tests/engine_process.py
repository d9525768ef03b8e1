"""Starts an engine process as the supervisor does and shows both ends of its pipes."""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.wire import Progress, Ready, Report, Spec, Start, decode_report, encode_line

ROOT = Path(__file__).resolve().parents[1]
SCRIPTED = (str(ROOT / "tests/fakes/scripted_engine.py"),)
REAL = ("-m", "mlx_isolate_engine")

T = TypeVar("T", bound=msgspec.Struct)


class EngineProcess:
    """One child in its own session. Use as a context manager: it leaves nothing behind."""

    def __init__(self, program: tuple[str, ...] = SCRIPTED) -> None:
        self.folder = tempfile.mkdtemp(prefix="mi", dir="/tmp")
        self.socket_path = f"{self.folder}/s"
        self.log_path = Path(self.folder) / "stderr"
        spec_read, self.spec_fd = os.pipe()
        self.report_fd, report_write = os.pipe()
        lifeline_read, self.lifeline_fd = os.pipe()
        given = (spec_read, report_write, lifeline_read)
        python_path = os.pathsep.join(str(ROOT / side) for side in ("engine", "shared"))
        with self.log_path.open("wb") as log:
            self.child = subprocess.Popen(
                [sys.executable, "-P", *program, "--id", "m", "--incarnation", "1"]
                + ["--spec-fd", str(spec_read), "--report-fd", str(report_write)]
                + ["--lifeline-fd", str(lifeline_read)],
                pass_fds=given,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": python_path},
            )
        for fd in given:
            os.close(fd)
        self._buffer = b""
        self._clients: list[socket.socket] = []
        self._open = {self.spec_fd, self.report_fd, self.lifeline_fd}

    def send(self, spec: Spec) -> None:
        os.write(self.spec_fd, encode_line(spec))

    def start(self, model: str = "ok", settings: EngineSettings | None = None) -> None:
        self.send(
            Start(
                model_id="m",
                model=model,
                incarnation=1,
                socket_path=self.socket_path,
                cache_home=f"{self.folder}/cache",
                settings=settings or EngineSettings(),
            )
        )

    def report(self, deadline_s: float = 20) -> Report | None:
        """The next report line; None at the end of the pipe."""
        end = time.monotonic() + deadline_s
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([self.report_fd], [], [], end - time.monotonic())
            assert readable, f"no report within {deadline_s} s; log:\n{self.log}"
            data = os.read(self.report_fd, 65536)
            if not data:
                return None
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return decode_report(line)

    def wait_report(self, kind: type[T], deadline_s: float = 20) -> T:
        """The next report of `kind`; others before it are dropped."""
        end = time.monotonic() + deadline_s
        while True:
            report = self.report(max(0.0, end - time.monotonic()))
            assert report is not None, f"the report ended before a {kind.__name__}:\n{self.log}"
            if isinstance(report, kind):
                return report

    def wait_ready(self, deadline_s: float = 60) -> Ready:
        return self.wait_report(Ready, deadline_s)

    def wait_progress(self, deadline_s: float = 5, **expected: int) -> Progress:
        """The next progress line with these counters."""
        end = time.monotonic() + deadline_s
        while True:
            progress = self.wait_report(Progress, max(0.0, end - time.monotonic()))
            if all(getattr(progress, name) == value for name, value in expected.items()):
                return progress

    def progress_now(self) -> Progress:
        """A progress line that was written after this call."""
        while b"\n" in self._buffer or select.select([self.report_fd], [], [], 0)[0]:
            self.report()
        return self.wait_report(Progress)

    def wait_exit(self, deadline_s: float) -> int:
        return self.child.wait(deadline_s)

    def begin_request(self, path: str, body: dict[str, Any]) -> socket.socket:
        """POST on a connection that stays open, unread, until this is closed."""
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._clients.append(client)
        client.connect(self.socket_path)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: engine\r\nContent-Length: {len(data)}\r\n\r\n"
        client.sendall(head.encode() + data)
        return client

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def close(self, fd: int) -> None:
        if fd in self._open:
            self._open.discard(fd)
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGKILL)
        self.child.wait(10)
        for fd in tuple(self._open):
            self.close(fd)
        for client in self._clients:
            client.close()
        shutil.rmtree(self.folder)


def served(folder: Path, settings: EngineSettings | None = None) -> Iterator[EngineProcess]:
    """A real engine that serves the model in `folder`, for a fixture to yield from."""
    with EngineProcess(REAL) as engine:
        engine.start(str(folder), settings)
        engine.wait_ready()
        yield engine
