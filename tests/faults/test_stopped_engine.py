"""SIGSTOP to an engine in every phase of its life: it is found, ended and followed by another."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from mlx_isolate_shared.errors import EngineError
from mlx_isolate_supervisor.engines.orphans import process_start
from mlx_isolate_supervisor.slots.slot_settings import SlotSettings
from tests.pool_rig import QUICK_RESTART, PoolRig, open_stream, pool_rig, run, with_lease
from tests.waiting import wait_until

WATCHFUL = SlotSettings(
    memory_policy="keep_then_commit",
    report_silence_s=1.5,
    watchdog_interval_s=0.05,
    abort_window_s=0.3,
    start_silence_s=3.0,
    stop_window_s=0.5,
    restart=QUICK_RESTART,
)


async def idle(rig: PoolRig) -> None:
    """Nobody asks for anything: it must be found all the same."""
    rig.kill("m", signal.SIGSTOP)
    await wait_until(lambda: rig.status().restarts_by_cause == {"hung": 1}, 10, "it is found")


async def prefill(rig: PoolRig) -> None:
    """A request waits for its first byte."""
    lease = await rig.pool.find("m").admit("1")
    request = asyncio.create_task(with_lease(lease, {"fake": {"prefill_s": 600.0}}))
    await wait_until(lambda: (now := rig.status().progress) and now.active, 10, "it works")
    rig.kill("m", signal.SIGSTOP)
    with pytest.raises(EngineError) as caught:
        await request
    assert (caught.value.status, caught.value.code) == (504, "engine_hung")


async def drain(rig: PoolRig) -> None:
    """It is to be unloaded and has a stream: the unload must not wait for the drain's ten minutes."""
    lease = await rig.pool.find("m").admit("1")
    stream = await open_stream(lease, chunks=100_000, interval_s=0.01)
    unload = asyncio.create_task(rig.pool.unload("m"))
    await rig.until_state("draining")
    rig.kill("m", signal.SIGSTOP)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        while True:
            await stream.chunk()
    assert (await lease.death()).code == "engine_hung"
    lease.release("failed")
    stream.close()
    await unload
    assert rig.status().state == "stopped"


async def reload(rig: PoolRig) -> None:
    """Its successor loads: that one takes over, and waits for nobody."""
    rig.set_faults(load_s=1.0)
    task = asyncio.create_task(rig.pool.reload("m"))
    await wait_until(lambda: rig.status().replacement, 10, "its successor loads")
    rig.kill("m", signal.SIGSTOP)
    await task
    assert rig.status().incarnation == 2 and rig.status().state == "ready"


async def successor(rig: PoolRig) -> None:
    """The successor itself: the old engine serves on."""
    rig.set_faults(load_s=1.0)
    task = asyncio.create_task(rig.pool.reload("m"))
    replacement = await wait_until(lambda: rig.status().replacement, 10, "its successor loads")
    assert replacement is not None and replacement.pid is not None
    os.kill(replacement.pid, signal.SIGSTOP)
    for _ in range(10):
        assert (await rig.complete()).status == 200
        await asyncio.sleep(0.1)
    with pytest.raises(Exception, match="the load made no progress for 3 s"):
        await task
    assert rig.status().incarnation == 1
    rig.set_faults()
    await rig.pool.reload("m")


async def stopping(rig: PoolRig) -> None:
    """It was told to end and has not: the window before SIGKILL holds."""
    rig.set_faults(term_s=600.0)
    await rig.pool.reload("m")
    unload = asyncio.create_task(rig.pool.unload("m"))
    await rig.until_state("stopping")
    rig.kill("m", signal.SIGSTOP)
    await asyncio.wait_for(unload, 5)


@pytest.mark.case("01")
@pytest.mark.parametrize("phase", [idle, prefill, drain, reload, successor, stopping])
def test_an_engine_that_stands_still_is_ended_in_every_phase(
    phase: Callable[[PoolRig], Awaitable[None]],
) -> None:
    async def main() -> None:
        async with pool_rig(settings=WATCHFUL) as rig:
            await rig.complete()
            first = rig.pid()
            await phase(rig)
            rig.set_faults()
            assert (await rig.complete()).status == 200
            await wait_until(lambda: process_start(first) is None, 10, "the first one is gone")
            assert rig.status().pid != first

    run(main(), 60)
