"""What a service runs, whatever manages it; pure."""

import re

import msgspec

from mlx_isolate_shared.errors import ConfigError

DEFAULT_NAME = "mlx-isolate"
# A manager waits this much longer than the daemon's own shutdown window before it kills.
STOP_GRACE_S = 30
# Variables of the installing shell that the daemon and its engines read besides their flags.
PASSED_ON = (
    "HF_HOME",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "HF_ENDPOINT",
    "XDG_CACHE_HOME",
    "XDG_STATE_HOME",
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """One service.

    Attributes:
        name: of the unit or agent.
        argv: the daemon's command line, its program absolute.
        environment: what is set for it.
        url: where it will listen, for a person.
        shutdown_timeout_s: the daemon's own window for an orderly end.
    """

    name: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    url: str
    shutdown_timeout_s: float

    @property
    def stop_timeout_s(self) -> int:
        """How long a manager gives it to end, in whole seconds."""
        return int(self.shutdown_timeout_s) + STOP_GRACE_S


class File(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a service: absolute path, mode, content."""

    path: str
    mode: int
    content: bytes


def check_name(name: str) -> str:
    """The name, if it can be that of a unit, an agent and a file.

    Raises:
        ConfigError: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--name: {name!r} cannot be a service's name; use letters, digits, '.', '-' and '_'."
        )
    return name
