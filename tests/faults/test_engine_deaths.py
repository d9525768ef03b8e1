"""Engines that die: in every phase, of every cause, and many in a row."""

import asyncio
import os
import signal
import time
from typing import Any

import psutil
import pytest

from mlx_isolate_shared.errors import EngineError
from mlx_isolate_supervisor.engines.command import EngineCommand
from mlx_isolate_supervisor.slots.slot_settings import RestartSettings, SlotSettings
from tests.pool_rig import (
    FAKE_COMMAND,
    QUICK_RESTART,
    PoolRig,
    open_stream,
    pool_rig,
    run,
    with_lease,
)
from tests.waiting import wait_until

ENDS = ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "exit:1"]
PHASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "prefill": (True, {"prefill_s": 0.05}),
    "decode": (True, {"after": 3, "chunks": 9}),
    "non-stream": (False, {"after": 3, "chunks": 9}),
}


@pytest.mark.case("14")
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("end", ENDS)
def test_a_death_with_a_request_is_told_by_its_cause(end: str, phase: str) -> None:
    async def main() -> None:
        async with pool_rig() as rig:
            stream, fake = PHASES[phase]
            lease = await rig.pool.find("m").admit("1")
            with pytest.raises(EngineError) as caught:
                await with_lease(lease, {"stream": stream, "fake": {**fake, "die": end}})
            said = "exited with code 1" if end == "exit:1" else f"was killed by {end}"
            assert (caught.value.status, caught.value.code) == (502, "engine_died")
            assert said in caught.value.message
            assert "Retry-After" in caught.value.headers()
            assert (await rig.complete()).status == 200
            assert rig.status().incarnation == 2
            last = rig.status().last_exit
            assert last is not None and said in last.reason

    run(main())


@pytest.mark.alone
def test_the_truth_about_a_kill_takes_less_than_fifty_ms() -> None:
    async def main() -> None:
        async with pool_rig() as rig:
            took: list[float] = []
            for _ in range(4):
                await rig.complete()
                lease = await rig.pool.find("m").admit("1")
                rig.kill()
                began = time.perf_counter()
                error = await lease.death()
                took.append(time.perf_counter() - began)
                lease.release("failed")
                assert "SIGKILL" in error.message
            assert sorted(took)[1] < 0.05, took

    run(main())


def fds() -> int:
    return len(os.listdir("/proc/self/fd"))


async def kill_once(rig: PoolRig, number: int) -> None:
    """Two hanging requests hold the places, three wait; kill; the three are served."""
    slot = rig.pool.find("m")
    held = [await slot.admit(f"held {number}.{n}") for n in range(2)]
    streams = [await open_stream(lease, hang=True, after=1) for lease in held]
    waiting = [asyncio.create_task(rig.complete(chunks=1)) for _ in range(3)]
    await wait_until(lambda: rig.status().queued == 3, 5)
    rig.kill()
    began = time.perf_counter()
    for lease, stream in zip(held, streams, strict=True):
        with pytest.raises(asyncio.IncompleteReadError):
            await stream.chunk()
        error = await lease.death()
        assert error.code == "engine_died" and "SIGKILL" in error.message
        lease.release("failed")
        stream.close()
    assert time.perf_counter() - began < 1.0
    answers = await asyncio.gather(*waiting)
    assert {answer.status for answer in answers} == {200}


def kill_again_and_again(times: int, deadline_s: float) -> None:
    # The delay of many crashes a minute, which the policy's own tests hold, would only be waited
    # for here.
    settings = SlotSettings(restart=RestartSettings(delays_s=(0.0, 0.05, 0.1)))

    # Other tests' daemons and browsers may live as long as the session.
    others = set(psutil.Process().children())

    async def main() -> None:
        async with pool_rig(places=2, settings=settings) as rig:
            await rig.complete()
            before = fds()
            for number in range(times):
                await kill_once(rig, number)
            await wait_until(lambda: rig.status().active == 0, 5)
            status = rig.status()
            assert status.incarnation == times + 1
            assert status.restarts == times
            assert status.restarts_by_cause == {"signal": times}
            assert fds() <= before
            assert len(rig.sockets()) == 1 and len(rig.records()) == 1
            children = set(psutil.Process().children()) - others
            assert [child.pid for child in children] == [status.pid], children

    run(main(), deadline_s)


def test_ten_kills_in_a_row_leave_nothing_behind() -> None:
    kill_again_and_again(10, 60)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_kills_in_a_row_leave_nothing_behind() -> None:
    kill_again_and_again(100, 590)


def test_a_kill_during_the_load_costs_no_request() -> None:
    async def main() -> None:
        async with pool_rig({"m": {"load_s": 0.4}}) as rig:
            waiting = [asyncio.create_task(rig.complete(chunks=1)) for _ in range(6)]
            await rig.until_state("starting")
            rig.kill()
            answers = await asyncio.gather(*waiting)
            assert {answer.status for answer in answers} == {200}
            assert rig.status().incarnation == 2

    run(main())


def test_another_model_does_not_notice() -> None:
    async def main() -> None:
        async with pool_rig({"m": {}, "n": {}}) as rig:
            lease = await rig.pool.find("n").admit("1")
            stream = await open_stream(lease, chunks=30, interval_s=0.02)
            await rig.complete()
            rig.kill("m")
            await wait_until(lambda: rig.status("m").last_exit, 5)
            await rig.complete()
            events = 1
            while await stream.chunk():
                events += 1
            assert events == 32
            stream.close()
            lease.release("answered")
            assert rig.status("n").incarnation == 1

    run(main())


@pytest.mark.case("x4")
def test_helpers_of_an_engine_die_with_it() -> None:
    async def main() -> None:
        async with pool_rig({"m": {"fork_helper": True}}) as rig:
            await rig.complete()
            helpers = psutil.Process(rig.pid()).children()
            assert len(helpers) == 1
            rig.kill()
            await wait_until(lambda: not helpers[0].is_running(), 5)

    run(main())


# As a launcher that passes nothing on: the engine is its child.
LAUNCHED = EngineCommand(argv=("/bin/sh", "-c", '"$@" & wait', "launcher", *FAKE_COMMAND.argv))
WATCHED = SlotSettings(
    report_silence_s=1.5, watchdog_interval_s=0.05, abort_window_s=0.3, restart=QUICK_RESTART
)


@pytest.mark.case("x4")
@pytest.mark.parametrize("ending", ["unload", "stop", "kill", "hang"])
def test_an_engine_behind_a_launcher_that_forks_is_reached(ending: str) -> None:
    async def main() -> None:
        async with pool_rig(command=LAUNCHED, settings=WATCHED) as rig:
            await rig.complete()
            launcher = psutil.Process(rig.pid())
            [engine] = launcher.children()
            if ending == "unload":
                await rig.pool.unload("m")
            elif ending == "stop":
                await rig.pool.stop(5.0)
            elif ending == "kill":
                launcher.kill()
            else:
                engine.suspend()
                with pytest.raises(EngineError):
                    await rig.complete()
            await wait_until(lambda: not engine.is_running() and not launcher.is_running(), 8)
            if ending in ("kill", "hang"):
                assert (await rig.complete()).status == 200

    run(main())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_from_outside_is_followed_by_a_respawn(number: signal.Signals) -> None:
    async def main() -> None:
        async with pool_rig(preload=True) as rig:
            await rig.until_state("ready")
            old = rig.kill("m", number)
            await wait_until(lambda: rig.status().pid not in (None, old), 5)
            await rig.until_state("ready")

    run(main())
