"""`mlx-isolate drill NAME…`: break something on purpose, and see what is promised kept."""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor import exit_codes
from mlx_isolate_supervisor.commands.client import Daemon, add_client_arguments, daemon_of
from mlx_isolate_supervisor.commands.errors import CommandError
from mlx_isolate_supervisor.commands.json_output import print_json
from mlx_isolate_supervisor.commands.serve import is_loopback
from mlx_isolate_supervisor.drills.catalogue import DRILLS, EVERY, Drill
from mlx_isolate_supervisor.drills.pages import report_lines, summary_lines
from mlx_isolate_supervisor.drills.record import DrillReport, Result, overall
from mlx_isolate_supervisor.drills.runner import run_drills
from mlx_isolate_supervisor.drills.stage import RunningDaemon, StagePlan
from mlx_isolate_supervisor.drills.throwaway import OwnPlan
from mlx_isolate_supervisor.settings.models import DEMO, check_demo, locate_model

_STATUS: dict[Result, int] = {
    "kept": exit_codes.OK,
    "broken": exit_codes.FAILED,
    "not_run": exit_codes.NOT_RUN,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the names, where the drills are done, and how often."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "drills:\n" + "\n".join(
        f"  {drill.name:16}{'*' if drill.own_because else ' '} {drill.help}"
        for drill in DRILLS.values()
    )
    parser.epilog += "\n\n* on a throw-away daemon only"
    parser.add_argument(
        "names",
        metavar="DRILL",
        nargs="+",
        choices=[*DRILLS, EVERY],
        help=f"some of those below, or '{EVERY}'",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--own", action="store_true", help="use throw-away daemons only")
    where.add_argument(
        "--no-own", action="store_true", help="skip drills that need a throw-away daemon"
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="throw-away daemons: a folder, a repo id or 'demo' (the default); a running one: the "
        "name of one of its models (default: its first)",
    )
    parser.add_argument("--repeat", type=_count, default=1, metavar="N", help="do each N times")
    parser.add_argument("--yes", action="store_true", help="do not ask before others are disturbed")
    parser.add_argument("--json", action="store_true", help="print the reports as JSON")
    add_client_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Do the drills; 0 = every promise kept, 1 = one was broken, 4 = one could not be run."""
    drills = list(DRILLS.values()) if EVERY in args.names else [DRILLS[n] for n in args.names]
    plan = _plan(args, drills)
    reports = asyncio.run(_run_to_end(drills, plan, args.repeat, quiet=args.json))
    if reports is None:
        return exit_codes.CUT_BASE + signal.SIGTERM
    result = overall(reports)
    if args.json:
        print_json({"result": result, "drills": reports})
    else:
        for line in summary_lines(reports):
            print(line)
    return _STATUS[result]


async def _run_to_end(
    drills: list[Drill], plan: StagePlan, repeat: int, *, quiet: bool
) -> list[DrillReport] | None:
    """The reports; None where a SIGTERM came first. No throw-away daemon is left either way."""
    running = asyncio.create_task(_run(drills, plan, repeat, quiet=quiet))
    loop = asyncio.get_running_loop()
    told = asyncio.Event()

    def stop() -> None:
        told.set()
        running.cancel()

    loop.add_signal_handler(signal.SIGTERM, stop)
    try:
        return await running
    except asyncio.CancelledError:
        if not told.is_set():
            raise
        return None


async def _run(
    drills: list[Drill], plan: StagePlan, repeat: int, *, quiet: bool
) -> list[DrillReport]:
    reports: list[DrillReport] = []
    begun = None if quiet else _tell_begun
    # Closed at once where this is cancelled: whatever it holds is removed then.
    async with contextlib.aclosing(run_drills(drills, plan, repeat, begun)) as done:
        async for report in done:
            reports.append(report)
            if not quiet:
                print("\n".join(report_lines(report)), end="\n\n", flush=True)
    return reports


def _tell_begun(drill: Drill, number: int) -> None:
    # A report comes at the end, which may be minutes away.
    print(f"{drill.name} #{number}: {drill.help} …", file=sys.stderr, flush=True)


def _plan(args: argparse.Namespace, drills: list[Drill]) -> StagePlan:
    running = None if args.own else _running(args)
    own = None
    if not args.no_own and (running is None or any(drill.own_because for drill in drills)):
        # The name of a model of a running daemon says nothing about a throw-away one.
        own = OwnPlan(model=_own_model(args.model if running is None else None))

    def consent(sentence: str) -> bool:
        return bool(args.yes) or _ask(sentence)

    return StagePlan(running=running, own=own, consent=consent)


def _running(args: argparse.Namespace) -> RunningDaemon | None:
    """The daemon that was named, or the one at the default address if there is one."""
    daemon = daemon_of(args)
    is_named = bool(args.url or os.environ.get("MLX_ISOLATE_URL") or args.no_own)
    try:
        daemon.get("/status")
    except CommandError:
        if is_named:
            raise
        return None
    if not is_loopback(daemon.host):
        raise CommandError("drills work on the machine of the daemon only")
    return RunningDaemon(url=_url(daemon), api_key=daemon.api_key, model=args.model)


def _url(daemon: Daemon) -> str:
    return daemon.url if "//" in daemon.url else f"http://{daemon.url}"


def _own_model(named: str | None) -> str:
    if named in (None, DEMO):
        check_demo()
        return DEMO
    assert named is not None
    return locate_model(named, Path.cwd())


def _ask(sentence: str) -> bool:
    if not sys.stdin.isatty():
        return False
    print(f"{sentence} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ConfigError(f"--repeat: {text!r} is not a number above 0.")
    return number
