"""What is done to a daemon in a soak: deaths of its engines, and reloads of its configuration."""

import asyncio
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
from tests.running_daemon import RunningDaemon

from bench.soak_http import Broken, get_json
from bench.soak_models import write_config
from bench.soak_plan import STANDBY, Act, Reload
from bench.soak_record import Done
from mlx_isolate_supervisor.drills.processes import Limit, child_of, send
from mlx_isolate_supervisor.drills.record import CannotRun

# What an engine may still map when its memory is taken away, and for how long that lasts.
SPARE_BYTES = 1 << 20
OUT_OF_MEMORY_S = 5.0


class Acts:
    """Does one thing after another to the daemon, and notes to whom.

    Args:
        daemon: which runs.
        config: its configuration file.
        folders: of its models.
        now: seconds since the start.
    """

    def __init__(
        self,
        daemon: RunningDaemon,
        config: Path,
        folders: Mapping[str, Path],
        now: Callable[[], float],
    ) -> None:
        self._daemon = daemon
        self._config = config
        self._folders = folders
        self._now = now
        self._changes: dict[str, dict[str, Any]] = {}
        self.done: list[Done] = []

    async def kill(self, act: Act) -> None:
        """End the target, if it has a process now."""
        pid: int | None = None
        at_s = self._now()
        try:
            pid = await self._pid(act.target)
            engine = child_of(self._daemon.process.pid, pid)
            at_s = self._now()
            if act.how == "out of memory":
                await self._starve(engine)
            else:
                number = "SIGUSR2" if act.how == "exit 1" else act.how
                send(engine, signal.Signals[number])
        except (CannotRun, Broken, psutil.Error):
            pid = None
        self.done.append(Done(at_s=round(at_s, 3), what=act.how, target=act.target, pid=pid))

    async def reload(self, reload: Reload) -> None:
        """Change the file and send SIGHUP."""
        number = reload.number
        if reload.change == "broken":
            self._config.write_text("models: {full: {no_such_key: 1}")
        else:
            if reload.change == "temp":
                self._changes[reload.model] = {"temp": 0.1 + number % 7 / 10}
            elif reload.change == "limit":
                self._changes[reload.model] = {"concurrencyLimit": 2 + number % 7}
            elif reload.change == "alias":
                self._changes[reload.model] = {"aliases": [f"alias-{number}"]}
            write_config(self._config, self._folders, self._changes)
        at_s = round(self._now(), 3)
        self._daemon.process.send_signal(signal.SIGHUP)
        self.done.append(Done(at_s=at_s, what=f"reload {reload.change}", target=reload.model))

    async def _pid(self, target: str) -> int | None:
        status = await get_json(self._daemon.port, "/status")
        if target == STANDBY:
            standbys = status["supervisor"]["standbys"]
            return standbys[0]["pid"] if standbys else None
        pids: dict[str, int | None] = {model["id"]: model["pid"] for model in status["models"]}
        return pids[target]

    async def _starve(self, engine: psutil.Process) -> None:
        limit = Limit(engine, "RLIMIT_AS", engine.memory_info().vms + SPARE_BYTES)
        try:
            await asyncio.sleep(OUT_OF_MEMORY_S)
        finally:
            limit.lift()
