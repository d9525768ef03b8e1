"""The endpoints of those who watch, on a real daemon: events, requests, history, page, access."""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_isolate_supervisor.relay.target import WORK_PATHS, asks_for_work
from tests.running_daemon import ROOT, RunningDaemon, fake_model, read_until
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    home = tmp_path_factory.mktemp("watching")
    models = {name: {"path": str(fake_model(home / name))} for name in ("m", "n")}
    config = home / "config.yaml"
    config.write_text(
        json.dumps(
            {
                "models": {"m": {**models["m"], "aliases": ["em"]}, "n": models["n"]},
                "hooks": {"on_startup": {"preload": ["m", "n"]}},
            }
        )
    )
    with RunningDaemon(home / "home", "--config", str(config)) as running:
        running.wait_state("ready", 0)
        running.wait_state("ready", 1)
        yield running


class EventStream:
    """One reader of /events on a raw socket."""

    def __init__(self, daemon: RunningDaemon, query: str = "", **headers: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", daemon.port), timeout=20)
        lines = [f"GET /events{query} HTTP/1.1", "Host: localhost"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.socket.sendall("\r\n".join(lines).encode() + b"\r\n\r\n")
        self.head = read_until(self.socket, b"event: hello").decode()
        self._seen = self.head

    def until(self, kind: str) -> dict[str, Any]:
        """Data of the next event of this kind."""
        pattern = re.compile(rf"event: {re.escape(kind)}\ndata: (.*)\n\n")
        while (found := pattern.search(self._seen)) is None:
            part = self.socket.recv(65536)
            assert part, "the stream ended"
            self._seen += part.decode()
        self._seen = self._seen[found.end() :]
        data: dict[str, Any] = json.loads(found[1])
        return data

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def stream(daemon: RunningDaemon) -> Iterator[EventStream]:
    found = EventStream(daemon)
    yield found
    found.close()


def test_event_stream_is_not_cached_nor_buffered(stream: EventStream) -> None:
    assert "200 OK" in stream.head
    assert "Content-Type: text/event-stream" in stream.head
    assert "Cache-Control: no-cache" in stream.head
    assert "X-Accel-Buffering: no" in stream.head
    assert "retry: 1000" in stream.head


def test_request_outcome_is_an_event(daemon: RunningDaemon, stream: EventStream) -> None:
    daemon.chat("m")
    event = stream.until("request.ended")
    assert (event["outcome"], event["model"], event["status"]) == ("answered", "m", 200)
    assert event["request_id"].startswith("req-")
    assert 0 < event["duration_s"] < 20


def test_kill_drill_is_told_with_the_end_and_the_comeback(
    daemon: RunningDaemon, stream: EventStream
) -> None:
    pid = daemon.wait_state("ready", 0)["pid"]
    answer = daemon.ask("POST", "/drill/kill", {"model": "em"})  # an alias of m
    assert answer.json()["pid"] == pid
    told = stream.until("drill.kill")
    assert (told["model"], told["pid"]) == ("m", pid)
    lost = stream.until("engine.lost")
    assert (lost["signal"], lost["cause"], lost["after"]) == ("SIGKILL", "signal", "backoff")
    assert stream.until("engine.ready")["pid"] != pid


@pytest.mark.parametrize(
    ("body", "status"), [({"model": "nosuch"}, 404), ({}, 400), ({"model": 7}, 400)]
)
def test_bad_kill_drill_is_refused(daemon: RunningDaemon, body: object, status: int) -> None:
    answer = daemon.ask("POST", "/drill/kill", body)
    assert (answer.status, answer.json()["error"]["param"]) == (status, "model")


def test_kill_drill_of_a_stopped_model_is_a_conflict(daemon: RunningDaemon) -> None:
    daemon.ask("POST", "/models/unload", {"model": "n"})
    answer = daemon.ask("POST", "/drill/kill", {"model": "n"})
    assert (answer.status, answer.json()["error"]["code"]) == (409, "no_engine")
    daemon.ask("POST", "/models/load", {"model": "n"})


def test_reader_catches_up_by_its_last_event_id(daemon: RunningDaemon) -> None:
    first = EventStream(daemon)
    daemon.chat("m")
    last = first.until("request.ended")["id"]
    first.close()
    missed = [daemon.chat("m").headers["x-request-id"] for _ in range(3)]
    second = EventStream(daemon, Last_Event_ID=last)
    assert [second.until("request.ended")["request_id"] for _ in range(3)] == missed
    second.close()


def test_model_filter(daemon: RunningDaemon) -> None:
    reader = EventStream(daemon, "?model=n")
    daemon.chat("m")
    daemon.chat("n")
    assert reader.until("request.ended")["model"] == "n"
    reader.close()


def test_wrong_replay_is_refused_by_name(daemon: RunningDaemon) -> None:
    answer = daemon.ask("GET", "/events?replay=many")
    assert (answer.status, answer.json()["error"]["param"]) == (400, "replay")


def test_reader_that_left_is_forgotten(daemon: RunningDaemon) -> None:
    def readers() -> float:
        text = daemon.ask("GET", "/metrics").body.decode()
        found = re.search(r"^mlx_isolate_event_readers (\S+)$", text, re.MULTILINE)
        assert found is not None
        return float(found[1])

    wait_for(lambda: readers() == 0, 10.0, "no readers")
    reader = EventStream(daemon)
    assert readers() == 1
    reader.close()
    wait_for(lambda: readers() == 0, 10.0, "the reader is forgotten")


def test_shutdown_ends_event_streams(tmp_path: Path) -> None:
    with RunningDaemon(tmp_path / "h", str(fake_model(tmp_path / "m"))) as daemon:
        daemon.wait_state("ready")
        reader = EventStream(daemon)
        daemon.process.terminate()
        while reader.socket.recv(65536):
            pass
        assert daemon.wait_end(10.0) == 0
        reader.close()


def test_running_request_is_listed_with_its_progress(daemon: RunningDaemon) -> None:
    with daemon.stream(model="m", fake={"chunks": 2000, "interval_s": 0.005}) as client:
        read_until(client, b"data: ")

        def listed() -> dict[str, Any] | None:
            found = daemon.get("/v1/requests")["requests"]
            return found[0] if found and found[0]["events"] > 3 else None

        request = wait_for(listed, 10.0, "a request under way")
        assert request is not None
        assert (request["model"], request["phase"], request["stream"]) == ("m", "streaming", True)
        assert request["path"] == "/v1/chat/completions"
        assert request["bytes_out"] > 0
        assert request["ttft_s"] is not None
    wait_for(lambda: not daemon.get("/v1/requests")["requests"], 10.0, "it is gone")


def test_cancelled_request_is_told_and_its_engine_stops(daemon: RunningDaemon) -> None:
    body = {"model": "m", "fake": {"chunks": 2000, "interval_s": 0.005}}
    with daemon.stream(**body) as client:
        read_until(client, b"data: ")
        (request,) = daemon.get("/v1/requests")["requests"]
        answer = daemon.ask("POST", f"/v1/requests/{request['id']}/cancel")
        assert answer.json() == {"cancelled": 1}
        assert b"cancelled by the operator" in read_until(client, b"operator")
    wait_for(lambda: daemon.status()["models"][0]["active"] == 0, 10.0, "the place is free")


def test_cancelling_what_is_not_running_is_404(daemon: RunningDaemon) -> None:
    answer = daemon.ask("POST", "/v1/requests/req-none/cancel")
    assert (answer.status, answer.json()["error"]["code"]) == (404, "request_not_found")


def test_history_grows_and_is_asked_for_in_parts(daemon: RunningDaemon) -> None:
    def samples() -> list[Any]:
        rows: list[Any] = daemon.get("/history")["models"].get("m", [])
        return rows

    wait_for(lambda: len(samples()) >= 2, 15.0, "two samples")
    first = samples()[0][0]
    later = daemon.get(f"/history?since={first}")["models"]["m"]
    assert all(row[0] > first for row in later)
    assert daemon.ask("GET", "/history?since=now").status == 400


def test_page_has_its_policy_and_is_not_modified_twice(daemon: RunningDaemon) -> None:
    answer = daemon.ask("GET", "/ui")
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    again = daemon.ask("GET", "/ui", headers={"If-None-Match": answer.headers["ETag"]})
    assert (again.status, again.body) == (304, b"")


def test_every_file_the_page_names_is_served(daemon: RunningDaemon) -> None:
    index = daemon.ask("GET", "/ui").body.decode()
    names = re.findall(r'(?:href|src)="(ui/[^"]+)"', index)
    assert len(names) > 5
    for name in names:
        assert daemon.ask("GET", f"/{name}").status == 200, name
    assert daemon.ask("GET", "/ui/nosuch.js").status == 404
    assert daemon.ask("GET", "/ui/..%2fpage.py").status == 404


def test_browser_at_the_root_is_sent_to_the_page(daemon: RunningDaemon) -> None:
    answer = daemon.ask("GET", "/", headers={"Accept": "text/html,*/*"})
    assert (answer.status, answer.headers["Location"]) == (302, "ui")
    assert daemon.ask("GET", "/").json()["name"] == "mlx-isolate"


def changing_endpoints() -> set[tuple[str, str]]:
    """Method and path of every endpoint that may change something, out of the sources."""
    found = {("POST", path) for path in (*WORK_PATHS, "/chat/completions")}
    found |= {("GET", "/unload"), ("POST", "/upstream/m/x")}
    for source in (ROOT / "supervisor/mlx_isolate_supervisor").rglob("*.py"):
        text = source.read_text()
        added = re.findall(r"add_(post|put|delete|patch)\(\s*f?\"([^\"]+)\"", text)
        added += [("post", path) for path in re.findall(r"\bpost\(\s*f?\"(/[^\"]+)\"", text)]
        found |= {(method.upper(), re.sub(r"\{\w+\}", "x", path)) for method, path in added}
    return found


def test_every_changing_endpoint_refuses_calls_from_another_site(daemon: RunningDaemon) -> None:
    endpoints = changing_endpoints()
    for known in ("/drill/kill", "/v1/requests/x/cancel", "/admin/cache/flush", "/v1/cache"):
        assert known in {path for _, path in endpoints}, known
    assert len(endpoints) >= 15
    before = daemon.status()["models"]
    # A browser names the origin with whatever is no GET, and the relation of sites with a GET.
    foreign = ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Host": "evil.example"})
    blind = ({"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"})
    for method, path in sorted(endpoints):
        for headers in blind if method == "GET" else foreign:
            for kind in ("text/plain", "application/json"):
                if kind == "application/json" and asks_for_work(path) and "Origin" in headers:
                    continue  # a browser asks first, and is refused: the next test
                connection = daemon.connect()
                sent = {"Content-Type": kind, **headers}
                connection.request(method, path, '{"model": "m"}', sent)
                assert connection.getresponse().status == 403, (method, path, sent)
                connection.close()
    for old, new in zip(before, daemon.status()["models"], strict=True):
        assert (old["pid"], old["state"]) == (new["pid"], new["state"])


def test_work_in_json_is_left_to_the_browser_which_is_refused_when_it_asks(
    daemon: RunningDaemon,
) -> None:
    origin = {"Origin": "https://evil.example"}
    asking = {**origin, "Access-Control-Request-Method": "POST"}
    refused = daemon.ask("OPTIONS", "/v1/chat/completions", headers=asking)
    assert (refused.status, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
    # What is no browser names an origin too, and is no page's cat's-paw.
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    served = daemon.ask("POST", "/v1/chat/completions", body, origin)
    assert served.status == 200
    assert "Access-Control-Allow-Origin" not in served.headers


def test_with_a_key_only_the_files_of_the_page_are_open(tmp_path: Path) -> None:
    model = str(fake_model(tmp_path / "m"))
    with RunningDaemon(tmp_path / "h", model, "--api-key", "sesame") as daemon:
        for path in ("/ui", "/ui/app.js", "/favicon.ico"):
            assert daemon.ask("GET", path).status == 200
        for path in ("/status", "/events", "/metrics", "/history", "/v1/requests", "/logs"):
            assert daemon.ask("GET", path).status == 401, path
        assert daemon.ask("POST", "/drill/kill", {"model": "m"}).status == 401
        key = {"Authorization": "Bearer sesame"}
        assert daemon.ask("GET", "/metrics", headers=key).status == 200
