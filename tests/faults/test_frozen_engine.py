"""An engine that is frozen under a daemon: pages answer, clients are told, another one serves."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.running_daemon import RunningDaemon, fake_model, read_all, read_until
from tests.waiting import wait_for

# A small part of the default, so that the test does not wait long.
SILENCE_S = 1.5
PAGE_S = 0.200


@pytest.mark.alone
@pytest.mark.case("01", "30")
def test_a_frozen_engine_is_told_of_and_replaced_and_holds_up_no_page(tmp_path: Path) -> None:
    with RunningDaemon(
        tmp_path / "home", str(fake_model(tmp_path / "m")), "--report-silence", f"{SILENCE_S}s"
    ) as daemon:
        old = daemon.wait_state("ready")["pid"]
        stream = daemon.stream(fake={"chunks": 5000, "interval_s": 0.01})
        for _ in range(5):
            read_until(stream, b"data: {")
        os.kill(old, signal.SIGSTOP)
        began = time.monotonic()
        took: list[float] = []
        told_at: list[float] = []

        def are_done() -> bool:
            for page in ("/health", "/v1/models", "/status"):
                asked = time.monotonic()
                answer = daemon.ask("GET", page)
                took.append(time.monotonic() - asked)
                if page == "/status" and answer.json()["models"][0]["state"] != "ready":
                    told_at.append(time.monotonic() - began)
            return ending.done() and whole.done()

        with ThreadPoolExecutor(2) as pool:
            ending = pool.submit(read_all, stream)
            whole = pool.submit(daemon.chat)
            wait_for(are_done, 15, "both requests have an outcome")
        assert max(took) < PAGE_S, sorted(took)[-5:]
        assert told_at[0] < SILENCE_S + 1.0
        rest = ending.result()
        # No comment held the error off, and nothing says that the answer was complete.
        assert rest.count(b'"engine_hung"') == 1
        assert b"[DONE]" not in rest and b'"finish_reason":"' not in rest
        # The frozen engine never read the second request, so that it may be served by the next.
        assert whole.result().status in (200, 504)
        assert daemon.chat().status == 200
        now = daemon.wait_state("ready")
        assert now["pid"] != old and not psutil.pid_exists(old)


@pytest.mark.case("01")
def test_a_prompt_longer_than_the_limits_is_left_alone(tmp_path: Path) -> None:
    flags = ("--report-silence", "1.5s", "--watchdog-timeout", "1s")
    with RunningDaemon(tmp_path / "home", str(fake_model(tmp_path / "m")), *flags) as daemon:
        before = daemon.wait_state("ready")["pid"]
        assert daemon.chat(fake={"prefill_s": 3.0}).status == 200
        assert daemon.status()["models"][0]["pid"] == before
