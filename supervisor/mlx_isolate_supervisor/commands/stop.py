"""`mlx-isolate stop`: end the daemon of this machine, as a first SIGTERM does."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence

from mlx_isolate_supervisor import exit_codes
from mlx_isolate_supervisor.commands.client import add_client_arguments, daemon_of
from mlx_isolate_supervisor.commands.errors import CommandError, NoAnswerError
from mlx_isolate_supervisor.commands.json_output import print_json
from mlx_isolate_supervisor.commands.numbers import some_seconds
from mlx_isolate_supervisor.commands.serve import is_loopback
from mlx_isolate_supervisor.engines.run_paths import run_directory
from mlx_isolate_supervisor.engines.rundir import holder_of
from mlx_isolate_supervisor.telemetry.status import Status

POLL_S = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --now, --timeout and the daemon's address."""
    parser.add_argument("--now", action="store_true", help="cut running requests")
    parser.add_argument(
        "--timeout",
        type=some_seconds,
        default=90.0,
        metavar="SECONDS",
        help="how long to wait for its end (default %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print pid and outcome as JSON")
    add_client_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Signal it and wait until it is gone."""
    daemon = daemon_of(args)
    if not is_loopback(daemon.host):
        raise CommandError("stop works on the machine of the daemon only")
    try:
        pid = daemon.decode(daemon.get("/status"), Status).supervisor.pid
        signals = [signal.SIGTERM]
    except NoAnswerError:
        # One that is stopping listens no more, but holds its run directory to the end.
        holder = holder_of(run_directory(daemon.port, os.environ.get("MLX_ISOLATE_RUN_DIR")))
        if holder is None or not holder.isdecimal():
            raise
        pid, signals = int(holder), []
    if args.now:
        # Of another kind: two equal signals may merge while the first is pending.
        signals.append(signal.SIGINT)
    is_gone = _end(pid, signals, args.timeout)
    if args.json:
        print_json({"pid": pid, "stopped": is_gone})
    elif is_gone:
        print(f"stopped (pid {pid})")
    else:
        then = "kill it with kill -9" if args.now else "to cut what it runs: stop --now"
        print(f"mlx-isolate: pid {pid} still runs; {then}", file=sys.stderr)
    return exit_codes.OK if is_gone else exit_codes.FAILED


def _end(pid: int, signals: Sequence[signal.Signals], timeout_s: float) -> bool:
    import psutil

    deadline = time.monotonic() + timeout_s
    try:
        process = psutil.Process(pid)
        for each in signals:
            process.send_signal(each)
        # is_running compares start times, so that a reused pid does not count as alive.
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied as error:
        raise CommandError(f"pid {pid} belongs to another user") from error
    return True
