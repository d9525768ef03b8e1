"""The client commands against a real daemon over fake engines."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_isolate_supervisor.exit_codes import FAILED, OK, USAGE
from tests.running_daemon import (
    REAL,
    ROOT,
    RunningDaemon,
    environment,
    fake_model,
    run_command,
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    home = tmp_path_factory.mktemp("commands")
    model = fake_model(home / "first", say=["a line of the engine"])
    broken = fake_model(home / "broken", die="exit:78", failed=("model_missing", "no config.json"))
    with RunningDaemon(home / "home", str(model), str(broken)) as running:
        running.wait_state("ready", 0)
        running.wait_state("failed", 1)
        yield running


def test_ps_prints_a_table_without_colours(daemon: RunningDaemon) -> None:
    outcome = daemon.command("ps")
    assert outcome.returncode == OK, outcome.stderr
    header, first, broken = outcome.stdout.splitlines()
    assert header.split() == [
        "MODEL", "STATE", "PID", "ENGINE", "ACTIVE", "QUEUED", "MEMORY", "RESTARTS", "SINCE",
        "STAYS",
    ]  # fmt: skip
    assert re.match(r"first +ready +\d+ +#1 +0 +0 +\S+ \wB +0  \S+ ago  -$", first), first
    assert re.match(r"broken +failed +- +#1 +0 +0 +- +0  \S+ ago +-$", broken), broken
    assert "\x1b" not in outcome.stdout


def test_ps_json_is_the_status_document(daemon: RunningDaemon) -> None:
    document = json.loads(daemon.command("ps", "--json").stdout)
    assert [model["id"] for model in document["models"]] == ["first", "broken"]
    assert document["models"][0]["pid"] == daemon.status()["models"][0]["pid"]


def test_the_address_of_an_openai_client_will_do(daemon: RunningDaemon) -> None:
    outcome = run_command(daemon.home, "ps", "--url", f"{daemon.url}/v1/")
    assert (outcome.returncode, outcome.stderr) == (OK, "")


def test_status_tells_what_failed_and_why(daemon: RunningDaemon) -> None:
    outcome = daemon.command("status")
    assert outcome.returncode == OK, outcome.stderr
    assert f"pid {daemon.process.pid}, version" in outcome.stdout
    assert "first  ready for" in outcome.stdout
    assert "failed (model_missing): no config.json; no new try by itself" in outcome.stdout
    assert "last exit: engine #1, exit 78" in outcome.stdout
    assert json.loads(daemon.command("status", "--json").stdout)["supervisor"]["pid"]


def test_top_tells_why_a_model_has_failed_in_a_line_of_its_own(daemon: RunningDaemon) -> None:
    shown = daemon.command("top", COLUMNS="80").stdout.splitlines()
    assert [line.split()[1] for line in shown[2:4]] == ["ready", "failed"]
    assert shown[4] == "broken: no config.json"


def test_logs_prints_the_lines_of_one_model(daemon: RunningDaemon) -> None:
    outcome = daemon.command("logs", "first")
    assert outcome.returncode == OK, outcome.stderr
    assert "first#1 | a line of the engine" in outcome.stdout
    assert "model=broken" not in outcome.stdout
    assert len(daemon.command("logs", "-n", "2").stdout.splitlines()) == 2


def test_load_of_a_broken_model_fails_with_the_reason(daemon: RunningDaemon) -> None:
    outcome = daemon.command("load", "broken")
    assert outcome.returncode == FAILED
    assert "no config.json" in outcome.stderr


def test_unload_and_load_say_what_became_of_the_model(daemon: RunningDaemon) -> None:
    unloaded = daemon.command("unload", "first")
    assert (unloaded.returncode, unloaded.stdout) == (OK, "first: stopped\n")
    loaded = daemon.command("load", "first")
    assert loaded.returncode == OK
    assert re.match(r"first: ready in \S+ \(fake, ", loaded.stdout), loaded.stdout
    reset = json.loads(daemon.command("reset", "first", "--json").stdout)
    assert (reset["id"], reset["state"]) == ("first", "ready")


def test_an_unknown_model_is_told(daemon: RunningDaemon) -> None:
    outcome = daemon.command("reload", "nope")
    assert outcome.returncode == FAILED
    assert "nope" in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1


def test_without_a_daemon_a_command_says_how_to_start_one(tmp_path: Path) -> None:
    outcome = run_command(tmp_path, "ps", "--url", "http://127.0.0.1:1")
    assert outcome.returncode == FAILED
    assert outcome.stderr == (
        "mlx-isolate: no daemon answers at http://127.0.0.1:1 (Connection refused); "
        "start one with 'mlx-isolate serve', or name another with --url.\n"
    )


def test_help_and_version_answer_and_no_command_is_an_error(tmp_path: Path) -> None:
    assert run_command(tmp_path, "--version").stdout.startswith("mlx-isolate ")
    help = run_command(tmp_path, "serve", "--help")
    assert help.returncode == OK
    assert "MLX_ISOLATE_QUEUE_TIMEOUT" in help.stdout
    assert run_command(tmp_path).returncode == USAGE
    assert run_command(tmp_path, "nonsense").returncode == USAGE


def test_the_start_tells_what_is_served_where_and_by_what(daemon: RunningDaemon) -> None:
    shown = daemon.stdout
    assert f"on http://127.0.0.1:{daemon.port} (pid {daemon.process.pid})" in shown
    assert re.search(r"^first: ready in \S+ \(fake, .*, none\)$", shown, re.MULTILINE), shown
    assert "\x1b" not in shown
    assert "\r" not in shown


def test_the_log_file_lies_where_it_was_asked_for(daemon: RunningDaemon) -> None:
    (path,) = (daemon.home / "logs").iterdir()
    assert path.name == f"mlx-isolate-{daemon.port}.log"
    assert " daemon.started " in path.read_text()


def test_keys_open_everything_but_the_probes(tmp_path: Path) -> None:
    model = str(fake_model(tmp_path / "m"))
    keys = tmp_path / "keys"
    keys.write_text("# a comment\n  # another\nfrom-file\n")
    flags = ("--api-key", "one", "--api-key-file", str(keys))
    with RunningDaemon(tmp_path / "home", model, *flags) as daemon:
        assert daemon.ask("GET", "/livez").status == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "# another"}):
            for path in ("/status", "/v1/models", "/logs", "/metrics", "/v1/nothing"):
                refused = daemon.ask("GET", path, headers=headers)
                assert refused.status == 401, path
                assert refused.json()["error"]["code"] == "invalid_api_key"
        for headers in (
            {"Authorization": "Bearer one"},
            {"x-api-key": "one"},
            {"x-api-key": "from-file"},
        ):
            assert daemon.ask("GET", "/status", headers=headers).status == 200
        for key, sentence in (("", "wants an API key"), ("x", "does not know that API key")):
            refused_ps = daemon.command("ps", MLX_ISOLATE_API_KEY=key)
            assert refused_ps.returncode == FAILED
            assert f"{sentence}; give --api-key KEY or MLX_ISOLATE_API_KEY" in refused_ps.stderr
        assert daemon.command("ps", "--api-key", "one").returncode == OK
        assert daemon.command("ps", MLX_ISOLATE_API_KEY="from-file").returncode == OK
        assert "one" not in daemon.ask("GET", "/logs", headers={"x-api-key": "one"}).body.decode()


def test_logs_follow_prints_new_lines_as_they_come(daemon: RunningDaemon) -> None:
    following = subprocess.Popen(
        [*REAL, "logs", "-f", "-n", "1", "first"],
        cwd=ROOT,
        env=environment(daemon.home, {"MLX_ISOLATE_URL": daemon.url}),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert following.stdout is not None
    with following, following.stdout:
        try:
            assert following.stdout.readline()  # the last one there was
            request_id = daemon.chat("first").headers["x-request-id"]
            assert request_id in following.stdout.readline()
        finally:
            following.terminate()


def test_logs_follow_tells_that_the_daemon_has_gone(tmp_path: Path) -> None:
    with RunningDaemon(tmp_path / "home", str(fake_model(tmp_path / "m"))) as running:
        following = subprocess.Popen(
            [*REAL, "logs", "-f", "-n", "1"],
            cwd=ROOT,
            env=environment(running.home, {"MLX_ISOLATE_URL": running.url}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert following.stdout is not None
        assert following.stdout.readline()
        running.process.kill()
        _, told = following.communicate(timeout=20)
    assert following.returncode == FAILED
    assert "has ended its log" in told and len(told.splitlines()) == 1
