"""`mlx-isolate status`: the state of a running daemon in full, for a person."""

import argparse
import time

from mlx_isolate_supervisor import exit_codes
from mlx_isolate_supervisor.commands.client import add_client_arguments, daemon_of
from mlx_isolate_supervisor.commands.tables import paint_states, use_colours
from mlx_isolate_supervisor.harmless import harmless
from mlx_isolate_supervisor.settings.quantities import show_bytes, show_seconds
from mlx_isolate_supervisor.telemetry.display import describe_facts
from mlx_isolate_supervisor.telemetry.status import LastExit, ModelStatus, StandbyStatus, Status

# Lines of a dead engine's output that are shown; all of them are in --json.
TAIL_LINES = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the daemon's address and --json."""
    add_client_arguments(parser)
    parser.add_argument("--json", action="store_true", help="the daemon's /status as it is")


def run(args: argparse.Namespace) -> int:
    """Print the state."""
    daemon = daemon_of(args)
    body = daemon.get("/status")
    if args.json:
        print(body.decode())
        return exit_codes.OK
    status = daemon.decode(body, Status)
    for line in status_lines(status, daemon.url, time.time()):
        print(paint_states(harmless(line), use_colours()))
    return exit_codes.OK


def status_lines(status: Status, url: str, now: float) -> list[str]:
    """Everything worth a line; `now` in seconds since the epoch."""
    own = status.supervisor
    memory = f"{show_bytes(own.memory_bytes)} ({own.memory_kind})"
    up = show_seconds(own.uptime_s)
    lines = [f"supervisor  {url}  pid {own.pid}, version {own.version}, up {up}, {memory}"]
    if own.memory_budget_bytes is not None:
        claimed = show_bytes(own.memory_claimed_bytes)
        lines.append(f"  engines: {claimed} of {show_bytes(own.memory_budget_bytes)} reserved")
    for gpu in own.gpus:
        name = f"GPU {gpu.name}" if gpu.name else "GPU"
        budget = show_bytes(gpu.budget_bytes)
        lines.append(f"  {name}: {show_bytes(gpu.claimed_bytes)} of {budget} reserved")
    lines += [f"  {_standby_line(standby)}" for standby in own.standbys]
    for model in status.models:
        lines += ["", *_model_lines(model, now)]
    return lines


def _standby_line(standby: StandbyStatus) -> str:
    done = "ready" if standby.is_prepared else "preparing"
    model = "" if standby.model is None else f" for {standby.model}"
    memory = ""
    if standby.memory_bytes is not None:
        memory = f", {show_bytes(standby.memory_bytes)} ({standby.memory_kind})"
    return f"standby: pid {standby.pid}, {done}{model}{memory}"


def _model_lines(model: ModelStatus, now: float) -> list[str]:
    since = show_seconds(max(0.0, now - model.since))
    names = f" (also {', '.join(model.aliases)})" if model.aliases else ""
    lines = [f"{model.id}{names}  {model.state} for {since}, wanted {model.desired}"]
    if model.pid is not None:
        memory = ""
        if model.memory_bytes is not None:
            memory = f", {show_bytes(model.memory_bytes)} ({model.memory_kind})"
        lines.append(f"  engine #{model.incarnation}: pid {model.pid}{memory}")
    if model.facts is not None:
        took = "" if model.load_s is None else f", loaded in {show_seconds(model.load_s)}"
        lines.append(f"  {describe_facts(model.facts)}{took}")
    if model.loading is not None:
        fraction = model.loading.fraction
        share = "" if fraction is None else f" {fraction:.0%}"
        lines.append(f"  loading: {model.loading.stage}{share} {model.loading.detail}".rstrip())
    lines.append(f"  requests: {model.active} running, {model.queued} waiting")
    lines += _room_lines(model)
    lines += _trouble_lines(model, now)
    return lines


def _room_lines(model: ModelStatus) -> list[str]:
    lines: list[str] = []
    if model.claimed_bytes is not None:
        pinned = ", pinned" if model.pinned else ""
        claimed = show_bytes(model.claimed_bytes)
        if model.claimed_gpu_bytes is not None:
            claimed += f" and {show_bytes(model.claimed_gpu_bytes)} of the GPU"
        lines.append(f"  reserved: {claimed}, its prompt cache included{pinned}")
    if model.waits_for is not None:
        lines.append(f"  waits {model.waits_for}")
    if model.ttl_left_s is not None:
        lines.append(f"  unloaded after {show_seconds(model.ttl_left_s)} more of idleness")
    return lines


def _trouble_lines(model: ModelStatus, now: float) -> list[str]:
    lines: list[str] = []
    if model.failure is not None:
        retry = model.failure.retry_in_s
        then = "no new try by itself" if retry is None else f"next try in {show_seconds(retry)}"
        why = model.failure.message.rstrip(".")
        lines.append(f"  failed ({model.failure.code}): {why}; {then}")
    if model.progress is not None and model.progress.cache.ssd_trouble:
        lines.append(f"  prompt cache on disk: {model.progress.cache.ssd_trouble}")
    if model.next_try_s is not None:
        lines.append(f"  next try in {show_seconds(model.next_try_s)}")
    if model.restarts:
        causes = ", ".join(f"{n} {cause}" for cause, n in model.restarts_by_cause.items())
        lines.append(f"  restarts: {model.restarts} ({causes})" if causes else
                     f"  restarts: {model.restarts}")  # fmt: skip
    if model.last_exit is not None:
        lines += _exit_lines(model.last_exit, now)
    return lines


def _exit_lines(last: LastExit, now: float) -> list[str]:
    how = last.signal or f"exit {last.code}"
    ago = show_seconds(max(0.0, now - last.at))
    tail = [f"    | {line}" for line in last.stderr_tail[-TAIL_LINES:]]
    return [f"  last exit: engine #{last.incarnation}, {how}, {ago} ago: {last.reason}", *tail]
