"""HTTP's edges at the whole daemon: pooled connections, Expect, bodies, CORS, Host names."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.running_daemon import RunningDaemon, fake_model

CHAT = "/v1/chat/completions"
ORIGIN = {"Origin": "http://localhost:3000"}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    home = tmp_path_factory.mktemp("edges")
    with RunningDaemon(home / "home", str(fake_model(home / "m"))) as running:
        running.wait_state("ready")
        yield running


def chat_on(connection: http.client.HTTPConnection, **fields: Any) -> tuple[int, Any]:
    """One chat on a client's own connection."""
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields})
    connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, json.loads(response.read())


@pytest.mark.case("27")
def test_a_kill_behind_pooled_connections_is_never_a_500(tmp_path: Path) -> None:
    """Ten chats fill the pool, the engine is killed, the client goes on at once."""
    with RunningDaemon(tmp_path / "home", str(fake_model(tmp_path / "m"))) as daemon:
        daemon.wait_state("ready")
        connection = daemon.connect()
        for round_number in range(3):
            answers = [chat_on(connection) for _ in range(10)]
            assert {status for status, _ in answers} == {200}
            pid = daemon.status()["models"][0]["pid"]
            os.kill(pid, signal.SIGKILL)
            status, value = chat_on(connection)
            assert status in (200, 502, 503), value
            if status != 200:
                assert value["error"]["code"] in ("engine_died", "not_ready"), value
            daemon.wait_state("ready")
            status, value = chat_on(connection)
            assert status == 200, value
            assert value["system_fingerprint"].endswith(f"incarnation-{round_number + 2}")
        connection.close()


def expect(daemon: RunningDaemon, body: bytes, expectation: str) -> tuple[list[int], float]:
    """The statuses that a client which waits for 100 gets, and the seconds until the first."""
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=10) as client:
        began = time.monotonic()
        client.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nExpect: {expectation}\r\n"
            "Connection: close\r\n\r\n".encode()
        )
        stream = client.makefile("rb")
        statuses = [int(stream.readline().split()[1])]
        waited_s = time.monotonic() - began
        while True:
            while stream.readline().strip():
                pass
            if statuses[-1] != 100:
                return statuses, waited_s
            client.sendall(body)
            statuses.append(int(stream.readline().split()[1]))


@pytest.mark.case("46")
@pytest.mark.parametrize("size", [10_000, 3_000_000])
def test_a_client_that_waits_for_100_is_not_held_up(daemon: RunningDaemon, size: int) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * size}]}).encode()
    tries = [expect(daemon, body, "100-continue") for _ in range(3)]
    assert all(statuses == [100, 200] for statuses, _ in tries)
    # The best of some, since other work of a test run may hold one up.
    assert min(waited_s for _, waited_s in tries) < 0.1


@pytest.mark.case("46")
def test_expectations_that_end_in_an_error_have_one_final_status(daemon: RunningDaemon) -> None:
    assert expect(daemon, b'{"model":"nope"}', "100-continue")[0] == [100, 404]
    assert expect(daemon, b"{}", "foo")[0] == [417]


@pytest.mark.case("46")
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_with_expect_is_answered_without_its_second_of_waiting(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"messages": [{"role": "user", "content": "x" * 3_000_000}]}))
    done = subprocess.run(
        ["curl", "-sS", "-o", str(tmp_path / "out"), "-w", "%{http_code} %{time_total}"]
        + ["-H", "Expect: 100-continue", "-H", "Content-Type: application/json"]
        + ["--data-binary", f"@{body}", f"http://127.0.0.1:{daemon.port}{CHAT}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    status, seconds = done.stdout.split()
    assert status == "200" and float(seconds) < 0.9


@pytest.mark.case("47")
@pytest.mark.parametrize("size", [1_153_433, 8 << 20, (64 << 20) - 200])
def test_large_bodies_reach_the_engine(daemon: RunningDaemon, size: int) -> None:
    answer = daemon.chat(padding="x" * size)
    assert answer.status == 200


@pytest.mark.case("47")
def test_a_body_over_the_limit_is_a_json_413(daemon: RunningDaemon) -> None:
    answer = daemon.chat(padding="x" * (64 << 20))
    assert answer.status == 413 and answer.json()["error"]["code"] == "body_too_large"


@pytest.mark.case("48")
@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", CHAT, {"messages": [], "stream": True}, 200),
        ("POST", CHAT, {"messages": []}, 200),
        ("POST", CHAT, [1], 400),
        ("POST", CHAT, {"model": "nope"}, 404),
        ("GET", "/v1/models", None, 200),
        ("GET", "/v1/models/nope", None, 404),
        ("GET", "/health", None, 200),
        ("GET", "/status", None, 200),
        ("GET", "/nowhere", None, 404),
        ("GET", CHAT, None, 405),
        ("HEAD", CHAT, None, 405),
        ("HEAD", "/", None, 200),
    ],
)
def test_every_answer_of_the_daemon_carries_the_origin_once(
    daemon: RunningDaemon, method: str, path: str, body: Any, status: int
) -> None:
    answer = daemon.ask(method, path, body, ORIGIN)
    assert answer.status == status or (path == "/" and answer.status in (200, 302, 404))
    assert answer.headers.get_all("Access-Control-Allow-Origin") == [ORIGIN["Origin"]]
    assert daemon.ask(method, path, body).headers.get_all("Access-Control-Allow-Origin") is None


@pytest.mark.case("48")
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/models/load", "/status"])
def test_a_preflight_of_any_endpoint_is_answered(daemon: RunningDaemon, path: str) -> None:
    asked = "authorization,content-type,x-stainless-os"
    headers = {
        **ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": asked,
    }
    answer = daemon.ask("OPTIONS", path, headers=headers)
    assert answer.status == 204 and answer.headers["Access-Control-Allow-Headers"] == asked


@pytest.mark.case("49")
@pytest.mark.parametrize("path", ["/", "/v1/models", "/status", "/ui", CHAT])
def test_a_foreign_host_reaches_no_endpoint(daemon: RunningDaemon, path: str) -> None:
    answer = daemon.ask("GET", path, headers={"Host": "evil.example"})
    assert answer.status == 403 and answer.json()["error"]["code"] == "host_not_allowed"


def strangers(daemon: RunningDaemon) -> list[str]:
    """Addresses beyond this machine that the daemon or an engine has a connection to."""
    processes = [psutil.Process(daemon.process.pid), *daemon.engines()]
    remote = [c.raddr for process in processes for c in process.net_connections("inet") if c.raddr]
    return [address.ip for address in remote if address.ip not in ("127.0.0.1", "::1")]


@pytest.mark.case("49")
@pytest.mark.parametrize("model", ["nope/nope", "../../etc", "/etc/passwd", ""])
def test_an_unknown_model_is_told_at_once_while_a_stream_runs(
    daemon: RunningDaemon, model: str
) -> None:
    """No look-up elsewhere, no spawn, no unload."""
    before = daemon.status()["models"][0]["pid"]
    with daemon.stream(fake={"chunks": 1000, "interval_s": 0.01}) as stream:
        stream.recv(1)
        took: list[float] = []
        for _ in range(5):
            began = time.monotonic()
            answer = daemon.chat(model=model)
            took.append(time.monotonic() - began)
            assert answer.status == 404 and answer.json()["error"]["code"] == "model_not_found"
            assert strangers(daemon) == []
        # The best of some, since other work of a test run may hold one up.
        assert min(took) < 0.1
        assert daemon.status()["models"][0]["pid"] == before
        assert [process.pid for process in daemon.engines()] == [before]


def raw_status(daemon: RunningDaemon, request: bytes) -> int:
    """The status that bytes get which no client library would send."""
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=30) as client:
        client.sendall(request)
        with client.makefile("rb") as answer:
            return int(answer.readline().split()[1])


DEEP = b'{"x":' + b"[" * 20_000 + b"]" * 20_000 + b',"model":"m"}'


@pytest.mark.parametrize(
    ("line", "field", "body", "status"),
    [
        (b"GET /upstream/m/v1/models", b"Connection: \xff, x-a", b"", 200),
        (b"GET /upstream/m/v1/models", b"Origin: http://\xff.localhost", b"", 200),
        (b"POST /models/load", b"Origin: http://[", b"", 403),
        (b"GET /upstream/m/ws", b"Origin: http://[\r\nUpgrade: websocket", b"", 403),
        (b"POST /v1/chat/completions", b"Content-Encoding: \xff", b"{}", 415),
        (b"GET /logs?lines=%C2%B2", b"Accept: */*", b"", 400),
        (b"GET /logs?lines=" + b"9" * 5000, b"Accept: */*", b"", 400),
        (b"GET /events?replay=" + b"9" * 5000, b"Accept: */*", b"", 400),
        (b"POST /models/load", b"Accept: */*", DEEP, 400),
        (b"POST /drill/kill", b"Accept: */*", DEEP, 400),
        (b"POST /v1/completions", b"Accept: */*", b'{"ttl":1%b}' % (b"0" * 400), 400),
        (b"POST /v1/completions", b"Accept: */*", b'{"keep_alive":1%b}' % (b"0" * 400), 400),
    ],
)
def test_what_makes_no_sense_is_never_a_fault_of_the_servers(
    daemon: RunningDaemon, line: bytes, field: bytes, body: bytes, status: int
) -> None:
    head = b"%b HTTP/1.1\r\nHost: localhost\r\n%b\r\n"
    request = head % (line, field) + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    assert raw_status(daemon, request) == status
    assert "Traceback" not in daemon.stderr
