"""Several models share one machine: who is loaded, who waits, who leaves; with real processes."""

import asyncio
import math
import time
from typing import Any

import msgspec
import pytest

from mlx_isolate_shared.errors import CapacityError
from mlx_isolate_supervisor.config import GroupSpec
from mlx_isolate_supervisor.models.pool_limits import PoolLimits
from mlx_isolate_supervisor.slots.slot_settings import SlotSettings
from tests.pool_rig import QUICK_RESTART, PoolRig, open_stream, pool_rig, run
from tests.raw_http import RawClient
from tests.waiting import wait_until

ONE = PoolLimits(models_max=1)
TWO: dict[str, dict[str, Any]] = {"a": {}, "b": {}}
THREE: dict[str, dict[str, Any]] = {"a": {}, "b": {}, "c": {}}
GB = 1_000_000_000


async def read_to_end(client: RawClient) -> int:
    count = 0
    while await client.chunk():
        count += 1
    client.close()
    return count


def loads(rig: PoolRig) -> int:
    return sum(len(rig.spawns(model)) for model in rig.pool.model_ids)


def most_at_once(rig: PoolRig) -> int:
    """How many models had an engine at a time, by what was told."""
    up: set[str] = set()
    most = 0
    for step in rig.transitions:
        (up.discard if step.after in ("stopped", "failed") else up.add)(step.model)
        most = max(most, len(up))
    return most


@pytest.mark.case("15")
def test_a_switch_waits_for_a_running_stream_and_cuts_nothing() -> None:
    async def main() -> None:
        async with pool_rig(TWO, limits=ONE) as rig:
            lease = await rig.pool.find("a").admit("1")
            stream = await open_stream(lease, chunks=60, interval_s=0.02)
            other = asyncio.create_task(rig.complete("b"))
            await wait_until(lambda: rig.status("b").waits_for, 5)
            assert rig.status("b").waits_for == "for running requests of a"
            late = asyncio.create_task(rig.complete("a"))
            assert await read_to_end(stream) == 61
            assert not other.done() and not late.done()
            lease.release("answered")
            assert (await other).status == 200
            # Who came to a after the switch was due waits for its next turn.
            assert (await late).status == 200
            assert rig.moves("a").count("starting") == 2
            assert most_at_once(rig) == 1

    run(main())


@pytest.mark.case("15")
def test_two_clients_that_alternate_never_block_each_other() -> None:
    async def main() -> None:
        async with pool_rig(TWO, limits=ONE) as rig:

            async def client(model: str) -> list[int]:
                return [(await rig.complete(model)).status for _ in range(10)]

            answers = await asyncio.gather(client("a"), client("b"))
            assert list(answers) == [[200] * 10, [200] * 10]
            assert loads(rig) <= 20 and most_at_once(rig) == 1
            assert rig.pool.find("a").status().restarts == 0

    run(main(), 60)


@pytest.mark.case("15")
def test_nobody_starves_beside_a_crowd() -> None:
    async def main() -> None:
        async with pool_rig(TWO, limits=ONE, places=2) as rig:
            stop = asyncio.Event()

            async def crowd() -> None:
                while not stop.is_set():
                    await rig.complete("a", chunks=1)

            crowds = [asyncio.create_task(crowd()) for _ in range(6)]
            await rig.until_state("ready", "a")
            for _ in range(3):
                assert (await rig.complete("b")).status == 200
            stop.set()
            await asyncio.gather(*crowds)

    run(main(), 60)


def test_the_budget_makes_the_least_recently_used_leave() -> None:
    async def main() -> None:
        limits = PoolLimits(budget_bytes=10 * GB, ceiling_bytes=10 * GB)
        needs = {"a": 4 * GB, "b": 4 * GB, "c": 4 * GB}
        async with pool_rig(THREE, limits=limits, needs=needs) as rig:
            for model in ("a", "b", "a"):
                await rig.complete(model)
            assert [rig.status(model).state for model in "ab"] == ["ready", "ready"]
            await rig.complete("c")
            assert [rig.status(model).state for model in "abc"] == ["ready", "stopped", "ready"]
            [moved] = [step for step in rig.transitions if "makes room" in step.reason]
            assert (moved.model, moved.reason) == ("b", "it makes room for c")

    run(main())


def test_more_than_the_budget_is_507_with_the_figures(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        limits = PoolLimits(budget_bytes=10 * GB, ceiling_bytes=10 * GB)
        async with pool_rig(TWO, limits=limits, needs={"a": 12 * GB, "b": GB}) as rig:
            with pytest.raises(CapacityError) as caught:
                await rig.complete("a")
            assert (caught.value.status, caught.value.code) == (507, "memory_budget_exceeded")
            assert "needs about 12 GB" in caught.value.message
            assert "budget of all models is 10 GB; nothing else is loaded" in caught.value.message
            with pytest.raises(CapacityError) as caught:
                await rig.pool.ensure_ready("a", 5.0)
            assert caught.value.status == 507
            assert rig.status("a").state == "stopped" and rig.spawns("a") == []
            assert ("WARNING", "model.not_loaded") in [
                (record.levelname, record.message) for record in caplog.records
            ]
            assert (await rig.complete("b")).status == 200

    run(main())


def test_a_pinned_model_stays_and_is_named_to_who_does_not_fit() -> None:
    async def main() -> None:
        limits = PoolLimits(budget_bytes=10 * GB, ceiling_bytes=10 * GB, ttl_s=0.05)
        async with pool_rig(TWO, limits=limits, needs={"a": 6 * GB, "b": 6 * GB}) as rig:
            pinned = msgspec.structs.replace(rig.pool.find("a").spec, pinned=True)
            rig.pool.reconfigure([pinned, rig.pool.find("b").spec])
            await rig.complete("a")
            with pytest.raises(CapacityError, match=r"held by a \(6.3 GB, pinned\)"):
                await rig.complete("b")
            assert rig.status("a").state == "ready" and rig.status("a").ttl_s is None

    run(main())


def test_a_waiter_that_gives_up_leaves_the_loaded_model_alone() -> None:
    settings = SlotSettings(queue_timeout_s=0.5, restart=QUICK_RESTART)

    async def main() -> None:
        async with pool_rig(TWO, limits=ONE, settings=settings) as rig:
            # On a busy machine a start may take longer than anybody waits here.
            await rig.pool.ensure_ready("a", 30.0)
            lease = await rig.pool.find("a").admit("1")
            with pytest.raises(CapacityError, match="waits for running requests of a") as caught:
                await rig.complete("b")
            assert caught.value.code == "queue_timeout"
            assert (await rig.complete("a")).status == 200
            lease.release("cancelled")
            assert (await rig.complete("a")).status == 200
            assert loads(rig) == 1 and rig.status("b").waits_for is None

    run(main())


def test_an_idle_model_is_unloaded_after_its_ttl() -> None:
    async def main() -> None:
        async with pool_rig(TWO, limits=PoolLimits(ttl_s=0.4)) as rig:
            lease = await rig.pool.find("a").admit("1")
            began = time.monotonic()
            stream = await open_stream(lease, chunks=40, interval_s=0.02)
            assert await read_to_end(stream) == 41
            assert rig.status("a").state == "ready" and time.monotonic() - began > 0.5
            lease.release("answered")
            left_s = rig.status("a").ttl_left_s
            assert left_s is not None and 0.0 < left_s <= 0.4
            idle = time.monotonic()
            await rig.until_state("stopped", "a")
            assert time.monotonic() - idle >= 0.39
            assert any("idle for 0.4s" in step.reason for step in rig.transitions)
            assert (await rig.complete("a")).status == 200

    run(main())


def test_a_request_says_how_long_its_model_stays() -> None:
    async def main() -> None:
        async with pool_rig(TWO) as rig:
            slot = rig.pool.find("a")
            slot.keep_alive(0.0)
            await rig.complete("a")
            await rig.until_state("stopped", "a")
            slot.keep_alive(60.0)
            await rig.complete("a")
            left_s = rig.status("a").ttl_left_s
            assert left_s is not None and 50.0 < left_s <= 60.0
            slot.keep_alive(math.inf)
            await rig.complete("a")
            assert rig.status("a").ttl_left_s is None and rig.status("a").state == "ready"

    run(main())


def test_preloads_load_while_there_is_room_and_push_nobody_out() -> None:
    async def main() -> None:
        limits = PoolLimits(models_max=2)
        async with pool_rig(THREE, limits=limits, preload=True) as rig:
            for model in "ab":
                await rig.until_state("ready", model)
            assert rig.status("c").state == "stopped" and rig.status("c").desired == "down"
            assert (await rig.complete("c")).status == 200
            assert most_at_once(rig) == 2

    run(main())


def test_a_group_swaps_its_members_and_leaves_others_alone() -> None:
    async def main() -> None:
        group = GroupSpec(id="g", members=("a", "b"), exclusive=False)
        async with pool_rig(THREE, limits=PoolLimits(groups=(group,))) as rig:
            for model in "cab":
                await rig.complete(model)
            assert [rig.status(m).state for m in "abc"] == ["stopped", "ready", "ready"]

    run(main())


def test_keep_then_commit_switches_without_a_gap_and_keeps_the_old_one_if_the_new_one_fails() -> (
    None
):
    async def main() -> None:
        limits = PoolLimits(models_max=1, policy="keep_then_commit")
        async with pool_rig({"a": {}, "b": {"load_s": 0.5}}, limits=limits) as rig:
            await rig.complete("a")
            other = asyncio.create_task(rig.complete("b"))
            await rig.until_state("starting", "b")
            assert (await rig.complete("a")).status == 200
            assert (await other).status == 200
            await rig.until_state("stopped", "a")
            rig.set_faults("a", die="exit:78", failed=["model_broken", "no weights"])
            with pytest.raises(CapacityError, match="no weights"):
                await rig.complete("a")
            assert rig.status("b").state == "ready" and (await rig.complete("b")).status == 200

    run(main())


@pytest.mark.case("16")
def test_a_model_that_cannot_work_gives_its_room_back() -> None:
    async def main() -> None:
        async with pool_rig({"a": {"die": "exit:78"}, "b": {}}, limits=ONE) as rig:
            with pytest.raises(CapacityError) as caught:
                await rig.complete("a")
            assert caught.value.status == 503
            assert (await rig.complete("b")).status == 200
            rig.set_faults("a")
            assert (await rig.complete("a")).status == 200
            assert rig.status("b").state == "stopped"

    run(main())


@pytest.mark.case("17")
def test_a_crash_loop_does_not_keep_another_model_out() -> None:
    async def main() -> None:
        async with pool_rig({"a": {"die": "exit:1"}, "b": {}}, limits=ONE) as rig:
            crashing = asyncio.create_task(rig.complete("a"))
            await wait_until(lambda: rig.spawns("a"), 5)
            answer = asyncio.create_task(rig.complete("b"))
            with pytest.raises(CapacityError) as caught:
                await crashing
            assert caught.value.code == "circuit_open" and caught.value.retry_after_s is not None
            assert (await answer).status == 200
            assert len(rig.spawns("a")) <= 6 and most_at_once(rig) == 1

    run(main())


def test_lower_limits_hold_at_once_without_a_restart() -> None:
    async def main() -> None:
        async with pool_rig(THREE) as rig:
            for model in "abc":
                await rig.complete(model)
            pids = [rig.pid(model) for model in "abc"]
            specs = [rig.pool.find(model).spec for model in "abc"]
            rig.pool.reconfigure(specs, PoolLimits(models_max=1))
            for model in "ab":
                await rig.until_state("stopped", model)
            assert rig.pid("c") == pids[2]
            rig.pool.reconfigure(specs, PoolLimits(ttl_s=0.1))
            await rig.until_state("stopped", "c")

    run(main())


def test_twenty_first_requests_of_a_slow_load_share_one_engine_at_a_time() -> None:
    """One child is killed while it loads, and the first who asked has gone; all are served."""

    async def main() -> None:
        async with pool_rig({"a": {"load_s": 0.6}}, limits=ONE) as rig:
            asking = [asyncio.create_task(rig.complete("a", chunks=1)) for _ in range(20)]
            await rig.until_state("starting", "a")
            asking[0].cancel()
            rig.kill("a")
            answers = await asyncio.gather(*asking[1:])
            assert {answer.status for answer in answers} == {200}
            assert rig.moves("a") == ["starting", "backoff", "starting", "ready"]
            assert len(rig.records()) == 1

    run(main())


def test_a_spare_engine_makes_room_for_a_model_and_none_is_made_without_room() -> None:
    async def main() -> None:
        limits = PoolLimits(budget_bytes=GB, ceiling_bytes=GB)
        # With the process's own 0.3 GB the model fills the budget to the last megabyte.
        async with pool_rig({"a": {}}, limits=limits, needs={"a": 699_000_000}, standby=1) as rig:
            spare = await rig.standby()
            assert spare.memory_bytes is not None and spare.memory_bytes > 1_000_000
            assert (await rig.complete("a")).status == 200
            assert rig.pid("a") != spare.pid and rig.pool.standbys() == ()
            await rig.pool.unload("a")
            assert (await rig.standby()).pid != spare.pid

    run(main())
