"""Reload of the configuration while the daemon runs: by SIGHUP, or when the file changes.

A file that is wrong changes nothing, and the log says why.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_shared.own_thread import in_own_thread
from mlx_isolate_supervisor.config import ServeSettings
from mlx_isolate_supervisor.service.notify import Notifier
from mlx_isolate_supervisor.settings.changes import ModelChanges, restart_fields
from mlx_isolate_supervisor.settings.file_facts import FileFacts, file_facts
from mlx_isolate_supervisor.settings.layers import Resolved
from mlx_isolate_supervisor.telemetry.logs import log_event, log_failure

# How often the file is looked at, and how long it must have been still: editors write in steps.
WATCH_INTERVAL_S = 0.5
# A file on a disk that does not answer, or a pipe, is given up after so long; until then, no other
# reload is begun.
READ_LIMIT_S = 30.0
# Name of the threads that ask the file's disk.
THREAD = "configuration"


class Reconfiguration:
    """Reads the settings again and hands them on.

    Args:
        read: gathers the settings anew; called in a thread of its own, since it reads files.
        apply: makes the models of the new settings be served; on the loop.
        tell: shows one line to a person.
        notifier: tells the service manager.
        seen: of the file as `settings` came from it; one that was changed since is read again.
    """

    def __init__(
        self,
        settings: ServeSettings,
        read: Callable[[], Resolved],
        apply: Callable[[ServeSettings], ModelChanges],
        tell: Callable[[str], None],
        notifier: Notifier,
        seen: FileFacts | None = None,
    ) -> None:
        self._settings = settings
        self._read = read
        self._apply = apply
        self._tell = tell
        self._notifier = notifier
        self._seen = seen
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Reload soon; several wishes at once are one."""
        self._asked.set()

    async def run(self) -> None:
        """Serve wishes, and watch the file where that is wanted; cancelled by its owner."""
        watching: asyncio.Task[None] | None = None
        if self._settings.watch_config and self._settings.config_path is not None:
            watching = asyncio.create_task(self._watch(self._settings.config_path))
        try:
            while True:
                await self._asked.wait()
                self._asked.clear()
                try:
                    await self.reload()
                except Exception as error:  # noqa: BLE001
                    # The top frame of this task: a fault of ours here must not end reloading.
                    log_failure("config.failed", error)
        finally:
            if watching is not None:
                watching.cancel()

    async def reload(self) -> None:
        """Read and apply once."""
        self._notifier.reloading()
        try:
            await self._reload()
        finally:
            self._notifier.ready("the configuration was read again")

    async def _reload(self) -> None:
        try:
            resolved = await self._read_in_time()
        except ConfigError as error:
            log_event("config.refused", logging.WARNING, reason=str(error))
            self._tell(f"the configuration stays as it was: {error}")
            return
        new = resolved.settings
        for sentence in resolved.warnings:
            log_event("settings.doubted", logging.WARNING, reason=sentence)
        late = restart_fields(self._settings, new)
        changes = self._apply(new)
        log_event(
            "config.applied",
            added=_names(changes.added),
            removed=_names(changes.removed),
            replaced=_names(changes.replaced),
            adjusted=_names(changes.adjusted),
            at_next_start=_names(late),
        )
        self._tell(describe_changes(changes, late))

    async def _read_in_time(self) -> Resolved:
        try:
            async with asyncio.timeout(READ_LIMIT_S):
                return await in_own_thread(self._read, THREAD)
        except TimeoutError:
            raise ConfigError(f"it could not be read in {READ_LIMIT_S:g} s.") from None

    async def _watch(self, path: str) -> None:
        told = seen = self._seen
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            try:
                now = await in_own_thread(partial(file_facts, path), THREAD)
            except RuntimeError:  # there is no thread to be had for now
                continue
            if now != seen:
                seen = now
            elif now != told and now is not None:
                told = now
                self.ask()


def describe_changes(changes: ModelChanges, late: tuple[str, ...]) -> str:
    """One line for a person."""
    parts = [
        f"{word} {', '.join(ids)}"
        for word, ids in (
            ("added", changes.added),
            ("removed", changes.removed),
            ("replaced", changes.replaced),
            ("adjusted", changes.adjusted),
        )
        if ids
    ]
    text = "; ".join(parts) or "no model changed"
    if late:
        text += f"; at the next start: {', '.join(late)}"
    return f"the configuration was reloaded: {text}"


def _names(names: tuple[str, ...]) -> str | None:
    return ",".join(names) or None
