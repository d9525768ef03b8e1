"""Engines that die: in every phase, of every cause, again and again."""

import asyncio
import itertools
import os
import signal
import time
from functools import partial
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
from tests.waiting import wait_until, wait_until_answer

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


@pytest.mark.case("16")
def test_exit_78_refuses_who_waits_at_once_and_spawns_nothing() -> None:
    reason = "the folder /models/secret holds no config.json"
    faults = {"load_s": 0.2, "die": "exit:78", "failed": ["model_broken", reason]}

    async def main() -> None:
        async with pool_rig({"m": faults}) as rig:
            slot = rig.pool.find("m")
            results = await asyncio.gather(
                *(slot.admit(str(n)) for n in range(5)), return_exceptions=True
            )
            for result in results:
                assert isinstance(result, CapacityError)
                assert (result.status, result.code) == (503, "model_failed")
                assert "holds no config.json" in result.message
                assert "/models" not in result.message
                assert result.retry_after_s is None
            with pytest.raises(CapacityError):
                await slot.admit("late")
            status = rig.status()
            assert status.state == "failed" and status.incarnation == 1
            assert status.failure is not None
            assert (status.failure.cause, status.failure.code) == ("cannot_work", "model_broken")
            assert status.failure.message == reason
            assert len(rig.spawns()) == 1

    run(main())


async def status_of_one(rig: PoolRig) -> int:
    """The status of one completion, 0 while the model is refused."""
    try:
        return (await rig.complete()).status
    except CapacityError:
        return 0


@pytest.mark.case("16")
def test_exit_78_is_left_when_the_files_change() -> None:
    faults = {"die": "exit:78", "failed": ["model_broken", "broken"]}

    async def main() -> None:
        async with pool_rig({"m": faults}) as rig:
            with pytest.raises(CapacityError):
                await rig.complete()
            rig.set_faults("m", load_s=0.0)
            answer = await wait_until_answer(partial(status_of_one, rig), 5)
            assert answer == 200
            assert len(rig.spawns()) == 2

    run(main())


@pytest.mark.case("17")
def test_a_crash_loop_is_bounded_and_opens_the_circuit() -> None:
    faults = {"die": "exit:3", "say": ["Traceback (most recent call last):", "OSError: disk gone"]}

    async def main() -> None:
        settings = SlotSettings(
            restart=RestartSettings(
                delays_s=QUICK_RESTART.delays_s, half_open_s=600.0, half_open_max_s=600.0
            )
        )
        async with pool_rig({"m": faults}, settings=settings) as rig:
            with pytest.raises(CapacityError) as caught:
                await rig.complete()
            error = caught.value
            assert (error.status, error.code) == (503, "circuit_open")
            assert "exited with code 3" in error.message and "disk gone" in error.message
            assert "OSError" not in error.message and "Traceback" not in error.message
            assert error.retry_after_s is not None and 590 < error.retry_after_s <= 600
            for _ in range(30):
                with pytest.raises(CapacityError):
                    await rig.complete()
            spawns = rig.spawns()
            assert len(spawns) == 5
            gaps = [later - earlier for earlier, later in itertools.pairwise(spawns)]
            # What each gap has over the bare life of a crashing engine (the first gap) is the
            # delay: 0.05, 0.1, 0.2 s with a fifth of jitter.
            assert gaps[3] > gaps[2] > 0.08 and gaps[3] > 0.16
            status = rig.status()
            assert status.failure is not None and status.failure.cause == "circuit_open"
            assert status.failure.retry_in_s is not None
            assert status.last_exit is not None
            assert status.last_exit.stderr_tail[-1] == "OSError: disk gone"
            assert status.last_exit.code == 3

    run(main())


@pytest.mark.case("17")
def test_dying_soon_after_ready_opens_the_circuit_too() -> None:
    faults = {"die": "SIGKILL", "die_after_ready_s": 0.05}

    async def main() -> None:
        async with pool_rig({"m": faults}, preload=True) as rig:
            await rig.until_state("failed")
            assert len(rig.spawns()) == 5

    run(main())


@pytest.mark.case("17")
def test_half_open_closes_with_one_completion() -> None:
    faults = {"die": "exit:1", "until_incarnation": 5}

    async def main() -> None:
        async with pool_rig({"m": faults}) as rig:
            with pytest.raises(CapacityError):
                await rig.complete()
            assert rig.status().state == "failed"
            await rig.until_state("ready")
            assert rig.status().incarnation == 6
            await rig.complete()
            await wait_until(lambda: rig.status().active == 0, 5)
            rig.kill()
            await wait_until(lambda: "backoff" in rig.moves()[-3:], 5)
            # The streak has ended: this crash is followed by a respawn, not by FAILED.
            assert (await rig.complete()).status == 200
            assert rig.moves().count("failed") == 1

    run(main())


def test_a_failed_half_open_try_waits_longer() -> None:
    async def main() -> None:
        async with pool_rig({"m": {"die": "exit:1"}}, preload=True) as rig:
            await wait_until(lambda: rig.moves().count("failed") == 3, 15)
            at = [step.at for step in rig.transitions if step.after == "failed"]
            tries = rig.spawns()[5:]
            first, second = tries[0] - at[0], tries[1] - at[1]
            assert 0.5 <= first < 0.9 <= second

    run(main())


@pytest.mark.case("17")
def test_reset_closes_the_circuit_at_once() -> None:
    async def main() -> None:
        async with pool_rig({"m": {"die": "exit:1"}}, preload=True) as rig:
            await rig.until_state("failed")
            rig.set_faults("m")
            rig.pool.reset("m")
            assert (await rig.pool.ensure_ready("m", 5)).state == "ready"
            assert rig.status().incarnation == 6

    run(main())


@pytest.mark.parametrize(
    "command",
    [
        EngineCommand(argv=("/nonexistent/engine",)),
        EngineCommand(argv=("/bin/true",), env={"A": "no\0system takes it"}),
    ],
    ids=["missing", "nonsense"],
)
def test_an_engine_that_cannot_be_spawned_counts_as_a_crash(command: EngineCommand) -> None:
    async def main() -> None:
        async with pool_rig(command=command) as rig:
            with pytest.raises(CapacityError) as caught:
                await rig.complete()
            assert caught.value.code == "circuit_open"
            assert "could not be spawned" in caught.value.message
            assert rig.status().restarts_by_cause == {"spawn_failed": 4}

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


def is_over(rig: PoolRig, incarnation: int) -> bool:
    last = rig.status().last_exit
    return last is not None and last.incarnation == incarnation


def test_a_request_that_was_cancelled_does_not_end_the_streak() -> None:
    async def main() -> None:
        async with pool_rig() as rig:
            for number in range(1, 6):
                lease = await rig.pool.find("m").admit("1")
                stream = await open_stream(lease, chunks=100, interval_s=0.05)
                stream.close()
                lease.release("cancelled")
                rig.kill()
                await wait_until(partial(is_over, rig, number), 5)
            assert rig.status().state == "failed"

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
