"""Reload of the configuration by SIGHUP and by a changed file, over a real daemon."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.running_daemon import RunningDaemon, fake_model, read_all, read_until
from tests.waiting import wait_for


class Configured:
    """A daemon with a configuration file that a test rewrites."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.file = folder / "config.yaml"
        self.models = {name: str(fake_model(folder / name)) for name in ("one", "two")}
        self.write(models={"one": {}, "two": {}})
        self.daemon = RunningDaemon(folder / "home", "--config", str(self.file), *flags)

    def write(self, **content: Any) -> None:
        """Put a new file in place in one step, as editors do."""
        for name, model in content.get("models", {}).items():
            model.setdefault("path", self.models.get(name, f"/no/{name}"))
        temporary = self.file.with_suffix(".new")
        temporary.write_text(json.dumps(content))
        temporary.replace(self.file)

    def reload(self, **content: Any) -> None:
        """Write, signal, and wait until the outcome was told."""
        told = self.daemon.stdout.count("configuration")
        self.write(**content)
        self.daemon.process.send_signal(signal.SIGHUP)
        wait_for(lambda: self.daemon.stdout.count("configuration") > told, 10, "a reload")

    def ids(self) -> list[str]:
        return [model["id"] for model in self.daemon.status()["models"]]


@pytest.fixture
def configured(tmp_path: Path) -> Iterator[Configured]:
    made = Configured(tmp_path)
    with made.daemon:
        yield made


def test_a_models_stream_outlives_the_reload_of_another(configured: Configured) -> None:
    daemon = configured.daemon
    daemon.ask("POST", "/models/load", {"model": "one"})
    daemon.ask("POST", "/models/load", {"model": "two"})
    pids = [model["pid"] for model in daemon.status()["models"]]
    stream = daemon.stream(model="one", fake={"chunks": 40, "interval_s": 0.05})
    read_until(stream, b"data:")
    configured.reload(models={"one": {}, "two": {"temp": 0.5}})
    # The second model serves all the while, and from its new engine soon.
    wait_for(lambda: daemon.status()["models"][1]["incarnation"] == 2, 10, "a new engine")
    assert [model["state"] for model in daemon.status()["models"]] == ["ready", "ready"]
    assert daemon.status()["models"][0]["pid"] == pids[0]
    assert daemon.status()["models"][1]["pid"] != pids[1]
    read_until(stream, b"data: [DONE]")


def test_a_changed_model_serves_on_beside_its_stream_while_the_new_engine_loads(
    configured: Configured,
) -> None:
    daemon = configured.daemon
    daemon.ask("POST", "/models/load", {"model": "two"})
    wait_for(lambda: daemon.status()["models"][1]["memory_bytes"], 10, "its footprint")
    stream = daemon.stream(model="two", fake={"chunks": 100, "interval_s": 0.05})
    read_until(stream, b"data:")
    configured.reload(models={"one": {}, "two": {"temp": 0.5}})
    assert daemon.chat("two").status == 200  # without waiting for the stream
    wait_for(lambda: daemon.status()["models"][1]["incarnation"] == 2, 10, "a new engine")
    assert daemon.chat("two").status == 200
    so_far = read_until(stream, b"data:")
    assert b"[DONE]" not in so_far
    read_until(stream, b"data: [DONE]")


def test_a_removed_model_finishes_what_it_has_and_is_unknown_at_once(
    configured: Configured,
) -> None:
    daemon = configured.daemon
    daemon.ask("POST", "/models/load", {"model": "two"})
    stream = daemon.stream(model="two", fake={"chunks": 20, "interval_s": 0.05})
    read_until(stream, b"data:")
    configured.reload(models={"one": {}})
    assert configured.ids() == ["one"]
    assert daemon.chat("two").status == 404
    read_until(stream, b"data: [DONE]")
    wait_for(lambda: not daemon.engines(), 10, "its engine is gone")


def test_who_waits_for_a_model_that_is_removed_is_told_so(configured: Configured) -> None:
    daemon = configured.daemon
    configured.reload(models={"one": {}, "two": {"concurrencyLimit": 1}})
    daemon.ask("POST", "/models/load", {"model": "two"})
    stream = daemon.stream(model="two", fake={"chunks": 20, "interval_s": 0.05})
    read_until(stream, b"data:")
    waits = daemon.stream(model="two")
    wait_for(lambda: daemon.status()["models"][1]["queued"] == 1, 5, "it waits")
    configured.reload(models={"one": {}})
    assert b'"code":"model_removed"' in read_all(waits)
    read_until(stream, b"data: [DONE]")


def test_a_model_that_leaves_does_not_hold_up_the_end(configured: Configured) -> None:
    daemon = configured.daemon
    daemon.ask("POST", "/models/load", {"model": "two"})
    stream = daemon.stream(model="two", fake={"chunks": 100_000, "interval_s": 0.05})
    read_until(stream, b"data:")
    configured.reload(models={"one": {}})
    daemon.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "a second Ctrl-C cuts" in daemon.stdout, 5)
    daemon.process.send_signal(signal.SIGINT)
    daemon.wait_end(5)


def test_an_added_model_is_served_and_preloaded_where_asked(configured: Configured) -> None:
    configured.models["three"] = str(fake_model(configured.file.parent / "three"))
    configured.reload(
        models={"three": {"aliases": ["drei"]}, "one": {}, "two": {}},
        hooks={"on_startup": {"preload": ["drei"]}},
    )
    assert configured.ids() == ["three", "one", "two"]
    configured.daemon.wait_state("ready", 0)
    assert configured.daemon.chat("drei").status == 200
    assert configured.daemon.chat(None).json()["model"] == "three"


def test_an_alias_changes_without_a_new_engine(configured: Configured) -> None:
    daemon = configured.daemon
    pid = daemon.ask("POST", "/models/load", {"model": "one"}).json()["pid"]
    configured.reload(models={"one": {"aliases": ["uno"]}, "two": {"unlisted": True}})
    assert daemon.chat("uno").status == 200
    assert daemon.status()["models"][0]["pid"] == pid
    assert [model["id"] for model in daemon.get("/v1/models")["data"]] == ["one"]


def test_keys_can_be_changed_while_it_runs(configured: Configured) -> None:
    daemon = configured.daemon
    configured.reload(models={"one": {}}, apiKeys=["new"])
    assert daemon.ask("GET", "/status").status == 401
    assert daemon.ask("GET", "/status", headers={"x-api-key": "new"}).status == 200


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"models": {"one": {"ttll": 5}}}, "there is no key 'ttll'; did you mean 'ttl'?"),
        ({"models": {"one": {"aliases": ["two"]}, "two": {}}}, "two models would be served as"),
        ({"queue_timeout": "soon"}, "'soon' is not a time"),
        ({"models": {}}, "the file names no model"),
        ({}, "the file names no model"),
    ],
)
def test_a_bad_file_changes_nothing_and_says_why(
    configured: Configured, content: dict[str, Any], reason: str
) -> None:
    configured.reload(**content)
    assert configured.ids() == ["one", "two"]
    assert reason in configured.daemon.stdout
    assert "config.refused" in configured.daemon.ask("GET", "/logs").body.decode()
    configured.reload(models={"one": {}})
    assert configured.ids() == ["one"]


def test_what_waits_for_the_next_start_is_named(configured: Configured) -> None:
    configured.reload(models={"one": {}, "two": {}}, queue_timeout=7)
    assert "no model changed; at the next start: queue_timeout_s" in configured.daemon.stdout


def test_switching_the_log_of_texts_on_is_warned_of(configured: Configured) -> None:
    configured.reload(models={"one": {"log_text": True}, "two": {}})
    lines = configured.daemon.ask("GET", "/logs").body.decode().splitlines()
    (warning,) = [line for line in lines if "settings.doubted" in line]
    assert "--log-text is on for one" in warning


def test_a_watched_file_is_reloaded_when_it_changes(tmp_path: Path) -> None:
    configured = Configured(tmp_path, "--watch-config")
    with configured.daemon:
        configured.write(models={"two": {}})
        wait_for(lambda: configured.ids() == ["two"], 10, "the new file is in force")


def test_without_a_file_a_hangup_is_a_stop(tmp_path: Path) -> None:
    with RunningDaemon(tmp_path / "home", str(fake_model(tmp_path / "m"))) as daemon:
        daemon.wait_state("ready")
        daemon.process.send_signal(signal.SIGHUP)
        assert daemon.wait_end(10) == 0
