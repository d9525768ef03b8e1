"""`mlx-isolate ps`: one line for each model of a running daemon."""

import argparse
import time

from mlx_isolate_supervisor import exit_codes
from mlx_isolate_supervisor.commands.client import add_client_arguments, daemon_of
from mlx_isolate_supervisor.commands.tables import paint_states, table, use_colours
from mlx_isolate_supervisor.harmless import harmless
from mlx_isolate_supervisor.settings.quantities import show_bytes, show_seconds
from mlx_isolate_supervisor.telemetry.status import ModelStatus, Status

HEADER = (
    "MODEL",
    "STATE",
    "PID",
    "ENGINE",
    "ACTIVE",
    "QUEUED",
    "MEMORY",
    "RESTARTS",
    "SINCE",
    "STAYS",
)
NUMBERS = frozenset({"PID", "ENGINE", "ACTIVE", "QUEUED", "MEMORY", "RESTARTS"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the daemon's address and --json."""
    add_client_arguments(parser)
    parser.add_argument("--json", action="store_true", help="the daemon's /status as it is")


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    daemon = daemon_of(args)
    body = daemon.get("/status")
    if args.json:
        print(body.decode())
        return exit_codes.OK
    status = daemon.decode(body, Status)
    for line in ps_lines(status, time.time()):
        print(paint_states(harmless(line), use_colours()))
    return exit_codes.OK


def ps_lines(status: Status, now: float) -> list[str]:
    """The table; `now` in seconds since the epoch."""
    return table(HEADER, [_row(model, now) for model in status.models], NUMBERS)


def _row(model: ModelStatus, now: float) -> tuple[str, ...]:
    return (
        model.id,
        model.state,
        "-" if model.pid is None else str(model.pid),
        f"#{model.incarnation}" if model.incarnation else "-",
        str(model.active),
        str(model.queued),
        "-" if model.memory_bytes is None else show_bytes(model.memory_bytes),
        str(model.restarts),
        show_seconds(max(0.0, now - model.since)) + " ago",
        _stay(model),
    )


def _stay(model: ModelStatus) -> str:
    """How much longer it stays loaded if it stays idle, or why it is not loaded."""
    if model.waits_for is not None:
        return f"waits {model.waits_for}"
    if model.pinned:
        return "pinned"
    return "-" if model.ttl_left_s is None else show_seconds(model.ttl_left_s)
