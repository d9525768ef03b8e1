"""A slot in service: first use, places, the queue, and what becomes of those who wait."""

import asyncio

import pytest

from mlx_isolate_shared.errors import CapacityError, EngineError, RequestError
from mlx_isolate_supervisor.slots.slot_settings import SlotSettings
from mlx_isolate_supervisor.telemetry.status import LoadStep
from tests.pool_rig import QUICK_RESTART, open_stream, pool_rig, run
from tests.waiting import wait_until


def test_a_hundred_first_requests_start_one_engine() -> None:
    async def main() -> None:
        async with pool_rig({"m": {"load_s": 0.2}}) as rig:
            answers = await asyncio.gather(*(rig.complete(chunks=1) for _ in range(100)))
            assert {answer.status for answer in answers} == {200}
            assert rig.status().incarnation == 1
            assert rig.moves() == ["starting", "ready"]

    run(main())


def test_a_model_is_down_until_it_is_wanted() -> None:
    async def main() -> None:
        async with pool_rig() as rig:
            assert rig.status().state == "stopped"
            assert rig.status().desired == "down"
            await rig.complete()
            await wait_until(lambda: rig.status().active == 0, 5)
            status = rig.status()
            assert (status.state, status.desired) == ("ready", "up")
            assert status.facts is not None and status.facts.architecture == "fake"
            assert status.load_s is not None and status.pid is not None

    run(main())


@pytest.mark.parametrize("id", ["-rf", "--incarnation", "--id=m"])
def test_a_model_may_be_called_like_a_flag(id: str) -> None:
    async def main() -> None:
        async with pool_rig({id: {}}) as rig:
            assert (await rig.complete(id)).status == 200

    run(main())


def test_preload_loads_at_start_and_tells_the_steps() -> None:
    async def main() -> None:
        async with pool_rig({"m": {"load_s": 0.1}}, preload=True) as rig:
            await rig.until_state("ready")
            stages = [event.loading.stage for event in rig.events if isinstance(event, LoadStep)]
            assert (stages[0], stages[-1]) == ("import", "weights")

    run(main())


def test_no_more_than_the_places_are_handed_out_and_in_order() -> None:
    async def main() -> None:
        async with pool_rig(places=2) as rig:
            slot = rig.pool.find("m")
            first, second = [await slot.admit(name) for name in ("1", "2")]
            order: list[str] = []

            async def wait_turn(name: str) -> None:
                lease = await slot.admit(name)
                order.append(name)
                lease.release("answered")

            waiting = [asyncio.create_task(wait_turn(str(n))) for n in range(3, 8)]
            await wait_until(lambda: rig.status().queued == 5, 5)
            assert rig.status().active == 2
            second.release("answered")
            await asyncio.gather(*waiting)
            assert order == ["3", "4", "5", "6", "7"]
            first.release("answered")

    run(main())


def test_what_is_waited_for_is_told_in_words() -> None:
    async def main() -> None:
        async with pool_rig(places=1) as rig:
            slot = rig.pool.find("m")
            lease = await slot.admit("1")
            assert slot.describe_wait() == "m is ready"
            waiting = [asyncio.create_task(slot.admit("2"))]
            await asyncio.sleep(0)
            assert slot.describe_wait() == "1 request waits for a place in m"
            waiting.append(asyncio.create_task(slot.admit("3")))
            await asyncio.sleep(0)
            assert slot.describe_wait() == "2 requests wait for a place in m"
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            lease.release("answered")

    run(main())


def test_who_leaves_the_queue_is_skipped() -> None:
    async def main() -> None:
        async with pool_rig(places=1) as rig:
            slot = rig.pool.find("m")
            first = await slot.admit("1")
            leaver = asyncio.create_task(slot.admit("2"))
            stayer = asyncio.create_task(slot.admit("3"))
            await wait_until(lambda: rig.status().queued == 2, 5)
            leaver.cancel()
            await wait_until(lambda: rig.status().queued == 1, 5)
            first.release("answered")
            (await stayer).release("answered")
            await wait_until(lambda: rig.status().active == 0, 5)

    run(main())


def test_a_full_queue_answers_429() -> None:
    settings = SlotSettings(queued_requests_max=2, restart=QUICK_RESTART)

    async def main() -> None:
        async with pool_rig(places=1, settings=settings) as rig:
            slot = rig.pool.find("m")
            first = await slot.admit("1")
            waiting = [asyncio.create_task(slot.admit(str(n))) for n in (2, 3)]
            await wait_until(lambda: rig.status().queued == 2, 5)
            with pytest.raises(CapacityError) as caught:
                await slot.admit("4")
            assert (caught.value.status, caught.value.code) == (429, "queue_full")
            assert "Retry-After" in caught.value.headers()
            first.release("answered")
            for task in waiting:
                (await task).release("answered")

    run(main())


def test_the_queue_timeout_answers_503_with_the_cause() -> None:
    settings = SlotSettings(queue_timeout_s=0.3, restart=QUICK_RESTART)

    async def main() -> None:
        async with pool_rig({"m": {"hang_load": True}}, settings=settings) as rig:
            with pytest.raises(CapacityError) as caught:
                await rig.pool.find("m").admit("1")
            assert (caught.value.status, caught.value.code) == (503, "queue_timeout")
            assert "starting" in caught.value.message
            assert rig.status().queued == 0

    run(main())


def test_an_unknown_model_names_those_there_are() -> None:
    async def main() -> None:
        async with pool_rig({"a/b": {}, "c": {}}) as rig:
            with pytest.raises(RequestError) as caught:
                rig.pool.find("nope")
            assert (caught.value.status, caught.value.code) == (404, "model_not_found")
            assert "a/b, c" in caught.value.message
            assert rig.pool.find(None).model_id == "a/b"

    run(main())


def test_what_clients_of_mlx_lm_ask_for_is_served() -> None:
    async def main() -> None:
        async with pool_rig({"one": {}, "two": {}}) as rig:
            one, two = (rig.pool.find(name) for name in ("one", "two"))
            assert rig.pool.find("default_model") is one
            assert rig.pool.find(two.spec.model) is two
        async with pool_rig({"one": {}, "default_model": {}}) as rig:
            assert rig.pool.find("default_model").model_id == "default_model"

    run(main())


def test_an_alias_leads_to_the_same_slot() -> None:
    async def main() -> None:
        async with pool_rig(aliases=("x", "y")) as rig:
            assert rig.pool.find("x") is rig.pool.find("m") is rig.pool.find("y")

    run(main())


@pytest.mark.case("x2")
def test_unload_drains_then_stops_and_the_next_request_loads_again() -> None:
    async def main() -> None:
        async with pool_rig() as rig:
            lease = await rig.pool.find("m").admit("1")
            client = await open_stream(lease, chunks=20, interval_s=0.02)
            unloading = asyncio.create_task(rig.pool.unload("m"))
            await rig.until_state("draining")
            rest = 0
            while await client.chunk():
                rest += 1
            assert rest == 21  # 19 events, the last one and [DONE]: nothing was cut
            client.close()
            lease.release("answered")
            await unloading
            assert rig.status().state == "stopped"
            last = rig.status().last_exit
            assert last is not None and last.code == 0 and last.cause == "planned"
            assert (await rig.complete()).status == 200
            assert rig.status().incarnation == 2
            assert rig.status().restarts == 0

    run(main())


def test_a_request_during_the_drain_waits_for_the_next_engine() -> None:
    async def main() -> None:
        async with pool_rig() as rig:
            lease = await rig.pool.find("m").admit("1")
            unloading = asyncio.create_task(rig.pool.unload("m"))
            await rig.until_state("draining")
            late = asyncio.create_task(rig.pool.find("m").admit("2"))
            await wait_until(lambda: rig.status().queued == 1, 5)
            lease.release("answered")
            await unloading
            second = await late
            assert second.incarnation == 2
            second.release("answered")

    run(main())


def test_a_drain_that_takes_too_long_is_cut() -> None:
    async def main() -> None:
        async with pool_rig() as rig:
            lease = await rig.pool.find("m").admit("1")
            client = await open_stream(lease, chunks=1000, interval_s=0.05)
            await rig.pool.unload("m", drain_timeout_s=0.2)
            error = await lease.death()
            assert (error.status, error.code) == (502, "engine_died")
            assert "was stopped" in error.message
            client.close()
            lease.release("failed")

    run(main())


def test_reload_replaces_the_engine_and_loses_no_request() -> None:
    async def main() -> None:
        async with pool_rig() as rig:
            await rig.complete()
            old = rig.pid()
            requests = [asyncio.create_task(rig.complete(chunks=5)) for _ in range(12)]
            await rig.pool.reload("m")
            answers = await asyncio.gather(*requests)
            assert {answer.status for answer in answers} == {200}
            assert rig.pid() != old
            assert rig.status().restarts == 0

    run(main())


def test_a_broken_connection_without_a_death_is_told_as_such() -> None:
    async def main() -> None:
        async with pool_rig() as rig:
            with pytest.raises(EngineError) as caught:
                await rig.complete(close=True)
            assert (caught.value.status, caught.value.code) == (502, "engine_died")
            assert "broke the connection" in caught.value.message
            assert rig.status().state == "ready"

    run(main())


def test_ensure_ready_tells_the_status() -> None:
    async def main() -> None:
        async with pool_rig() as rig:
            status = await rig.pool.ensure_ready("m", 10)
            assert status.state == "ready"

    run(main())


def test_ensure_ready_gives_up_at_its_deadline() -> None:
    async def main() -> None:
        async with pool_rig({"m": {"hang_load": True}}) as rig:
            with pytest.raises(CapacityError) as caught:
                await rig.pool.ensure_ready("m", 0.2)
            assert caught.value.status == 503

    run(main())


def test_a_free_place_is_given_without_a_turn_of_the_loop() -> None:
    async def main() -> None:
        async with pool_rig(places=1) as rig:
            await rig.complete()
            slot = rig.pool.find("m")
            await wait_until(lambda: rig.status().active == 0, 5)
            turns: list[None] = []
            asyncio.get_running_loop().call_soon(turns.append, None)
            lease = await slot.admit("1")
            assert rig.status().active == 1
            lease.release("answered")
            assert rig.status().active == 0
            assert turns == []

    run(main())
