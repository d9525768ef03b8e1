"""Units and agents as they are written: golden files, and values that want to break out."""

import argparse
import os
import plistlib
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor.cli import main
from mlx_isolate_supervisor.commands import serve
from mlx_isolate_supervisor.commands.errors import CommandError
from mlx_isolate_supervisor.service.command_line import Installation, installation
from mlx_isolate_supervisor.service.definition import Definition, File, check_name
from mlx_isolate_supervisor.service.files import remember, restore, write
from mlx_isolate_supervisor.service.managers import Launchd, Systemd, manager_here
from mlx_isolate_supervisor.service.plist import plist_bytes
from mlx_isolate_supervisor.service.unit import unit_text
from tests.architecture.generated import ROOT
from tests.fakes.fake_systemd import unquote

GOLDEN = ROOT / "tests/material/service"
NASTY = 'a "quoted" \\ 100% $HOME ${X} %h ;\té\nExecStartPre=/bin/rm'
SERVICE = Definition(
    name="mlx-isolate",
    argv=(
        "/opt/env 1/bin/python",
        "-P",
        "-m",
        "mlx_isolate_supervisor.cli",
        "serve",
        "/models/50% café",
        '--served-model-name=it\'s "mine" for $5',
        "--port=8080",
    ),
    environment={"HF_HOME": "/big disk/hf"},
    url="http://127.0.0.1:8080",
    shutdown_timeout_s=60.0,
)


def test_unit_is_the_golden_one() -> None:
    assert unit_text(SERVICE) == (GOLDEN / "mlx-isolate.service").read_text()


def test_agent_is_the_golden_one() -> None:
    assert plist_bytes(SERVICE, Path("/Users/me")) == (GOLDEN / "mlx-isolate.plist").read_bytes()


def test_agent_is_a_property_list_with_a_window_above_the_shutdown() -> None:
    agent = plistlib.loads(plist_bytes(SERVICE, Path("/Users/me")))
    assert agent["ProgramArguments"] == list(SERVICE.argv)
    assert agent["ExitTimeOut"] > SERVICE.shutdown_timeout_s
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["ThrottleInterval"] >= 10
    assert agent["StandardErrorPath"].startswith("/Users/me/Library/Logs/")


def test_unit_has_a_window_above_the_shutdown() -> None:
    found = dict(re.findall(r"^(\w+)=(.*)$", unit_text(SERVICE), re.MULTILINE))
    assert int(found["TimeoutStopSec"]) > SERVICE.shutdown_timeout_s
    assert found["Type"] == "notify"
    assert found["KillMode"] == "mixed"
    assert found["Restart"] == "on-failure"


words = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]))


@given(st.lists(words, min_size=1), words)
def test_no_value_breaks_out_of_a_unit(arguments: list[str], value: str) -> None:
    service = Definition(
        name="x",
        argv=("/bin/a $5 %h", *arguments),
        environment={"HF_HOME": value},
        url="http://127.0.0.1:1",
        shutdown_timeout_s=1.0,
    )
    lines = unit_text(service).split("\n")
    [command] = [line for line in lines if line.startswith("ExecStart")]
    [environment] = [line for line in lines if line.startswith("Environment")]
    assert len(lines) == len(unit_text(SERVICE).split("\n"))
    assert tuple(unquote(command.partition("=")[2], expands=True)) == service.argv
    assert unquote(environment.partition("=")[2], expands=False) == [f"HF_HOME={value}"]


def test_no_value_breaks_out_of_an_agent() -> None:
    service = Definition(
        name="x",
        argv=("/bin/a", NASTY, "</string><string>more"),
        environment={"HF_HOME": NASTY},
        url="",
        shutdown_timeout_s=1.0,
    )
    agent = plistlib.loads(plist_bytes(service, Path("/Users/a & b")))
    assert agent["ProgramArguments"] == list(service.argv)
    assert agent["EnvironmentVariables"] == {"HF_HOME": NASTY}


def test_an_agent_that_cannot_hold_a_value_is_refused() -> None:
    service = Definition(
        name="x", argv=("/bin/a", "\x01"), environment={}, url="", shutdown_timeout_s=1.0
    )
    with pytest.raises(ConfigError):
        plist_bytes(service, Path("/Users/me"))


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = tmp_path / "my python"
    program.symlink_to(sys.executable)
    service = Definition(
        name="mlx-isolate",
        argv=(str(program), "serve", NASTY.replace("\n", " ")),
        environment={"HF_HOME": NASTY},
        url="http://127.0.0.1:8080",
        shutdown_timeout_s=60.0,
    )
    unit = tmp_path / "mlx-isolate.service"
    unit.write_text(unit_text(service))
    done = subprocess.run(
        ["systemd-analyze", "--user", "--man=no", "verify", str(unit)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    complaints = [line for line in done.stderr.splitlines() if "mlx-isolate" in line]
    assert not complaints, done.stderr


@pytest.mark.parametrize("name", ["", "../up", "a b", "-x", "a/b", "x" * 65])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        check_name(name)


def planned(tmp_path: Path, *typed: str, variables: dict[str, str] | None = None) -> Installation:
    """What `service install` of this command line would install."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args(list(typed))
    resolved = serve.settings_of(args)
    return installation("s", args, resolved, config_home=tmp_path, environment=variables or {})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_a_service_serves_what_serve_would(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = ("my model", "--served-model-name", "m", "--ssd-cache-dir", "cache", "--no-metrics")
    passed_on = {"HF_HOME": "/hf", "HF_HUB_CACHE": "/hub"}
    wanted = planned(tmp_path, *typed, variables={"MLX_ISOLATE_TTL": "5m", **passed_on})
    words = wanted.service.argv[wanted.service.argv.index("serve") + 1 :]
    assert words[:2] == (str(model), "--served-model-name=m")
    assert set(words[2:]) == {"--no-metrics", "--ttl=5m", f"--ssd-cache-dir={tmp_path}/cache"}
    assert wanted.service.environment == passed_on
    assert Path(wanted.service.argv[0]).is_absolute()


def test_keys_go_to_a_private_file_and_not_on_the_command_line(tmp_path: Path, model: Path) -> None:
    wanted = planned(tmp_path, str(model), "--api-key", "hunter2", "--api-key", "hunter3")
    assert wanted.key_file is not None
    assert wanted.key_file.mode == 0o600
    assert wanted.key_file.content == b"hunter2\nhunter3\n"
    assert not any("hunter" in word for word in wanted.service.argv)
    assert wanted.key_file.path in wanted.service.argv


def test_a_dry_run_prints_everything_but_secrets_and_writes_nothing(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    if sys.platform not in ("linux", "darwin"):
        pytest.skip("no service manager that we know")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home/config"))
    typed = ["service", "install", "--dry-run", str(model), "--api-key", "hunter2"]
    assert main(typed) == 0
    shown = capsys.readouterr().out
    path = manager_here().path("mlx-isolate")
    assert f"# {path}, mode 0644" in shown
    assert str(model) in shown
    assert "hunter2" not in shown
    assert not (tmp_path / "home").exists()


def test_a_variable_that_the_service_would_not_have_is_named(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    if sys.platform not in ("linux", "darwin"):
        pytest.skip("no service manager that we know")
    file = tmp_path / "c.yaml"
    file.write_text(f'apiKeys: ["${{env.MY_KEY}}"]\nmodels: {{m: {{path: {model}}}}}\n')
    monkeypatch.setenv("MY_KEY", "hunter2")
    assert main(["service", "install", "--dry-run", "--config", str(file)]) == 0
    said = capsys.readouterr()
    assert f"{file} reads MY_KEY from the environment" in said.err
    assert "hunter2" not in said.out + said.err


@pytest.mark.parametrize(
    "typed", [["--port", "0"], ["--host", "0.0.0.0"], ["--no-such-flag"], ["--name", "a/b"]]
)
def test_a_service_that_could_not_serve_is_not_installed(
    typed: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home/config"))
    try:
        status = main(["service", "install", str(model), *typed])
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    assert status == 2
    assert not (tmp_path / "home").exists()


def test_files_are_put_back_with_their_modes(tmp_path: Path) -> None:
    old, new = tmp_path / "a/old", tmp_path / "a/new"
    write(File(path=str(old), mode=0o640, content=b"before"))
    before = remember([str(old), str(new)])
    write(File(path=str(old), mode=0o600, content=b"after"))
    write(File(path=str(new), mode=0o600, content=b"key"))
    assert stat.S_IMODE(new.stat().st_mode) == 0o600
    restore(before)
    assert old.read_bytes() == b"before"
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
    assert sorted(path.name for path in old.parent.iterdir()) == ["old"]


def test_systems_without_a_known_manager_are_told() -> None:
    with pytest.raises(CommandError, match="no service manager"):
        manager_here("freebsd14")


def test_launchd_loads_the_new_agent_in_place_of_the_old() -> None:
    launchd = Launchd(Path("/Users/me"), 501)
    agent = "/Users/me/Library/LaunchAgents/mlx-isolate.plist"
    assert launchd.install_commands("mlx-isolate", start=True) == (
        ("launchctl", "enable", "gui/501/mlx-isolate"),
        ("launchctl", "bootout", "gui/501/mlx-isolate"),
        ("launchctl", "bootstrap", "gui/501", agent),
    )
    assert len(launchd.install_commands("mlx-isolate", start=False)) == 1
    assert launchd.file(SERVICE).path == agent


def test_systemd_starts_the_new_unit_only_if_asked() -> None:
    systemd = Systemd(Path("/c"))
    verbs = [command[2] for command in systemd.install_commands("x", start=True)]
    assert verbs == ["daemon-reload", "enable", "reset-failed", "restart"]
    verbs = [command[2] for command in systemd.install_commands("x", start=False)]
    assert verbs == ["daemon-reload", "enable"]


def test_launchd_state_is_read_from_its_print() -> None:
    from mlx_isolate_supervisor.service.managers import Done

    text = "gui/501/mlx-isolate = {\n\tactive count = 1\n\tstate = running\n\n\tpid = 4711\n}\n"
    state = Launchd(Path("/Users/me"), 501).state("mlx-isolate", lambda _: Done(0, text))
    assert (state.state, state.is_running, state.pid) == ("running", True, 4711)
    missing = Launchd(Path("/Users/me"), 501).state("mlx-isolate", lambda _: Done(113, "Could not"))
    assert (missing.state, missing.is_running, missing.pid) == ("not loaded", False, None)
