"""The running daemon: its HTTP application, its signals, its status and the order of its end.

Stop: no new connections, running requests drained, engines ended, connections closed.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence

from aiohttp import web

from mlx_isolate_shared.footprint import MemoryKind
from mlx_isolate_supervisor import exit_codes
from mlx_isolate_supervisor.config import ServeSettings
from mlx_isolate_supervisor.engines.memory import footprint
from mlx_isolate_supervisor.harmless import harmless
from mlx_isolate_supervisor.listening import BACKLOG, urls_of, wildcards_of
from mlx_isolate_supervisor.models.pool import Pool
from mlx_isolate_supervisor.models.pool_limits import pool_limits
from mlx_isolate_supervisor.pages.auth import KeyGuard, KeyRing
from mlx_isolate_supervisor.pages.engine_pages import EnginePages
from mlx_isolate_supervisor.pages.routes import Routes
from mlx_isolate_supervisor.pages.ui_routes import add_ui_routes
from mlx_isolate_supervisor.reconfigure import Reconfiguration
from mlx_isolate_supervisor.relay.client import client_factory, runner_options
from mlx_isolate_supervisor.relay.edge import Edge
from mlx_isolate_supervisor.relay.hosts import HostPolicy
from mlx_isolate_supervisor.relay.limits import RelayLimits
from mlx_isolate_supervisor.relay.origins import OriginPolicy
from mlx_isolate_supervisor.relay.work import add_work_routes
from mlx_isolate_supervisor.service.notify import Notifier
from mlx_isolate_supervisor.settings.changes import ModelChanges, merge_live
from mlx_isolate_supervisor.settings.layers import Resolved
from mlx_isolate_supervisor.stop_signals import StopSignals
from mlx_isolate_supervisor.telemetry.display import (
    Display,
    describe_place,
    describe_ready,
    describe_start,
)
from mlx_isolate_supervisor.telemetry.logs import LogBook, log_event, set_level
from mlx_isolate_supervisor.telemetry.observability import Observability
from mlx_isolate_supervisor.telemetry.request_log import RequestLog
from mlx_isolate_supervisor.telemetry.status import (
    LoadStep,
    SlotEvent,
    Status,
    SupervisorStatus,
    Transition,
)
from mlx_isolate_supervisor.version import installed_version

# Part of the shutdown timeout kept for closing connections once the engines are gone.
CLOSING_S = 2.0
# An engine ends a request whose client does not read by itself; the relay waits this much longer.
CLIENT_STALL_GRACE_S = 30.0
# A walk over this process's pages takes a millisecond in which nothing else is done, so its size
# is looked at no more often than this.
OWN_MEMORY_READ_S = 5.0
# After a second signal connections get this long to take their last bytes.
CUT_CLOSING_S = 0.3
# Lifecycle events that the person at the terminal should see.
TROUBLE = {
    "start_failed": "did not start: {}; another try follows",
    "start_timeout": "did not start: {}",
    "hung": "is ended: {}",
    "stop_timeout": "is killed: it had not ended by itself",
    "lost": "lost its engine: {}; a new one follows",
    "circuit_opened": "failed too often, the next try comes after a pause: {}",
    "cannot_work": "cannot be served until that is repaired: {}",
    "successor_lost": "keeps its engine, the new one failed: {}",
}


class Daemon:
    """One running supervisor.

    Args:
        resolved: what it runs with, and where that came from.
        book: what was logged.
        display: what a person sees.
        run_dir: its run directory.
        read: gathers the settings anew, for a reload.

    Attributes:
        pool: its models; set before it serves.
    """

    pool: Pool

    def __init__(
        self,
        resolved: Resolved,
        book: LogBook,
        display: Display,
        run_dir: str,
        read: Callable[[], Resolved],
    ) -> None:
        self._settings = settings = resolved.settings
        self._display = display
        self._run_dir = run_dir
        self._watch = Observability(self.status, lambda: self.pool.snapshot())
        self._guard = KeyGuard(settings.api_keys)
        self._began = time.monotonic()
        self._stop = asyncio.Event()
        self._cut = asyncio.Event()
        self._signals = StopSignals(time.monotonic)
        self._memory: tuple[int, MemoryKind] = (0, "rss")
        self._memory_read_at = float("-inf")
        self.book = book
        self.version = installed_version()
        self.started_at = time.time()
        self.unlisted: set[str] = set()
        self.load_timeout_s = settings.start_total_timeout_s
        self._know_models()
        self._notifier = Notifier()
        self._reconfiguration = Reconfiguration(
            settings, read, self._apply, display.line, self._notifier, resolved.file_facts
        )

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
            time=time.time(),
            standbys=self.pool.standbys(),
            memory_budget_bytes=self.pool.limits.budget_bytes,
            memory_claimed_bytes=self.pool.claimed_bytes,
            models_max=self.pool.limits.models_max,
            gpus=self.pool.gpus(),
        )
        return Status(supervisor=own, models=self.pool.snapshot())

    def _own_memory(self) -> tuple[int, MemoryKind]:
        """Read only when asked, and not every time: the kernel walks all pages for it."""
        now = time.monotonic()
        if now - self._memory_read_at >= OWN_MEMORY_READ_S:
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
        trouble = trouble_of(moved)
        if trouble is not None:
            self._display.line(f"{moved.model} {trouble}")
        if moved.after == "ready" and moved.before != "ready":
            model = next(m for m in self.pool.snapshot() if m.id == moved.model)
            self._display.line(describe_ready(model.id, model.load_s, model.facts))

    async def serve(self, sockets: Sequence[socket.socket]) -> int:
        """Serve on `sockets` until a signal; the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)
        limits = relay_limits(self._settings)
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
        # Until the very end: a long orderly stop is no hang.
        watchdog = asyncio.create_task(self._notifier.watch(), name="notify")
        try:
            self.pool.start()
            self._tell_start(sockets)
            reloading = asyncio.create_task(self._reconfiguration.run(), name="reconfigure")
            await self._stop.wait()
            reloading.cancel()
        finally:
            await self._shut_down(servers, runner)
            watchdog.cancel()
        if self._signals.cut_by is not None:
            return exit_codes.CUT_BASE + self._signals.cut_by
        return exit_codes.OK

    def _application(self, limits: RelayLimits) -> web.Application:
        settings = self._settings
        app = web.Application()
        origins = OriginPolicy(allowed=settings.allowed_origins)
        hosts = HostPolicy(bound_host=settings.host, allowed=settings.allowed_hosts)
        Edge(origins, hosts, limits.header_bytes_max).install(app)
        self._guard.install(app)
        Routes(self).add_to(app)
        EnginePages(self.pool).add_to(app)
        add_ui_routes(app, self._watch, metrics=settings.metrics)
        add_work_routes(app, self.pool, limits, RequestLog(self._watch.requests))
        return app

    def _tell_start(self, sockets: Sequence[socket.socket]) -> None:
        urls, wildcards = urls_of(sockets), wildcards_of(sockets)
        log_event(
            "daemon.started",
            pid=os.getpid(),
            urls=",".join(urls),
            wildcards=",".join(wildcards) or None,
            version=self.version,
        )
        place = describe_place(urls, wildcards)
        self._display.line(describe_start(self.version, place, urls[0], self._settings.models))
        self._notifier.ready(f"listening on {place}")

    def _apply(self, new: ServeSettings) -> ModelChanges:
        """Take over from new settings what can change while running."""
        changes = self.pool.reconfigure(new.models, pool_limits(new))
        self._settings = merge_live(self._settings, new)
        self._guard.ring = KeyRing(new.api_keys)
        set_level(new.log_level)
        self._know_models()
        return changes

    def _know_models(self) -> None:
        self.unlisted = {model.id for model in self._settings.models if model.unlisted}
        self.book.track(model.id for model in self._settings.models)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP and self._settings.config_path is not None:
            self._reconfiguration.ask()
            return
        name = signal.Signals(number).name
        match self._signals.hear(number):
            case "stop":
                log_event("daemon.stopping", signal=name)
                self._display.line(
                    "stopping; running requests may finish, a second Ctrl-C cuts them"
                )
                self._stop.set()
            case "cut":
                log_event("daemon.cut", logging.WARNING, signal=name)
                self._display.line("cutting what still runs")
                self._cut.set()
                self.pool.cut()
            case "repeat":
                pass

    async def _shut_down(self, servers: Sequence[asyncio.Server], runner: web.AppRunner) -> None:
        self._stop.set()
        self._notifier.stopping()
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


def trouble_of(moved: Transition) -> str | None:
    """What a person is told about a step that is bad news; None where it is not."""
    if moved.is_planned:
        return None
    # An engine that ends while it loads was nobody's to lose.
    event = "start_failed" if (moved.before, moved.event) == ("starting", "lost") else moved.event
    told = TROUBLE.get(event)
    return None if told is None else told.format(harmless(moved.reason.removesuffix(".")))


def relay_limits(settings: ServeSettings) -> RelayLimits:
    """The limits of the relay, from the daemon's settings."""
    return RelayLimits(
        client_stall_s=settings.stall_timeout_s + CLIENT_STALL_GRACE_S,
        body_bytes_max=settings.body_bytes_max,
        bodies_bytes_max=settings.max_queued_bytes,
        header_bytes_max=settings.header_bytes_max,
    )
