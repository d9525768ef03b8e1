"""The supervisor killed with SIGKILL in any phase: engines go, and the next start just works."""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor.engines.orphans import (
    EngineRecord,
    process_start,
    reap_orphans,
    record_engine,
)
from mlx_isolate_supervisor.engines.rundir import RunDirectory
from tests.waiting import wait_for

TINY = Path(__file__).resolve().parents[1] / "fakes/tiny_supervisor.py"


class Tiny:
    """A tiny supervisor as a child process."""

    def __init__(self, home: Path, *, faults: dict[str, Any], words: tuple[str, ...] = ()) -> None:
        (home / "model").mkdir(exist_ok=True)
        (home / "model/fake.json").write_text(json.dumps(faults))
        argv = [sys.executable, str(TINY), str(home / "run"), str(home / "model")]
        self.child = subprocess.Popen(
            [*argv, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self.child.stdout is not None
        self._stdout = self.child.stdout
        self.first = self.line()
        self.pid = 0
        self.pids: set[int] = set()

    def line(self) -> dict[str, Any]:
        text = self._stdout.readline()
        if not text:
            assert self.child.stderr is not None
            raise AssertionError(self.child.stderr.read().decode())
        found: dict[str, Any] = json.loads(text)
        return found

    def until(self, state: str) -> int:
        """Read on until the model is in `state`; the engine's pid."""
        while True:
            line = self.line()
            if line.get("pid"):
                self.pid = int(line["pid"])
                self.pids.add(self.pid)
            if line.get("state") == state:
                return self.pid

    def kill(self) -> None:
        self.child.kill()
        self.child.wait(10)
        for pipe in (self.child.stdout, self.child.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mi", dir="/tmp") as folder:
        yield Path(folder)


def gone_within(pids: set[int], seconds: float) -> None:
    wait_for(lambda: all(process_start(pid) is None for pid in pids), seconds, f"{pids} are gone")


def next_start_works(home: Path) -> dict[str, Any]:
    """Start another on the same run directory at once; returns its first line."""
    began = time.monotonic()
    tiny = Tiny(home, faults={})
    try:
        tiny.until("ready")
        assert time.monotonic() - began < 10
        sockets = list((home / "run").glob("*.sock"))
        assert len(sockets) == 1
        return tiny.first
    finally:
        tiny.kill()
        gone_within(tiny.pids, 2)


PHASES: dict[str, tuple[dict[str, Any], str]] = {
    # The first load step comes from an engine that has asked for its parent-death signal. Before
    # that only its lifeline holds, and a stopped engine cannot read that.
    "loading": ({"hang_load": True}, "loading"),
    "idle": ({}, "ready"),
    "streaming": ({}, "streaming"),
}


@pytest.mark.case("03")
@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
@pytest.mark.parametrize("phase", PHASES)
def test_engines_end_with_a_killed_supervisor(home: Path, phase: str, stopped: bool) -> None:
    faults, state = PHASES[phase]
    tiny = Tiny(home, faults=faults, words=("stream",) if state == "streaming" else ())
    pid = tiny.until(state)
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    tiny.kill()
    gone_within(tiny.pids, 2)
    next_start_works(home)


@pytest.mark.case("03")
@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_the_next_start_ends_an_engine_that_outlived_its_supervisor(
    home: Path, stopped: bool
) -> None:
    tiny = Tiny(home, faults={"ignore_lifeline": True})
    pid = tiny.until("ready")
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    tiny.kill()
    assert process_start(pid) is not None
    first = next_start_works(home)
    assert first["orphans"] == [pid]
    assert process_start(pid) is None


@pytest.mark.case("x4")
def test_an_engine_behind_a_launcher_that_forks_ends_with_a_killed_supervisor(home: Path) -> None:
    tiny = Tiny(home, faults={}, words=("launcher",))
    launcher = psutil.Process(tiny.until("ready"))
    [engine] = launcher.children()
    tiny.kill()
    gone_within({launcher.pid, engine.pid}, 2)
    next_start_works(home)


def test_a_record_of_a_reused_pid_signals_nobody(home: Path) -> None:
    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        record = EngineRecord(pid=bystander.pid, started="some-boot:1", model="m", incarnation=1)
        record_engine(home, record)
        assert reap_orphans(home) == ()
        assert bystander.poll() is None
        assert list(home.glob("engine-*")) == []
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": "x"}', b"\x00\xff"])
def test_a_damaged_record_is_removed(home: Path, content: bytes) -> None:
    (home / "engine-1.json").write_bytes(content)
    (home / "engine-2.tmp").write_bytes(content)
    assert reap_orphans(home) == ()
    assert list(home.glob("engine-*")) == []


def test_what_is_no_record_and_no_socket_of_ours_stays_and_holds_nothing_up(home: Path) -> None:
    run_directory = RunDirectory.acquire(home / "run")
    kept = {home / "run" / name for name in ("engine-1.json", "engine-x", "a.sock")}
    for folder in kept:
        folder.mkdir()
    os.mkfifo(home / "run/engine-2.json")
    assert reap_orphans(run_directory.path) == ()
    assert run_directory.remove_stray_sockets() == 0
    assert {path for path in (home / "run").iterdir() if path.is_dir()} == kept
    run_directory.release()


def test_a_second_supervisor_on_the_same_run_directory_is_refused(home: Path) -> None:
    tiny = Tiny(home, faults={})
    try:
        pid = tiny.until("ready")
        with pytest.raises(ConfigError, match=f"pid {tiny.child.pid}"):
            RunDirectory.acquire(home / "run")
        assert process_start(pid) is not None
        assert tiny.child.poll() is None
    finally:
        tiny.kill()


def test_the_run_directory_is_private_and_its_paths_are_checked(home: Path) -> None:
    run_directory = RunDirectory.acquire(home / "run")
    assert (home / "run").stat().st_mode & 0o777 == 0o700
    paths = {run_directory.new_socket_path() for _ in range(100)}
    assert len(paths) == 100
    (home / "run/old-1.sock").touch()
    assert run_directory.remove_stray_sockets() == 1
    run_directory.release()
    RunDirectory.acquire(home / "run").release()
    with pytest.raises(ConfigError, match="bytes"):
        RunDirectory.acquire(home / ("x" * 100))


def test_a_run_directory_that_cannot_be_written_is_told_with_the_remedy(home: Path) -> None:
    (home / "run/supervisor.lock").mkdir(parents=True)
    with pytest.raises(ConfigError, match="cannot write in the run directory .*another --run-dir"):
        RunDirectory.acquire(home / "run")


def test_a_run_directory_on_a_full_disk_is_told_with_the_remedy(home: Path) -> None:
    # The kernel takes no byte more of any file: as a full disk, whose number is another.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(ConfigError, match="cannot write in the run directory"):
            RunDirectory.acquire(home / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    RunDirectory.acquire(home / "run").release()
