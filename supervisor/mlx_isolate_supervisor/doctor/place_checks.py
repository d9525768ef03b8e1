"""Where the daemon would run: its port, run directory, hub cache, and its service."""

import os
import stat
from pathlib import Path

from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor.commands.client import Daemon
from mlx_isolate_supervisor.config import ServeSettings
from mlx_isolate_supervisor.doctor.findings import Finding, doubt, fault, ok
from mlx_isolate_supervisor.engines.run_paths import check_socket_path, run_directory
from mlx_isolate_supervisor.engines.rundir import SOCKET_NAME_MAX, holder_of
from mlx_isolate_supervisor.listening import PortTakenError, bind
from mlx_isolate_supervisor.models.model_files import hub_folder
from mlx_isolate_supervisor.service.managers import Manager, Run
from mlx_isolate_supervisor.user_folders import log_folder


def check_port(settings: ServeSettings, daemon: Daemon) -> tuple[Finding, bool]:
    """Whether the port can be had; and whether a daemon of ours has it already."""
    place = f"{settings.host} port {settings.port}"
    try:
        for listener in bind(settings.host, settings.port):
            listener.close()
    except PortTakenError:
        if daemon.is_ours():
            return ok(
                "port", f"{place}: a daemon of ours answers there; another one needs another port."
            ), True
        remedy = "stop the other program, or choose another --port"
        return fault("port", f"{place} is in use by another program.", remedy), False
    except ConfigError as error:
        return fault("port", str(error), "choose another --host or --port"), False
    return ok("port", f"{place} is free."), False


def check_run_directory(settings: ServeSettings, *, is_ours_running: bool) -> Finding:
    """Whether the run directory can be had; nothing is made."""
    path = run_directory(settings.port, settings.run_dir)
    remedy = "choose another folder: --run-dir"
    try:
        check_socket_path(path / ("x" * SOCKET_NAME_MAX))
    except ConfigError as error:
        return fault("run dir", str(error), remedy)
    place = _existing(path)
    if place != path:
        if not os.access(place, os.W_OK | os.X_OK):
            return fault("run dir", f"{path} cannot be made in {place}.", remedy)
        return ok("run dir", f"{path} can be made.")
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        return fault("run dir", f"{path} is no folder of this user's.", remedy)
    holder = holder_of(path)
    if holder is not None and not is_ours_running:
        text = f"{path} is in use by the supervisor {holder}, which does not have the port."
        return fault("run dir", text, "stop it (kill it if it hangs), or choose another --run-dir")
    return ok("run dir", f"{path}{' is in use by that daemon' if holder else ' is free'}.")


def check_log_folder(settings: ServeSettings) -> Finding:
    """Whether the log file can be written, without which nothing starts; nothing is made."""
    if settings.log_dir == "":
        return ok("log", "no log file is kept.")
    path = Path(settings.log_dir) if settings.log_dir else log_folder()
    place = _existing(path)
    if not os.path.isdir(place) or not os.access(place, os.W_OK | os.X_OK):
        return fault("log", f"{path} cannot be written.", "choose another folder: --log-dir")
    return ok("log", f"{path} {'can be written' if place == path else 'can be made'}.")


def _existing(path: Path) -> Path:
    """The path, or what there is of it."""
    # Not Path.exists, which raises where a folder above may not be looked into.
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def check_hub_model(model: str) -> Finding:
    """Whether a repo of the hub is in its cache; nothing is downloaded."""
    snapshots = hub_folder(model) / "snapshots"
    if snapshots.is_dir() and any(snapshots.iterdir()):
        return ok("model", f"{model} is in the hub's cache.")
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        text = f"{model} is not in the hub's cache, and HF_HUB_OFFLINE forbids the download."
        return fault("model", text, f"download it once: hf download {model}")
    return doubt(
        "model",
        f"{model} is not in the hub's cache; its first load downloads it.",
        f"download it ahead: hf download {model}",
    )


def check_service(manager: Manager, name: str, run: Run) -> Finding:
    """How the service is, if there is one."""
    if not manager.path(name).is_file():
        return ok("service", f"none is installed ({manager.path(name)}).")
    program = manager.program(name)
    if program is None or not os.access(program, os.X_OK):
        return fault(
            "service",
            f"{manager.path(name)} names a program that is not there: {program}.",
            "install it again: mlx-isolate service install",
        )
    state = manager.state(name, run)
    if state.has_failed:
        remedy = "see why: mlx-isolate service logs; then mlx-isolate service restart"
        return doubt("service", f"{name} ({manager.kind}) has failed.", remedy)
    if not state.is_running:
        remedy = "mlx-isolate service start"
        return doubt("service", f"{name} ({manager.kind}) is installed and not running.", remedy)
    return ok("service", f"{name} ({manager.kind}) runs, pid {state.pid}.")
