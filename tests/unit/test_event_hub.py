"""The event ring: ids, replay, gaps, filters, bounds, slow readers."""

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest

from mlx_isolate_shared.errors import CapacityError
from mlx_isolate_supervisor.telemetry.events import (
    EVENT_BYTES_MAX,
    LIFECYCLE_EVENTS_MAX,
    READ_BYTES_MAX,
    READERS_MAX,
    REQUEST_EVENTS_MAX,
    EventHub,
    EventReader,
    SlowReader,
)


class StillClock:
    def monotonic(self) -> float:
        return 0.0

    def wall(self) -> float:
        return 1000.0


def make_hub(epoch: str = "e") -> EventHub:
    return EventHub(StillClock(), epoch=epoch)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10):
            await scenario

    asyncio.run(bounded())


def parse(frames: bytes | None) -> list[dict[str, Any]]:
    """Data of each frame, with its event name under `event` and its id under `sse_id`."""
    found: list[dict[str, Any]] = []
    for block in (frames or b"").decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        if "data" in fields:
            data = json.loads(fields["data"])
            found.append({**data, "event": fields["event"], "sse_id": fields.get("id")})
    return found


async def read_kinds(reader: EventReader) -> list[str]:
    return [event["event"] for event in parse(await reader.read(0.01))]


async def skip_hello(reader: EventReader) -> None:
    assert (await read_kinds(reader))[0] == "hello"


def test_event_carries_its_id_time_model_and_fields() -> None:
    async def scenario() -> None:
        hub = make_hub()
        reader = hub.subscribe()
        await skip_hello(reader)
        hub.publish("engine.ready", model="m", pid=7)
        (event,) = parse(await reader.read(1))
        assert event == {
            "id": "e-1",
            "sse_id": "e-1",
            "time": 1000.0,
            "kind": "engine.ready",
            "event": "engine.ready",
            "model": "m",
            "pid": 7,
        }

    run(scenario())


def test_waiting_reader_is_woken_by_a_publish() -> None:
    async def scenario() -> None:
        hub = make_hub()
        reader = hub.subscribe()
        await skip_hello(reader)
        reading = asyncio.create_task(reader.read(5))
        await asyncio.sleep(0)
        hub.publish("a")
        assert [e["kind"] for e in parse(await reading)] == ["a"]

    run(scenario())


def test_quiet_reader_gets_an_empty_read_and_leaves_no_waiter_behind() -> None:
    async def scenario() -> None:
        hub = make_hub()
        reader = hub.subscribe()
        await skip_hello(reader)
        for _ in range(5):
            assert await reader.read(0.001) == b""
        assert not hub._waiters  # pyright: ignore[reportPrivateUsage]

    run(scenario())


def test_last_event_id_continues_right_behind_it() -> None:
    async def scenario() -> None:
        hub = make_hub()
        for number in range(5):
            hub.publish(f"k{number}")
        reader = hub.subscribe(last_event_id="e-3")
        await skip_hello(reader)
        assert await read_kinds(reader) == ["k3", "k4"]

    run(scenario())


def test_id_of_an_earlier_life_replays_everything_kept() -> None:
    async def scenario() -> None:
        hub = make_hub("second")
        hub.publish("a")
        hub.publish("b")
        reader = hub.subscribe(last_event_id="first-900")
        hello = parse(await reader.read(1))[0]
        assert hello["epoch"] == "second"
        assert await read_kinds(reader) == ["a", "b"]

    run(scenario())


@pytest.mark.parametrize("wrong", ["e-", "e-x", "e-99", "-", "e--1"])
def test_odd_id_of_this_life_starts_at_the_newest_or_replays(wrong: str) -> None:
    async def scenario() -> None:
        hub = make_hub()
        hub.publish("a")
        reader = hub.subscribe(last_event_id=wrong)
        await skip_hello(reader)
        assert await read_kinds(reader) in ([], ["a"])

    run(scenario())


def test_replay_counts_back_over_both_classes_in_order() -> None:
    async def scenario() -> None:
        hub = make_hub()
        for number in range(6):
            hub.publish("request.ended" if number % 2 else f"engine.{number}")
        reader = hub.subscribe(replay=3)
        await skip_hello(reader)
        assert await read_kinds(reader) == ["request.ended", "engine.4", "request.ended"]

    run(scenario())


def test_requests_cannot_push_lifecycle_out_of_the_replay() -> None:
    async def scenario() -> None:
        hub = make_hub()
        hub.publish("engine.exited")
        for _ in range(REQUEST_EVENTS_MAX * 2):
            hub.publish("request.ended")
        reader = hub.subscribe(last_event_id="e-0")
        first = parse(await reader.read(1))
        assert [event["event"] for event in first] == ["hello", "gap"]
        assert first[1]["missed"] == REQUEST_EVENTS_MAX
        assert (await read_kinds(reader))[0] == "engine.exited"

    run(scenario())


def test_model_filter_keeps_events_of_no_model() -> None:
    async def scenario() -> None:
        hub = make_hub()
        reader = hub.subscribe(model="a")
        await skip_hello(reader)
        hub.publish("x", model="a")
        hub.publish("y", model="b")
        hub.publish("z")
        assert await read_kinds(reader) == ["x", "z"]

    run(scenario())


def test_reader_that_the_ring_has_passed_is_told_to_leave() -> None:
    async def scenario() -> None:
        hub = make_hub()
        reader = hub.subscribe()
        await skip_hello(reader)
        for _ in range(LIFECYCLE_EVENTS_MAX + 1):
            hub.publish("k")
        with pytest.raises(SlowReader):
            await reader.read(1)
        reader.close(slow=True)
        reader.close(slow=True)
        assert hub.dropped_readers == 1
        assert hub.readers == 0

    run(scenario())


def test_a_gap_that_was_told_does_not_end_the_reader() -> None:
    async def scenario() -> None:
        hub = make_hub()
        for _ in range(LIFECYCLE_EVENTS_MAX + 5):
            hub.publish("k")
        reader = hub.subscribe(last_event_id="e-0")
        total = 0
        await skip_hello(reader)
        while frames := await reader.read(0.01):
            total += len(parse(frames))
        assert total == LIFECYCLE_EVENTS_MAX

    run(scenario())


def test_one_read_is_bounded_in_bytes() -> None:
    async def scenario() -> None:
        hub = make_hub()
        reader = hub.subscribe()
        await skip_hello(reader)
        for _ in range(40):
            hub.publish("k", text="x" * 4000)
        frames = await reader.read(1)
        assert frames is not None
        assert len(frames) <= READ_BYTES_MAX + EVENT_BYTES_MAX + 100

    run(scenario())


def test_overlong_event_loses_its_detail() -> None:
    async def scenario() -> None:
        hub = make_hub()
        reader = hub.subscribe()
        await skip_hello(reader)
        hub.publish("engine.exited", detail=["x" * EVENT_BYTES_MAX], code=1)
        (event,) = parse(await reader.read(1))
        assert event["truncated"] is True
        assert event["code"] == 1
        assert "detail" not in event

    run(scenario())


def test_too_many_readers_are_refused_and_room_comes_back() -> None:
    async def scenario() -> None:
        hub = make_hub()
        readers = [hub.subscribe() for _ in range(READERS_MAX)]
        with pytest.raises(CapacityError) as refused:
            hub.subscribe()
        assert refused.value.status == 503
        readers[0].close()
        hub.subscribe()

    run(scenario())


def test_close_ends_readers_after_their_last_events() -> None:
    async def scenario() -> None:
        hub = make_hub()
        reader = hub.subscribe()
        await skip_hello(reader)
        waiting = asyncio.create_task(reader.read(5))
        await asyncio.sleep(0)
        hub.publish("last")
        hub.close()
        assert [e["kind"] for e in parse(await waiting)] == ["last"]
        assert await reader.read(5) is None
        with pytest.raises(CapacityError):
            hub.subscribe()

    run(scenario())


def test_burst_of_events_wakes_a_reader_few_times() -> None:
    async def scenario() -> None:
        hub = make_hub()
        reader = hub.subscribe()
        await skip_hello(reader)
        reads = seen = 0

        async def follow() -> None:
            nonlocal reads, seen
            while seen < 200:
                seen += len(parse(await reader.read(5)))
                reads += 1

        following = asyncio.create_task(follow())
        for _ in range(200):
            await asyncio.sleep(0)
            hub.publish("request.ended")
        await following
        assert reads <= 5

    run(scenario())
