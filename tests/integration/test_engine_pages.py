"""What the supervisor asks its engines about themselves, over real engines on tiny models."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_isolate_supervisor.exit_codes import FAILED, OK
from tests.running_daemon import REAL, RunningDaemon, fake_model, run_command


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, full_model: Path) -> Iterator[RunningDaemon]:
    home = tmp_path_factory.mktemp("engines")
    flags = ("--ssd-cache-dir", str(home / "ssd"), "--served-model-name", "full")
    with RunningDaemon(home / "home", str(full_model), *flags, program=REAL) as running:
        running.wait_state("ready", deadline_s=90)
        yield running


def test_the_probe_generates_a_token(daemon: RunningDaemon) -> None:
    answer = daemon.get("/health_generate")
    assert (answer["status"], answer["model"]) == ("ok", "full")
    assert daemon.ask("GET", "/health_generate?model=nope").status == 404
    assert daemon.ask("GET", "/health_generate?timeout_s=x").status == 400


def test_a_flush_gives_evidence_and_lands_on_disk(daemon: RunningDaemon) -> None:
    assert daemon.chat("full", max_tokens=4).status == 200
    answer = daemon.ask("POST", "/admin/cache/flush")
    assert answer.status == 200, answer.body
    assert answer.json()["durable"] is True
    evidence = answer.json()["models"]["full"]
    assert evidence["entries"] >= 1
    assert evidence["pending_snapshots"] == 0
    flushed = daemon.command("flush", "full")
    assert flushed.returncode == OK, flushed.stderr
    assert flushed.stdout.startswith("full: durable (")
    folder = str(daemon.home.parent / "ssd")
    listed = run_command(daemon.home, "cache", "ls", "--dir", folder, "--json")
    assert json.loads(listed.stdout)["entries"]


def test_the_cache_is_listed_counted_and_cleared(daemon: RunningDaemon) -> None:
    assert daemon.chat("full", max_tokens=4).status == 200
    assert daemon.get("/v1/cache")["models"]["full"]["data"]
    assert "ram_entries" in daemon.get("/v1/cache/stats")["models"]["full"]
    assert daemon.ask("DELETE", "/v1/cache").json()["models"]["full"]["cleared"] >= 1
    assert daemon.get("/v1/cache")["models"]["full"]["data"] == []


def test_without_an_ssd_tier_a_flush_says_so(tmp_path: Path, full_model: Path) -> None:
    with RunningDaemon(tmp_path / "home", str(full_model), program=REAL) as daemon:
        daemon.wait_state("ready", deadline_s=90)
        answer = daemon.ask("POST", "/admin/cache/flush")
        assert (answer.status, answer.json()["durable"]) == (409, False)
        flushed = daemon.command("flush")
        assert flushed.returncode == FAILED
        assert "There is no SSD tier to flush to" in flushed.stdout


def test_a_model_that_is_not_loaded_is_told(tmp_path: Path) -> None:
    model = str(fake_model(tmp_path / "m"))
    with RunningDaemon(tmp_path / "home", model) as daemon:
        daemon.wait_state("ready")
        daemon.ask("POST", "/models/unload", {"model": "m"})
        assert daemon.ask("GET", "/v1/cache?model=m").status == 409
        assert daemon.ask("POST", "/admin/cache/flush?model=nope").status == 404
        assert daemon.get("/v1/cache") == {"models": {}}
        assert daemon.command("flush").stdout == "no model is loaded\n"
        unknown = daemon.command("flush", "nope")
        assert (unknown.returncode, unknown.stdout) == (FAILED, "")
        assert unknown.stderr == "mlx-isolate: there is no model 'nope'; there are: m.\n"


def test_an_engine_that_stands_still_costs_the_probe_its_time_and_no_more(tmp_path: Path) -> None:
    model = str(fake_model(tmp_path / "m"))
    with RunningDaemon(tmp_path / "home", model) as daemon:
        engine = daemon.wait_state("ready")["pid"]
        os.kill(engine, signal.SIGSTOP)
        try:
            answer = daemon.ask("GET", "/health_generate?timeout_s=0.5")
            assert (answer.status, answer.json()["error"]["code"]) == (504, "engine_timeout")
            assert daemon.get("/health")["status"] == "ok"
        finally:
            os.kill(engine, signal.SIGCONT)
        assert daemon.get("/health_generate")["status"] == "ok"


def test_a_kept_response_is_shown_and_forgotten(daemon: RunningDaemon) -> None:
    asked = {"model": "full", "input": "hi", "max_output_tokens": 4}
    made = daemon.ask("POST", "/v1/responses", asked)
    assert made.status == 200, made.body
    path = f"/v1/responses/{made.json()['id']}"
    assert daemon.get(path) == made.json()
    listed = daemon.get(f"{path}/input_items?order=asc&limit=1")
    assert [item["content"][0]["text"] for item in listed["data"]] == ["hi"]
    assert daemon.ask("GET", f"{path}/input_items?limit=0").status == 400
    assert daemon.ask("DELETE", path).json()["deleted"] is True
    for method in ("GET", "DELETE"):
        answer = daemon.ask(method, path)
        assert (answer.status, answer.json()["error"]["code"]) == (404, "response_not_found")
    assert daemon.ask("GET", f"{path}/input_items").status == 404


@pytest.mark.parametrize("name", ["resp_0", "resp_" + "0" * 40, "%2e%2e%2fhealth", "x" * 5000])
def test_a_response_that_nobody_made_is_404(daemon: RunningDaemon, name: str) -> None:
    answer = daemon.ask("GET", f"/v1/responses/{name}")
    assert (answer.status, answer.json()["error"]["code"]) == (404, "response_not_found")


def test_a_kept_response_is_gone_with_its_engine(tmp_path: Path, full_model: Path) -> None:
    with RunningDaemon(tmp_path / "home", str(full_model), program=REAL) as daemon:
        ready = daemon.wait_state("ready", deadline_s=90)
        name = daemon.get("/v1/models")["data"][0]["id"]
        asked = {"model": name, "input": "hi", "max_output_tokens": 4}
        made = daemon.ask("POST", "/v1/responses", asked)
        path = f"/v1/responses/{made.json()['id']}"
        assert daemon.ask("GET", path).status == 200
        os.kill(ready["pid"], signal.SIGKILL)
        again = daemon.ask("POST", "/v1/responses", asked)  # answered by the next engine, or not
        assert again.status in (200, 502)
        daemon.wait_state("ready", deadline_s=90)
        answer = daemon.ask("GET", path)
        assert (answer.status, answer.json()["error"]["code"]) == (404, "response_not_found")
