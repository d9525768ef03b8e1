"""The daemon under a service manager: what it tells systemd, and installations that go back."""

import argparse
import json
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_isolate_supervisor.commands import serve
from mlx_isolate_supervisor.commands.client import daemon_of_settings
from mlx_isolate_supervisor.commands.errors import CommandError
from mlx_isolate_supervisor.service.command_line import installation
from mlx_isolate_supervisor.service.install import Failure, Installer
from mlx_isolate_supervisor.service.managers import Systemd
from mlx_isolate_supervisor.service.notify import Notifier
from tests.fakes.fake_systemd import FakeSystemd
from tests.running_daemon import FAKE, RunningDaemon, fake_model, run_command
from tests.waiting import wait_for


class Told:
    """A manager's datagram socket: what was told so far, message by message."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.setblocking(False)
        self.messages: list[str] = []

    def has(self, text: str) -> bool:
        try:
            while True:
                self.messages.append(self.socket.recv(4096).decode())
        except BlockingIOError:
            pass
        return any(text in message.splitlines() for message in self.messages)

    def wait(self, text: str) -> None:
        wait_for(lambda: self.has(text), 10.0, text)


@pytest.fixture
def told(short_folder: Path) -> Iterator[Told]:
    told = Told(short_folder / "n")
    yield told
    told.socket.close()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="mi"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_systemd_is_told_of_ready_reload_and_stop(
    tmp_path: Path, told: Told, short_folder: Path
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(json.dumps({"models": {"m": {"path": str(fake_model(tmp_path / "m"))}}}))
    variables = {"NOTIFY_SOCKET": str(short_folder / "n"), "WATCHDOG_USEC": "200000"}
    with RunningDaemon(tmp_path / "home", "--config", str(config), variables=variables) as daemon:
        told.wait("READY=1")
        told.wait("WATCHDOG=1")
        assert not told.has("STOPPING=1")
        told.messages.clear()
        daemon.process.send_signal(signal.SIGHUP)
        told.wait("RELOADING=1")
        told.wait("READY=1")
        daemon.process.send_signal(signal.SIGTERM)
        told.wait("STOPPING=1")
        assert daemon.wait_end(20) == 0


def test_a_wrong_file_ends_the_reload_for_systemd_too(
    tmp_path: Path, told: Told, short_folder: Path
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(json.dumps({"models": {"m": {"path": str(fake_model(tmp_path / "m"))}}}))
    variables = {"NOTIFY_SOCKET": str(short_folder / "n")}
    with RunningDaemon(tmp_path / "home", "--config", str(config), variables=variables) as daemon:
        told.wait("READY=1")
        told.messages.clear()
        config.write_text("models: [")
        daemon.process.send_signal(signal.SIGHUP)
        told.wait("RELOADING=1")
        told.wait("READY=1")


def test_a_manager_that_does_not_listen_harms_nobody(tmp_path: Path) -> None:
    variables = {"NOTIFY_SOCKET": str(tmp_path / "nobody"), "WATCHDOG_USEC": "200000"}
    model = str(fake_model(tmp_path / "m"))
    with RunningDaemon(tmp_path / "home", model, variables=variables) as daemon:
        daemon.wait_state("ready")
        assert daemon.chat().status == 200


def test_a_watchdog_of_another_process_is_not_answered() -> None:
    mine = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "2000000"}
    assert Notifier(mine).watchdog_s == 1.0
    assert Notifier(mine | {"WATCHDOG_PID": str(os.getpid())}).watchdog_s == 1.0
    assert Notifier(mine | {"WATCHDOG_PID": "1"}).watchdog_s == 0.0
    assert Notifier({}).watchdog_s == 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
def test_an_abstract_socket_is_reached() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        name = f"mlx-isolate-test-{os.getpid()}"
        listener.bind(f"\0{name}")
        listener.settimeout(5)
        Notifier({"NOTIFY_SOCKET": f"@{name}"}).stopping()
        assert listener.recv(100) == b"STOPPING=1"


class Desk:
    """Installs services of fake engines with a fake systemd."""

    def __init__(self, home: Path, run_dir: Path) -> None:
        self.config_home = home / "config"
        home.mkdir()
        self.manager = Systemd(self.config_home)
        self.systemd = FakeSystemd(self.config_home / "systemd/user", home)
        self.lines: list[str] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._run_dir = run_dir

    @property
    def unit(self) -> Path:
        return self.manager.path("mlx-isolate")

    def install(self, *typed: str, start: bool = True, timeout_s: float = 20.0) -> None:
        parser = argparse.ArgumentParser()
        serve.add_arguments(parser)
        flags = [f"--port={self.port}", f"--run-dir={self._run_dir}", "--standby=0", "--log-dir="]
        args = parser.parse_args([*typed, *flags])
        resolved = serve.settings_of(args)
        wanted = installation(
            "mlx-isolate",
            args,
            resolved,
            config_home=self.config_home,
            program=FAKE,
            environment={},
        )
        installer = Installer(self.manager, self.systemd, self.lines.append)
        installer.install(
            wanted, daemon_of_settings(resolved.settings), start=start, timeout_s=timeout_s
        )

    def pid(self) -> int | None:
        return self.manager.state("mlx-isolate", self.systemd).pid


@pytest.fixture
def desk(tmp_path: Path, short_folder: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path / "home", short_folder)
    yield desk
    desk.systemd.close()


def test_install_starts_the_service_and_waits_until_it_is_ready(desk: Desk, tmp_path: Path) -> None:
    model = fake_model(tmp_path / "my model %h", load_s=0.3)
    desk.install(str(model), "--api-key", "hunter2")
    assert desk.pid() is not None
    assert "mlx-isolate.service" in desk.systemd.enabled
    assert "hunter2" not in desk.unit.read_text()
    keys = desk.config_home / "mlx-isolate/mlx-isolate.keys"
    assert keys.read_text() == "hunter2\n"
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600
    assert any(line.startswith("loading") for line in desk.lines)


def test_a_first_install_that_does_not_work_leaves_nothing(desk: Desk, tmp_path: Path) -> None:
    model = fake_model(tmp_path / "m", failed=("broken", "its weights are broken"), die="exit:78")
    with pytest.raises(Failure, match="weights are broken; nothing is installed"):
        desk.install(str(model), "--api-key", "hunter2")
    assert desk.pid() is None
    assert not desk.unit.exists()
    assert not (desk.config_home / "mlx-isolate/mlx-isolate.keys").exists()
    assert not desk.systemd.enabled


def test_an_install_that_does_not_work_brings_the_earlier_service_back(
    desk: Desk, tmp_path: Path
) -> None:
    desk.install(str(fake_model(tmp_path / "good")), "--api-key", "hunter2")
    before, unit = desk.pid(), desk.unit.read_bytes()
    bad = fake_model(tmp_path / "bad", failed=("broken", "it is broken"), die="exit:78")
    with pytest.raises(Failure, match="the earlier service is back"):
        desk.install(str(bad), "--api-key", "hunter3")
    assert desk.unit.read_bytes() == unit
    assert (desk.config_home / "mlx-isolate/mlx-isolate.keys").read_text() == "hunter2\n"
    assert "mlx-isolate.service" in desk.systemd.enabled
    assert desk.pid() not in (None, before)


def test_an_install_whose_model_never_loads_goes_back_in_time(desk: Desk, tmp_path: Path) -> None:
    model = fake_model(tmp_path / "m", hang_load=True)
    with pytest.raises(Failure, match="not ready within 2 s: loading m"):
        desk.install(str(model), timeout_s=2.0)
    assert not desk.unit.exists()


def test_without_start_nothing_is_started_or_stopped(desk: Desk, tmp_path: Path) -> None:
    desk.install(str(fake_model(tmp_path / "m")), start=False)
    assert desk.unit.exists()
    assert desk.pid() is None


def test_a_port_that_somebody_answers_on_is_refused_before_anything_is_written(
    desk: Desk, tmp_path: Path
) -> None:
    model = str(fake_model(tmp_path / "m"))
    with RunningDaemon(tmp_path / "other", model) as other:
        desk.port = other.port
        with pytest.raises(CommandError, match="something answers"):
            desk.install(model)
    assert not desk.unit.exists()
    assert [command[2] for command in desk.systemd.commands] == ["show"]


class Shell:
    """`mlx-isolate service …` where systemctl and journalctl only write down what they are asked."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._said = home / "said"
        programs = home / "bin"
        programs.mkdir(parents=True)
        for name in ("systemctl", "journalctl", "loginctl"):
            script = programs / name
            script.write_text(f'#!/bin/sh\necho {name} "$@" >> "{self._said}"\n')
            script.chmod(0o755)
        self._variables = {"PATH": f"{programs}:/usr/bin:/bin"}
        self.unit = home / "config/systemd/user/mlx-isolate.service"

    def run(self, *words: str) -> tuple[int, str]:
        done = run_command(self._home, "service", *words, variables=self._variables)
        return done.returncode, done.stdout + done.stderr

    def asked(self) -> list[str]:
        return self._said.read_text().splitlines() if self._said.exists() else []


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    if sys.platform != "linux":
        pytest.skip("systemd is Linux's")
    return Shell(tmp_path / "home")


@pytest.mark.parametrize("verb", ["start", "stop", "restart", "uninstall"])
def test_a_verb_without_a_service_says_how_to_get_one(shell: Shell, verb: str) -> None:
    status, said = shell.run(verb)
    assert status == 1
    assert "mlx-isolate service install" in said
    assert not shell.asked()


def test_a_service_is_installed_started_shown_and_removed(shell: Shell, tmp_path: Path) -> None:
    model = fake_model(tmp_path / "m")
    (model / "config.json").write_text("{}")
    assert shell.run("install", str(model), "--no-start", "--api-key", "k")[0] == 0
    keys = tmp_path / "home/config/mlx-isolate/mlx-isolate.keys"
    assert shell.unit.exists() and keys.exists()
    for verb in ("start", "restart", "stop"):
        assert shell.run(verb)[0] == 0
    assert shell.run("logs", "-n", "7")[0] == 0
    assert shell.run("status")[0] == 1  # this systemd says nothing, and no daemon answers
    assert shell.run("uninstall")[0] == 0
    assert not shell.unit.exists() and not keys.exists()
    asked = [line for line in shell.asked() if "show" not in line]
    assert asked == [
        "systemctl --user daemon-reload",
        "systemctl --user enable mlx-isolate.service",
        "systemctl --user start mlx-isolate.service",
        "systemctl --user restart mlx-isolate.service",
        "systemctl --user stop mlx-isolate.service",
        "journalctl --user --unit mlx-isolate.service --lines 7 --no-pager",
        "systemctl --user disable --now mlx-isolate.service",
        "systemctl --user daemon-reload",
    ]
