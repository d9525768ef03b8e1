"""Installing a service: its files, its start, and the way back when it does not become ready."""

import time
from collections.abc import Callable, Sequence

import msgspec

from mlx_isolate_supervisor.commands.client import Daemon
from mlx_isolate_supervisor.commands.errors import CommandError
from mlx_isolate_supervisor.service.command_line import Installation
from mlx_isolate_supervisor.service.definition import File
from mlx_isolate_supervisor.service.files import make_folder, remember, restore, write
from mlx_isolate_supervisor.service.managers import NO_SESSION, Command, Manager, Run, lacks_session
from mlx_isolate_supervisor.telemetry.status import Status

POLL_S = 0.2


class Failure(CommandError):
    """The new service does not work; the earlier state is back."""


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an installation writes and runs."""

    files: tuple[File, ...]
    commands: tuple[Command, ...]


def plan_steps(installation: Installation, manager: Manager, *, start: bool) -> Steps:
    """What will be done, for a dry run as for a real one."""
    key_file = installation.key_file
    files = (*((key_file,) if key_file else ()), manager.file(installation.service))
    commands = manager.install_commands(installation.service.name, start=start)
    return Steps(files=files, commands=commands)


class Installer:
    """Does an installation.

    Args:
        manager: of this system.
        run: runs its commands.
        tell: shows a line to a person.
    """

    def __init__(self, manager: Manager, run: Run, tell: Callable[[str], None]) -> None:
        self._manager = manager
        self._run = run
        self._tell = tell

    def install(
        self, installation: Installation, daemon: Daemon, *, start: bool, timeout_s: float
    ) -> None:
        """Write, start, and wait until it is ready.

        Args:
            installation: what to install.
            daemon: how to ask the new daemon.
            start: whether to start it, and wait.
            timeout_s: how long it may take until it is ready.

        Raises:
            Failure: it did not become ready; the earlier files and service are back.
            CommandError: nothing was done.
        """
        name = installation.service.name
        steps = plan_steps(installation, self._manager, start=start)
        before = remember([file.path for file in steps.files])
        was_running = self._manager.state(name, self._run).is_running
        if start and not was_running:
            _check_free(daemon)
        try:
            for folder in self._manager.folders():
                make_folder(folder)
            for file in steps.files:
                write(file)
                self._tell(f"wrote {file.path}")
            self._do(steps.commands, optional=("bootout", "reset-failed"))
            if start:
                self._wait_ready(name, daemon, timeout_s)
        except CommandError as error:
            self._tell(f"it does not work: {error}; going back")
            self._do(self._manager.uninstall_commands(name), optional=("",))
            restore(before)
            had_one = before[-1].file is not None
            if had_one:
                back = self._manager.install_commands(name, start=was_running)
            else:
                back = self._manager.forget_commands()
            self._do(back, optional=("",))
            state = "the earlier service is back" if had_one else "nothing is installed"
            raise Failure(f"{error}; {state}") from error

    def _do(self, commands: Sequence[Command], optional: Sequence[str] = ()) -> None:
        """Run commands; one may fail if it has a word that begins with one of `optional`."""
        for command in commands:
            done = self._run(command)
            may_fail = any(word.startswith(tuple(optional)) for word in command)
            if done.status != 0 and not may_fail:
                said = (done.output.strip() or f"status {done.status}").splitlines()[-1]
                remedy = f"; {NO_SESSION}" if lacks_session(said) else ""
                raise CommandError(f"{' '.join(command)}: {said}{remedy}")

    def _wait_ready(self, name: str, daemon: Daemon, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        told = ""
        while True:
            state = self._manager.state(name, self._run)
            if state.has_failed:
                raise CommandError(f"the service has {state.state}{self._last_words(name)}")
            words = _readiness(daemon, state.pid)
            if words is None:
                return
            if words != told:
                told = words
                self._tell(words)
            if time.monotonic() > deadline:
                raise CommandError(f"not ready within {timeout_s:g} s: {words}")
            time.sleep(POLL_S)

    def _last_words(self, name: str) -> str:
        output = self._run(self._manager.log_command(name, 5, follow=False)).output
        lines = [line for line in output.splitlines() if "mlx-isolate: " in line]
        return f": {lines[-1].partition('mlx-isolate: ')[2]}" if lines else ""


def _check_free(daemon: Daemon) -> None:
    """Refuse where something else already answers: the new service could never listen."""
    try:
        daemon.ask("GET", "/livez")
    except CommandError:
        return
    raise CommandError(
        f"something answers at {daemon.url} already; stop it (mlx-isolate stop) or choose another "
        "--port"
    )


def _readiness(daemon: Daemon, pid: int | None) -> str | None:
    """None once the service's own daemon is ready, else what it waits for.

    Raises:
        CommandError: a model can never be served.
    """
    try:
        status = msgspec.json.decode(daemon.get("/status"), type=Status)
    except CommandError:
        return "waiting for the daemon to listen"
    if pid is not None and status.supervisor.pid != pid:
        return "waiting for the new daemon"
    for model in status.models:
        if model.failure is not None:
            raise CommandError(f"{model.id} cannot be served: {model.failure.message}")
    waiting = [m for m in status.models if m.desired == "up" and m.state != "ready"]
    if waiting:
        return f"loading {', '.join(model.id for model in waiting)}"
    return None
