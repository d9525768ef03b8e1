"""A daemon that is killed, and one whose engines come and go: nothing is left and nothing grows."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.running_daemon import RunningDaemon, fake_model, read_until
from tests.waiting import wait_for

GONE_S = 5.0
PHASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Faults of the load, and what a request asks for that is under way.
    "idle": ({}, {}),
    "loading": ({"hang_load": True}, {}),
    "streaming": ({}, {"chunks": 100_000, "interval_s": 0.01}),
    "prefill": ({}, {"prefill_s": 600.0}),
}


@pytest.mark.case("03")
@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_daemon_leaves_no_engine_and_its_port_to_the_next(
    tmp_path: Path, phase: str, is_stopped: bool
) -> None:
    faults, fake = PHASES[phase]
    model = fake_model(tmp_path / "m", **faults)
    with RunningDaemon(tmp_path / "home", str(model)) as first:
        state = "starting" if phase == "loading" else "ready"
        first.wait_state(state)
        engines = wait_for(first.engines, 5, "an engine runs")
        if phase == "loading":
            # Told by an engine that has asked for its parent-death signal.
            wait_for(lambda: first.status()["models"][0]["loading"], 10, "a step of the load")
        if fake:
            stream = first.stream(fake=fake)
            wait_for(lambda: first.status()["models"][0]["active"] == 1, 5, "it is with the engine")
            if phase == "streaming":
                read_until(stream, b"data:")
        if is_stopped:
            for engine in engines:
                os.kill(engine.pid, signal.SIGSTOP)
        first.process.kill()
        first.process.wait()
        (model / "fake.json").write_text(json.dumps({}))
        with RunningDaemon(
            tmp_path / "home", str(model), port=first.port, run_dir=first.run_dir
        ) as second:
            assert second.port == first.port
            _, alive = psutil.wait_procs(engines, timeout=GONE_S)
            assert not alive
            second.wait_state("ready")
            assert second.chat().status == 200


@pytest.mark.case("26")
def test_twenty_engines_one_after_the_other_leave_the_supervisor_as_it_was(tmp_path: Path) -> None:
    with RunningDaemon(tmp_path / "home", str(fake_model(tmp_path / "m"))) as daemon:
        supervisor = psutil.Process(daemon.process.pid)
        sizes: list[int] = []
        for _ in range(20):
            [engine] = wait_for(daemon.engines, 10, "an engine runs")
            daemon.wait_state("ready")
            assert daemon.chat().status == 200
            assert daemon.ask("POST", "/models/unload", {"model": "m"}).status == 200
            assert not engine.is_running()
            assert daemon.ask("POST", "/models/load", {"model": "m"}).status == 200
            sizes.append(supervisor.memory_info().rss)
        assert max(sizes[10:]) <= max(sizes[:10]) + (2 << 20), sizes
