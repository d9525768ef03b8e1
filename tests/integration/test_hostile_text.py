"""Engines whose output and reports try to do harm: to a terminal, to a log, to a reader of JSON."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.running_daemon import RunningDaemon, fake_model
from tests.waiting import wait_for

HARM = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\ud800-\udfff]")
SAID = (
    "\x1b[31mred\x1b[0m alert",
    "\x1b]0;owned\x07title",
    "50%\r100% done",
    "forged\x85 2026-01-01 00:00:00.000 ERROR   daemon.stopped",
    "evil \u202etxt.exe",
    "x" * 100_000,
)
REASON = "no file \x1b[2J\x1b]0;owned\x07 named [red]x[/red]"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    home = tmp_path_factory.mktemp("hostile")
    talks = fake_model(home / "talks", say=SAID)
    fails = fake_model(home / "fails", say=SAID, die="exit:78", failed=("model_bad", REASON))
    with RunningDaemon(home / "home", str(talks), str(fails)) as running:
        running.wait_state("ready", 0)
        running.wait_state("failed", 1)
        yield running


@pytest.mark.parametrize(
    "command",
    [("logs",), ("logs", "talks"), ("status",), ("ps",), ("top",), ("load", "fails")],
    ids=" ".join,
)
def test_no_command_passes_harm_on_to_the_terminal(
    daemon: RunningDaemon, command: tuple[str, ...]
) -> None:
    outcome = daemon.command(*command, COLUMNS="200")
    assert not HARM.findall(outcome.stdout + outcome.stderr), (outcome.stdout, outcome.stderr)
    assert outcome.stdout or outcome.stderr


def test_an_engines_line_stays_one_line_that_reads_well(daemon: RunningDaemon) -> None:
    told = daemon.command("logs", "talks").stdout
    assert "talks#1 | red alert\n" in told
    assert "talks#1 | title\n" in told
    assert "talks#1 | 100% done\n" in told
    assert "talks#1 | forged\\x85 2026" in told
    assert max(map(len, told.splitlines())) < 5000


def test_the_daemons_own_output_and_file_hold_no_harm(daemon: RunningDaemon) -> None:
    (file,) = (daemon.home / "logs").glob("*.log")
    for text in (daemon.stdout, daemon.stderr, file.read_text()):
        assert not HARM.findall(text)
    assert "fails cannot be served until that is repaired: no file" in daemon.stdout


def test_markup_in_a_reason_is_text_in_top(daemon: RunningDaemon) -> None:
    assert "[red]" in daemon.command("status").stdout
    assert daemon.command("top").returncode == 0


def test_failures_are_told_louder_than_the_rest(daemon: RunningDaemon) -> None:
    lines = daemon.command("logs", "fails").stdout.splitlines()
    (failed,) = (line for line in lines if "engine.failed" in line)
    assert " WARNING " in failed and "incarnation=1 code=model_bad reason=" in failed
    (moved,) = (line for line in lines if "after=failed" in line)
    assert " ERROR " in moved
    (started,) = (line for line in lines if "after=starting" in line)
    assert " INFO " in started


def test_a_killed_engine_is_a_warning_and_its_comeback_is_not(daemon: RunningDaemon) -> None:
    daemon.ask("POST", "/drill/kill", {"model": "talks"})

    def moves() -> list[str]:
        told = daemon.ask("GET", "/logs?model=talks").body.decode().splitlines()
        return [line for line in told if "model.moved" in line]

    wait_for(lambda: sum("after=ready" in line for line in moves()) == 2, 10.0, "the comeback")
    (lost,) = (line for line in moves() if "after=backoff" in line)
    assert " WARNING " in lost
    assert all(" INFO " in line for line in moves() if "after=ready" in line)


def test_status_shows_a_reason_and_the_last_words_without_harm(daemon: RunningDaemon) -> None:
    model = daemon.status()["models"][1]
    assert model["failure"]["message"].startswith("no file ")
    for text in (model["failure"]["message"], *model["last_exit"]["stderr_tail"]):
        assert not HARM.findall(text)
    assert "red alert" in model["last_exit"]["stderr_tail"]


def test_a_log_in_json_is_one_object_a_line_with_the_same_facts(tmp_path: Path) -> None:
    model = fake_model(tmp_path / "m", say=SAID)
    with RunningDaemon(tmp_path / "h", str(model), "--log-format", "json") as daemon:
        daemon.wait_state("ready")
        request_id = daemon.chat("m").headers["x-request-id"]
    (file,) = (daemon.home / "logs").glob("*.log")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert all({"time", "level", "event"} <= line.keys() for line in lines)
    (ended,) = (line for line in lines if line["event"] == "request.ended")
    assert (ended["id"], ended["outcome"], ended["status"]) == (request_id, "answered", 200)
    said = [line["line"] for line in lines if line["event"] == "engine.line"]
    assert "red alert" in said
    assert not HARM.findall(file.read_text().replace("\n", ""))
