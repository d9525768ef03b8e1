"""Engines that cannot work, or die again and again: when a model is given up, and how it comes back."""

import asyncio
from functools import partial

import pytest

from mlx_isolate_shared.errors import CapacityError
from mlx_isolate_supervisor.engines.command import EngineCommand
from mlx_isolate_supervisor.slots.slot_settings import RestartSettings, SlotSettings
from tests.pool_rig import (
    QUICK_RESTART,
    PoolRig,
    open_stream,
    pool_rig,
    run,
)
from tests.waiting import wait_until, wait_until_answer


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
            assert len(rig.spawns()) == 5
            # 0, 0.05, 0.1 and 0.2 s with a fifth of jitter, and never less.
            at_least = (0.0, 0.04, 0.08, 0.16)
            pauses = rig.pauses()
            assert all(pause >= least for pause, least in zip(pauses, at_least, strict=True)), (
                pauses
            )
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
