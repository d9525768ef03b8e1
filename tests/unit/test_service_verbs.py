"""What `service start`, `stop` and `restart` say: each in one sentence, with what to do about it."""

from pathlib import Path

import pytest

from mlx_isolate_supervisor.cli import main
from mlx_isolate_supervisor.commands import service
from mlx_isolate_supervisor.exit_codes import FAILED, OK
from mlx_isolate_supervisor.service.managers import Command, Done, Launchd, Manager, Systemd

NO_BUS = "Failed to connect to bus: No medium found\n"
NO_BUS_LATER = (
    "Failed to connect to user scope bus via local transport: $DBUS_SESSION_BUS_ADDRESS and "
    "$XDG_RUNTIME_DIR not defined (consider using --machine=<user>@.host --user to connect to bus "
    "of other user)\n"
)
JOB_FAILED = (
    "Job for mlx-isolate.service failed because the control process exited with error code.\n"
    'See "systemctl --user status mlx-isolate.service" for details.\n'
)


class Script:
    """A service manager that says what a test wants; what is not named succeeds silently."""

    def __init__(self, **said: Done) -> None:
        self._said = said
        self.asked: list[str] = []

    def __call__(self, command: Command) -> Done:
        verb = command[2] if command[0] == "systemctl" else command[1]
        self.asked.append(verb)
        return self._said.get(verb, Done(0, ""))


def use(monkeypatch: pytest.MonkeyPatch, manager: Manager, script: Script) -> None:
    path = manager.path("mlx-isolate")
    path.parent.mkdir(parents=True)
    path.touch()
    monkeypatch.setattr(service, "manager_here", lambda: manager)
    monkeypatch.setattr(service, "run_command", script)


@pytest.mark.parametrize("verb", ["start", "stop", "restart"])
def test_what_the_manager_refuses_is_one_line_with_where_to_look(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, Systemd(tmp_path), Script(**{verb: Done(1, JOB_FAILED)}))
    assert main(["service", verb]) == FAILED
    told = capsys.readouterr().err
    assert told == (
        f"mlx-isolate: systemctl --user {verb} mlx-isolate.service: Job for mlx-isolate.service "
        "failed because the control process exited with error code; see 'mlx-isolate service "
        "status' and 'mlx-isolate service logs'\n"
    )


@pytest.mark.parametrize("said", [NO_BUS, NO_BUS_LATER])
def test_a_shell_without_a_session_of_systemd_is_told_what_it_lacks(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, Systemd(tmp_path), Script(show=Done(1, said), start=Done(1, said)))
    assert main(["service", "start"]) == FAILED
    assert "log in as this user, or run 'mlx-isolate serve' itself\n" in capsys.readouterr().err


def test_an_installation_in_such_a_shell_says_so_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, Systemd(tmp_path), Script(**{"daemon-reload": Done(1, NO_BUS)}))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["service", "install", "--no-start", "demo"]) == FAILED
    assert capsys.readouterr().err == (
        "mlx-isolate: systemctl --user daemon-reload: Failed to connect to bus: No medium found; "
        "log in as this user, or run 'mlx-isolate serve' itself; the earlier service is back\n"
    )


@pytest.mark.parametrize("kind", ["systemd", "launchd"])
def test_a_service_that_runs_is_not_started_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manager: Manager = Systemd(tmp_path) if kind == "systemd" else Launchd(tmp_path, 501)
    script = Script(
        show=Done(0, "ActiveState=active\nMainPID=7\n"),
        print=Done(0, "\tstate = running\n\tpid = 7\n"),
        bootstrap=Done(5, "Bootstrap failed: 5: Input/output error\n"),
    )
    use(monkeypatch, manager, script)
    assert main(["service", "start"]) == OK
    assert capsys.readouterr().out == "mlx-isolate runs already, pid 7\n"
    assert len(script.asked) == 1


def test_an_agent_that_is_not_loaded_is_started_by_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(bootout=Done(3, "Boot-out failed: 3: No such process\n"))
    use(monkeypatch, Launchd(tmp_path, 501), script)
    assert main(["service", "restart"]) == OK
    assert script.asked[-2:] == ["bootout", "bootstrap"]
