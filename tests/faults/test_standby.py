"""Spare engines: taken by a respawn, replaced with restraint, never in the way, never left over."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from mlx_isolate_shared.errors import CapacityError
from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.engines.command import EngineCommand
from mlx_isolate_supervisor.engines.orphans import process_start
from mlx_isolate_supervisor.slots.slot_settings import SlotSettings
from tests.pool_rig import FAKE_COMMAND, QUICK_RESTART, PoolRig, pool_rig, run
from tests.running_daemon import RunningDaemon, fake_model
from tests.waiting import wait_for, wait_until


def faulty(**faults: object) -> EngineCommand:
    """Fake engines that as standbys do wrong what `fake_faults.StandbyFaults` names."""
    return msgspec.structs.replace(FAKE_COMMAND, env={"FAKE_STANDBY": json.dumps(faults)})


async def until_replaced(rig: PoolRig, pid: int) -> None:
    """Wait until another engine than `pid` serves."""
    await wait_until(
        lambda: rig.status().state == "ready" and rig.status().pid not in (pid, None),
        10,
        "another engine serves",
    )


def test_a_respawn_takes_the_standby_that_is_bound_to_its_model_and_another_is_made() -> None:
    async def main() -> None:
        async with pool_rig(standby=1, preload=True) as rig:
            await rig.until_state("ready")
            for _ in range(3):
                await wait_until(
                    lambda: any(s.is_prepared and s.model == "m" for s in rig.pool.standbys()), 10
                )
                (spare,) = rig.pool.standbys()
                rig.kill()
                await wait_until(lambda spare=spare: rig.status().pid == spare.pid, 10)  # type: ignore[misc]
                await rig.until_state("ready")
                facts = rig.status().facts
                assert facts is not None and facts.warnings == (str(rig.models / "m"),)
                assert (await rig.complete()).status == 200
            assert rig.status().restarts == 3

    run(main())


def test_a_first_load_takes_the_standby() -> None:
    async def main() -> None:
        async with pool_rig(standby=1) as rig:
            spare = await rig.standby()
            assert spare.model is None
            await rig.complete()
            assert rig.pid() == spare.pid

    run(main())


def test_the_successor_of_a_reload_is_a_standby() -> None:
    async def main() -> None:
        settings = SlotSettings(memory_policy="keep_then_commit", restart=QUICK_RESTART)
        async with pool_rig(standby=1, preload=True, settings=settings) as rig:
            await rig.until_state("ready")
            spare = await rig.standby()
            await rig.pool.reload("m")
            assert rig.pid() == spare.pid

    run(main())


def test_no_standby_is_made_while_a_model_loads() -> None:
    async def main() -> None:
        async with pool_rig({"m": {"load_s": 0.5}}, standby=1, preload=True) as rig:
            await rig.until_state("starting")
            seen: list[bool] = []

            def is_ready() -> bool:
                seen.append(bool(rig.pool.standbys()))
                return rig.status().state == "ready"

            await wait_until(is_ready, 10)
            assert not any(seen[:-1])
            await rig.standby()

    run(main())


def test_a_standby_of_another_environment_is_not_used() -> None:
    async def main() -> None:
        async with pool_rig(standby=1, preload=True) as rig:
            await rig.until_state("ready")
            spare = await rig.standby()
            folder, old = str(rig.models / "m"), rig.pid()
            rig.pool.reconfigure([ModelSpec(id="m", model=folder, env={"WITH": "another"})])
            await until_replaced(rig, old)
            assert rig.pid() != spare.pid

    run(main())


def test_a_standby_is_made_for_the_environment_of_its_model() -> None:
    async def main() -> None:
        async with pool_rig(standby=1) as rig:
            folder = str(rig.models / "m")
            await rig.standby()
            rig.pool.reconfigure([ModelSpec(id="m", model=folder, env={"WITH": "another"})])
            await rig.complete()

            def bound() -> int | None:
                return next((s.pid for s in rig.pool.standbys() if s.model and s.is_prepared), None)

            pid = await wait_until(bound, 10)
            assert pid is not None and psutil.Process(pid).environ()["WITH"] == "another"
            rig.kill()
            await wait_until(lambda: rig.status().pid == pid, 10)
            await rig.until_state("ready")

    run(main())


def test_a_killed_standby_is_replaced_and_costs_no_model_anything() -> None:
    async def main() -> None:
        async with pool_rig(standby=1, preload=True) as rig:
            await rig.until_state("ready")
            spare = await rig.standby()
            os.kill(spare.pid, signal.SIGKILL)
            await wait_until(lambda: spare.pid not in [s.pid for s in rig.pool.standbys()], 10)
            other = await rig.standby()
            assert process_start(spare.pid) is None and other.pid != spare.pid
            assert rig.status().restarts == 0 and rig.moves() == ["starting", "ready"]

    run(main())


def test_a_standby_that_is_dead_or_stopped_when_it_is_needed_holds_up_nobody() -> None:
    async def main() -> None:
        async with pool_rig(standby=1, preload=True) as rig:
            await rig.until_state("ready")
            for number in (signal.SIGKILL, signal.SIGSTOP):
                spare = await rig.standby()
                os.kill(spare.pid, number)
                await until_replaced(rig, rig.kill())
                assert (await rig.complete()).status == 200
                assert number == signal.SIGSTOP or rig.pid() != spare.pid
            # A spare killed in the same moment may be taken, and then is one more death.
            assert rig.status().restarts in (2, 3)

    run(main())


@pytest.mark.parametrize("how", ["exit:1", "exit:78", "exit:0", "SIGSEGV"])
def test_a_standby_that_always_dies_is_replaced_within_the_restart_budget(how: str) -> None:
    async def main() -> None:
        settings = SlotSettings(restart=QUICK_RESTART)
        async with pool_rig(
            standby=1, preload=True, settings=settings, command=faulty(die=how)
        ) as rig:
            await rig.until_state("ready")
            seen: set[int] = set()

            def enough() -> bool:
                seen.update(spare.pid for spare in rig.pool.standbys())
                return len(seen) >= 6

            loop_s = 0.05 + 0.1 + 0.2 + 0.5 * (1 - QUICK_RESTART.jitter)

            began = time.monotonic()
            await wait_until(enough, 20)
            # Five deaths open the circuit: the sixth spare comes after the half-open pause.
            assert time.monotonic() - began >= loop_s * (1 - QUICK_RESTART.jitter)
            assert (await rig.complete()).status == 200
            await until_replaced(rig, rig.kill())
            assert (await rig.complete()).status == 200

    run(main())


def test_after_a_death_the_next_standby_prepares_for_no_model() -> None:
    async def main() -> None:
        command = faulty(die="SIGSEGV", only_for_models=True)
        async with pool_rig(standby=1, preload=True, command=command) as rig:
            await rig.until_state("ready")
            spare = await rig.standby()
            assert spare.model is None

    run(main())


@pytest.mark.parametrize(("die", "rounds", "spent"), [("exit:78", 4, 1), ("exit:1", 1, 2)])
def test_a_model_that_cannot_start_does_not_eat_the_standby_of_others(
    die: str, rounds: int, spent: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with pool_rig({"bad": {"die": die}, "good": {}}, standby=1) as rig:
            await rig.complete("good")
            for _ in range(rounds):
                await rig.standby()
                rig.pool.reset("bad")
                with pytest.raises(CapacityError):
                    await rig.pool.ensure_ready("bad", 20)
            assert rig.status("bad").incarnation >= 4
            assert rig.status("good").restarts == 0

    caplog.set_level("INFO")
    run(main(), 60)
    facts: list[dict[str, object]] = [
        getattr(record, "facts")  # noqa: B009
        for record in caplog.records
        if getattr(record, "event", "") == "standby.taken"
    ]
    # Only its first tries, before it had shown what it is like, were made of spares.
    assert len([taken for taken in facts if taken["model"] == "bad"]) <= spent


def test_no_standby_without_asking_for_one() -> None:
    # Other tests' daemons and browsers may live as long as the session.
    others = set(psutil.Process().children())

    async def main() -> None:
        async with pool_rig(standby=0, preload=True) as rig:
            await rig.until_state("ready")
            await rig.complete()
            assert rig.pool.standbys() == ()
            children = set(psutil.Process().children()) - others
            assert [child.pid for child in children] == [rig.pid()]

    run(main())


def test_several_standbys_are_made_one_after_the_other_and_end_with_the_pool() -> None:
    async def main() -> None:
        async with pool_rig({"a": {}, "b": {}}, standby=3, preload=True) as rig:
            await wait_until(lambda: [s.is_prepared for s in rig.pool.standbys()] == [True] * 3, 10)
            assert {s.model for s in rig.pool.standbys()} >= {"a", "b"}
            spares = [s.pid for s in rig.pool.standbys()]
            await rig.pool.stop(2.0)
            assert [pid for pid in spares if process_start(pid) is not None] == []
            assert rig.pool.standbys() == ()

    run(main())


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    model = str(fake_model(tmp_path / "m"))
    with RunningDaemon(tmp_path / "home", model, standby=1) as running:
        running.wait_state("ready")
        yield running


def wait_standby(daemon: RunningDaemon) -> int:
    """The pid of the daemon's prepared standby."""

    def found() -> int | None:
        spares = daemon.status()["supervisor"]["standbys"]
        return spares[0]["pid"] if spares and spares[0]["is_prepared"] else None

    pid = wait_for(found, 10, "a standby is prepared")
    assert pid is not None
    return pid


def test_the_status_shows_the_standby(daemon: RunningDaemon) -> None:
    pid = wait_standby(daemon)
    (spare,) = daemon.status()["supervisor"]["standbys"]
    assert spare["model"] == "m" and spare["memory_bytes"] > 1 << 20
    shown = daemon.command("status").stdout
    assert f"standby: pid {pid}, ready for m" in shown
    assert "--id standby" in " ".join(psutil.Process(pid).cmdline())


def test_a_shutdown_leaves_no_standby(daemon: RunningDaemon) -> None:
    pid = wait_standby(daemon)
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait_end(10) == 0
    assert process_start(pid) is None
    assert list(daemon.run_dir.glob("engine-*")) == []


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_a_killed_supervisor_leaves_no_standby(daemon: RunningDaemon, stopped: bool) -> None:
    pid = wait_standby(daemon)
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    daemon.process.kill()
    daemon.process.wait()
    wait_for(lambda: process_start(pid) is None, 2, "the standby is gone")


def test_a_daemon_with_a_standby_is_quiet_when_idle(daemon: RunningDaemon) -> None:
    wait_standby(daemon)
    before = daemon.command("logs").stdout
    daemon.chat()
    after = daemon.command("logs").stdout
    assert before.count("standby.") == after.count("standby.") == 2
