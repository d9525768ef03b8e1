"""`mlx-isolate service install|…`: the daemon as a service of the user's, by systemd or launchd."""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor import exit_codes
from mlx_isolate_supervisor.commands import serve
from mlx_isolate_supervisor.commands.client import (
    add_client_arguments,
    daemon_of,
    daemon_of_settings,
)
from mlx_isolate_supervisor.commands.errors import CommandError
from mlx_isolate_supervisor.commands.json_output import print_json
from mlx_isolate_supervisor.commands.numbers import some_seconds, whole_number
from mlx_isolate_supervisor.service.command_line import Installation, installation
from mlx_isolate_supervisor.service.definition import DEFAULT_NAME, File, check_name
from mlx_isolate_supervisor.service.install import Installer, Steps, plan_steps
from mlx_isolate_supervisor.service.managers import (
    NO_SESSION,
    Command,
    Done,
    Manager,
    ServiceState,
    lacks_session,
    manager_here,
)
from mlx_isolate_supervisor.settings.layers import Resolved

# A command of a service manager that takes longer than a daemon's stop is stuck.
COMMAND_TIMEOUT_S = 300.0
# How a variable reaches a service of each manager.
_SET_ONE = {
    "systemd": "set it in a file in ~/.config/environment.d",
    "launchd": "set it with launchctl setenv",
}
# What to do where a command of the manager fails.
_LOOK = "see 'mlx-isolate service status' and 'mlx-isolate service logs'"
VERBS = {
    "start": "start the service",
    "stop": "stop the service",
    "restart": "stop and start the service",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verbs."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    def add(verb: str, help: str) -> argparse.ArgumentParser:
        parser = verbs.add_parser(verb, help=help, description=help)
        parser.add_argument(
            "--name",
            default=DEFAULT_NAME,
            metavar="NAME",
            help="name of the service (default %(default)s)",
        )
        return parser

    install = add("install", "install and start a service that serves what 'serve' would")
    install.add_argument("--dry-run", action="store_true", help="print files and commands only")
    install.add_argument("--no-start", action="store_true", help="do not start it")
    install.add_argument(
        "--ready-timeout",
        type=some_seconds,
        default=600.0,
        metavar="SECONDS",
        help="go back to the earlier service if the new one is not ready by then (default 600)",
    )
    serve.add_arguments(install)
    uninstall = add("uninstall", "stop the service and remove its files")
    uninstall.add_argument("--dry-run", action="store_true", help="print commands only")
    for verb, help in VERBS.items():
        add(verb, help)
    status = add("status", "what the service manager and the daemon say")
    status.add_argument("--json", action="store_true", help="as JSON")
    add_client_arguments(status)
    logs = add("logs", "what the service wrote")
    logs.add_argument("-f", "--follow", action="store_true", help="go on with what comes")
    logs.add_argument(
        "-n",
        "--lines",
        type=whole_number,
        default=200,
        metavar="N",
        help="how many (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Do what the verb says."""
    check_name(args.name)
    manager = manager_here()
    match args.verb:
        case "install":
            return _install(args, manager)
        case "uninstall":
            return _uninstall(args, manager)
        case "status":
            return _status(args, manager)
        case "logs":
            _require(manager, args.name)
            command = manager.log_command(args.name, args.lines, follow=args.follow)
            return _show(command)
        case _:
            _require(manager, args.name)
            return _act(args.verb, args.name, manager)


def _install(args: argparse.Namespace, manager: Manager) -> int:
    resolved = serve.settings_of(args)
    if resolved.settings.port == 0:
        raise ConfigError("--port: a service needs a port of its own; give one above 0.")
    wanted = installation(args.name, args, resolved, config_home=_config_home())
    # Copied into the service's file, which others may read, a secret would be one no more.
    unset = [name for name in resolved.variables if name not in wanted.service.environment]
    if unset:
        print(
            f"mlx-isolate: {resolved.settings.config_path} reads {', '.join(unset)} from the "
            f"environment, and a service does not get this shell's; {_SET_ONE[manager.kind]}",
            file=sys.stderr,
        )
    if args.dry_run:
        _show_steps(plan_steps(wanted, manager, start=not args.no_start))
        return exit_codes.OK
    for sentence in remarks(resolved):
        print(f"mlx-isolate: {sentence}", file=sys.stderr)
    installer = Installer(manager, run_command, print)
    installer.install(
        wanted,
        daemon_of_settings(resolved.settings),
        start=not args.no_start,
        timeout_s=args.ready_timeout,
    )
    print(_outcome(wanted, started=not args.no_start))
    if manager.kind == "systemd" and not _lingers():
        print("it ends with your last session; to keep it running: loginctl enable-linger")
    return exit_codes.OK


def _outcome(wanted: Installation, *, started: bool) -> str:
    service = wanted.service
    if started:
        return f"{service.name} is installed and ready on {service.url}"
    return f"{service.name} is installed; start it with: mlx-isolate service start"


def remarks(resolved: Resolved) -> list[str]:
    """What is doubtful about the files that a service of these settings would read."""
    found: list[str] = []
    for name in (resolved.api_key_file, resolved.key_holder):
        path = Path(name).expanduser() if name else None
        if path is not None and path.exists() and path.stat().st_mode & 0o077:
            found.append(f"{path} holds API keys and others can read it; chmod 600 {path}")
    return found


def _uninstall(args: argparse.Namespace, manager: Manager) -> int:
    before, after = manager.uninstall_commands(args.name), manager.forget_commands()
    files = [manager.path(args.name), _config_home() / "mlx-isolate" / f"{args.name}.keys"]
    if args.dry_run:
        shown = [*before, *(("rm", "-f", str(path)) for path in files), *after]
        print("\n".join(shlex.join(command) for command in shown))
        return exit_codes.OK
    _require(manager, args.name)
    for command in before:
        done = run_command(command)
        if done.status != 0 and manager.state(args.name, run_command).is_running:
            raise CommandError(f"it still runs; {shlex.join(command)} said: {done.output.strip()}")
    for path in files:
        path.unlink(missing_ok=True)
    for command in after:
        _must(command)
    print(f"{args.name} is removed")
    return exit_codes.OK


def _act(verb: str, name: str, manager: Manager) -> int:
    """Start, stop or restart it."""
    state = manager.state(name, run_command)
    if verb == "start" and state.is_running:
        # launchd calls that an input/output error.
        print(f"{name} runs already, pid {state.pid}")
        return exit_codes.OK
    *before, last = manager.verb_commands(verb, name)
    for command in before:
        # To stop what does not run fails, which does no harm.
        run_command(command)
    _must(last)
    return exit_codes.OK


def _status(args: argparse.Namespace, manager: Manager) -> int:
    state = manager.state(args.name, run_command)
    daemon = daemon_of(args)
    try:
        answer = daemon.ask("GET", "/health")
        health = f"{answer.status} {answer.body.decode(errors='replace').strip()}"
        is_well = answer.status == 200
    except CommandError as error:
        health, is_well = str(error), False
    if args.json:
        shown = {"manager": manager.kind, "service": state, "health": health}
        print_json(shown)
    else:
        print("\n".join(state_lines(manager, args.name, state)))
        print(f"health    {health}")
    return exit_codes.OK if state.is_running and is_well else exit_codes.FAILED


def state_lines(manager: Manager, name: str, state: ServiceState) -> list[str]:
    """What a manager says of a service, for a person."""
    pid = f", pid {state.pid}" if state.pid else ""
    return [
        f"service   {name} ({manager.kind}): {state.state}{pid}",
        f"file      {manager.path(name)}{'' if state.is_installed else ' (not installed)'}",
    ]


def _require(manager: Manager, name: str) -> None:
    if not manager.path(name).is_file():
        raise CommandError(
            f"there is no service {name}; install one with 'mlx-isolate service install'"
        )


def _show_steps(steps: Steps) -> None:
    for file in steps.files:
        print(f"# {file.path}, mode {file.mode:04o}")
        print(_shown(file))
    for command in steps.commands:
        print(f"$ {shlex.join(command)}")


def _shown(file: File) -> str:
    if file.mode & 0o077 == 0:
        # Secrets are never printed.
        return "(hidden)\n"
    return file.content.decode()


def run_command(command: Command) -> Done:
    """Run a command of the service manager; a missing program is status 127."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        return Done(127, f"{command[0]} is not installed")
    except subprocess.TimeoutExpired:
        return Done(124, f"no end within {COMMAND_TIMEOUT_S:g} s")
    return Done(done.returncode, done.stdout.decode(errors="replace"))


def _must(command: Command) -> None:
    done = run_command(command)
    if done.status != 0:
        said = (done.output.strip() or f"status {done.status}").splitlines()[0].rstrip(".")
        remedy = NO_SESSION if lacks_session(said) else _LOOK
        raise CommandError(f"{shlex.join(command)}: {said}; {remedy}")


def _show(command: Command) -> int:
    """Run a command with our own streams."""
    try:
        return subprocess.run(command, check=False).returncode
    except FileNotFoundError:
        raise CommandError(f"{command[0]} is not installed") from None


def _config_home() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def _lingers() -> bool:
    user = os.environ.get("USER") or str(os.getuid())
    return "yes" in run_command(("loginctl", "show-user", user, "--property=Linger")).output
