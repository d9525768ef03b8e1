"""systemd and launchd as one interface: where a service's files lie and which commands act on it.

Commands are run by whoever calls, so that they can be shown instead.
"""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from mlx_isolate_supervisor.commands.errors import CommandError
from mlx_isolate_supervisor.service.definition import Definition, File
from mlx_isolate_supervisor.service.plist import log_folder, plist_bytes, program_of_agent
from mlx_isolate_supervisor.service.unit import program_of, unit_text

Command = tuple[str, ...]
# In a shell that systemd knows nothing of, as under su or in a container; its words have changed
# over its versions.
_NO_BUS = re.compile("Failed to connect to .*bus")
NO_SESSION = "log in as this user, or run 'mlx-isolate serve' itself"


class Done(msgspec.Struct, frozen=True):
    """How a command ended, and what it wrote."""

    status: int
    output: str


# Runs a command to its end.
Run = Callable[[Command], Done]


class ServiceState(msgspec.Struct, frozen=True, kw_only=True):
    """What a manager says.

    Attributes:
        state: its own word, e.g. `active`, `failed`.
        is_running: whether there is a process.
        has_failed: whether it has given up.
    """

    is_installed: bool
    state: str
    is_running: bool
    has_failed: bool
    pid: int | None


class Manager(Protocol):
    """One service manager."""

    @property
    def kind(self) -> str:
        """`systemd` or `launchd`."""
        ...

    def file(self, service: Definition) -> File:
        """The unit or agent."""
        ...

    def path(self, name: str) -> Path:
        """Where that lies."""
        ...

    def program(self, name: str) -> Path | None:
        """The program that the installed file names."""
        ...

    def folders(self) -> tuple[Path, ...]:
        """What must be there before it starts, besides its files' own folders."""
        ...

    def install_commands(self, name: str, *, start: bool) -> tuple[Command, ...]:
        """After its file was written: make it known, enabled, and running anew if `start`."""
        ...

    def uninstall_commands(self, name: str) -> tuple[Command, ...]:
        """Before its file is removed: stop and forget."""
        ...

    def forget_commands(self) -> tuple[Command, ...]:
        """After its file was removed."""
        ...

    def verb_commands(self, verb: str, name: str) -> tuple[Command, ...]:
        """For `start`, `stop`, `restart`."""
        ...

    def log_command(self, name: str, lines: int, *, follow: bool) -> Command:
        """Shows what the service wrote."""
        ...

    def state(self, name: str, run: Run) -> ServiceState:
        """What the manager says about it."""
        ...


class Systemd:
    """The user's systemd.

    Args:
        config_home: where the user's configuration lies.
    """

    kind = "systemd"

    def __init__(self, config_home: Path) -> None:
        self._folder = config_home / "systemd" / "user"

    def path(self, name: str) -> Path:
        """As in Manager."""
        return self._folder / f"{name}.service"

    def file(self, service: Definition) -> File:
        """As in Manager."""
        content = unit_text(service).encode()
        return File(path=str(self.path(service.name)), mode=0o644, content=content)

    def program(self, name: str) -> Path | None:
        """As in Manager."""
        return program_of(_text(self.path(name)))

    def folders(self) -> tuple[Path, ...]:
        """As in Manager; it keeps the logs itself."""
        return ()

    def install_commands(self, name: str, *, start: bool) -> tuple[Command, ...]:
        """As in Manager."""
        commands = [_systemctl("daemon-reload"), _systemctl("enable", _unit(name))]
        if start:
            # An earlier one that has failed too often is not started otherwise.
            commands += [_systemctl("reset-failed", _unit(name))]
            commands += [_systemctl("restart", _unit(name))]
        return tuple(commands)

    def uninstall_commands(self, name: str) -> tuple[Command, ...]:
        """As in Manager."""
        return (_systemctl("disable", "--now", _unit(name)),)

    def forget_commands(self) -> tuple[Command, ...]:
        """As in Manager."""
        return (_systemctl("daemon-reload"),)

    def verb_commands(self, verb: str, name: str) -> tuple[Command, ...]:
        """As in Manager."""
        return (_systemctl(verb, _unit(name)),)

    def log_command(self, name: str, lines: int, *, follow: bool) -> Command:
        """As in Manager."""
        command = ("journalctl", "--user", "--unit", _unit(name), "--lines", str(lines))
        return (*command, "--follow") if follow else (*command, "--no-pager")

    def state(self, name: str, run: Run) -> ServiceState:
        """As in Manager."""
        shown = run(_systemctl("show", _unit(name), "--property=ActiveState,MainPID"))
        found = dict(line.split("=", 1) for line in shown.output.splitlines() if "=" in line)
        state = found.get("ActiveState", "unknown")
        pid = int(found.get("MainPID", "0") or 0)
        return ServiceState(
            is_installed=self.path(name).is_file(),
            state=state,
            is_running=pid > 0,
            has_failed=state == "failed",
            pid=pid or None,
        )


class Launchd:
    """The user's launchd.

    Args:
        home: the user's folder.
        uid: the user.
    """

    kind = "launchd"

    def __init__(self, home: Path, uid: int) -> None:
        self._home = home
        self._domain = f"gui/{uid}"

    def path(self, name: str) -> Path:
        """As in Manager."""
        return self._home / "Library" / "LaunchAgents" / f"{name}.plist"

    def file(self, service: Definition) -> File:
        """As in Manager."""
        content = plist_bytes(service, self._home)
        return File(path=str(self.path(service.name)), mode=0o644, content=content)

    def program(self, name: str) -> Path | None:
        """As in Manager."""
        return program_of_agent(_text(self.path(name)))

    def folders(self) -> tuple[Path, ...]:
        """As in Manager; it writes to log files but makes no folder for them."""
        return (log_folder(self._home),)

    def _target(self, name: str) -> str:
        return f"{self._domain}/{name}"

    def install_commands(self, name: str, *, start: bool) -> tuple[Command, ...]:
        """As in Manager; `bootout` of one that is not loaded fails, which does no harm."""
        commands: list[Command] = [("launchctl", "enable", self._target(name))]
        if start:
            commands += [("launchctl", "bootout", self._target(name))]
            commands += [("launchctl", "bootstrap", self._domain, str(self.path(name)))]
        return tuple(commands)

    def uninstall_commands(self, name: str) -> tuple[Command, ...]:
        """As in Manager."""
        return (("launchctl", "bootout", self._target(name)),)

    def forget_commands(self) -> tuple[Command, ...]:
        """As in Manager."""
        return ()

    def verb_commands(self, verb: str, name: str) -> tuple[Command, ...]:
        """As in Manager. An agent that is loaded runs, so to stop is to unload."""
        stop: Command = ("launchctl", "bootout", self._target(name))
        start: Command = ("launchctl", "bootstrap", self._domain, str(self.path(name)))
        return {"start": (start,), "stop": (stop,), "restart": (stop, start)}[verb]

    def log_command(self, name: str, lines: int, *, follow: bool) -> Command:
        """As in Manager."""
        files = [str(log_folder(self._home) / f"{name}.{kind}.log") for kind in ("out", "err")]
        return ("tail", "-n", str(lines), *(["-F"] if follow else []), *files)

    def state(self, name: str, run: Run) -> ServiceState:
        """As in Manager."""
        shown = run(("launchctl", "print", self._target(name)))
        state = re.search(r"^\s*state = (.+)$", shown.output, re.MULTILINE)
        pid = re.search(r"^\s*pid = (\d+)$", shown.output, re.MULTILINE)
        word = state[1].strip() if state and shown.status == 0 else "not loaded"
        return ServiceState(
            is_installed=self.path(name).is_file(),
            state=word,
            is_running=pid is not None and shown.status == 0,
            # It never gives up: it throttles.
            has_failed=False,
            pid=int(pid[1]) if pid and shown.status == 0 else None,
        )


def manager_here(platform: str = sys.platform) -> Manager:
    """The manager of this system.

    Raises:
        CommandError: there is none that we know.
    """
    home = Path.home()
    if platform == "darwin":
        return Launchd(home, os.getuid())
    if platform == "linux":
        return Systemd(Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config"))
    raise CommandError(f"no service manager of {platform} is known; use systemd or launchd")


def lacks_session(said: str) -> bool:
    """Whether a manager's words mean that it knows nothing of this shell, as under su."""
    return _NO_BUS.match(said) is not None


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _systemctl(*words: str) -> Command:
    return ("systemctl", "--user", *words)


def _unit(name: str) -> str:
    return f"{name}.service"
