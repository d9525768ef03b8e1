"""The engine process around a scripted runtime: pipes, lifeline, signals, exit status."""

import asyncio
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mlx_isolate_shared.config import EXIT_CANNOT_WORK, LIFELINE_EXIT_S, PROGRESS_INTERVAL_S
from mlx_isolate_shared.wire import Failed, Loading, Prepare, Progress, Ready
from tests.engine_process import ROOT, SCRIPTED, EngineProcess
from tests.raw_http import RawClient, RawResponse, ask
from tests.waiting import wait_for

CHAT = "/v1/chat/completions"


@pytest.fixture
def engine() -> Iterator[EngineProcess]:
    with EngineProcess() as process:
        yield process


def begin_chat(engine: EngineProcess, word: str) -> None:
    """Send a streaming chat; its client stays connected until the engine is closed."""
    engine.begin_request(CHAT, {"messages": [{"role": "user", "content": word}], "stream": True})


def test_reports_loading_then_ready_then_progress(engine: EngineProcess) -> None:
    engine.start()
    assert isinstance(engine.report(), Loading)
    ready = engine.report()
    assert isinstance(ready, Ready)
    assert ready.pid == engine.child.pid
    assert ready.socket_path == engine.socket_path
    progress = [engine.report(PROGRESS_INTERVAL_S) for _ in range(4)]
    for line in progress:
        assert isinstance(line, Progress)
        assert line.footprint_bytes > 1 << 20


def test_first_completion_is_reported_at_once(engine: EngineProcess) -> None:
    engine.start()
    engine.wait_ready()
    engine.wait_report(Progress)

    async def main() -> RawResponse:
        body = {"messages": [{"role": "user", "content": "short"}]}
        return await ask(engine.socket_path, CHAT, body)

    assert asyncio.run(main()).status == 200
    # Well under the interval: the line was not waited for.
    engine.wait_progress(0.25, completed=1)


def test_standby_prepares_and_ends_with_its_spec(engine: EngineProcess) -> None:
    engine.send(Prepare(model="demo"))
    wait_for(lambda: "prepared demo" in engine.log, 20)
    assert engine.child.poll() is None
    engine.close(engine.spec_fd)
    assert engine.wait_exit(5) == 0


def test_spec_that_is_none_can_never_work(engine: EngineProcess) -> None:
    os.write(engine.spec_fd, b'{"type":"nonsense"}\n')
    failed = engine.wait_report(Failed)
    assert failed.code == "cannot_work"
    assert engine.wait_exit(5) == EXIT_CANNOT_WORK


def test_model_that_can_never_work_exits_78_with_its_reason(engine: EngineProcess) -> None:
    engine.start("cannot")
    failed = engine.wait_report(Failed)
    assert (failed.code, failed.message) == ("model_missing", "There is no such model.")
    assert engine.wait_exit(5) == EXIT_CANNOT_WORK
    assert engine.report() is None


def test_load_that_fails_otherwise_exits_with_another_status(engine: EngineProcess) -> None:
    engine.start("fails")
    assert engine.wait_report(Failed).code == "engine_failed"
    assert engine.wait_exit(5) == 1


def test_load_that_would_end_the_program_is_told_as_a_failure(engine: EngineProcess) -> None:
    engine.start("leaves")
    assert "it needs another package" in engine.wait_report(Failed).message
    assert engine.wait_exit(5) == 1


@pytest.mark.case("01")
def test_end_of_generation_ends_the_process_with_its_reason(engine: EngineProcess) -> None:
    engine.start()
    engine.wait_ready()
    begin_chat(engine, "die")
    failed = engine.wait_report(Failed)
    assert (failed.code, failed.message) == ("generation_failed", "the loop ended")
    assert engine.wait_exit(5) == 1


def reach(engine: EngineProcess, phase: str) -> None:
    """Bring the engine into a phase of its life."""
    if phase == "idle":
        wait_for(lambda: psutil.Process(engine.child.pid).num_threads() > 1, 20)
    elif phase == "loading":
        engine.start("hangs")
        engine.wait_report(Loading)
    elif phase == "loading in native code":
        engine.start("holds")
        wait_for(lambda: "holding" in engine.log, 20)
    else:
        engine.start()
        engine.wait_ready()
        words = {"prefill": "prefill", "decode": "endless", "decode in native code": "hold"}
        begin_chat(engine, words[phase])
        if phase == "decode in native code":
            wait_for(lambda: "holding" in engine.log, 20)
        else:
            engine.wait_progress(active=1)


PHASES = [
    "idle",
    "loading",
    "loading in native code",
    "prefill",
    "decode",
    "decode in native code",
]


@pytest.mark.case("03")
@pytest.mark.parametrize("phase", PHASES)
def test_end_of_the_lifeline_ends_the_engine(engine: EngineProcess, phase: str) -> None:
    reach(engine, phase)
    assert engine.child.poll() is None
    engine.close(engine.lifeline_fd)
    assert engine.wait_exit(LIFELINE_EXIT_S) not in (0, EXIT_CANNOT_WORK)


@pytest.mark.parametrize("phase", ["idle", "loading", "prefill", "decode"])
def test_sigterm_ends_with_status_0(engine: EngineProcess, phase: str) -> None:
    reach(engine, phase)
    engine.child.send_signal(signal.SIGTERM)
    assert engine.wait_exit(8) == 0
    if phase in ("prefill", "decode"):
        assert "runtime closed" in engine.log


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux signals one thread of another process"
)
def test_a_sigterm_that_the_system_gives_to_any_other_thread_is_heard(
    engine: EngineProcess,
) -> None:
    """Which thread gets a process's signal is the system's choice: gVisor's is not Linux's."""
    engine.start()
    engine.wait_ready()
    threads = [thread.id for thread in psutil.Process(engine.child.pid).threads()]
    others = [thread for thread in threads if thread != engine.child.pid]
    system = ctypes.CDLL(None, use_errno=True)
    assert system.tgkill(engine.child.pid, others[-1], int(signal.SIGTERM)) == 0
    assert engine.wait_exit(8) == 0


def test_sigint_of_a_terminal_is_not_for_engines(engine: EngineProcess) -> None:
    engine.start()
    engine.wait_ready()
    engine.child.send_signal(signal.SIGINT)
    engine.wait_report(Progress)
    engine.wait_report(Progress)
    assert engine.child.poll() is None


def test_sigabrt_leaves_the_python_stacks_in_the_log(engine: EngineProcess) -> None:
    engine.start()
    engine.wait_ready()
    engine.child.send_signal(signal.SIGABRT)
    assert engine.wait_exit(5) == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in engine.log
    assert 'File "' in engine.log


def test_closed_report_pipe_does_not_stop_the_engine(engine: EngineProcess) -> None:
    engine.start()
    engine.wait_ready()
    engine.close(engine.report_fd)
    body = {"messages": [{"role": "user", "content": "short"}]}
    for _ in range(2):
        assert asyncio.run(ask(engine.socket_path, CHAT, body)).status == 200
    assert engine.child.poll() is None


def test_client_that_leaves_is_counted_as_cancelled(engine: EngineProcess) -> None:
    engine.start()
    engine.wait_ready()

    async def main() -> None:
        async with await RawClient.connect(engine.socket_path) as client:
            body = {"messages": [{"role": "user", "content": "endless"}], "stream": True}
            client.send(CHAT, body)
            await client.head()
            await client.chunk()

    asyncio.run(main())
    assert engine.wait_progress(2, cancelled=1).active == 0


@pytest.mark.case("03")
@pytest.mark.skipif(sys.platform != "linux", reason="a stopped process hears nothing elsewhere")
@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("model", ["idle", "hangs", "ok"])
def test_killed_parent_takes_the_engine_with_it(model: str, stopped: bool) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-P", str(ROOT / "tests/fakes/engine_parent.py"), model],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(f"{ROOT}/{s}" for s in ("engine", "shared")),
        },
    )
    assert parent.stdout is not None
    with parent.stdout as said:
        pid, folder = said.readline().split()
        child = psutil.Process(int(pid))
        try:
            assert said.readline() == "ready\n"
            wait_for(lambda: child.num_threads() > 1, 20)
            if stopped:
                child.send_signal(signal.SIGSTOP)
                wait_for(lambda: child.status() == psutil.STATUS_STOPPED, 5)
            parent.kill()
            parent.wait(5)
            wait_for(lambda: is_gone(child), LIFELINE_EXIT_S)
        finally:
            if not is_gone(child):
                child.kill()
            parent.kill()
            parent.wait(5)
            shutil.rmtree(Path(folder), ignore_errors=True)


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_all_work_has_the_lower_priority_and_the_main_thread_keeps_its_own() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    with EngineProcess((*SCRIPTED, "--nice", "3")) as engine:
        engine.start()
        engine.wait_ready()
        threads = [int(name) for name in os.listdir(f"/proc/{engine.child.pid}/task")]
        niceness = {thread: os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
        assert niceness.pop(engine.child.pid) == own
    assert niceness and set(niceness.values()) == {min(own + 3, 19)}
