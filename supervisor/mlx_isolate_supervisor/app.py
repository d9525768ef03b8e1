"""Composition of the supervisor: from settings and listening sockets to a running daemon.

Order of a start: run directory and its lock, log, what an earlier supervisor left, models, HTTP.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Sequence

import msgspec
import uvloop

from mlx_isolate_supervisor.config import ServeSettings
from mlx_isolate_supervisor.daemon import Daemon
from mlx_isolate_supervisor.engines.blas import choose_blas
from mlx_isolate_supervisor.engines.command import EngineCommand
from mlx_isolate_supervisor.engines.orphans import reap_orphans
from mlx_isolate_supervisor.engines.run_paths import run_directory
from mlx_isolate_supervisor.engines.rundir import RunDirectory
from mlx_isolate_supervisor.models import devices, footprints
from mlx_isolate_supervisor.models.devices import DeviceBook
from mlx_isolate_supervisor.models.footprints import FootprintBook
from mlx_isolate_supervisor.models.pool import Pool
from mlx_isolate_supervisor.models.pool_limits import pool_limits
from mlx_isolate_supervisor.settings.layers import Resolved
from mlx_isolate_supervisor.slots.slot_settings import SlotSettings
from mlx_isolate_supervisor.telemetry.display import make_display
from mlx_isolate_supervisor.telemetry.logs import Logs, log_event, start_logging
from mlx_isolate_supervisor.user_folders import cache_folder, state_folder

# At its end the daemon waits so long for its last lines to be taken.
LAST_WORDS_S = 0.5


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What a daemon is started with.

    Attributes:
        resolved: settings and what there is to say about them.
        sockets: listening; closed by whoever opened them.
        read: gathers the settings anew, for a reload.
        engine: how to start an engine; None = the real one.
    """

    resolved: Resolved
    sockets: Sequence[socket.socket]
    read: Callable[[], Resolved]
    engine: EngineCommand | None = None


def run_daemon(launch: Launch) -> int:
    """Serve until a signal; the exit status.

    Raises:
        ConfigError: it cannot start as configured; nothing is left behind.
    """
    settings = launch.resolved.settings
    port: int = launch.sockets[0].getsockname()[1]
    folder = RunDirectory.acquire(run_directory(port, settings.run_dir))
    try:
        name = f"mlx-isolate-{port}"
        logs = start_logging(
            settings.log_level, folder=settings.log_dir, name=name, form=settings.log_format
        )
        for sentence in launch.resolved.warnings:
            log_event("settings.doubted", logging.WARNING, reason=sentence)
        try:
            clear_leftovers(folder)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_serve(launch, folder, logs))
        finally:
            logs.finish(LAST_WORDS_S)
    finally:
        folder.release()


async def _serve(launch: Launch, folder: RunDirectory, logs: Logs) -> int:
    settings = launch.resolved.settings
    display = make_display(logs)
    daemon = Daemon(launch.resolved, logs.book, display, str(folder.path), launch.read)
    daemon.pool = Pool(
        settings.models,
        command=engine_command(settings, launch.engine),
        settings=slot_settings(settings),
        run_directory=folder,
        on_event=daemon.on_event,
        standby=settings.standby,
        limits=pool_limits(settings),
        footprints=FootprintBook(state_folder() / footprints.FILE_NAME),
        devices=DeviceBook(state_folder() / devices.FILE_NAME),
    )
    return await daemon.serve(launch.sockets)


def clear_leftovers(folder: RunDirectory) -> None:
    """End engines that an earlier supervisor left behind, and remove their sockets."""
    for orphan in reap_orphans(folder.path):
        log_event(
            "orphan.killed",
            logging.WARNING,
            model=orphan.model,
            pid=orphan.pid,
            incarnation=orphan.incarnation,
        )
    folder.remove_stray_sockets()


def slot_settings(settings: ServeSettings) -> SlotSettings:
    """The limits of a slot, from the daemon's settings."""
    return SlotSettings(
        queue_timeout_s=settings.queue_timeout_s,
        queued_requests_max=settings.max_queued_requests,
        start_silence_s=settings.start_timeout_s,
        start_after_download_s=settings.start_total_timeout_s,
        drain_timeout_s=settings.drain_timeout_s,
        stop_window_s=settings.stop_timeout_s,
        watchdog_timeout_s=settings.watchdog_timeout_s,
        report_silence_s=settings.report_silence_s,
        stall_timeout_s=settings.stall_timeout_s,
        memory_policy=settings.memory_policy,
    )


def engine_command(settings: ServeSettings, given: EngineCommand | None) -> EngineCommand:
    """How engines are started: `given` or the real one, with the daemon's settings in it.

    Raises:
        ConfigError: the BLAS asked for cannot be preloaded.
    """
    command = given or EngineCommand()
    blas = choose_blas(settings.blas)
    log_event("blas.chosen", path=blas.path, reason=blas.reason)
    return msgspec.structs.replace(
        command,
        env=blas.environment(os.environ.get("LD_PRELOAD")) | command.env,
        nice=settings.engine_nice,
        cache_home=settings.cache_home or str(cache_folder()),
        log_level=settings.log_level,
    )
