"""After the end of a large engine the next load waits for its memory, but not for ever."""

import asyncio

import pytest

from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.models.memory_return import RETURN_LIMIT_S
from mlx_isolate_supervisor.models.pool_limits import PoolLimits
from mlx_isolate_supervisor.slots.slot_settings import SlotSettings
from tests.simulation import Fate, SimulatedLoop, simulate, simulated_pool

GB = 1_000_000_000


def slow_to_end(_spec: ModelSpec) -> Fate:
    return Fate(bytes=8 * GB, term_s=10.0)


@pytest.mark.case("x2")
@pytest.mark.parametrize("lag_s", [0.0, 6.0, 600.0])
def test_a_load_waits_for_the_memory_of_the_one_before_within_limits(lag_s: float) -> None:
    async def main(loop: SimulatedLoop) -> None:
        limits = PoolLimits(models_max=1)
        needs = {"a": 8 * GB, "b": 8 * GB}
        async with simulated_pool(loop, needs, limits, settings=SlotSettings()) as (pool, world):
            world.memory_bytes, world.return_lag_s = 12 * GB, lag_s
            (await pool.find("a").admit("1")).release("answered")
            # It is looked at now and then how much is free beside a large engine.
            await asyncio.sleep(2.0)
            world.alive[0].end("SIGKILL")
            began = loop.time()
            # Its respawn waits as any load does.
            asking = asyncio.create_task(pool.find("a").admit("2"))
            await asyncio.sleep(0.5)
            if lag_s:
                [status] = [status for status in pool.snapshot() if status.id == "a"]
                assert status.waits_for == "until the memory of a has come back"
            (await asking).release("answered")
            waited_s = loop.time() - began - 1.0
            assert min(lag_s, RETURN_LIMIT_S) - 0.1 <= waited_s <= min(lag_s, RETURN_LIMIT_S) + 1.0

    simulate(main)


def test_a_load_that_has_room_anyway_does_not_wait() -> None:
    async def main(loop: SimulatedLoop) -> None:
        needs = {"a": 8 * GB, "b": 2 * GB}
        limits = PoolLimits(models_max=1)
        async with simulated_pool(loop, needs, limits, settings=SlotSettings()) as (pool, world):
            world.memory_bytes, world.return_lag_s = 13 * GB, 600.0
            (await pool.find("a").admit("1")).release("answered")
            await asyncio.sleep(2.0)
            began = loop.time()
            (await pool.find("b").admit("2")).release("answered")
            assert loop.time() - began < 3.0

    simulate(main)


def test_memory_that_nobody_waited_for_has_come_back_too() -> None:
    """A debt was only looked at for a load that waited; a reload long after one drained first."""

    async def main(loop: SimulatedLoop) -> None:
        limits = PoolLimits(policy="keep_then_commit")
        settings = SlotSettings(memory_policy="keep_then_commit")
        async with simulated_pool(loop, {"a": 8 * GB}, limits, settings=settings) as (pool, world):
            world.memory_bytes, world.return_lag_s = 100 * GB, 0.5
            (await pool.find("a").admit("1")).release("answered")
            await asyncio.sleep(2.0)
            await pool.reload("a")
            await asyncio.sleep(5.0)
            lease = await pool.find("a").admit("2")
            reloading = asyncio.create_task(pool.reload("a"))
            await asyncio.sleep(0.1)
            [status] = pool.snapshot()
            assert (status.state, status.replacement is not None) == ("ready", True)
            lease.release("answered")
            await reloading

    simulate(main)


def test_memory_that_came_back_and_is_used_again_is_no_debt() -> None:
    """An engine that respawned took it; the next load waited for what had been there already."""

    async def main(loop: SimulatedLoop) -> None:
        needs = {"a": 8 * GB, "b": 8 * GB}
        async with simulated_pool(loop, needs, PoolLimits(), settings=SlotSettings()) as (
            pool,
            world,
        ):
            world.memory_bytes = 18 * GB
            (await pool.find("a").admit("1")).release("answered")
            await asyncio.sleep(2.0)
            world.alive[0].end("SIGKILL")
            (await pool.find("a").admit("2")).release("answered")
            began = loop.time()
            (await pool.find("b").admit("3")).release("answered")
            assert loop.time() - began < 3.0

    simulate(main)


def test_reloads_in_a_row_hold_no_more_than_two_engines_may() -> None:
    """Each engine that took its time to end lent all of its room to one that loaded: three and more."""

    async def main(loop: SimulatedLoop) -> None:
        limits = PoolLimits(budget_bytes=20 * GB, policy="keep_then_commit")
        settings = SlotSettings(memory_policy="keep_then_commit")
        async with simulated_pool(loop, {"a": 8 * GB}, limits, settings=settings) as (pool, world):
            world.memory_bytes = 100 * GB
            world.fate = slow_to_end
            (await pool.find("a").admit("1")).release("answered")
            reloading: list[asyncio.Task[None]] = []
            for _ in range(4):
                reloading.append(asyncio.create_task(pool.reload("a")))
                await asyncio.sleep(2.0)
                assert len(world.alive) <= 2
            await asyncio.gather(*reloading)

    simulate(main)
