"""Several models in a real daemon: flags, file, request fields, the pages, and a reload."""

import json
import signal
from pathlib import Path
from typing import Any

from tests.running_daemon import RunningDaemon, fake_model, read_all, read_until
from tests.waiting import wait_for


def config(folder: Path, faults: dict[str, dict[str, Any]], **content: Any) -> Path:
    """A configuration file with a fake model for each entry of `faults`."""
    models = {name: {"path": str(fake_model(folder / name, **f))} for name, f in faults.items()}
    file = folder / "config.yaml"
    file.write_text(json.dumps({"models": models, **content}))
    return file


def states(daemon: RunningDaemon) -> dict[str, str]:
    return {model["id"]: model["state"] for model in daemon.status()["models"]}


def test_one_model_at_a_time_and_what_the_pages_say_of_it(tmp_path: Path) -> None:
    file = config(tmp_path, {"a": {}, "b": {}})
    with RunningDaemon(
        tmp_path / "home", "--config", str(file), "--models-max", "1", "--ttl", "5m"
    ) as daemon:
        assert daemon.chat("a").status == 200
        stream = daemon.stream(model="a", fake={"chunks": 60, "interval_s": 0.02})
        read_until(stream, b"data:")
        waiter = daemon.stream(model="b")
        model = wait_for(
            lambda: next((m for m in daemon.status()["models"] if m["waits_for"]), None), 5
        )
        assert model is not None
        assert (model["id"], model["waits_for"]) == ("b", "for running requests of a")
        assert "waits for running requests of a" in daemon.command("ps").stdout
        assert read_until(stream, b"[DONE]")
        assert read_until(waiter, b"[DONE]")
        assert states(daemon) == {"a": "stopped", "b": "ready"}
        (running,) = daemon.get("/running")["running"]
        assert (running["model"], running["ttl"], running["pinned"]) == ("b", 300.0, False)
        assert 0 < running["ttl_left_s"] <= 300
        own = daemon.status()["supervisor"]
        assert own["models_max"] == 1 and own["memory_budget_bytes"] > 0
        assert own["memory_claimed_bytes"] > 0
        assert " reserved" in daemon.command("status").stdout


def test_keep_alive_0_unloads_after_the_answer(tmp_path: Path) -> None:
    with RunningDaemon(tmp_path / "home", str(fake_model(tmp_path / "a"))) as daemon:
        assert daemon.chat(keep_alive=0).status == 200
        daemon.wait_state("stopped")
        assert daemon.chat(keep_alive="-1").status == 200
        assert daemon.status()["models"][0]["ttl_s"] is None
        answer = daemon.chat(keep_alive="soon")
        assert answer.status == 400 and answer.json()["error"]["param"] == "keep_alive"


def test_more_than_the_budget_is_507_and_the_rest_is_served(tmp_path: Path) -> None:
    file = config(tmp_path, {"large": {}, "small": {}})
    with (tmp_path / "large/model.safetensors").open("wb") as weights:
        weights.truncate(3_000_000_000)
    with RunningDaemon(
        tmp_path / "home", "--config", str(file), "--memory-budget-gb", "2"
    ) as daemon:
        answer = daemon.chat("large")
        assert answer.status == 507
        error = answer.json()["error"]
        assert error["code"] == "memory_budget_exceeded"
        assert "needs about 4.2 GB" in error["message"] and "is 2.0 GB" in error["message"]
        loaded = daemon.ask("POST", "/models/load", {"model": "large"})
        assert loaded.status == 507
        assert daemon.chat("small").status == 200


def test_a_loading_model_keeps_a_streaming_client_company(tmp_path: Path) -> None:
    file = config(tmp_path, {"a": {"load_s": 2.5}}, sendLoadingState=True)
    with RunningDaemon(tmp_path / "home", "--config", str(file)) as daemon:
        text = read_until(daemon.stream(model="a"), b"[DONE]").decode()
        assert text.startswith("HTTP/1.1 200") and ": a is loading: weights" in text
        assert daemon.stderr.count("no effect") == 0


def test_a_failed_load_after_a_comment_is_an_error_event(tmp_path: Path) -> None:
    faults = {"load_s": 2.0, "die": "exit:78", "failed": ["model_broken", "it has no weights"]}
    file = config(tmp_path, {"a": faults}, sendLoadingState=True)
    with RunningDaemon(tmp_path / "home", "--config", str(file)) as daemon:
        text = read_all(daemon.stream(model="a")).decode()
        assert "data: {" in text and "it has no weights" in text and "[DONE]" not in text


def test_a_reload_changes_the_limits_of_running_models(tmp_path: Path) -> None:
    file = config(tmp_path, {"a": {}, "b": {}})
    with RunningDaemon(tmp_path / "home", "--config", str(file)) as daemon:
        for model in "ab":
            assert daemon.chat(model).status == 200
        pids = {model["id"]: model["pid"] for model in daemon.status()["models"]}
        content = json.loads(file.read_text()) | {"models_max": 1}
        file.write_text(json.dumps(content))
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_state("stopped", 0)
        assert daemon.status()["models"][1]["pid"] == pids["b"]
        file.write_text(json.dumps(content | {"globalTTL": 0.1}))
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_state("stopped", 1)
        assert "at the next start" not in daemon.stdout


def test_what_a_run_held_is_remembered_for_the_next_start(tmp_path: Path) -> None:
    folder = fake_model(tmp_path / "a")
    home = tmp_path / "home"
    with RunningDaemon(home, str(folder)) as daemon:
        daemon.wait_state("ready")
        guess = daemon.status()["models"][0]["claimed_bytes"]
        wait_for(lambda: daemon.status()["models"][0]["memory_bytes"], 10, "a measurement")
    assert (home / "state/mlx-isolate/footprints.json").exists()
    with RunningDaemon(home, str(folder)) as daemon:
        daemon.wait_state("ready")
        # A fake engine is a tenth of what a real one without weights is taken for.
        assert daemon.status()["models"][0]["claimed_bytes"] < guess
