"""A new engine loads beside the old one and takes over; nothing is cut, and failures cost nothing."""

import asyncio
import os
import signal

import pytest

from mlx_isolate_shared.errors import CapacityError
from mlx_isolate_supervisor.engines.orphans import process_start
from mlx_isolate_supervisor.models.pool_limits import PoolLimits
from mlx_isolate_supervisor.models.projection import PROCESS_BYTES
from mlx_isolate_supervisor.slots.lease import Lease
from mlx_isolate_supervisor.slots.slot_settings import SlotSettings
from tests.pool_rig import QUICK_RESTART, PoolRig, open_stream, pool_rig, run
from tests.raw_http import RawClient
from tests.waiting import wait_until

KEEP = SlotSettings(
    memory_policy="keep_then_commit",
    watchdog_interval_s=0.1,
    start_silence_s=3.0,
    drain_timeout_s=20.0,
    restart=QUICK_RESTART,
)
# A prompt cache that makes an engine large; the fake one has none.
SHARE = 10_000_000_000


async def read_to_end(client: RawClient) -> int:
    """Events until the stream's proper end."""
    count = 0
    while await client.chunk():
        count += 1
    client.close()
    return count


async def streams(rig: PoolRig, count: int, chunks: int) -> list[tuple[Lease, RawClient]]:
    held: list[tuple[Lease, RawClient]] = []
    for number in range(count):
        lease = await rig.pool.find("m").admit(str(number))
        held.append((lease, await open_stream(lease, chunks=chunks, interval_s=0.02)))
    return held


def test_reload_under_sixteen_streams_cuts_none_and_serves_at_once() -> None:
    async def main() -> None:
        async with pool_rig(places=16, settings=KEEP) as rig:
            held = await streams(rig, 16, 100)
            old = rig.pid()
            reading = [asyncio.create_task(read_to_end(client)) for _, client in held]
            await rig.pool.reload("m")
            assert rig.pid() != old and not all(task.done() for task in reading)
            assert (await rig.complete()).status == 200
            # 99 events, the last one and [DONE].
            assert await asyncio.gather(*reading) == [101] * 16
            assert process_start(old) is not None
            for lease, _ in held:
                lease.release("answered")
            await wait_until(lambda: process_start(old) is None, 5)
            assert rig.status().restarts == 0
            assert rig.moves() == ["starting", "ready"]

    run(main(), 60)


def test_a_successor_that_fails_costs_nothing_and_its_cause_is_shown() -> None:
    async def main() -> None:
        async with pool_rig(settings=KEEP) as rig:
            await rig.complete()
            old = rig.pid()
            rig.set_faults("m", die="exit:78", failed=["model_broken", "no weights in /a/b"])
            with pytest.raises(CapacityError) as caught:
                await rig.pool.reload("m")
            assert caught.value.code == "reload_failed"
            assert "no weights in b" in caught.value.message
            assert rig.pid() == old and (await rig.complete()).status == 200
            replacement = rig.status().replacement
            assert replacement is not None and replacement.error == "no weights in /a/b"
            rig.set_faults("m")
            await rig.pool.reload("m")
            assert rig.pid() != old and rig.status().replacement is None

    run(main())


def test_a_successor_that_does_not_load_ends_at_the_start_limit() -> None:
    async def main() -> None:
        async with pool_rig(settings=KEEP) as rig:
            await rig.complete()
            old = rig.pid()
            rig.set_faults("m", hang_load=True, silent=True)
            with pytest.raises(CapacityError, match="no progress for 3 s"):
                await rig.pool.reload("m")
            assert rig.pid() == old and rig.status().state == "ready"
            await wait_until(lambda: len(rig.records()) == 1, 5)

    run(main())


def test_an_engine_that_dies_is_followed_by_the_successor_that_loads() -> None:
    async def main() -> None:
        async with pool_rig(settings=KEEP) as rig:
            await rig.complete()
            rig.set_faults("m", load_s=0.5)
            reloading = asyncio.create_task(rig.pool.reload("m"))
            await wait_until(lambda: rig.status().replacement, 5)
            rig.kill()
            await wait_until(lambda: rig.status().state == "starting", 5)
            assert (await rig.complete()).status == 200
            await reloading
            assert rig.status().incarnation == 2

    run(main())


def test_a_second_reload_replaces_the_successor() -> None:
    async def main() -> None:
        async with pool_rig(settings=KEEP) as rig:
            await rig.complete()
            rig.set_faults("m", hang_load=True)
            first = asyncio.create_task(rig.pool.reload("m"))
            await wait_until(lambda: rig.status().replacement, 5)
            rig.set_faults("m")
            await rig.pool.reload("m")
            await first
            assert rig.status().incarnation == 3
            await wait_until(lambda: len(rig.records()) == 1, 5)

    run(main())


def test_a_successor_leaves_its_room_to_the_one_that_replaces_it() -> None:
    """It counted beside the newer one: the engine that served drained, and requests waited."""
    budget = 2 * (PROCESS_BYTES + SHARE) + SHARE // 2
    two = PoolLimits(budget_bytes=budget, policy="keep_then_commit")

    async def main() -> None:
        async with pool_rig(settings=KEEP, limits=two, needs={"m": SHARE}) as rig:
            [(lease, client)] = await streams(rig, 1, 10_000)
            rig.set_faults("m", hang_load=True)
            reloading = [asyncio.create_task(rig.pool.reload("m")) for _ in range(3)]
            await wait_until(lambda: rig.pool.find("m").status().replacement, 5)
            assert rig.moves() == ["starting", "ready"]
            assert (await rig.complete()).status == 200
            rig.set_faults("m")
            await rig.pool.reload("m")
            await asyncio.gather(*reloading)
            assert (await rig.complete()).status == 200
            assert rig.moves() == ["starting", "ready"] and rig.status().incarnation == 5
            client.close()
            lease.release("cancelled")

    run(main())


def test_unload_during_a_reload_leaves_nothing() -> None:
    async def main() -> None:
        async with pool_rig(settings=KEEP) as rig:
            await rig.complete()
            rig.set_faults("m", hang_load=True)
            reloading = asyncio.create_task(rig.pool.reload("m"))
            await wait_until(lambda: rig.status().replacement, 5)
            await rig.pool.unload("m")
            assert rig.status().state == "stopped" and rig.records() == []
            await reloading

    run(main())


def test_a_retired_engine_that_hangs_is_ended_alone() -> None:
    settings = SlotSettings(
        memory_policy="keep_then_commit",
        watchdog_interval_s=0.1,
        report_silence_s=1.5,
        abort_window_s=0.3,
    )

    async def main() -> None:
        async with pool_rig(settings=settings) as rig:
            [(lease, client)] = await streams(rig, 1, 10_000)
            old = rig.pid()
            await rig.pool.reload("m")

            os.kill(old, signal.SIGSTOP)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await read_to_end(client)
            client.close()
            assert (await lease.death()).code == "engine_hung"
            lease.release("failed")
            assert rig.status().state == "ready" and rig.status().incarnation == 2

    run(main())


def test_a_shutdown_ends_engine_successor_and_retirees() -> None:
    async def main() -> None:
        async with pool_rig(settings=KEEP) as rig:
            [(lease, client)] = await streams(rig, 1, 10_000)
            await rig.pool.reload("m")
            rig.set_faults("m", hang_load=True, ignore_term=True)
            reloading = asyncio.create_task(rig.pool.reload("m"))
            await wait_until(lambda: len(rig.records()) == 3, 5)
            await rig.pool.stop(2.0)
            assert rig.records() == [] and rig.sockets() == []
            assert "was stopped" in (await lease.death()).message
            client.close()
            reloading.cancel()

    run(main())


def test_evict_first_never_runs_two() -> None:
    settings = SlotSettings(memory_policy="evict_first", restart=QUICK_RESTART)

    async def main() -> None:
        async with pool_rig(settings=settings) as rig:
            await rig.complete()
            await rig.pool.reload("m")
            assert rig.moves() == [
                *("starting", "ready", "draining", "stopping", "backoff", "starting", "ready")
            ]
            [gone] = [step for step in rig.transitions if step.event == "lost"]
            assert gone.is_planned  # nobody is told that it was lost
            rig.kill()
            await wait_until(lambda: rig.status().incarnation == 3, 10, "the comeback")
            [_, lost] = [step for step in rig.transitions if step.event == "lost"]
            assert not lost.is_planned

    run(main())
