"""The two servers of the serving bench as child processes: mlx_lm.server and the daemon."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

# A GPU compiles kernels for half a minute before a daemon's engine is ready.
READY_S = 300.0
STOP_S = 30.0


def free_port() -> int:
    """A port on the loopback address that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Rival:
    """One server with one model, started and stopped; use as a context manager.

    Args:
        name: for tables.
        command: its argv, without the port.
        ready_path: answers 200 when the model can be asked.
    """

    def __init__(self, name: str, command: list[str], ready_path: str) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready_url = self.url + ready_path
        self._command = [*command, "--port", str(self.port)]
        self._folder = tempfile.TemporaryDirectory(prefix="mi", dir="/tmp")
        self._home = Path(self._folder.name)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start it and wait until its model can be asked."""
        environment = {
            **os.environ,
            "HOME": str(self._home),
            "MLX_ISOLATE_CACHE_DIR": f"{self._home}/cache",
            "MLX_ISOLATE_LOG_DIR": f"{self._home}/logs",
            "HF_HUB_OFFLINE": "1",
        }
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + READY_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} did not start:\n{self.log}")
            time.sleep(0.1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop it and remove what it left."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    @property
    def log(self) -> str:
        """What it printed."""
        return self._log_path.read_text(errors="replace")[-4000:]

    @property
    def _log_path(self) -> Path:
        return self._home / "log"

    def cpu_s(self) -> float:
        """Processor time of the server and its children so far, in seconds."""
        assert self._process is not None
        root = psutil.Process(self._process.pid)
        total = 0.0
        for process in [root, *root.children(recursive=True)]:
            try:
                spent = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += spent.user + spent.system
        return total

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self._ready_url, timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def ours(model: Path) -> Rival:
    """The daemon as anyone starts it, with its defaults."""
    command = [sys.executable, "-m", "mlx_isolate_supervisor.cli", "serve", str(model)]
    return Rival("mlx-isolate", command, "/readyz")


def theirs(model: Path) -> Rival:
    """mlx_lm.server; its defaults are its best settings for this load (32 rows, 8 prompts)."""
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model)]
    return Rival("mlx_lm.server", [*command, "--log-level", "ERROR"], "/health")
