"""Models that keep failing share a limit with others, and nobody starves; in simulated time."""

import asyncio

import pytest

from mlx_isolate_shared.errors import HttpError
from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.models.pool import Pool
from mlx_isolate_supervisor.models.pool_limits import PoolLimits
from mlx_isolate_supervisor.slots.slot_settings import SlotSettings
from tests.simulation import Fate, SimulatedLoop, World, simulate, simulated_pool
from tests.waiting import wait_until

GB = 1_000_000_000
TWO = {"a": 4 * GB, "b": 4 * GB}
ONE_AT_A_TIME = PoolLimits(models_max=1, policy="evict_first")
# Who came before are served first, a few by each of the engines that die; still far below the
# queue timeout of 300 s.
PATIENCE_S = 200.0


async def ask(pool: Pool, world: World, model: str, run_s: float = 0.5) -> str:
    try:
        lease = await pool.find(model).admit("r")
    except HttpError as error:
        return f"{error.status} {error.code}"
    try:
        async with asyncio.timeout(run_s):
            await world.engine_of(model, lease.incarnation).wait_exit()
        return f"{(await lease.death()).status}"
    except TimeoutError:
        return "answered"
    finally:
        lease.release("answered")


async def crowd(pool: Pool, world: World, model: str, told: list[str], pause_s: float) -> None:
    """One of those that ask again soon after they have been told."""
    while True:
        told.append(await ask(pool, world, model))
        await asyncio.sleep(pause_s)


def test_a_model_that_dies_after_each_answer_starves_nobody() -> None:
    async def main(loop: SimulatedLoop) -> None:
        async with simulated_pool(loop, TWO, ONE_AT_A_TIME, settings=SlotSettings()) as (pool, w):
            mortal = Fate(end="SIGSEGV", end_after_s=1.7, bytes=4 * GB)
            well = Fate(bytes=4 * GB)

            def fate(spec: ModelSpec) -> Fate:
                return mortal if spec.id == "a" else well

            w.fate = fate
            told: list[str] = []
            crowds = [asyncio.create_task(crowd(pool, w, "a", told, 0.01)) for _ in range(20)]
            await asyncio.sleep(30.0)
            async with asyncio.timeout(PATIENCE_S):
                assert await ask(pool, w, "b") == "answered"
            # And it has its own turn again.
            told.clear()
            await asyncio.sleep(60.0)
            assert "answered" in told
            for task in crowds:
                task.cancel()
            await asyncio.gather(*crowds, return_exceptions=True)

    simulate(main)


def test_two_models_that_cannot_start_do_not_hold_each_other_up() -> None:
    async def main(loop: SimulatedLoop) -> None:
        async with simulated_pool(loop, TWO, ONE_AT_A_TIME, settings=SlotSettings()) as (pool, w):
            peace = w.fate

            def broken(_: ModelSpec) -> Fate:
                return Fate(end=1, end_after_s=0.5, bytes=4 * GB)

            w.fate = broken
            told: dict[str, list[str]] = {"a": [], "b": []}
            crowds = [
                asyncio.create_task(crowd(pool, w, model, told[model], 0.5)) for model in "ab" * 3
            ]
            await asyncio.sleep(200.0)
            # Each had its tries, and its clients their outcome.
            assert {"503 circuit_open"} == set(told["a"]) == set(told["b"])
            w.fate = peace
            async with asyncio.timeout(SlotSettings().restart.half_open_max_s):
                await wait_until(lambda: all("answered" in told[model] for model in "ab"), 700.0)
            for task in crowds:
                task.cancel()
            await asyncio.gather(*crowds, return_exceptions=True)

    simulate(main)


async def fail(pool: Pool, world: World, model: str) -> None:
    """Let `model` open its circuit, and another take its place."""
    peace = world.fate

    def broken(spec: ModelSpec) -> Fate:
        return Fate(end=1, end_after_s=0.5, bytes=4 * GB) if spec.id == model else peace(spec)

    world.fate = broken
    assert await ask(pool, world, model) == "503 circuit_open"
    assert await ask(pool, world, "b") == "answered"
    world.fate = peace


@pytest.mark.parametrize("command", ["reset", "reload"])
def test_a_failed_model_that_is_reset_is_served_though_another_has_its_place(command: str) -> None:
    async def main(loop: SimulatedLoop) -> None:
        async with simulated_pool(loop, TWO, ONE_AT_A_TIME, settings=SlotSettings()) as (pool, w):
            await fail(pool, w, "a")
            async with asyncio.timeout(PATIENCE_S):
                if command == "reset":
                    pool.reset("a")
                else:
                    await pool.reload("a")
                assert await ask(pool, w, "a") == "answered"

    simulate(main)
