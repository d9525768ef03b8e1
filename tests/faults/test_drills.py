"""Every drill does what it says, on throw-away daemons over fake engines and on a running one."""

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from mlx_isolate_supervisor import exit_codes
from mlx_isolate_supervisor.drills import scene
from mlx_isolate_supervisor.drills.catalogue import DRILLS, Drill
from mlx_isolate_supervisor.drills.pages import report_lines
from mlx_isolate_supervisor.drills.record import DrillReport
from mlx_isolate_supervisor.drills.runner import run_drills
from mlx_isolate_supervisor.drills.stage import StagePlan
from mlx_isolate_supervisor.drills.throwaway import OwnPlan
from tests.running_daemon import (
    FAKE,
    REAL,
    ROOT,
    RunningDaemon,
    environment,
    fake_model,
    read_until,
    run_command,
)
from tests.waiting import wait_for

# A pace at which a stream is in its middle when the drill acts.
PACE = {"fake": {"interval_s": 0.01}}
# The default of 10 s would only be waited for.
SILENCE = ("--report-silence", "2")
# These need what a fake engine has not: a prompt cache on disk.
REAL_ONLY = {"disk-full"}


def drill(names: list[str], plan: OwnPlan, repeat: int = 1) -> list[DrillReport]:
    """The reports of drills on throw-away daemons."""
    stage = StagePlan(running=None, own=plan, consent=lambda _: False)

    async def run() -> list[DrillReport]:
        return [r async for r in run_drills([DRILLS[name] for name in names], stage, repeat)]

    return asyncio.run(run())


def told(report: DrillReport) -> str:
    return "\n".join(report_lines(report))


@pytest.fixture
def fake_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OwnPlan:
    """Throw-away daemons over fake engines, in folders of the test."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(ROOT)
    model = str(fake_model(tmp_path / "m"))
    return OwnPlan(model=model, program=FAKE, flags=SILENCE, fields=PACE)


@pytest.mark.case("03", "20")
@pytest.mark.alone
@pytest.mark.parametrize("name", sorted(set(DRILLS) - REAL_ONLY))
def test_drill_keeps_its_promises(name: str, fake_plan: OwnPlan) -> None:
    if name == "oom" and sys.platform != "linux":
        pytest.skip("only Linux can limit what another process may use")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    [report] = drill([name], fake_plan)
    assert report.result == "kept", told(report)
    assert report.is_own
    assert report.facts["supervisor_probes"]
    if DRILLS[name].run.__name__ in ("kill", "segv", "abort", "hang"):
        assert report.facts["new_pid"] not in (None, report.facts["old_pid"])
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert not left


@pytest.mark.case("22")
@pytest.mark.alone
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can limit another process")
def test_a_full_disk_costs_no_answer_in_the_drill(full_model: Path, fake_plan: OwnPlan) -> None:
    [report] = drill(["disk-full"], OwnPlan(model=str(full_model), flags=("--standby", "0")))
    assert report.result == "kept", told(report)


@pytest.mark.alone
def test_a_slow_model_has_the_time_that_it_needed_before(
    fake_plan: OwnPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scene, "MOMENT_S", 0.1)
    slow = {"fake": {"prefill_s": 0.4, "interval_s": 0.01}}
    [report] = drill(["kill"], msgspec.structs.replace(fake_plan, fields=slow))
    assert report.result == "kept", told(report)


def test_a_drill_that_cannot_be_done_says_why(fake_plan: OwnPlan) -> None:
    [report] = drill(["disk-full"], fake_plan, repeat=3)
    assert report.result == "not_run"
    assert report.reason == "the engine has no prompt cache on disk"


def test_a_throw_away_daemon_leaves_nothing(fake_plan: OwnPlan, tmp_path: Path) -> None:
    seen: list[int] = []

    async def note(scene: Any) -> None:
        seen.extend(child.pid for child in psutil.Process(scene.own.pid).children())
        seen.append(scene.own.pid)
        homes.append(scene.own.home)

    homes: list[Path] = []
    stage = StagePlan(running=None, own=fake_plan, consent=lambda _: False)

    async def run() -> None:
        async for _ in run_drills([Drill(name="kill", help="", run=note)], stage):
            pass

    asyncio.run(run())
    assert seen and homes
    assert not any(psutil.pid_exists(pid) for pid in seen)
    assert not homes[0].exists()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mi") as folder:
        yield Path(folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_drill_that_is_ended_takes_its_daemon_along(
    number: signal.Signals, full_model: Path, tmp_path: Path, short_folder: Path
) -> None:
    command = [*REAL, "drill", "kill", "--own", "--model", str(full_model)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(tmp_path, {"TMPDIR": str(short_folder)}),
        stdout=subprocess.DEVNULL,
    ) as drilling:
        of_drill = psutil.Process(drilling.pid)
        wait_for(lambda: of_drill.children(recursive=True)[1:], 20, "its daemon has an engine")
        below = of_drill.children(recursive=True)
        drilling.send_signal(number)
        assert drilling.wait(30) == exit_codes.CUT_BASE + number
    assert not [child for child in below if child.is_running()]
    assert not list(short_folder.glob("mi-drill-*"))


# Starts a throw-away daemon over fake engines, says which it is, and does not end by itself.
DRILLING = """
import asyncio, sys
from mlx_isolate_supervisor.drills.throwaway import OwnDaemon, OwnPlan
from tests.running_daemon import FAKE

async def drill():
    daemon = OwnDaemon(OwnPlan(model=sys.argv[1], program=FAKE), ("--standby", "0"), ("m",))
    await daemon.start()
    print(daemon.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(drill())
"""


def test_a_drill_that_is_killed_leaves_no_daemon(tmp_path: Path, short_folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DRILLING, str(fake_model(tmp_path / "m"))],
        cwd=ROOT,
        env=environment(tmp_path, {"TMPDIR": str(short_folder)}),
        stdout=subprocess.PIPE,
    ) as drilling:
        assert drilling.stdout is not None
        supervisor = psutil.Process(int(drilling.stdout.readline()))
        below = wait_for(supervisor.children, 10, "it has an engine")
        drilling.kill()
    try:
        left = [supervisor, *below]
        wait_for(lambda: not any(one.is_running() for one in left), 5, "they are gone")
    finally:
        if supervisor.is_running():
            supervisor.kill()


@pytest.fixture
def daemon(tmp_path: Path) -> Any:
    with RunningDaemon(tmp_path / "home", str(fake_model(tmp_path / "m"))) as running:
        running.wait_state("ready")
        yield running


@pytest.mark.alone
def test_drill_on_a_running_daemon_reports_as_json(daemon: RunningDaemon) -> None:
    before = daemon.status()
    done = daemon.command("drill", "kill", "--json")
    assert (done.returncode, done.stderr) == (exit_codes.OK, ""), done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["result"] == "kept"
    [one] = report["drills"]
    assert not one["is_own"]
    assert one["facts"]["old_pid"] == before["models"][0]["pid"]
    assert one["facts"]["new_pid"] == daemon.status()["models"][0]["pid"]
    assert daemon.status()["supervisor"]["pid"] == before["supervisor"]["pid"]
    assert {"told_s", "detected_s", "ready_s", "first_token_s", "supervisor_worst_s"} <= set(
        one["facts"]
    )


def test_drill_does_not_disturb_others_without_consent(daemon: RunningDaemon) -> None:
    stream = daemon.stream(max_tokens=2000, fake={"interval_s": 0.01})
    read_until(stream, b"data: ")
    pid = daemon.status()["models"][0]["pid"]
    refused = daemon.command("drill", "kill")
    assert refused.returncode == exit_codes.NOT_RUN
    assert "1 requests of others run there" in refused.stdout
    assert daemon.status()["models"][0]["pid"] == pid
    done = daemon.command("drill", "kill", "--yes")
    assert done.returncode == exit_codes.OK, done.stdout + done.stderr
    assert done.stderr == "kill #1: SIGKILL to a busy engine …\n"
    assert daemon.status()["models"][0]["pid"] != pid


def test_drill_that_needs_its_own_daemon_leaves_a_running_one_alone(daemon: RunningDaemon) -> None:
    done = daemon.command("drill", "supervisor-kill", "--no-own")
    assert done.returncode == exit_codes.NOT_RUN
    assert "it needs a throw-away daemon, since it kills the daemon" in done.stdout
    assert daemon.status()


def test_a_broken_promise_is_an_exit_status_of_1(tmp_path: Path) -> None:
    model = fake_model(tmp_path / "m")
    with RunningDaemon(tmp_path / "home", str(model)) as daemon:
        daemon.wait_state("ready")
        # The engine that takes over will say that it can never work.
        (model / "fake.json").write_text(
            json.dumps({"failed": ["gone", "it is gone"], "die": "exit:78"})
        )
        done = daemon.command("drill", "kill")
    assert done.returncode == exit_codes.FAILED
    assert "BROKEN  served" in done.stdout
    assert "it is gone" in done.stdout


def test_a_named_daemon_that_does_not_answer_is_not_replaced_by_another(tmp_path: Path) -> None:
    done = run_command(tmp_path, "drill", "kill", "--url", "http://127.0.0.1:1")
    assert done.returncode == exit_codes.FAILED
    assert "no daemon answers" in done.stderr


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(3600)
def test_all_drills_twenty_times(fake_plan: OwnPlan) -> None:
    names = sorted(set(DRILLS) - REAL_ONLY)
    reports = drill(names, fake_plan, repeat=20)
    broken = [told(report) for report in reports if report.result != "kept"]
    assert not broken, "\n".join(broken)
    # Each twenty times, and the median of those that a standby takes over.
    assert len([report for report in reports if report.number]) == 20 * len(names)
