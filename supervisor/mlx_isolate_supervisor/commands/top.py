"""`mlx-isolate top`: the models of a running daemon, live in the terminal, with the last events."""

import argparse
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mlx_isolate_supervisor import exit_codes
from mlx_isolate_supervisor.commands.client import Daemon, add_client_arguments, daemon_of
from mlx_isolate_supervisor.commands.errors import CommandError
from mlx_isolate_supervisor.commands.numbers import some_seconds
from mlx_isolate_supervisor.harmless import harmless
from mlx_isolate_supervisor.settings.quantities import show_bytes, show_seconds
from mlx_isolate_supervisor.telemetry.status import ModelStatus, Status

EVENTS_SHOWN = 8
# Time over which tokens per second are taken.
RATE_WINDOW_S = 4.0
# Pause before the event stream is asked for again.
RETRY_S = 1.0
STYLES = {
    "ready": "green",
    "starting": "blue",
    "draining": "blue",
    "stopping": "blue",
    "backoff": "yellow",
    "failed": "red",
    "stopped": "dim",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the daemon's address, the interval and --once."""
    add_client_arguments(parser)
    parser.add_argument(
        "--interval",
        type=some_seconds,
        default=1.0,
        metavar="SECONDS",
        help="between looks (default 1)",
    )
    parser.add_argument("--once", action="store_true", help="print one picture and leave")


def run(args: argparse.Namespace) -> int:
    """Show until interrupted; without a terminal one picture is printed."""
    daemon = daemon_of(args)
    console = Console(highlight=False)
    screen = Screen()
    if args.once or not sys.stdout.isatty():
        screen.take_status(_status(daemon), time.monotonic())
        console.print(screen.draw(time.time()))
        return exit_codes.OK
    threading.Thread(target=_follow, args=(daemon, screen), daemon=True).start()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                screen.take_status(_status(daemon), time.monotonic())
            except CommandError as error:
                screen.trouble = str(error)
            live.update(screen.draw(time.time()), refresh=True)
            time.sleep(max(0.1, args.interval))


def _status(daemon: Daemon) -> Status:
    return daemon.decode(daemon.get("/status"), Status)


def _follow(daemon: Daemon, screen: "Screen") -> None:
    """Read /events for ever; a daemon that is restarted is found again."""
    while True:
        try:
            for line in daemon.lines(f"/events?replay={EVENTS_SHOWN}"):
                if line.startswith("data: "):
                    screen.take_event(json.loads(line[6:]))
        except (CommandError, OSError, ValueError):
            pass
        time.sleep(RETRY_S)


class Screen:
    """What is known, and how it looks."""

    def __init__(self) -> None:
        self.trouble: str | None = None
        self._status: Status | None = None
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENTS_SHOWN)
        self._seen: set[str] = set()
        self._tokens: dict[tuple[str, int], deque[tuple[float, int]]] = {}

    def take_status(self, status: Status, now: float) -> None:
        """A new snapshot, taken at `now` (monotonic seconds)."""
        self._status, self.trouble = status, None
        counted: dict[tuple[str, int], deque[tuple[float, int]]] = {}
        for model in status.models:
            if model.progress is not None:
                key = (model.id, model.incarnation)
                points = counted[key] = self._tokens.get(key, deque())
                points.append((now, model.progress.generated_tokens))
                while len(points) > 2 and points[1][0] < now - RATE_WINDOW_S:
                    points.popleft()
        self._tokens = counted

    def take_event(self, event: dict[str, Any]) -> None:
        """An event; one that was seen before (a replay after a break) is dropped."""
        name = event.get("id")
        if not isinstance(name, str) or name in self._seen or event["kind"] == "engine.loading":
            return
        self._events.append(event)
        self._seen = {str(each["id"]) for each in self._events}

    def tokens_per_s(self, model: ModelStatus) -> float | None:
        """Rate over the last seconds, None until two looks have been taken."""
        points = self._tokens.get((model.id, model.incarnation))
        if points is None or points[-1][0] <= points[0][0]:
            return None
        return (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])

    def draw(self, now: float) -> RenderableType:
        """The picture; `now` in seconds since the epoch."""
        if self._status is None:
            return Text(self.trouble or "no answer yet", style="red")
        parts: list[RenderableType] = [self._head(self._status), self._models(self._status, now)]
        for model in self._status.models:
            if model.failure is not None:
                why = f"{model.id}: {model.failure.message}"
                parts.append(Text(harmless(why), style=STYLES["failed"]))
        if self._events:
            parts += [Text(), self._event_lines()]
        return Group(*parts)

    def _head(self, status: Status) -> Text:
        own = status.supervisor
        text = Text(
            f"mlx-isolate {own.version}  pid {own.pid}  up {show_seconds(own.uptime_s)}  "
            f"{show_bytes(own.memory_bytes)}",
            style="bold",
        )
        if self.trouble is not None:
            text.append(f"  {harmless(self.trouble)}", style="red")
        return text

    def _models(self, status: Status, now: float) -> Table:
        table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="dim")
        for name in ("MODEL", "STATE", "FOR"):
            table.add_column(name, overflow="fold")
        for name in ("PID", "ENGINE", "RESTARTS", "MEMORY", "TOK/S", "ACTIVE", "QUEUED", "CACHE"):
            # In a narrow terminal names fold, numbers and headings stay whole.
            table.add_column(name, justify="right", no_wrap=True)
        for model in status.models:
            table.add_row(*self._row(model, now))
        return table

    def _row(self, model: ModelStatus, now: float) -> Sequence[str | Text]:
        rate = self.tokens_per_s(model)
        cache = None if model.progress is None else model.progress.cache
        return (
            Text(harmless(model.id)),
            Text(harmless(_state(model)), style=STYLES[model.state]),
            show_seconds(max(0.0, now - model.since)),
            "-" if model.pid is None else str(model.pid),
            f"#{model.incarnation}" if model.incarnation else "-",
            str(model.restarts),
            "-" if model.memory_bytes is None else show_bytes(model.memory_bytes),
            "-" if rate is None else f"{rate:.1f}",
            str(model.active),
            str(model.queued),
            # In memory: a folder on disk may be that of many models, and is not this one's alone.
            "-" if cache is None else show_bytes(cache.ram_bytes),
        )

    def _event_lines(self) -> Table:
        table = Table(box=None, pad_edge=False, show_header=False)
        for style in ("dim", "", "dim", ""):
            table.add_column(style=style, overflow="fold")
        for event in reversed(self._events):
            stamp = time.strftime("%H:%M:%S", time.localtime(event["time"]))
            cells = (event["kind"], event.get("model") or "", _tell(event))
            table.add_row(stamp, *(Text(harmless(str(cell))) for cell in cells))
        return table


def _state(model: ModelStatus) -> str:
    if model.state == "starting" and model.loading is not None:
        step = model.loading
        return step.stage if step.fraction is None else f"{step.stage} {step.fraction:.0%}"
    return model.state


def _tell(event: dict[str, Any]) -> str:
    """What happened, in a few words."""
    if event["kind"] == "request.ended":
        parts = [event["outcome"], event["code"], f"after {show_seconds(event['duration_s'])}"]
        return " ".join(part for part in parts if part)
    moved = f"{event['before']} → {event['after']}" if "after" in event else ""
    return " ".join(part for part in (moved, event.get("reason")) if part)
