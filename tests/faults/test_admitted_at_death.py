"""Requests that were given to an engine at the moment of its death, which it never read."""

import os
import signal
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests.running_daemon import Answer, RunningDaemon, fake_model, read_all, read_until
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux' word on unread bytes")


def is_stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def test_a_request_that_the_dead_engine_never_read_is_served_by_the_respawn(tmp_path: Path) -> None:
    """A stopped engine reads nothing; what it had read before it was stopped is told."""
    with RunningDaemon(tmp_path / "home", str(fake_model(tmp_path / "m"))) as daemon:
        pid = daemon.wait_state("ready")["pid"]
        had = daemon.stream(fake={"after": 1, "hang": True})
        read_until(had, b"data: ")
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: is_stopped(pid), 5)
        answers: list[Answer] = []
        asking = threading.Thread(target=lambda: answers.append(daemon.chat()))
        asking.start()
        wait_for(
            lambda: daemon.status()["models"][0]["active"] == 2, 5, "the engine was given both"
        )
        os.kill(pid, signal.SIGKILL)
        asking.join(20)
        assert [answer.status for answer in answers] == [200]
        assert b"engine_died" in read_all(had)
        assert daemon.status()["models"][0]["incarnation"] == 2
