"""The supervisor's log: noun.verb events with fields, to console, file and memory.

Owns formats, handlers and the bounded memory that `/logs` answers from. Never holds prompt or
output text: callers give facts (ids, counts, times), engines give their own stderr lines.
"""

import asyncio
import json
import logging
import sys
import time
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Literal, TextIO

import msgspec

from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor.harmless import harmless
from mlx_isolate_supervisor.telemetry.log_file import LogFile
from mlx_isolate_supervisor.telemetry.outlet import Outlet
from mlx_isolate_supervisor.user_folders import log_folder

# Lines kept in memory, of everything and of each model; without a bound a chatty engine fills the
# memory of the process that must not die.
BOOK_LINES_MAX = 2000
# Characters of a line that are kept, for the same reason.
LINE_CHARACTERS_MAX = 4096
# Characters handed to a follower at once; bounds what lies in its transport.
GROUP_CHARACTERS_MAX = 32 * 1024
# Bytes of lines that wait for a disk; what a stuck one does not take is dropped.
FILE_WAITING_BYTES_MAX = 4 << 20

# On a terminal the display says these in a person's words.
TOLD_BY_THE_DISPLAY = frozenset({"model.moved", "engine.failed"})

_log = logging.getLogger("mlx_isolate_supervisor")


def log_event(event: str, /, level: int = logging.INFO, **fields: object) -> None:
    """Log one event.

    Args:
        event: `noun.verb`, e.g. `engine.exited`.
        level: a level of the logging module.
        fields: facts; `model` also files the line under that model, None is left out.
    """
    if _log.isEnabledFor(level):
        _log.log(level, "%s", event, extra={"event": event, "facts": fields})


def log_engine_line(model: str, incarnation: int, line: str) -> None:
    """Log one line that an engine wrote to stdout or stderr."""
    facts = {"model": model, "incarnation": incarnation, "line": line[:LINE_CHARACTERS_MAX]}
    _log.log(logging.INFO, "engine.line", extra={"event": "engine.line", "facts": facts})


def log_failure(event: str, /, error: BaseException, **fields: object) -> None:
    """Log an error that should not have happened, with its traceback."""
    extra = {"event": event, "facts": fields}
    _log.error("%s", event, extra=extra, exc_info=(type(error), error, error.__traceback__))


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    text = str(value)
    if text and text.isprintable() and " " not in text:
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())


class EventFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.123 INFO engine.ready model=demo load_s=2.1`."""

    def __init__(self, *, with_date: bool) -> None:
        super().__init__()
        self._pattern = "%Y-%m-%d %H:%M:%S" if with_date else "%H:%M:%S"
        self._second = -1
        self._stamp = ""

    def format(self, record: logging.LogRecord) -> str:
        """One line, or several where a traceback follows."""
        second = int(record.created)
        if second != self._second:
            self._second = second
            self._stamp = time.strftime(self._pattern, time.localtime(second))
        # Each record is formatted by every handler; all but the stamp is the same, and every
        # request has its line.
        shown: str | None = record.__dict__.get("shown")
        if shown is None:
            shown = record.__dict__["shown"] = self._describe(record)
        text = f"{self._stamp}.{int(record.msecs):03d} {record.levelname:<7}{shown}"
        if record.exc_info:
            text += "\n" + "\n".join(
                map(harmless, self.formatException(record.exc_info).split("\n"))
            )
        if not text.isascii():
            # What a client sent as bytes that are no UTF-8 could not be written or sent as such.
            text = text.encode("utf-8", "backslashreplace").decode()
        return text

    @staticmethod
    def _describe(record: logging.LogRecord) -> str:
        facts: dict[str, object] = getattr(record, "facts", {})
        event: str = getattr(record, "event", "") or harmless(record.getMessage())
        if event == "engine.line":
            return f" {facts['model']}#{facts['incarnation']} | {facts['line']}"
        return f" {event}" + "".join(f" {k}={_show(v)}" for k, v in facts.items() if v is not None)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, event, the facts, and a traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, all ASCII."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "event": getattr(record, "event", "") or record.getMessage(),
        }
        facts: dict[str, object] = getattr(record, "facts", {})
        line |= {name: value for name, value in facts.items() if value is not None}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Entry(msgspec.Struct, frozen=True):
    """One remembered line; `number` counts from 1 over the daemon's life."""

    number: int
    text: str


class LogBook(logging.Handler):
    """The last lines in memory, of everything and of each model, for `/logs`."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(EventFormatter(with_date=True))
        self._count = 0
        self._all: deque[Entry] = deque(maxlen=BOOK_LINES_MAX)
        self._by_model: dict[str, deque[Entry]] = {}
        self._waiters: set[asyncio.Future[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_ended = False

    def end(self) -> None:
        """Let every follower finish; for a shutdown."""
        self._is_ended = True
        self._wake()

    def track(self, models: Iterable[str]) -> None:
        """Keep a page of its own for each of `models`; others appear in the whole only."""
        kept = self._by_model
        self._by_model = {model: kept.get(model, deque(maxlen=BOOK_LINES_MAX)) for model in models}

    def emit(self, record: logging.LogRecord) -> None:
        """Remember a record; called in whichever thread logs, under the handler's lock."""
        self._count += 1
        entry = Entry(self._count, self.format(record)[: 4 * LINE_CHARACTERS_MAX])
        self._all.append(entry)
        facts: dict[str, object] = getattr(record, "facts", {})
        page = self._by_model.get(str(facts.get("model")))
        if page is not None:
            page.append(entry)
        if self._loop is not None and self._waiters:
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def _page(self, model: str | None) -> deque[Entry]:
        return self._all if model is None else self._by_model.get(model, deque())

    def tail(self, count: int = BOOK_LINES_MAX, model: str | None = None) -> list[str]:
        """The last `count` lines, of everything or of one model."""
        page = list(self._page(model))
        return [entry.text for entry in page[max(0, len(page) - count) :]]

    async def follow(self, count: int, model: str | None = None) -> AsyncGenerator[list[str], None]:
        """Yield the last `count` lines, then new ones as they come, in groups.

        A reader that falls behind by more than the book holds misses lines; one of everything is
        told so, while the numbers of one model's lines have gaps anyway.
        """
        self._loop = asyncio.get_running_loop()
        seen = self._start(count, model)
        while not self._is_ended:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters.add(waiter)
            try:
                fresh = self._after(seen, model)
                if not fresh:
                    await waiter
                    continue
            finally:
                self._waiters.discard(waiter)
            lost = model is None and fresh[0].number > seen + 1
            seen = fresh[-1].number
            yield [*(["(lines lost: this reader is too slow)"] if lost else []),
                   *(entry.text for entry in fresh)]  # fmt: skip

    def _start(self, count: int, model: str | None) -> int:
        """Number of the line that comes before the last `count`."""
        # Copied at once, here and below: another thread may be adding a line.
        page = list(self._page(model))
        if count <= 0:
            return page[-1].number if page else 0
        return page[-min(count, len(page))].number - 1 if page else 0

    def _after(self, seen: int, model: str | None) -> list[Entry]:
        """The first lines with a higher number, up to GROUP_CHARACTERS_MAX."""
        page = list(self._page(model))
        found: list[Entry] = []
        size = 0
        for entry in islice(page, bisect_right(page, seen, key=lambda each: each.number), None):
            if size >= GROUP_CHARACTERS_MAX:
                break
            found.append(entry)
            size += len(entry.text)
        return found


class ConsoleHandler(logging.StreamHandler[TextIO]):
    """Lines on stderr; engine lines only where everything is asked for.

    Attributes:
        before_line: is called ahead of each line, so that a progress bar can make room.
        left_out: events that a person is told in other words.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.before_line: Callable[[], None] | None = None
        self.left_out: frozenset[str] = frozenset()
        self.setFormatter(EventFormatter(with_date=False))

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        event = getattr(record, "event", "")
        if event == "engine.line" and not _log.isEnabledFor(logging.DEBUG):
            return
        if event in self.left_out:
            return
        if self.before_line is not None:
            self.before_line()
        super().emit(record)


class FileHandler(logging.Handler):
    """Lines for the log file, written by an outlet of its own.

    A disk that stands still holds nobody up; a killed supervisor loses what the outlet has not
    written yet. A disk that takes no more costs lines, which is told everywhere else, once.
    """

    def __init__(self, file: LogFile, outlet: Outlet) -> None:
        super().__init__()
        self._file = file
        self._outlet = outlet
        # Since the file could not be written, in the outlet's thread.
        self._is_failing = False
        self._lines_lost = 0
        self.setFormatter(EventFormatter(with_date=True))

    def emit(self, record: logging.LogRecord) -> None:
        """Hand one record to the outlet."""
        line = self.format(record) + "\n"
        self._outlet.put(self._write, line.encode("utf-8", "backslashreplace"))

    def _write(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            self._lines_lost += data.count(b"\n")
            if not self._is_failing:
                self._is_failing = True
                reason = error.strerror or str(error)
                log_event("log.not_written", logging.WARNING, path=self._file.path, reason=reason)
            return
        if self._is_failing:
            lost, self._is_failing, self._lines_lost = self._lines_lost, False, 0
            log_event("log.written_again", path=self._file.path, lines_lost=lost)


def set_level(level: str) -> None:
    """Change how much is logged."""
    _log.setLevel(level)


class Logs(msgspec.Struct, frozen=True):
    """The handlers that are in place.

    Attributes:
        outlet: of the console; the display of the terminal goes the same way.
        file_outlet: of the log file, which no stuck terminal may hold up.
    """

    book: LogBook
    console: ConsoleHandler
    file: Path | None
    outlet: Outlet
    file_outlet: Outlet

    def finish(self, limit_s: float) -> None:
        """Wait until the last lines are written, or twice `limit_s` have passed."""
        self.file_outlet.finish(limit_s)
        self.outlet.finish(limit_s)

    def show_on_terminal(self) -> None:
        """Leave only warnings on the console, unless debugging."""
        if not _log.isEnabledFor(logging.DEBUG):
            self.console.setLevel(logging.WARNING)
            self.console.left_out = TOLD_BY_THE_DISPLAY


def start_logging(
    level: str, *, folder: str | None, name: str, form: Literal["text", "json"] = "text"
) -> Logs:
    """Put console, memory and file handlers in place; once per process.

    Args:
        level: of the supervisor's own events.
        folder: of the log file; None = the user's, "" = no file.
        name: of the log file, without its ending.
        form: of console and file; what is kept in memory for people is text.

    Raises:
        ConfigError: the log file cannot be written.
    """
    _log.setLevel(level)
    _log.propagate = False
    outlet = Outlet()
    console = ConsoleHandler(outlet.stream(sys.stderr))
    file_outlet = Outlet(FILE_WAITING_BYTES_MAX)
    logs = Logs(LogBook(), console, _log_path(folder, name), outlet, file_outlet)
    handlers: list[logging.Handler] = [logs.book, logs.console]
    if logs.file is not None:
        handlers.append(FileHandler(_log_file(logs.file), file_outlet))
    if form == "json":
        for handler in handlers[1:]:
            handler.setFormatter(JsonFormatter())
    for logger in (_log, logging.getLogger("aiohttp"), logging.getLogger("asyncio")):
        logger.handlers = list(handlers)
        logger.propagate = False
    # A full disk or a closed terminal must not print a traceback for every line.
    logging.raiseExceptions = False
    # What no line shows is not looked up for it: the caller's frame, thread, process and task.
    logging._srcfile = None  # pyright: ignore[reportPrivateUsage]
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    return logs


def _log_path(folder: str | None, name: str) -> Path | None:
    if folder == "":
        return None
    return (Path(folder) if folder else log_folder()) / f"{name}.log"


def _log_file(path: Path) -> LogFile:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return LogFile(path)
    except OSError as error:
        raise ConfigError(
            f"cannot write the log file {path}: {error.strerror}; choose another --log-dir."
        ) from error
