"""Engines that live and do wrong: hang, stop, lie, refuse to end, never start."""

import asyncio
import os
import signal
import threading
import time
from typing import Any

import msgspec
import psutil
import pytest

from mlx_isolate_shared.errors import CapacityError, EngineError
from mlx_isolate_supervisor.engines.orphans import process_start
from mlx_isolate_supervisor.slots.slot_settings import SlotSettings
from tests.pool_rig import QUICK_RESTART, open_stream, pool_rig, run
from tests.waiting import wait_until

# A small part of the defaults, so that a hang is found within the test's time; still long enough
# for an engine that is starved on a busy machine.
WATCHFUL = SlotSettings(
    watchdog_timeout_s=1.5,
    report_silence_s=1.5,
    stall_timeout_s=1.0,
    watchdog_interval_s=0.05,
    abort_window_s=0.3,
    start_silence_s=3.0,
    stop_window_s=0.4,
    restart=QUICK_RESTART,
)


@pytest.mark.case("01")
def test_a_stopped_engine_is_ended_and_its_requests_are_told() -> None:
    async def main() -> None:
        async with pool_rig(settings=WATCHFUL) as rig:
            lease = await rig.pool.find("m").admit("1")
            stream = await open_stream(lease, chunks=10_000, interval_s=0.01)
            old = rig.kill("m", signal.SIGSTOP)
            began = time.monotonic()
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                while True:
                    await stream.chunk()
            error = await lease.death()
            assert (error.status, error.code) == (504, "engine_hung")
            assert "reported nothing for 1.5 s" in error.message
            assert time.monotonic() - began < 4.0
            lease.release("failed")
            stream.close()
            assert (await rig.complete()).status == 200
            assert rig.pid() != old and process_start(old) is None
            assert rig.status().restarts_by_cause == {"hung": 1}

    run(main())


@pytest.mark.case("01")
def test_busy_without_progress_is_a_hang() -> None:
    async def main() -> None:
        async with pool_rig(settings=WATCHFUL) as rig:
            with pytest.raises(EngineError) as caught:
                await rig.complete(hang=True)
            assert (caught.value.status, caught.value.code) == (504, "engine_hung")
            assert "busy for 1.5 s without progress" in caught.value.message
            assert (await rig.complete()).status == 200

    run(main())


def test_the_stacks_of_a_frozen_engine_land_in_its_output() -> None:
    async def main() -> None:
        async with pool_rig(settings=WATCHFUL) as rig:
            with pytest.raises(EngineError) as caught:
                await rig.complete(freeze=True)
            assert caught.value.code == "engine_hung"
            await wait_until(lambda: rig.status().last_exit, 5)
            last = rig.status().last_exit
            assert last is not None and last.cause == "hung" and last.signal == "SIGABRT"
            output = rig.pool.output("m")
            assert any("Fatal Python error: Aborted" in line for line in output)
            assert any("in _fault" in line for line in output), output

    run(main())


@pytest.mark.case("01")
def test_a_prefill_longer_than_the_watchdog_is_no_hang() -> None:
    async def main() -> None:
        async with pool_rig(settings=WATCHFUL) as rig:
            assert (await rig.complete(prefill_s=3.0)).status == 200
            assert rig.status().incarnation == 1

    run(main())


def test_a_prefill_that_stands_still_is_a_hang() -> None:
    async def main() -> None:
        async with pool_rig(settings=WATCHFUL) as rig:
            with pytest.raises(EngineError) as caught:
                await rig.complete(prefill_s=5.0, prefill_still=True)
            assert caught.value.code == "engine_hung"

    run(main())


def test_a_watchdog_that_is_off_leaves_a_stopped_engine_alone() -> None:
    off = SlotSettings(watchdog_timeout_s=0, report_silence_s=0, watchdog_interval_s=0.05)

    async def main() -> None:
        async with pool_rig(settings=off) as rig:
            await rig.complete()
            rig.kill("m", signal.SIGSTOP)
            await asyncio.sleep(1.0)  # nothing is to happen in this time
            assert rig.status().state == "ready"
            rig.kill("m", signal.SIGCONT)
            assert (await rig.complete()).status == 200
            assert rig.status().incarnation == 1

    run(main())


@pytest.mark.case("16")
def test_a_load_without_progress_ends_at_the_start_limit() -> None:
    faults = {"silent": True, "hang_load": True, "until_incarnation": 1}

    async def main() -> None:
        async with pool_rig({"m": faults}, settings=WATCHFUL) as rig:
            assert (await rig.complete()).status == 200
            assert rig.status().restarts_by_cause == {"start_timeout": 1}
            last = rig.status().last_exit
            assert last is not None and "no progress for 3 s" in last.reason

    run(main())


@pytest.mark.case("16")
def test_an_engine_stopped_during_its_load_ends_at_the_start_limit() -> None:
    async def main() -> None:
        async with pool_rig({"m": {"load_s": 0.5}}, settings=WATCHFUL) as rig:
            request = asyncio.create_task(rig.complete())
            await wait_until(lambda: rig.status().loading, 5)
            rig.kill("m", signal.SIGSTOP)
            assert (await request).status == 200
            assert rig.status().restarts_by_cause == {"start_timeout": 1}

    run(main())


@pytest.mark.case("16")
def test_a_slow_load_that_progresses_is_left_alone() -> None:
    async def main() -> None:
        async with pool_rig({"m": {"load_s": 4.0}}, settings=WATCHFUL) as rig:
            assert (await rig.complete()).status == 200
            assert rig.status().incarnation == 1

    run(main())


def test_stop_during_start_ends_the_child() -> None:
    async def main() -> None:
        async with pool_rig({"m": {"hang_load": True}}, preload=True) as rig:
            await rig.until_state("starting")
            pid = rig.pid()
            await rig.pool.unload("m")
            assert rig.status().state == "stopped" and process_start(pid) is None
            assert rig.moves() == ["starting", "stopping", "stopped"]

    run(main())


@pytest.mark.case("20")
def test_an_engine_that_refuses_sigterm_is_killed_after_the_window() -> None:
    async def main() -> None:
        async with pool_rig({"m": {"ignore_term": True}}, settings=WATCHFUL) as rig:
            await rig.complete()
            began = time.monotonic()
            await rig.pool.unload("m")
            assert 0.4 <= time.monotonic() - began < 2.0
            last = rig.status().last_exit
            assert last is not None and last.signal == "SIGKILL" and last.cause == "planned"

    run(main())


def test_a_stopped_engine_hears_sigterm_through_sigcont() -> None:
    async def main() -> None:
        async with pool_rig() as rig:
            await rig.complete()
            rig.kill("m", signal.SIGSTOP)
            began = time.monotonic()
            await rig.pool.unload("m")
            assert time.monotonic() - began < 5.0
            last = rig.status().last_exit
            assert last is not None and last.code == 0

    run(main())


@pytest.mark.parametrize("lie", ["garbage", "overlong", "flood", "double_ready", "unknown_tag"])
def test_a_lying_engine_harms_nobody(lie: str) -> None:
    async def main() -> None:
        async with pool_rig({"m": {"lies": [lie]}}) as rig:
            assert (await rig.complete()).status == 200
            assert rig.moves() == ["starting", "ready"]

    run(main())


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("close_report", "closed its report pipe"),
        ("no_socket", "called itself ready without a socket"),
    ],
)
def test_a_start_that_goes_wrong_is_ended(fault: str, why: str) -> None:
    async def main() -> None:
        faults = {fault: True, "until_incarnation": 1}
        settings = msgspec.structs.replace(WATCHFUL, start_silence_s=10.0)
        async with pool_rig({"m": faults}, settings=settings) as rig:
            assert (await rig.complete()).status == 200
            assert rig.status().restarts_by_cause == {"start_failed": 1}
            last = rig.status().last_exit
            assert last is not None and why in last.reason

    run(main())


def test_a_chatty_engine_keeps_its_last_two_thousand_lines() -> None:
    async def main() -> None:
        async with pool_rig({"m": {"say_many": 5000}}) as rig:
            await rig.complete()
            await wait_until(lambda: "line 4999" in rig.pool.output("m"), 10, "the last line")
            output = rig.pool.output("m")
            assert (len(output), output[-1]) == (2000, "line 4999"), output[-3:]

    run(main())


def test_engines_are_told_a_lower_priority_and_dump_no_core() -> None:
    async def main() -> None:
        async with pool_rig() as rig:
            await rig.complete()
            engine = psutil.Process(rig.pid())
            assert " --nice 5" in " ".join(engine.cmdline())
            assert engine.rlimit(psutil.RLIMIT_CORE)[0] == 0
            # Its own group for Ctrl-C, but our session, in which alone niceness counts.
            assert os.getpgid(rig.pid()) == rig.pid()
            assert os.getsid(rig.pid()) == os.getsid(0)

    run(main())


@pytest.mark.case("20")
@pytest.mark.parametrize(
    "state", ["starting", "ready", "draining", "stopping", "backoff", "failed"]
)
def test_a_shutdown_in_any_state_leaves_nothing_within_its_time(state: str) -> None:
    faults: dict[str, dict[str, Any]] = {
        "starting": {"hang_load": True},
        "draining": {"ignore_term": True},
        "stopping": {"ignore_term": True},
        "backoff": {"die": "exit:1", "die_after_ready_s": 0.0},
        "failed": {"die": "exit:78"},
    }

    async def main() -> None:
        async with pool_rig({"m": faults.get(state, {})}, places=1) as rig:
            slot = rig.pool.find("m")
            requests = []
            if state in ("ready", "draining"):
                requests.append(await slot.admit("1"))
            if state in ("draining", "stopping"):
                await slot.ensure_ready(5)
                unloading = asyncio.create_task(slot.unload())
                await asyncio.wait({unloading}, timeout=0.1)
            elif state != "ready":
                slot.want_up()
            await rig.until_state(state)
            waiter = asyncio.create_task(slot.admit("2"))
            began = time.monotonic()
            await rig.pool.stop(1.5)
            assert time.monotonic() - began < 1.6
            assert rig.status().state == "stopped"
            with pytest.raises(CapacityError) as caught:
                await waiter
            assert caught.value.status == 503
            for lease in requests:
                assert "was stopped" in (await lease.death()).message

    run(main())


def test_a_second_signal_cuts_a_shutdown_short() -> None:
    async def main() -> None:
        async with pool_rig({"m": {"ignore_term": True}}) as rig:
            lease = await rig.pool.find("m").admit("1")
            stream = await open_stream(lease, chunks=10_000, interval_s=0.01)
            stopping = asyncio.create_task(rig.pool.stop(60))
            await rig.until_state("draining")
            began = time.monotonic()
            rig.pool.cut()
            await stopping
            assert time.monotonic() - began < 1.0
            stream.close()

    run(main())


@pytest.mark.case("03")
def test_an_idle_engine_outlives_the_threads_of_its_supervisor() -> None:
    """Linux' parent-death signal fires when the spawning thread ends, so the main one spawns."""

    async def main() -> None:
        async with pool_rig() as rig:
            ended = threading.Event()
            loading = asyncio.create_task(asyncio.to_thread(ended.wait, 10))
            await rig.complete()
            ended.set()
            await loading
            await asyncio.get_running_loop().shutdown_default_executor()
            assert [
                thread for thread in threading.enumerate() if thread.name.startswith("asyn")
            ] == []
            assert (await rig.complete()).status == 200
            assert rig.status().incarnation == 1

    run(main())


@pytest.mark.case("03")
@pytest.mark.slow
def test_an_idle_engine_is_left_alone_for_two_minutes() -> None:
    async def main() -> None:
        async with pool_rig(settings=SlotSettings()) as rig:
            await rig.complete()
            await asyncio.sleep(120)  # nothing is to happen in this time
            assert (await rig.complete()).status == 200
            assert rig.status().incarnation == 1

    run(main(), 150)
