"""One engine process: reports, output ring, signals, reap; no policy.

Everything runs on the event loop of the main thread: the parent-death signal that engines ask for
fires when the *thread* that spawned them ends.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Protocol

from mlx_isolate_shared import wire
from mlx_isolate_shared.config import PIPE_LINE_BYTES_MAX
from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.engines.child import (
    EngineName,
    Exit,
    Pipes,
    close_all,
    describe_status,
    environment_of,
    forbid_core_dumps,
    open_pipes,
    start_child,
)
from mlx_isolate_supervisor.engines.command import EngineCommand
from mlx_isolate_supervisor.engines.death_watch import DeathWatch
from mlx_isolate_supervisor.engines.hearing import hear
from mlx_isolate_supervisor.engines.orphans import (
    EngineRecord,
    forget_engine,
    process_start,
    record_engine,
)
from mlx_isolate_supervisor.engines.pipes import LineSplitter, PipeReader, PipeWriter
from mlx_isolate_supervisor.engines.rundir import RunDirectory
from mlx_isolate_supervisor.harmless import harmless_output
from mlx_isolate_supervisor.telemetry.logs import log_engine_line, log_event

# Lines of output that are kept of an engine; without a bound a chatty one fills the memory.
OUTPUT_LINES_MAX = 2000
# Longer lines of output are cut in pieces of this size.
OUTPUT_LINE_BYTES_MAX = 4096
# The end of the report pipe, or a broken connection, announces a death; the process becomes
# reapable a moment later, so it is asked for often and then ever less.
_EXIT_POLLS_S = (0.0, 0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.05, 0.1, 0.2)
# How often it is asked for without any hint (a helper process may hold the pipes open).
_EXIT_POLL_IDLE_S = 0.5


class ProcessListener(Protocol):
    """Who is told about one engine process; called on the loop, must not block."""

    def on_report(self, process: "EngineProcess", message: wire.Report) -> None:
        """A report line came."""
        ...

    def on_report_end(self, process: "EngineProcess") -> None:
        """The report pipe ended while the process lives."""
        ...

    def on_dying(self, process: "EngineProcess") -> None:
        """Nothing of the process runs any more, but it is not reaped yet; not told everywhere."""
        ...

    def on_exit(self, process: "EngineProcess", exit: Exit) -> None:
        """The process is reaped; its pipes, socket and record are gone. Called once, last."""
        ...


def _supersedes(later: wire.Report, earlier: wire.Report) -> bool:
    """Whether nothing is lost when only the later of two report lines is heard."""
    match later, earlier:
        case wire.Loading(), wire.Loading():
            return later.stage == earlier.stage
        case wire.Progress(), wire.Progress():
            return True
        case _:
            return False


class EngineProcess:
    """A spawned engine. Make one with `spawn`, or with `launch` and give it a model by `begin`.

    Attributes:
        output: the ring that its lines of stdout and stderr go to, shared with its predecessors.
        failure: the last `failed` line it reported.
        violations: report lines that were no report (a lying or foreign engine).
        dying: how it ends, once none of its code runs any more while the kernel still takes it
            down; None until then, and where that cannot be known before it is reaped.
    """

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        pipes: Pipes,
        name: EngineName,
        socket_path: Path,
        listener: ProcessListener,
        output: deque[str],
    ) -> None:
        """Adopt a child; use `spawn` or `launch`."""
        self._popen = popen
        self.pid = popen.pid
        self.model_id = name.id
        self.incarnation = name.incarnation
        self.socket_path = str(socket_path)
        self._folder = socket_path.parent
        self.output = output
        self._output_lines = 0
        self.failure: wire.Failed | None = None
        self.violations = 0
        self.dying: Exit | None = None
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[Exit] = self._loop.create_future()
        self._polls = len(_EXIT_POLLS_S)
        self._poll_timer = self._loop.call_later(_EXIT_POLL_IDLE_S, self._poll_exit)
        self._death_watch = DeathWatch(
            popen.pid, on_dying=self._note_dying, on_ended=self.expect_exit
        )
        self._lifeline = pipes.lifeline[1]
        self._spec = PipeWriter(pipes.spec[1])
        self._report = PipeReader(
            pipes.report[0],
            LineSplitter(PIPE_LINE_BYTES_MAX, "drop"),
            on_lines=self._hear,
            on_end=self._report_ended,
        )
        self._output = PipeReader(
            pipes.output[0],
            LineSplitter(OUTPUT_LINE_BYTES_MAX, "cut"),
            on_lines=self._keep_output,
            on_end=self.expect_exit,
        )

    @classmethod
    def launch(
        cls,
        command: EngineCommand,
        environment: dict[str, str],
        name: EngineName,
        *,
        run_directory: RunDirectory,
        listener: ProcessListener,
        output: deque[str],
    ) -> "EngineProcess":
        """Start a child in its own process group; it waits for its configuration.

        Raises:
            OSError: it cannot be started (no such program, no memory, no descriptors).
        """
        # All that can fail comes before there is a child, or with it: none is left to nobody.
        socket_path = run_directory.new_socket_path()
        pipes = open_pipes()
        try:
            popen = start_child(command, environment, name, pipes)
        except BaseException:
            close_all(*pipes.ours)
            raise
        finally:
            close_all(*pipes.theirs)
        process = cls(popen, pipes, name, socket_path, listener, output)
        forbid_core_dumps(popen.pid)
        process._record()
        return process

    @classmethod
    def spawn(
        cls,
        command: EngineCommand,
        spec: ModelSpec,
        incarnation: int,
        *,
        run_directory: RunDirectory,
        listener: ProcessListener,
        output: deque[str],
    ) -> "EngineProcess":
        """Start a child in its own process group and send it its whole configuration.

        Raises:
            OSError: as `launch`.
        """
        process = cls.launch(
            command,
            environment_of(command, spec),
            EngineName(spec.id, incarnation),
            run_directory=run_directory,
            listener=listener,
            output=output,
        )
        process._configure(command, spec)
        return process

    def prepare(self, prepare: wire.Prepare) -> None:
        """Let a launched child do ahead what it can."""
        self._spec.send(wire.encode_line(prepare), last=False)

    def begin(
        self,
        command: EngineCommand,
        spec: ModelSpec,
        incarnation: int,
        *,
        listener: ProcessListener,
        output: deque[str],
    ) -> None:
        """Make a launched child an engine of `spec`, with another listener and ring."""
        self.model_id, self.incarnation = spec.id, incarnation
        self._listener, self.output, self._output_lines = listener, output, 0
        self._record()
        self._configure(command, spec)
        # Someone may have stopped it while nobody looked.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGCONT)

    def _configure(self, command: EngineCommand, spec: ModelSpec) -> None:
        start = wire.Start(
            model_id=spec.id,
            model=spec.model,
            incarnation=self.incarnation,
            socket_path=self.socket_path,
            cache_home=command.cache_home,
            log_level=command.log_level,
            settings=spec.engine,
        )
        self._spec.send(wire.encode_line(start), last=True)

    def _record(self) -> None:
        started = process_start(self.pid)
        if started is not None:
            record = EngineRecord(
                pid=self.pid,
                started=started,
                model=self.model_id,
                incarnation=self.incarnation,
            )
            try:
                record_engine(self._folder, record)
            except OSError as error:
                # It ends with us all the same, but for a system without a parent-death signal.
                log_event(
                    "engine.not_recorded",
                    logging.WARNING,
                    model=self.model_id,
                    incarnation=self.incarnation,
                    reason=error.strerror,
                )

    def _hear(self, lines: list[bytes]) -> None:
        messages: list[wire.Report] = []
        for line in lines:
            message = hear(line)
            if message is None:
                self._note_violation()
                continue
            if isinstance(message, wire.Failed):
                self.failure = message
            # Of a flood that was read at once, the last of its kind says it all.
            if messages and _supersedes(message, messages[-1]):
                messages.pop()
            messages.append(message)
        for message in messages:
            if isinstance(message, wire.Ready | wire.Progress):
                self._death_watch.watch_threads()
            self._listener.on_report(self, message)

    def _note_violation(self) -> None:
        self.violations += 1
        if self.violations == 1:
            log_event(
                "engine.bad_report",
                logging.WARNING,
                model=self.model_id,
                incarnation=self.incarnation,
            )

    def _keep_output(self, lines: list[bytes]) -> None:
        for line in lines:
            text = harmless_output(line.decode(errors="replace"))
            self.output.append(text)
            self._output_lines += 1
            log_engine_line(self.model_id, self.incarnation, text)

    def tail(self, lines: int) -> tuple[str, ...]:
        """The last so many lines of output that are its own, oldest first."""
        own = min(lines, self._output_lines, len(self.output))
        return tuple(islice(self.output, len(self.output) - own, None))

    def _report_ended(self) -> None:
        self.expect_exit()
        self._listener.on_report_end(self)

    def _note_dying(self, status: int) -> None:
        if not self._exited.done():
            self.dying = describe_status(os.waitstatus_to_exitcode(status))
            self._listener.on_dying(self)

    def expect_exit(self) -> None:
        """Something announced a death: look for it closely for a while."""
        if not self._exited.done():
            self._polls = 0
            self._poll_exit()

    def _poll_exit(self) -> None:
        self._poll_timer.cancel()
        returncode = self._popen.poll()
        if returncode is not None:
            self._settle(describe_status(returncode))
            return
        delay = _EXIT_POLL_IDLE_S
        if self._polls < len(_EXIT_POLLS_S):
            delay = _EXIT_POLLS_S[self._polls]
            self._polls += 1
        self._poll_timer = self._loop.call_later(delay, self._poll_exit)

    def _settle(self, exit: Exit) -> None:
        """The process is reaped: end its helpers, take what it still said, leave nothing behind."""
        if self._exited.done():
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._exited.set_result(exit)
        self._death_watch.close()
        self._report.close()
        self._output.close()
        self._spec.close()
        os.close(self._lifeline)
        # Whoever waits for this end must learn of it, whatever has become of the run directory.
        with contextlib.suppress(OSError):
            Path(self.socket_path).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            forget_engine(self._folder, self.pid)
        self._listener.on_exit(self, exit)

    @property
    def has_exited(self) -> bool:
        """Whether the process is reaped."""
        return self._exited.done()

    def is_alive(self) -> bool:
        """Whether the process still runs, asked of the system just now."""
        if not self._exited.done() and self._popen.poll() is not None:
            self.expect_exit()
        return not self._exited.done()

    async def wait_exit(self) -> Exit:
        """Wait until the process is reaped. Cancelling the wait does no harm."""
        return await asyncio.shield(self._exited)

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the engine, if it still lives, and wake it: a stopped process hears nothing.

        The whole group gets it, so that a launcher's real engine hears it too.
        """
        if self._popen.poll() is not None:
            self.expect_exit()
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
            os.killpg(self.pid, signal.SIGCONT)
        if number is signal.SIGKILL:
            self.expect_exit()
