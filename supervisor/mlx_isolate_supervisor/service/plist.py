"""A launchd agent as a property list; pure."""

import plistlib
from pathlib import Path
from typing import Any
from xml.parsers.expat import ExpatError

from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor.service.definition import Definition

# launchd starts it again at most this often.
THROTTLE_S = 10
# Its default of 256 is less than a busy server's connections.
FILES_MAX = 8192


def log_folder(home: Path) -> Path:
    """Where agents write, below the user's folder."""
    return home / "Library" / "Logs" / "mlx-isolate"


def program_of_agent(content: bytes) -> Path | None:
    """The program that an agent starts; None where that cannot be read."""
    try:
        return Path(plistlib.loads(content)["ProgramArguments"][0])
    except (ValueError, KeyError, IndexError, TypeError, ExpatError):
        return None


def plist_bytes(service: Definition, home: Path) -> bytes:
    """The whole agent.

    Args:
        service: what it runs.
        home: the user's folder; logs go below it.

    Raises:
        ConfigError: a value that no property list can hold.
    """
    logs = log_folder(home)
    limits = {"NumberOfFiles": FILES_MAX}
    agent: dict[str, Any] = {
        "Label": service.name,
        "ProgramArguments": list(service.argv),
        "EnvironmentVariables": service.environment,
        "WorkingDirectory": str(home),
        "RunAtLoad": True,
        # After a crash, not after an orderly stop.
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": THROTTLE_S,
        "ExitTimeOut": service.stop_timeout_s,
        # Not slowed down as background work is.
        "ProcessType": "Interactive",
        "SoftResourceLimits": limits,
        "HardResourceLimits": limits,
        "Umask": 0o077,
        "StandardOutPath": str(logs / f"{service.name}.out.log"),
        "StandardErrorPath": str(logs / f"{service.name}.err.log"),
    }
    try:
        return plistlib.dumps(agent, sort_keys=True)
    except ValueError as error:
        raise ConfigError(f"a property list cannot hold this command line: {error}.") from error
