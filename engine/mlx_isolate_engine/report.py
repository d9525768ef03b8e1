"""Writes the report pipe: load stages, readiness or failure, then counters for ever.

One thread owns the descriptor, so that a supervisor that does not read holds up nothing else. A
closed pipe is not an error here: whether the supervisor still lives is the lifeline's question.
"""

import os
import queue
import threading
import time
from collections.abc import Callable

from mlx_isolate_shared.config import PROGRESS_INTERVAL_S
from mlx_isolate_shared.wire import Failed, Loading, Progress, Ready, Report, encode_line

# Progress lines are due a little early, so that scheduling delays do not break the promise.
_INTERVAL_S = PROGRESS_INTERVAL_S * 0.8
# Longest failure message on the pipe, in characters; the whole text is in the log.
_MESSAGE_MAX = 4000

Figures = Callable[[], Progress]


class Reporter:
    """The report pipe's only writer; every method may be called from any thread."""

    def __init__(self, report_fd: int) -> None:
        self._fd = report_fd
        self._inbox: queue.SimpleQueue[Report | Figures | None] = queue.SimpleQueue()
        self._figures: Figures | None = None
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="report", daemon=True)
        self._thread.start()

    def loading(self, loading: Loading) -> None:
        """Tell that the load moves."""
        self._inbox.put(loading)

    def ready(self, ready: Ready, figures: Figures) -> None:
        """Tell that the engine serves; from now on `figures` is asked for progress lines."""
        self._inbox.put(ready)
        self._inbox.put(figures)

    def failed(self, code: str, message: str) -> None:
        """Tell why the engine is about to exit."""
        self._inbox.put(Failed(code=code, message=message[:_MESSAGE_MAX]))

    def progress_now(self) -> None:
        """Write a progress line at once instead of at its time."""
        figures = self._figures
        if figures is not None:
            self._inbox.put(figures)

    def close(self, timeout_s: float) -> None:
        """Write what is waiting, for at most `timeout_s`; a supervisor may have stopped reading."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            try:
                wait_s = max(0.0, due - time.monotonic()) if self._figures else None
                item = self._inbox.get(timeout=wait_s)
            except queue.Empty:
                item = self._figures
            if item is None:
                return
            if callable(item):
                self._figures = item
                item = item()
                due = time.monotonic() + _INTERVAL_S
            self._write(encode_line(item))

    def _write(self, line: bytes) -> None:
        while line and self._is_open:
            try:
                line = line[os.write(self._fd, line) :]
            except OSError:
                self._is_open = False
