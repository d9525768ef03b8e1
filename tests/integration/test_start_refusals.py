"""Starts that must not happen: one sentence, an exit status, and nothing left behind."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mlx_isolate_supervisor.exit_codes import TAKEN, USAGE
from tests.running_daemon import FAKE, RunningDaemon, fake_model, run_command


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(fake_model(tmp_path / "m"))


@pytest.fixture
def run_dir() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="mi")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def refused(outcome: subprocess.CompletedProcess[str], status: int) -> str:
    """The one sentence on stderr."""
    assert outcome.returncode == status, outcome.stderr
    assert outcome.stdout == ""
    lines = outcome.stderr.splitlines()
    assert len(lines) == 1, outcome.stderr
    assert lines[0].startswith("mlx-isolate: ")
    return lines[0].removeprefix("mlx-isolate: ")


@pytest.mark.case("19")
def test_a_taken_port_ends_the_start_and_harms_nobody(tmp_path: Path, model: str) -> None:
    with RunningDaemon(tmp_path / "a", model) as first:
        first.wait_state("ready")
        pid = first.status()["models"][0]["pid"]
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        began = time.monotonic()
        second = run_command(
            tmp_path / "b", "serve", model, "--port", str(first.port), program=FAKE
        )
        assert time.monotonic() - began < 3.0
        assert refused(second, TAKEN) == (
            f"another mlx-isolate serves at {first.url}; choose another --port, or end it with "
            f"'mlx-isolate stop --url {first.url}'."
        )
        assert {child.pid for child in psutil.Process().children(recursive=True)} == before
        assert first.status()["models"][0]["pid"] == pid
        assert first.chat().status == 200


@pytest.mark.case("19")
def test_a_port_that_something_else_holds_is_never_swapped_for_another(
    tmp_path: Path, model: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        outcome = run_command(tmp_path / "a", "serve", model, "--port", str(port), program=FAKE)
    assert refused(outcome, TAKEN) == (
        f"port {port} on 127.0.0.1 is in use by another process; stop it or choose another --port."
    )


def test_a_second_daemon_on_the_same_run_directory_is_refused(tmp_path: Path, model: str) -> None:
    with RunningDaemon(tmp_path / "a", model) as first:
        first.wait_state("ready")
        flags = ("--port", "0", "--run-dir", str(first.run_dir))
        outcome = run_command(tmp_path / "b", "serve", model, *flags, program=FAKE)
        sentence = refused(outcome, USAGE)
        assert f"another supervisor (pid {first.process.pid})" in sentence
        assert first.chat().status == 200


def test_a_run_directory_too_long_for_sockets_is_refused(tmp_path: Path, model: str) -> None:
    folder = "/tmp/" + "x" * 120
    outcome = run_command(tmp_path / "a", "serve", model, "--run-dir", folder, "--port", "0")
    assert "choose a shorter run directory (--run-dir)" in refused(outcome, USAGE)
    assert not os.path.exists(folder)


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    outcome = run_command(tmp_path / "a", "serve", "/no/such/model")
    assert refused(outcome, USAGE) == (
        "there is no folder /no/such/model; check the path of the model."
    )


def test_a_missing_demo_package_is_told_with_the_command_that_installs_it(tmp_path: Path) -> None:
    # -S and the bare paths: an interpreter that sees the project and msgspec alone.
    import msgspec

    packages = tmp_path / "site"
    packages.mkdir()
    (packages / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    paths = [str(packages), *(path for path in sys.path if path.endswith(("supervisor", "shared")))]
    outcome = subprocess.run(
        [sys.executable, "-S", "-m", "mlx_isolate_supervisor.cli", "serve"],
        env={"PYTHONPATH": ":".join(paths), "HOME": str(tmp_path), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert refused(outcome, USAGE) == (
        "the demo model is not installed; install it with: pip install 'mlx-isolate[demo]'"
    )


def test_other_machines_are_let_in_only_with_a_key(tmp_path: Path, model: str) -> None:
    outcome = run_command(tmp_path / "a", "serve", model, "--host", "0.0.0.0", "--port", "0")
    assert refused(outcome, USAGE) == (
        "--host 0.0.0.0 lets other machines in, so an API key is needed; give "
        "--api-key KEY or --api-key-file FILE, or listen on 127.0.0.1."
    )


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--queue-timeout", "soon"], "--queue-timeout: 'soon' is not a time; write it as 90, 90s"),
        (["--api-key-file", "/no/keys"], "--api-key-file: cannot read /no/keys: No such file"),
        (["--config", "/no/file.yaml"], "cannot read the configuration /no/file.yaml: No such"),
        (["--host", "203.0.113.7", "--api-key", "k"], "cannot listen on 203.0.113.7 port 0: "),
        (["--served-model-name", "a", "--served-model-name", "b"], "--served-model-name was given"),
    ],
)
def test_a_bad_flag_is_told_in_one_sentence(
    tmp_path: Path, model: str, run_dir: str, flags: list[str], sentence: str
) -> None:
    fixed = ["--port", "0", "--run-dir", run_dir]
    outcome = run_command(tmp_path / "a", "serve", model, *fixed, *flags)
    assert refused(outcome, USAGE).startswith(sentence)


def test_a_remark_behind_a_key_is_told_without_the_key(tmp_path: Path, model: str) -> None:
    keys = tmp_path / "keys"
    keys.write_text("  # whose\ns3cret # mine\n")
    outcome = run_command(
        tmp_path / "a", "serve", model, "--port", "0", "--api-key-file", str(keys)
    )
    assert refused(outcome, USAGE) == (
        f"--api-key-file: line 2 of {keys} holds more than a key; write comments on lines of "
        "their own."
    )


def test_an_unwritable_log_folder_is_told(tmp_path: Path, model: str, run_dir: str) -> None:
    (tmp_path / "file").touch()
    flags = ["--port", "0", "--run-dir", run_dir, "--log-dir", str(tmp_path / "file" / "logs")]
    outcome = run_command(tmp_path / "a", "serve", model, *flags)
    assert "choose another --log-dir" in refused(outcome, USAGE)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    outcome = run_command(tmp_path / "a", "serve", str(folder), "--port", "0", program=FAKE)
    assert refused(outcome, USAGE).startswith(f"{folder} holds no model: it has no config.json")


def test_a_configuration_in_the_place_of_a_model_is_told_its_flag(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("port: 0\n")
    outcome = run_command(tmp_path / "a", "config", "show", str(file), program=FAKE)
    assert refused(outcome, USAGE).endswith(f"a configuration is given as --config {file}.")


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://h:x", "http://[", "http://h:0"])
def test_an_address_that_is_none_is_refused(tmp_path: Path, url: str) -> None:
    told = refused(run_command(tmp_path / "a", "ps", "--url", url, program=FAKE), USAGE)
    assert told == f"--url: {url!r} is not an address such as http://127.0.0.1:8080."


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("serve", "--prot", "1"), "unknown argument --prot, did you mean --port"),
        (("config", "show", "--prot"), "unknown argument --prot, did you mean --port"),
        (("logs", "--folow"), "unknown argument --folow, did you mean --follow"),
        (("load",), "give MODEL; see mlx-isolate load"),
        (("logs", "--lines", "many"), "-n/--lines: many is no whole number"),
        (("stop", "--timeout", "x"), "--timeout: x is no number of seconds"),
        (("flush", "--timeout", "-1"), "--timeout: -1 is no number of seconds"),
        (("cache", "ls", "--dri", "x"), "unknown argument --dri, did you mean --dir"),
        (("cache", "lss"), "there is no verb 'lss', did you mean ls"),
        (("cache", "ls"), "give --dir FOLDER, or --config FILE or MLX_ISOLATE_SSD_CACHE_DIR as"),
        (("cache", "ls", "--config"), "--config: expected one argument; see mlx-isolate cache"),
        (("ps", "--json", "--url"), "--url: expected one argument"),
    ],
)
def test_a_wrong_word_is_told_in_one_sentence_with_the_nearest_flag(
    tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    told = refused(run_command(tmp_path / "a", *words, program=FAKE), USAGE)
    assert told.startswith(sentence)
    assert told.endswith(" --help")
