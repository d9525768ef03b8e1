"""A daemon of the drills' own: started in folders of its own, on a port of its own, and removed.

One whose drill is killed ends too; only its folder stays.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from mlx_isolate_supervisor.drills.polling import poll
from mlx_isolate_supervisor.drills.processes import children, end
from mlx_isolate_supervisor.drills.record import Broken

SERVE = (sys.executable, "-P", "-m", "mlx_isolate_supervisor.cli")
LISTENING_DEADLINE_S = 30.0
# For its own orderly stop; then it is killed.
STOP_DEADLINE_S = 90.0
_LISTENING = re.compile(r"on http://\S+?:(\d+)")
# What a person has set for a daemon of their own is not meant for this one, but for these.
_KEPT_VARIABLES = ("MLX_ISOLATE_CACHE_DIR", "MLX_ISOLATE_BLAS")


class OwnPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What throw-away daemons serve.

    Attributes:
        model: a folder, a hub repo id, or `demo`.
        program: what comes before `serve`.
        flags: further flags of every one.
        fields: what every request to generate has besides.
    """

    model: str = "demo"
    program: tuple[str, ...] = SERVE
    flags: tuple[str, ...] = ()
    fields: Mapping[str, Any] = {}


class OwnDaemon:
    """One throw-away daemon; `{home}` in a flag is its temporary folder.

    Args:
        plan: what it serves.
        flags: of this one alone.
        models: names under which the plan's model is served; above one they load on first use.

    Attributes:
        home: its temporary folder.
        run_dir: its run directory.
        port: 0 until it listens.
    """

    def __init__(self, plan: OwnPlan, flags: tuple[str, ...], models: tuple[str, ...]) -> None:
        self._plan = plan
        self.flags = flags
        self.models = models
        # Short, since socket paths are.
        self.home = Path(tempfile.mkdtemp(prefix="mi-drill-"))
        self.run_dir = self.home / "r"
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        # Our end of the pipe that its supervisor must not outlive, until that is gone.
        self._lifeline: int | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def all_flags(self) -> tuple[str, ...]:
        """The plan's and its own."""
        flags = self._plan.flags + self.flags
        return tuple(flag.replace("{home}", str(self.home)) for flag in flags)

    @property
    def pid(self) -> int:
        """Of its supervisor."""
        assert self.process is not None
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """Whether its supervisor lives."""
        return self.process is not None and self.process.poll() is None

    async def start(self) -> None:
        """Start it, on its earlier port if it had one, and wait until it listens.

        Raises:
            Broken: it ended instead, or does not listen in time.
        """
        self._starts += 1
        output = self.home / f"output-{self._starts}"
        self._spawn(output)

        def found() -> re.Match[str] | None:
            if not self.is_running:
                raise Broken("restart", f"the daemon ended: {_last_lines(output)}")
            return _LISTENING.search(_text(output))

        try:
            async with asyncio.timeout(LISTENING_DEADLINE_S):
                line = await poll(found)
        except TimeoutError:
            raise Broken("restart", f"no daemon listens: {_last_lines(output)}") from None
        assert line is not None
        self.port = int(line[1])

    def _spawn(self, output: Path) -> None:
        self._close_lifeline()
        theirs, self._lifeline = os.pipe()
        try:
            with output.open("wb") as stream:
                self.process = subprocess.Popen(
                    [*self._plan.program, "serve", *self._arguments(theirs)],
                    env=_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(theirs,),
                )
        finally:
            os.close(theirs)

    def _close_lifeline(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def _arguments(self, lifeline_fd: int) -> list[str]:
        flags = ["--port", str(self.port), "--run-dir", str(self.run_dir), "--log-dir", ""]
        flags += ["--lifeline-fd", str(lifeline_fd)]
        flags += self.all_flags
        if len(self.models) == 1:
            return [self._plan.model, "--served-model-name", self.models[0], *flags]
        path = self._plan.model
        if Path(path).expanduser().exists():
            path = str(Path(path).expanduser().absolute())
        # JSON is YAML.
        config = self.home / "config.yaml"
        config.write_text(json.dumps({"models": {name: {"path": path} for name in self.models}}))
        return ["--config", str(config), *flags]

    async def wait_end(self, deadline_s: float) -> int | None:
        """The exit status of its supervisor; None if it still runs at the deadline."""
        process = self.process
        assert process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await poll(lambda: process.poll() is not None)
        return process.poll()

    async def remove(self) -> None:
        """Stop it, by force if it must be, and remove its folder."""
        if self.process is not None and self.process.poll() is None:
            left = children(self.process.pid)
            self.process.send_signal(signal.SIGTERM)
            # Of another kind: two equal signals may merge. What runs now need not finish.
            self.process.send_signal(signal.SIGINT)
            if await self.wait_end(STOP_DEADLINE_S) is None:
                self.process.kill()
                self.process.wait()
            for child in left:
                end(child)
        self._close_lifeline()
        shutil.rmtree(self.home, ignore_errors=True)


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MLX_ISOLATE_") or name in _KEPT_VARIABLES
    }


def _text(path: Path) -> str:
    return path.read_text(errors="replace")


def _last_lines(path: Path) -> str:
    return " / ".join(_text(path).strip().splitlines()[-3:]) or "it said nothing"
