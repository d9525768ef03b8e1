"""The daemon: puts all parts of the supervisor together, and takes them down in order.

Start: run directory and its lock, log, what an earlier supervisor left, models, HTTP.
Stop: no new connections, running requests drained, engines ended, connections closed, lock.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Sequence

import msgspec
import uvloop
from aiohttp import web

from mlx_isolate_shared.paths import run_directory
from mlx_isolate_supervisor import exit_codes
from mlx_isolate_supervisor.auth import install_keys
from mlx_isolate_supervisor.blas import choose_blas
from mlx_isolate_supervisor.config import ServeSettings
from mlx_isolate_supervisor.display import Display, describe_ready, describe_start, make_display
from mlx_isolate_supervisor.listening import BACKLOG, urls_of
from mlx_isolate_supervisor.logs import LogBook, Logs, log_event, start_logging
from mlx_isolate_supervisor.memory import footprint
from mlx_isolate_supervisor.observability import Observability
from mlx_isolate_supervisor.orphans import reap_orphans
from mlx_isolate_supervisor.pool import Pool
from mlx_isolate_supervisor.relay.client import client_factory, runner_options
from mlx_isolate_supervisor.relay.edge import Edge
from mlx_isolate_supervisor.relay.hosts import HostPolicy
from mlx_isolate_supervisor.relay.limits import RelayLimits
from mlx_isolate_supervisor.relay.origins import OriginPolicy
from mlx_isolate_supervisor.relay.work import add_work_routes
from mlx_isolate_supervisor.request_log import RequestLog
from mlx_isolate_supervisor.routes import Routes
from mlx_isolate_supervisor.rundir import RunDirectory
from mlx_isolate_supervisor.settings.layers import Resolved
from mlx_isolate_supervisor.slot_settings import EngineCommand, SlotSettings
from mlx_isolate_supervisor.status import (
    LoadStep,
    MemoryKind,
    SlotEvent,
    Status,
    SupervisorStatus,
    Transition,
)
from mlx_isolate_supervisor.ui_routes import add_ui_routes
from mlx_isolate_supervisor.version import installed_version

# Part of the shutdown timeout kept for closing connections once the engines are gone.
CLOSING_S = 2.0
# After a second signal connections get this long to take their last bytes.
CUT_CLOSING_S = 0.3
# Lifecycle events that the person at the terminal should see.
TROUBLE = frozenset(
    {"start_failed", "start_timeout", "hung", "stop_timeout", "lost", "circuit_opened",
     "cannot_work"}
)  # fmt: skip


def run_daemon(
    resolved: Resolved, sockets: Sequence[socket.socket], engine: EngineCommand | None = None
) -> int:
    """Serve until a signal; the exit status.

    Args:
        resolved: settings and what there is to say about them.
        sockets: listening; closed by the caller.
        engine: how to start an engine; None = the real one.

    Raises:
        ConfigError: it cannot start as configured; nothing is left behind.
    """
    settings = resolved.settings
    port: int = sockets[0].getsockname()[1]
    folder = RunDirectory.acquire(run_directory(port, settings.run_dir))
    try:
        name = f"mlx-isolate-{port}"
        logs = start_logging(settings.log_level, folder=settings.log_dir, name=name)
        for sentence in resolved.warnings:
            log_event("settings.doubted", logging.WARNING, reason=sentence)
        clear_leftovers(folder)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(settings, sockets, folder, logs, engine))
    finally:
        folder.release()


async def _serve(
    settings: ServeSettings,
    sockets: Sequence[socket.socket],
    folder: RunDirectory,
    logs: Logs,
    engine: EngineCommand | None,
) -> int:
    daemon = Daemon(settings, logs, make_display(logs), folder)
    daemon.pool = Pool(
        settings.models,
        command=engine_command(settings, engine),
        settings=slot_settings(settings),
        run_directory=folder,
        on_event=daemon.on_event,
    )
    return await daemon.serve(sockets)


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
        cache_home=settings.cache_home or _user_cache(),
        log_level=settings.log_level,
    )


def _user_cache() -> str:
    from platformdirs import user_cache_path

    return str(user_cache_path("mlx-isolate", appauthor=False))


class Daemon:
    """One running supervisor.

    Args:
        settings: what it runs with.
        logs: handlers in place.
        display: what a person sees.
        folder: its run directory.
    """

    pool: Pool

    def __init__(
        self, settings: ServeSettings, logs: Logs, display: Display, folder: RunDirectory
    ) -> None:
        self._settings = settings
        self._logs = logs
        self._display = display
        self._run_dir = str(folder.path)
        self._watch = Observability(self.status)
        self._began = time.monotonic()
        self._stop = asyncio.Event()
        self._cut = asyncio.Event()
        self._signals: list[int] = []
        self._memory: tuple[int, MemoryKind] = (0, "rss")
        self._memory_read_at = float("-inf")
        self.book: LogBook = logs.book
        self.version = installed_version()
        self.started_at = time.time()
        self.unlisted = {model.id for model in settings.models if model.unlisted}
        self.load_timeout_s = settings.start_total_timeout_s
        self.book.track(model.id for model in settings.models)

    @property
    def is_stopping(self) -> bool:
        """Whether a shutdown has begun."""
        return self._stop.is_set()

    def status(self) -> Status:
        """Everything, from memory."""
        memory_bytes, kind = self._own_memory()
        own = SupervisorStatus(
            pid=os.getpid(),
            version=self.version,
            uptime_s=time.monotonic() - self._began,
            memory_bytes=memory_bytes,
            memory_kind=kind,
            run_dir=self._run_dir,
        )
        return Status(supervisor=own, models=self.pool.snapshot())

    def _own_memory(self) -> tuple[int, MemoryKind]:
        """Read at most once a second: the kernel walks all pages for it."""
        now = time.monotonic()
        if now - self._memory_read_at >= 1.0:
            self._memory = footprint(os.getpid()) or self._memory
            self._memory_read_at = now
        return self._memory

    def on_event(self, event: SlotEvent) -> None:
        """Count and show a step of a model's life."""
        self._watch.slot_event(event)
        match event:
            case LoadStep():
                self._display.loading(event.model, event.loading)
            case Transition():
                self._show(event)

    def _show(self, moved: Transition) -> None:
        if moved.after != "starting":
            self._display.loaded(moved.model)
        if moved.event in TROUBLE:
            self._display.line(f"{moved.model}: {moved.event}: {moved.reason}")
        if moved.after == "ready" and moved.before != "ready":
            model = next(m for m in self.pool.snapshot() if m.id == moved.model)
            self._display.line(describe_ready(model.id, model.load_s, model.facts))

    async def serve(self, sockets: Sequence[socket.socket]) -> int:
        """Serve on `sockets` until a signal; the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        limits = self._limits()
        runner = web.AppRunner(
            self._application(limits),
            handle_signals=False,
            shutdown_timeout=CLOSING_S,
            **runner_options(limits),
        )
        await runner.setup()
        connect = client_factory(runner, limits)
        servers = [
            await loop.create_server(connect, sock=listener, backlog=BACKLOG)
            for listener in sockets
        ]
        try:
            self.pool.start()
            self._tell_start(sockets)
            await self._stop.wait()
        finally:
            await self._shut_down(servers, runner)
        if len(self._signals) > 1:
            return exit_codes.CUT_BASE + self._signals[1]
        return exit_codes.OK

    def _limits(self) -> RelayLimits:
        return RelayLimits(
            body_bytes_max=self._settings.body_bytes_max,
            bodies_bytes_max=self._settings.max_queued_bytes,
            header_bytes_max=self._settings.header_bytes_max,
        )

    def _application(self, limits: RelayLimits) -> web.Application:
        settings = self._settings
        app = web.Application()
        origins = OriginPolicy(allowed=settings.allowed_origins)
        hosts = HostPolicy(bound_host=settings.host, allowed=settings.allowed_hosts)
        Edge(origins, hosts, limits.header_bytes_max).install(app)
        install_keys(app, settings.api_keys)
        Routes(self).add_to(app)
        add_ui_routes(app, self._watch, metrics=settings.metrics)
        add_work_routes(app, self.pool, limits, RequestLog(self._watch.requests))
        return app

    def _tell_start(self, sockets: Sequence[socket.socket]) -> None:
        urls = urls_of(sockets)
        models = [(model.id, model.model) for model in self._settings.models]
        log_event("daemon.started", pid=os.getpid(), urls=",".join(urls), version=self.version)
        self._display.line(describe_start(self.version, urls, models))

    def _on_signal(self, number: int) -> None:
        self._signals.append(number)
        name = signal.Signals(number).name
        if len(self._signals) == 1:
            log_event("daemon.stopping", signal=name)
            self._display.line("stopping; once more to cut what is running")
            self._stop.set()
        else:
            log_event("daemon.cut", logging.WARNING, signal=name)
            self._cut.set()
            self.pool.cut()

    async def _shut_down(self, servers: Sequence[asyncio.Server], runner: web.AppRunner) -> None:
        self._stop.set()
        for server in servers:
            server.close()
        await self.pool.stop(max(0.0, self._settings.shutdown_timeout_s - CLOSING_S))
        self.book.end()
        closing = asyncio.ensure_future(runner.cleanup())
        cut = asyncio.ensure_future(self._cut.wait())
        await asyncio.wait({closing, cut}, return_when=asyncio.FIRST_COMPLETED)
        if not closing.done():
            await asyncio.wait({closing}, timeout=CUT_CLOSING_S)
        cut.cancel()
        log_event("daemon.stopped", uptime_s=time.monotonic() - self._began)
