"""The endpoints that the supervisor answers by itself, over a real daemon and fake engines."""

import os
import resource
import signal
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from mlx_isolate_shared import wire
from mlx_isolate_supervisor.open_files import WANTED
from tests.running_daemon import RunningDaemon, fake_model, read_all, read_until
from tests.waiting import wait_for

STATUS_FIELDS = {
    "id", "aliases", "desired", "state", "pid", "incarnation", "socket", "since", "restarts",
    "last_exit", "active", "queued", "load_s", "memory_bytes",
}  # fmt: skip


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    home = tmp_path_factory.mktemp("pages")
    # What the first engine says before its own counters, in which there is no trouble any more.
    trouble = wire.Progress(cache=wire.CacheFigures(ssd_trouble="/c cannot be written"))
    (home / "report").write_bytes(wire.encode_line(trouble) * 2)
    first = fake_model(home / "first", report_after=str(home / "report"))
    models = [str(first), str(fake_model(home / "second"))]
    with RunningDaemon(home / "home", *models) as running:
        running.wait_state("ready", 0)
        running.wait_state("ready", 1)
        yield running


def test_status_shows_every_promised_field(daemon: RunningDaemon) -> None:
    document = daemon.status()
    own = document["supervisor"]
    assert own["pid"] == daemon.process.pid
    assert own["uptime_s"] > 0
    assert own["version"]
    first, second = document["models"]
    assert STATUS_FIELDS <= set(first)
    assert (first["id"], first["desired"], first["state"]) == ("first", "up", "ready")
    assert (first["incarnation"], first["restarts"], first["last_exit"]) == (1, 0, None)
    assert {first["pid"], second["pid"]} <= {engine.pid for engine in daemon.engines()}
    assert os.path.exists(first["socket"])


def test_the_supervisor_is_small_and_starts_with_little_work(daemon: RunningDaemon) -> None:
    """60 MB and 0.7 s are promised; processor time stands for time, which a busy machine blurs."""
    assert daemon.status()["supervisor"]["memory_bytes"] <= 60_000_000
    spent = psutil.Process(daemon.process.pid).cpu_times()
    assert spent.user + spent.system < 2.0


def test_models_are_listed_in_order(daemon: RunningDaemon) -> None:
    listing = daemon.get("/v1/models")
    assert [model["id"] for model in listing["data"]] == ["first", "second"]
    assert daemon.get("/models") == listing
    assert daemon.get("/v1/models/second")["id"] == "second"


def test_an_unknown_model_is_404_and_names_those_there_are(daemon: RunningDaemon) -> None:
    for answer in (daemon.ask("GET", "/v1/models/nope/nope"), daemon.chat("nope/nope")):
        assert answer.status == 404
        error = answer.json()["error"]
        assert error["code"] == "model_not_found"
        assert "first" in error["message"]
        assert "second" in error["message"]


def test_a_request_without_a_model_goes_to_the_first(daemon: RunningDaemon) -> None:
    first = daemon.chat(None, fake={"echo": True}).json()
    second = daemon.chat("second", fake={"echo": True}).json()
    assert first != second
    assert daemon.chat("first").json()["model"] == daemon.chat(None).json()["model"] == "first"


@pytest.mark.parametrize(
    ("path", "word"),
    [("/health", "ok"), ("/livez", "alive"), ("/readyz", "ready")],
)
def test_probes_say_up(daemon: RunningDaemon, path: str, word: str) -> None:
    assert daemon.get(path)["status"] == word


def test_running_version_and_root_answer(daemon: RunningDaemon) -> None:
    running = daemon.get("/running")["running"]
    assert [model["model"] for model in running] == ["first", "second"]
    version = daemon.get("/api/version")["version"]
    assert daemon.get("/") == {"name": "mlx-isolate", "version": version, "status": "/status"}
    assert daemon.ask("HEAD", "/").status == 200


def test_what_does_not_exist_is_a_json_404(daemon: RunningDaemon) -> None:
    answer = daemon.ask("GET", "/no/such/page")
    assert answer.status == 404
    assert answer.json()["error"]["type"] == "invalid_request_error"
    answer = daemon.ask("GET", "/models/load")
    assert answer.status == 404


def test_logs_show_events_and_those_of_one_model(daemon: RunningDaemon) -> None:
    everything = daemon.ask("GET", "/logs").body.decode()
    assert " daemon.started " in everything
    of_first = daemon.ask("GET", "/logs?model=first").body.decode()
    assert "model=first" in of_first
    assert "model=second" not in of_first
    assert len(daemon.ask("GET", "/logs?lines=2").body.decode().splitlines()) == 2
    assert daemon.ask("GET", "/logs?model=nope").status == 404


def test_a_cache_that_cannot_be_written_is_logged_once_and_so_is_its_end(
    daemon: RunningDaemon,
) -> None:
    def lines() -> list[str]:
        logged = daemon.ask("GET", "/logs?model=first").body.decode().splitlines()
        told = [line.split(" ", 2)[2] for line in logged if " cache." in line]
        return [line for line in told if "incarnation=1" in line]

    wait_for(lambda: len(lines()) == 2, 10, "both are logged")
    assert lines() == [
        'WARNING cache.not_written model=first incarnation=1 reason="/c cannot be written"',
        "INFO    cache.written_again model=first incarnation=1",
    ]
    assert daemon.ask("GET", "/logs?lines=x").status == 400


def test_each_request_is_one_line_with_its_id_and_without_its_text(daemon: RunningDaemon) -> None:
    body = {"messages": [{"role": "user", "content": "a canary sings"}], "max_tokens": 2}
    headers = {"x-request-id": "my-own-id"}
    assert daemon.ask("POST", "/v1/chat/completions", body, headers).status == 200
    lines = daemon.ask("GET", "/logs").body.decode().splitlines()
    (line,) = [line for line in lines if "id=my-own-id" in line]
    assert " request.ended " in line
    assert "model=first" in line
    assert "outcome=answered status=200" in line
    assert not [line for line in lines if "canary" in line]


@pytest.mark.parametrize("path", ["/logs/stream/first?lines=0", "/logs/stream?lines=0&model=first"])
def test_a_log_stream_goes_on_with_new_lines(daemon: RunningDaemon, path: str) -> None:
    client = daemon.open_socket()
    client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert b"text/plain" in read_until(client, b"\r\n\r\n")
    assert daemon.ask("POST", "/models/unload", {"model": "first"}).status == 200
    read_until(client, b"model=first")
    client.close()
    assert daemon.ask("POST", "/models/load", {"model": "first"}).json()["state"] == "ready"


def test_a_model_is_unloaded_loaded_reloaded_and_reset(daemon: RunningDaemon) -> None:
    pid = daemon.wait_state("ready", 1)["pid"]
    unloaded = daemon.ask("POST", "/models/unload", {"model": "second"}).json()
    assert (unloaded["state"], unloaded["desired"], unloaded["pid"]) == ("stopped", "down", None)
    assert not psutil.pid_exists(pid)
    loaded = daemon.ask("POST", "/models/load", {"model": "second"}).json()
    assert (loaded["state"], loaded["incarnation"]) == ("ready", 2)
    reloaded = daemon.ask("POST", "/models/reload", {"model": "second"}).json()
    assert (reloaded["state"], reloaded["incarnation"]) == ("ready", 3)
    reset = daemon.ask("POST", "/models/reset", {"model": "second"})
    assert (reset.status, reset.json()["state"]) == (200, "ready")


def test_unload_of_everything_is_not_for_pages_of_other_sites(daemon: RunningDaemon) -> None:
    refused = daemon.ask("GET", "/unload", headers={"Sec-Fetch-Site": "cross-site"})
    assert refused.status == 403
    assert daemon.wait_state("ready", 0)
    stream = daemon.stream(model="first", fake={"chunks": 1000, "interval_s": 0.05})
    read_until(stream, b"data:")
    asking = daemon.open_socket()
    asking.sendall(b"GET /unload HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    daemon.wait_state("stopped", 1)  # without waiting for the stream of the other
    assert daemon.status()["models"][0]["state"] == "draining"
    stream.close()
    assert read_all(asking).endswith(b"OK")
    assert [model["state"] for model in daemon.status()["models"]] == ["stopped", "stopped"]
    for model in ("first", "second"):
        assert daemon.ask("POST", "/models/load", {"model": model}).status == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [({}, 400), ({"model": 5}, 400), ([], 400), ({"model": "nope"}, 404)],
)
def test_a_bad_control_request_is_told(daemon: RunningDaemon, body: object, status: int) -> None:
    answer = daemon.ask("POST", "/models/load", body)
    assert answer.status == status
    assert answer.json()["error"]["message"]


@pytest.mark.case("01", "21")
@pytest.mark.alone
def test_pages_are_quick_while_an_engine_stands_still(daemon: RunningDaemon) -> None:
    """The supervisor's part."""
    engine = daemon.wait_state("ready", 1)["pid"]
    streams = [daemon.stream(model="second", max_tokens=1000) for _ in range(3)]
    os.kill(engine, signal.SIGSTOP)
    try:
        for path in ("/health", "/v1/models", "/status", "/running", "/logs") * 4:
            began = time.monotonic()
            assert daemon.ask("GET", path).status == 200
            assert time.monotonic() - began < 0.2, path
    finally:
        os.kill(engine, signal.SIGCONT)
        for stream in streams:
            stream.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs prlimit (Linux)")
def test_it_may_have_as_many_files_open_as_it_is_allowed(daemon: RunningDaemon) -> None:
    """A shell's 1,024 are filled by idle connections alone."""
    soft, hard = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
    assert soft >= min(WANTED[0], hard)


def test_an_error_of_a_handler_is_one_envelope_without_a_traceback(daemon: RunningDaemon) -> None:
    answer = daemon.ask("POST", "/models/load", "x" * 100_000)
    assert answer.status == 413
    assert set(answer.json()) == {"error"}
    assert daemon.get("/livez")["status"] == "alive"


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/admin/cache/flush"), ("DELETE", "/v1/cache")]
)
def test_a_model_named_in_the_body_is_the_only_one_whose_cache_is_touched(
    method: str, path: str, daemon: RunningDaemon
) -> None:
    # The fake engines have no cache: what counts here is which of them are asked.
    def asked(body: object, query: str = "") -> list[str]:
        return list(daemon.ask(method, path + query, body).json()["models"])

    assert asked({"model": "second"}) == asked(None, "?model=second") == ["second"]
    assert asked(None) == asked({}) == asked({"model": None}) == ["first", "second"]
    unknown = daemon.ask(method, path, {"model": "nope"})
    assert (unknown.status, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert "first, second" in unknown.json()["error"]["message"]
    for body in ({"model": 7}, "second"):
        wrong = daemon.ask(method, path, body)
        assert (wrong.status, wrong.json()["error"]["param"]) == (400, "model")


def test_a_flush_takes_its_time_from_the_body_or_the_query(daemon: RunningDaemon) -> None:
    def told(body: object, query: str = "") -> str:
        answer = daemon.ask("POST", "/admin/cache/flush" + query, body)
        (evidence,) = answer.json()["models"].values()
        return str(evidence["target"]).partition("?")[2]

    assert told({"model": "first", "timeout_s": 2.5}) == "timeout_s=2.5"
    assert told({"timeout_s": 0}, "?model=first&timeout_s=9") == "timeout_s=0"
    assert told({"timeout_s": None}, "?model=first&timeout_s=9") == "timeout_s=9"
    assert told({"model": "first", "depth": 7}) == "timeout_s=30"
    wrongs: list[object] = [-1, 3601, 10**400, "5", True, [], {}]
    for wrong in wrongs:
        answer = daemon.ask("POST", "/admin/cache/flush", {"timeout_s": wrong})
        assert (answer.status, answer.json()["error"]["param"]) == (400, "timeout_s"), wrong
    for text in ("-1", "3601", "nan", "x", ""):
        answer = daemon.ask("POST", f"/admin/cache/flush?timeout_s={text}")
        assert (answer.status, answer.json()["error"]["param"]) == (400, "timeout_s"), text
