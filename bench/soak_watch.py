"""Watches the daemon of a soak: its size as time goes on, and what is left at the end."""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from tests.running_daemon import RunningDaemon
from tests.waiting import wait_for

from bench.soak_http import Broken, get_json
from bench.soak_record import Sample
from mlx_isolate_supervisor.engines.memory import footprint

SAMPLE_EVERY_S = 5.0
# Lines of a traceback that are shown.
TRACEBACK_LINES = 40
IDLE = ("ready", "stopped")


class Watch:
    """Takes samples until it is cancelled.

    Args:
        daemon: which runs.
        ssd: folder of the prompt caches.
        now: seconds since the start.
    """

    def __init__(self, daemon: RunningDaemon, ssd: Path, now: Callable[[], float]) -> None:
        self._daemon = daemon
        self._ssd = ssd
        self._now = now
        self._pid = daemon.process.pid
        self._failures: list[str] = []
        self.samples: list[Sample] = []

    def line(self) -> str:
        """The last sample, for a person."""
        if not self.samples:
            return "no sample"
        last = self.samples[-1]
        return f"{last.memory_bytes >> 20} MiB, {last.descriptors} descriptors"

    async def run(self) -> None:
        """Sample at a steady pace."""
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            began_s = self._now()
            try:
                await get_json(self._daemon.port, "/livez")
            except (Broken, OSError) as error:
                self._failures.append(f"/livez at {began_s:.0f} s: {error!r}")
                continue
            self.samples.append(self._sample(began_s, self._now() - began_s))

    def unsettled(self, deadline_s: float) -> list[str]:
        """What failed meanwhile, and what does not rest `deadline_s` after the last client's end."""
        found, self._failures = self._failures, []
        try:
            wait_for(lambda: self._is_at_rest() and not self._strangers(), deadline_s)
        except AssertionError:
            return [*found, f"no rest: {self._daemon.status()}, strangers {self._strangers()}"]
        if self._daemon.status()["supervisor"]["pid"] != self._pid:
            found.append("another supervisor answers")
        scrape = self._daemon.ask("GET", "/metrics").body.decode()
        for line in scrape.splitlines():
            if line.startswith("mlx_isolate_requests_in_flight{") and not line.endswith(" 0.0"):
                found.append(line)
        return found

    def left_behind(self, code: int) -> list[str]:
        """What is wrong after the end with exit status `code`."""
        found = [] if code == 0 else [f"exit status {code}"]
        found += [
            f"left in the run directory: {path}" for path in self._daemon.run_dir.glob("*.sock")
        ]
        found += [f"left in the cache: {path}" for path in self._ssd.rglob("*.tmp")]
        lines = self._daemon.stderr.splitlines()
        for at, line in enumerate(lines):
            if line.startswith("Traceback"):
                found.append("\n".join(lines[max(0, at - 2) : at + TRACEBACK_LINES]))
        return found

    def _strangers(self) -> list[psutil.Process]:
        """Children that the status does not tell of."""
        status = self._daemon.status()
        known = {model["pid"] for model in status["models"]}
        known |= {standby["pid"] for standby in status["supervisor"]["standbys"]}
        return [child for child in self._daemon.engines() if child.pid not in known]

    def _is_at_rest(self) -> bool:
        models = self._daemon.status()["models"]
        return all(
            one["state"] in IDLE and not one["active"] and not one["queued"] for one in models
        )

    def _sample(self, at_s: float, livez_s: float) -> Sample:
        home = self._daemon.home
        held = footprint(self._pid)
        return Sample(
            at_s=round(at_s, 1),
            memory_bytes=held[0] if held else 0,
            descriptors=psutil.Process(self._pid).num_fds(),
            sockets=len(list(self._daemon.run_dir.iterdir())),
            cache_bytes=_size(self._ssd),
            state_bytes=_size(*(home / name for name in ("state", "cache", "config", "mlx-cache"))),
            log_bytes=_size(home / "logs"),
            livez_s=round(livez_s, 4),
        )


def _size(*folders: Path) -> int:
    """Bytes of all files below; what is removed meanwhile does not count."""
    total = 0
    for folder in folders:
        for place, _, names in os.walk(folder):
            for name in names:
                with suppress(OSError):
                    total += os.lstat(os.path.join(place, name)).st_size
    return total
