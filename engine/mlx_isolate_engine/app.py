"""One engine process from its spec pipe to its exit status: the composition root.

Owns the order of things: wait for the spec, load, listen, report, stop. Knows nothing of models
(see runtime.py) or of requests (see server.py).
"""

import asyncio
import faulthandler
import functools
import logging
import os
import sys
import time
from typing import Any, NoReturn

import msgspec
import uvloop

from mlx_isolate_engine.arguments import Arguments
from mlx_isolate_engine.aside import StopSignal
from mlx_isolate_engine.footprint import Footprint
from mlx_isolate_engine.identity import Identity
from mlx_isolate_engine.model.errors import ModelError
from mlx_isolate_engine.process_name import name_in_ps
from mlx_isolate_engine.report import Reporter
from mlx_isolate_engine.runtime import LoadRuntime, PrepareModel, Runtime
from mlx_isolate_engine.server import EngineServer
from mlx_isolate_engine.spec import read_specs
from mlx_isolate_shared.config import EXIT_CANNOT_WORK
from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_shared.wire import Loading, Prepare, Progress, Ready, Start

log = logging.getLogger("engine")

EXIT_FAILED = 1
# How long one thread may go on while another wants the interpreter. A request changes threads some
# six times before it can be generated, and generating for a fast GPU is all Python: at the default
# of 5 ms that alone is 30 ms for each request.
SWITCH_INTERVAL_S = 0.0005
# What is left of the active completions after SIGTERM is cut after this time. The supervisor has
# drained before it sends SIGTERM, and sends SIGKILL after 30 s.
FINISH_S = 2.0
# Longest wait for the report pipe to take the last words of a failing engine.
_LAST_WORDS_S = 1.0


def run(
    arguments: Arguments, stop: StopSignal, load_runtime: LoadRuntime, prepare: PrepareModel
) -> NoReturn:
    """Run one engine process to its end; never returns."""
    faulthandler.enable(all_threads=True)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    reporter = Reporter(arguments.report_fd)
    try:
        status = _run_to_status(arguments.spec_fd, stop, reporter, load_runtime, prepare)
    finally:
        stop.is_ignored()
    reporter.close(_LAST_WORDS_S)
    logging.shutdown()
    sys.stdout.flush()
    # Not sys.exit: native threads of the model must not hold up or crash the exit.
    os._exit(status)


def _run_to_status(
    spec_fd: int,
    stop: StopSignal,
    reporter: Reporter,
    load_runtime: LoadRuntime,
    prepare: PrepareModel,
) -> int:
    try:
        start = _wait_for_start(spec_fd, reporter, prepare)
        if start is None:
            return 0
        _log_to_stderr(start.log_level)
        # Not uvloop.run: it would wait for executor threads before it returned, stuck ones too.
        loop = uvloop.new_event_loop()
        asyncio.set_event_loop(loop)
        status: int = loop.run_until_complete(_Engine(start, stop, reporter, load_runtime).run())
        return status
    except ModelError as error:
        log.error("engine.load_failed code=%s reason=%s", error.code, error)
        reporter.failed(error.code, error.message)
        return EXIT_CANNOT_WORK if error.is_permanent else EXIT_FAILED
    except ConfigError as error:
        log.error("engine.cannot_work reason=%s", error)
        reporter.failed("cannot_work", str(error))
        return EXIT_CANNOT_WORK
    # Also what would end a program: foreign code that is imported may say why it cannot go on so.
    except BaseException as error:
        log.exception("engine.failed")
        reporter.failed("engine_failed", f"{type(error).__name__}: {error}")
        return EXIT_FAILED


def _wait_for_start(spec_fd: int, reporter: Reporter, prepare: PrepareModel) -> Start | None:
    was_standby = False
    for spec in read_specs(spec_fd):
        match spec:
            case Prepare():
                prepare(spec)
                reporter.loading(Loading(stage="prepared"))
                was_standby = True
            case Start():
                if was_standby:
                    name_in_ps(spec.model_id, spec.incarnation)
                return spec
    return None


class _Engine:
    """The part of an engine's life that needs an event loop."""

    def __init__(
        self, start: Start, stop: StopSignal, reporter: Reporter, load_runtime: LoadRuntime
    ) -> None:
        self._start = start
        self._stop = stop
        self._reporter = reporter
        self._load_runtime = load_runtime
        self._footprint = Footprint()

    async def run(self) -> int:
        """Load, serve until SIGTERM or until generation fails; returns the exit status."""
        began = time.monotonic()
        asked_to_stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._stop.calls(lambda: loop.call_soon_threadsafe(asked_to_stop.set))
        stop = asyncio.create_task(asked_to_stop.wait())
        load = asyncio.ensure_future(self._load_runtime(self._start, self._reporter.loading))
        await asyncio.wait({load, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not load.done():
            log.info("engine.stopped while=loading")
            load.cancel()
            # The load itself cannot be interrupted; nothing of it outlives the process.
            os._exit(0)
        runtime = load.result()
        server = EngineServer(
            runtime.service,
            Identity.of(self._start, runtime.facts),
            self._start.settings,
            on_completed=self._reporter.progress_now,
            cache=runtime.cache,
        )
        await server.start(self._start.socket_path)
        self._report_ready(runtime, time.monotonic() - began)
        ends: set[asyncio.Future[Any]] = {stop, runtime.failure}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not stop.done():
            reason = runtime.failure.result()
            log.error("engine.failed reason=%s", reason)
            self._reporter.failed("generation_failed", reason)
            return EXIT_FAILED
        log.info("engine.stopping active=%d", server.active)
        await server.stop(FINISH_S)
        await runtime.close()
        log.info("engine.stopped")
        return 0

    def _report_ready(self, runtime: Runtime, load_s: float) -> None:
        ready = Ready(
            pid=os.getpid(),
            socket_path=self._start.socket_path,
            load_s=load_s,
            facts=runtime.facts,
        )
        self._reporter.ready(ready, functools.partial(self._figures, runtime))
        log.info("engine.ready load_s=%.2f", load_s)

    def _figures(self, runtime: Runtime) -> Progress:
        footprint_bytes, kind = self._footprint.read()
        return msgspec.structs.replace(
            runtime.progress(), footprint_bytes=footprint_bytes, footprint_kind=kind
        )


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(
        stream=sys.stderr, level=level.upper(), format="%(levelname)s %(name)s %(message)s"
    )
