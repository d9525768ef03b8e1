"""The servers of the serving benches as child processes: the daemon, and who stands against it.

mlx_lm.server is installed beside the daemon. mlx-openai-server and vllm-mlx want an older mlx-lm and
so an environment of their own, whose program is named: `vllm-mlx=/path/to/env/bin/vllm-mlx`.
"""

import contextlib
import json
import os
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
from tests.free_port import free_port

from mlx_isolate_supervisor.engines.blas import choose_blas

OURS = "mlx-isolate"
OUR_READY = "/readyz"
MLX_LM = "mlx_lm.server"
RIVALS = (MLX_LM, "mlx-openai-server", "vllm-mlx")
# How a server without a supervisor is kept up: started again at once, however it ended.
LOOP = 'trap exit TERM; while :; do "$@" & wait $!; done'
# A GPU compiles kernels for half a minute before a daemon's engine is ready.
READY_S = 300.0
STOP_S = 30.0


def memory_bytes(processes: list[psutil.Process]) -> int:
    """Memory of some processes; pages that they share count once where the system tells."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found = process.memory_full_info()
            total += getattr(found, "pss", found.rss)
    return total


def resident_bytes(process: psutil.Process) -> int:
    """0 of one that has gone."""
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


class Rival:
    """One server with one model, started and stopped; use as a context manager.

    Args:
        name: for tables.
        command: its argv, without the port.
        ready_path: answers 200 when the model can be asked.
        is_looped: whether a shell starts it again as often as it ends.
    """

    def __init__(
        self, name: str, command: list[str], ready_path: str, *, is_looped: bool = False
    ) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready_url = self.url + ready_path
        self._command = [*command, "--port", str(self.port)]
        self._is_looped = is_looped
        self._folder = tempfile.TemporaryDirectory(prefix="mi", dir="/tmp")
        self._home = Path(self._folder.name)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start it and wait until its model can be asked."""
        environment = {
            **os.environ,
            # The daemon chooses this for its engines; the rival gets the same.
            **choose_blas("auto").environment(os.environ.get("LD_PRELOAD")),
            "HOME": str(self._home),
            "MLX_ISOLATE_CACHE_DIR": f"{self._home}/cache",
            "MLX_ISOLATE_LOG_DIR": f"{self._home}/logs",
            "MLX_ISOLATE_RUN_DIR": f"{self._home}/run",
            "HF_HUB_OFFLINE": "1",
        }
        command = ["/bin/sh", "-c", LOOP, "loop"] if self._is_looped else []
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *self._command], stdout=log, stderr=log, env=environment
            )
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
        processes = self.processes()
        for process in processes if self._is_looped else processes[:1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        _, living = psutil.wait_procs(processes, STOP_S)
        for process in living:
            process.kill()
        self._process.wait()
        self._folder.cleanup()

    @property
    def log(self) -> str:
        """What it printed."""
        return self._log_path.read_text(errors="replace")[-4000:]

    @property
    def _log_path(self) -> Path:
        return self._home / "log"

    def processes(self) -> list[psutil.Process]:
        """The process that was started, then all below it."""
        assert self._process is not None
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]

    def serving(self) -> psutil.Process:
        """The process that holds the model."""
        if self._ready_url.endswith(OUR_READY):
            with urllib.request.urlopen(f"{self.url}/status", timeout=10) as answer:
                return psutil.Process(json.load(answer)["models"][0]["pid"])
        return max(self.processes(), key=resident_bytes)

    def kill_all_served(self) -> None:
        """Kill everything but what starts it again."""
        for process in self.processes()[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def model_name(self) -> str:
        """What a request has to call the model that was given at the start."""
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=10) as answer:
            name: str = json.load(answer)["data"][0]["id"]
            return name

    def cpu_s(self) -> float:
        """Processor time of the server and its children so far, in seconds."""
        total = 0.0
        for process in self.processes():
            try:
                spent = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += spent.user + spent.system
        return total

    def memory_bytes(self) -> int:
        """Memory of the server and its children."""
        return memory_bytes(self.processes())

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self._ready_url, timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def ours(model: Path, *flags: str) -> Rival:
    """The daemon as anyone starts it, with its defaults unless `flags` say otherwise."""
    command = [sys.executable, "-m", "mlx_isolate_supervisor.cli", "serve", str(model), *flags]
    return Rival(OURS, command, OUR_READY)


def theirs(model: Path, rival: str = MLX_LM, *, is_looped: bool = False) -> Rival:
    """A rival with the settings that are its best for these loads.

    mlx_lm.server's (32 rows, 8 prompts) and mlx-openai-server's defaults are; vllm-mlx batches only
    when told to.

    Args:
        model: its folder.
        rival: a name in RIVALS, with `=PROGRAM` where that is not on the path.
        is_looped: whether a shell starts it again as often as it ends.
    """
    name, _, program = rival.partition("=")
    match name:
        case "mlx_lm.server":
            command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model)]
            command += ["--log-level", "ERROR"]
        case "mlx-openai-server":
            command = [program or name, "launch", "--model-path", str(model), "--model-type", "lm"]
            command += ["--host", "127.0.0.1", "--no-log-file", "--log-level", "ERROR"]
        case "vllm-mlx":
            command = [program or name, "serve", str(model), "--host", "127.0.0.1", "--offline"]
            command += ["--continuous-batching"]
        case _:
            raise ValueError(f"no rival {name}; there are {', '.join(RIVALS)}")
    return Rival(name, command, "/health", is_looped=is_looped)
