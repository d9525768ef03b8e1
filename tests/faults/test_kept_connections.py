"""Connections to a living engine that ends them by itself, in the instant of the next request."""

import http.client
import json
import sys
from pathlib import Path

import pytest

from tests.running_daemon import RunningDaemon, fake_model
from tests.waiting import wait_for

CHATS = 50
NEXT = pytest.param(
    "next",
    marks=pytest.mark.skipif(
        sys.platform != "linux", reason="only Linux tells that a request was not read"
    ),
)


def chat(client: http.client.HTTPConnection, hang_up: str) -> int:
    """One chat on the client's own kept connection, after which the engine hangs up."""
    body = {"messages": [{"role": "user", "content": "hi"}], "fake": {"hang_up": hang_up}}
    headers = {"Content-Type": "application/json"}
    client.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = client.getresponse()
    response.read()
    return response.status


@pytest.mark.case("27")
@pytest.mark.parametrize("hang_up", ["idle", NEXT])
def test_a_request_that_meets_the_engines_idle_timeout_is_answered_once(
    tmp_path: Path, hang_up: str
) -> None:
    """`next` is the worst instant, the request is there and the engine closes unread."""
    with RunningDaemon(tmp_path / "home", str(fake_model(tmp_path / "m"))) as daemon:
        before = daemon.wait_state("ready")
        client = daemon.connect()
        try:
            assert {chat(client, hang_up) for _ in range(CHATS)} == {200}
        finally:
            client.close()

        def completed() -> bool:
            model = daemon.status()["models"][0]
            return bool(model["progress"]["completed"] == CHATS and model["active"] == 0)

        wait_for(completed, 5, "each was worked on, and none twice")
        assert daemon.status()["models"][0]["incarnation"] == before["incarnation"]
