"""What others do to a living daemon's pipes and folders: unread, closed, swept away."""

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlx_isolate_supervisor.telemetry.outlet import WAITING_BYTES_MAX, Outlet, write_all
from tests.running_daemon import RunningDaemon, fake_model
from tests.waiting import wait_for

# Requests whose lines of log are several times what the pipe below holds.
ENOUGH = 150


def test_a_standard_error_that_nobody_reads_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_end, write_end = os.pipe()
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    popen = subprocess.Popen

    def start(*args: Any, **kwargs: Any) -> Any:
        return popen(*args, **(kwargs | {"stderr": write_end}))

    monkeypatch.setattr(subprocess, "Popen", start)
    daemon = RunningDaemon(tmp_path / "home", str(fake_model(tmp_path / "m")))
    monkeypatch.undo()
    os.close(write_end)
    with daemon:
        assert {daemon.chat().status for _ in range(ENOUGH)} == {200}
        assert daemon.ask("GET", "/health").status == 200
        os.close(read_end)
        assert {daemon.chat().status for _ in range(5)} == {200}
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.wait_end(10) == 0


def test_an_outlet_keeps_order_and_drops_what_does_not_fit() -> None:
    read_end, write_end = os.pipe()
    outlet = Outlet()
    write = partial(write_all, write_end)
    chunk = b"x" * 1023 + b"\n"
    for _ in range(2 * WAITING_BYTES_MAX // len(chunk) + 256):
        outlet.put(write, chunk)
    outlet.finish(0.0)
    seen = 0
    while seen < WAITING_BYTES_MAX:
        seen += len(os.read(read_end, 1 << 16))
    outlet.finish(10)
    outlet.put(write, b"first ")
    outlet.put(write, b"second")
    outlet.finish(10)
    last = b""
    while not last.endswith(b"second"):
        last += os.read(read_end, 1 << 20)
    assert last.endswith(b"first second")
    os.close(read_end)
    os.close(write_end)


def test_an_engine_whose_socket_was_removed_is_replaced(tmp_path: Path) -> None:
    with RunningDaemon(tmp_path / "home", str(fake_model(tmp_path / "m"))) as daemon:
        old = daemon.wait_state("ready")["pid"]
        for path in daemon.run_dir.glob("*.sock"):
            path.unlink()
        wait_for(lambda: daemon.status()["models"][0]["pid"] not in (None, old), 15, "respawn")
        daemon.wait_state("ready")
        assert daemon.chat().status == 200
        last = daemon.status()["models"][0]["last_exit"]
        assert last["cause"] == "hung"
        assert "was removed" in last["reason"]


def test_a_run_directory_that_was_removed_is_made_anew(tmp_path: Path) -> None:
    with RunningDaemon(tmp_path / "home", str(fake_model(tmp_path / "m"))) as daemon:
        old = daemon.wait_state("ready")["pid"]
        shutil.rmtree(daemon.run_dir)
        wait_for(lambda: daemon.status()["models"][0]["pid"] not in (None, old), 15, "respawn")
        daemon.wait_state("ready")
        assert daemon.chat().status == 200
        assert daemon.run_dir.stat().st_mode & 0o077 == 0
        assert (daemon.run_dir / "supervisor.lock").read_text().strip() == str(daemon.process.pid)


def test_a_run_directory_that_became_a_file_leaves_no_model_stuck(tmp_path: Path) -> None:
    place = Path(tempfile.mkdtemp(prefix="mi"))
    run_dir = place / "r"
    model = str(fake_model(tmp_path / "m"))
    try:
        with RunningDaemon(tmp_path / "home", model, run_dir=run_dir) as daemon:
            pid = daemon.wait_state("ready")["pid"]
            shutil.rmtree(run_dir)
            run_dir.write_text("in the way")
            os.kill(pid, signal.SIGKILL)
            last = daemon.wait_state("backoff")["last_exit"]
            assert last["cause"] == "spawn_failed"
            assert str(run_dir) in last["reason"]
            # What could not be started has left nobody behind either.
            assert daemon.engines() == []
            run_dir.unlink()
            daemon.ask("POST", "/models/reset", {"model": "m"})
            assert daemon.chat().status == 200
            assert "Traceback" not in daemon.stderr
    finally:
        shutil.rmtree(place)


def test_a_log_folder_that_was_removed_is_made_anew(tmp_path: Path) -> None:
    with RunningDaemon(tmp_path / "home", str(fake_model(tmp_path / "m"))) as daemon:
        daemon.wait_state("ready")
        folder = tmp_path / "home" / "logs"
        (name,) = (path.name for path in folder.iterdir())
        shutil.rmtree(folder)
        daemon.chat()
        wait_for(lambda: (folder / name).exists(), 5, "a new log file")
