"""The child process of an engine as the system knows it: pipes, environment, start and end."""

import contextlib
import errno
import os
import signal
import subprocess
import sys

import msgspec

from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.engines.command import EngineCommand

# What an engine has no use for and must not show in its environment.
_SECRET_VARIABLES = ("MLX_ISOLATE_API_KEY",)


class EngineName(msgspec.Struct, frozen=True):
    """What an engine is called in `ps`, the log and its record."""

    id: str
    incarnation: int


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How a process ended: by an exit code or by a signal's name."""

    code: int | None
    signal: str | None


def describe_status(returncode: int) -> Exit:
    """`subprocess`'s return code as an Exit."""
    if returncode >= 0:
        return Exit(code=returncode, signal=None)
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return Exit(code=None, signal=name)


class Pipes(msgspec.Struct, frozen=True):
    """Both ends of everything between supervisor and engine: (read, write) each."""

    spec: tuple[int, int]
    report: tuple[int, int]
    lifeline: tuple[int, int]
    output: tuple[int, int]

    @property
    def ours(self) -> tuple[int, ...]:
        """The supervisor's ends."""
        return (self.spec[1], self.report[0], self.lifeline[1], self.output[0])

    @property
    def theirs(self) -> tuple[int, ...]:
        """The engine's ends."""
        return (self.spec[0], self.report[1], self.lifeline[0], self.output[1])


def open_pipes() -> Pipes:
    """All of them.

    Raises:
        OSError: too many files are open.
    """
    opened: list[tuple[int, int]] = []
    try:
        for _ in range(4):
            opened.append(os.pipe())
    except OSError:
        for pair in opened:
            close_all(*pair)
        raise
    return Pipes(*opened)


def close_all(*fds: int) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def environment_of(command: EngineCommand, spec: ModelSpec | None) -> dict[str, str]:
    """The whole environment of an engine of `spec`, or (None) of one without a model yet."""
    environment = {**os.environ, **command.env, **(spec.env if spec is not None else {})}
    for name in _SECRET_VARIABLES:
        environment.pop(name, None)
    # Stacks of a crash or of the watchdog's SIGABRT belong in the log, output not in a buffer.
    environment |= {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    return environment


def start_child(
    command: EngineCommand, environment: dict[str, str], name: EngineName, pipes: Pipes
) -> subprocess.Popen[bytes]:
    """Start the engine's program.

    Raises:
        OSError: it cannot be started.
    """
    # An id that begins with a dash would be taken for a flag.
    id = [f"--id={name.id}"] if name.id.startswith("-") else ["--id", name.id]
    argv = [*command.argv, *id, "--incarnation", str(name.incarnation)]
    argv += ["--spec-fd", str(pipes.spec[0]), "--report-fd", str(pipes.report[1])]
    argv += ["--lifeline-fd", str(pipes.lifeline[0]), "--nice", str(command.nice)]
    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=pipes.output[1],
            stderr=pipes.output[1],
            env=environment,
            pass_fds=(pipes.spec[0], pipes.report[1], pipes.lifeline[0]),
            # So that Ctrl-C reaches only the supervisor. Not a session of its own: Linux shares the
            # CPU out by session first (autogroup), and niceness counts only within one.
            process_group=0,
        )
    except ValueError as error:
        # An argument or variable that no system takes, such as one with a NUL.
        raise OSError(errno.EINVAL, str(error)) from error


def forbid_core_dumps(pid: int) -> None:
    """As far as the system can be told."""
    if sys.platform == "linux":
        import resource

        # A hung engine is ended by SIGABRT; a core dump of its weights would take minutes.
        with contextlib.suppress(OSError):
            _, hard = resource.prlimit(pid, resource.RLIMIT_CORE)
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, hard))
