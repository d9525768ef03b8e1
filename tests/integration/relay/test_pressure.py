"""Back-pressure: what a client that reads slowly, or not at all, may cost."""

import asyncio
import os
from pathlib import Path

import pytest
from aiohttp import web

from mlx_isolate_supervisor.relay.limits import CLIENT_STALL_LOOK_S, MIB, RelayLimits
from tests.integration.relay.client_side import Client
from tests.integration.relay.engine_side import END, JSON_HEAD, SSE_HEAD, EngineSide, event
from tests.integration.relay.rig import Rig, make_rig, run, soon
from tests.waiting import wait_until

STALLED = 20
# The relay's share of the 2 MiB that a stalled reader may cost in each process.
STALLED_BYTES_MAX = 2 * MIB


def memory_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def open_stalled(rig: Rig) -> tuple[Client, EngineSide, asyncio.Task[None]]:
    """A stream whose client has stopped reading, and whose engine is made to wait for it."""
    client, side = await rig.open_stream()
    client.pause()
    flood = asyncio.create_task(side.flood())
    await wait_until(lambda: side.is_blocked, 10, "the relay stops reading from the engine")
    return client, side, flood


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_stalled_readers_cost_little_and_slow_nobody() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            reader, side = await rig.open_stream()
            before = memory_bytes()
            stalled = [await open_stalled(rig) for _ in range(STALLED)]
            assert (memory_bytes() - before) / STALLED < STALLED_BYTES_MAX
            for _, blocked, _ in stalled:
                # The kernel's share on the way: an engine must notice soon that nobody reads.
                assert blocked.flooded_bytes < STALLED_BYTES_MAX
            for number in range(200):
                await side.send(event(str(number)))
                assert await soon(reader.read_chunk()) == f"data: {number}\n\n".encode()
            await side.send(END)
            assert await reader.read_chunk() == b""
            for client, _, _ in stalled:
                client.reset()
            await soon(asyncio.gather(*(flood for _, _, flood in stalled)), 5)

    run(scenario())


def test_a_stalled_reader_that_reads_again_gets_every_event() -> None:
    count = 20_000

    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.ask(b'{"stream":true}')
            client.pause()

            async def produce() -> None:
                await side.send(SSE_HEAD)
                for number in range(count):
                    await side.send(event(str(number) + "x" * 200))
                await side.send(END)

            producing = asyncio.create_task(produce())
            await wait_until(lambda: side.is_blocked, 10)
            assert not producing.done()
            client.resume()
            await client.read_head()
            for number in range(count):
                assert (await client.read_chunk()).startswith(f"data: {number}x".encode())
            assert await client.read_chunk() == b""
            await producing
            assert await rig.slot.outcome() == "answered"

    run(scenario())


def test_a_reader_that_stays_stalled_is_cut_off_and_counted_as_cancelled() -> None:
    async def scenario() -> None:
        # The real time is above a minute, so that the engine's own comes first.
        async with make_rig(RelayLimits(client_stall_s=0.2)) as rig:
            _, _, flood = await open_stalled(rig)
            assert await soon(rig.slot.outcome(), 5) == "cancelled"
            await soon(flood)

    run(scenario())


def test_a_reader_that_is_slow_but_reads_is_not_cut_off() -> None:
    async def scenario() -> None:
        # A receiver's kernel may take nothing more until half of its buffer, up to 3 MB, has been
        # read: 8 rounds. The limit lies above that, and all rounds together above the limit.
        async with make_rig(RelayLimits(client_stall_s=1.5)) as rig:
            client, _, flood = await open_stalled(rig)
            for _ in range(30):
                client.resume()
                await client.reader.readexactly(400_000)
                client.pause()
                await asyncio.wait([flood], timeout=0.1)
            assert not flood.done()
            client.reset()
            await soon(flood, 5)

    run(scenario())


def test_a_death_behind_a_stalled_reader_frees_its_place_and_is_told_when_it_reads_again() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side, flood = await open_stalled(rig)
            side.reset()
            await flood
            assert await soon(rig.slot.outcome(), 5) == "failed"
            await soon(rig.recorder.all_ended.wait(), 5)
            client.resume()
            rest = await soon(client.wait_closed(), 5)
            assert rest.endswith(END) and b'"code":"engine_died"' in rest[-300:]

    run(scenario())


def test_a_reader_that_its_engine_gave_up_frees_its_place_and_finds_that_it_stopped_reading() -> (
    None
):
    async def scenario() -> None:
        async with make_rig() as rig:
            rig.slot.reason.engine_lives = True
            client, side, flood = await open_stalled(rig)
            side.reset()
            await flood
            assert await soon(rig.slot.outcome(), 5) == "cancelled"
            await soon(rig.recorder.all_ended.wait(), 5)
            assert rig.recorder.ended_ones[0].code == "client_stalled"
            client.resume()
            rest = await soon(client.wait_closed(), 5)
            assert rest.endswith(END) and b'"code":"client_stalled"' in rest[-300:]
            assert b"engine_died" not in rest

    run(scenario())


def test_an_answer_that_was_whole_before_its_engine_closed_reaches_a_slow_reader() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side, flood = await open_stalled(rig)
            flood.cancel()
            # What the engine has written lies in its buffer; it closes once that is gone.
            client.resume()
            await side.send(event("last") + END)
            client.pause()
            side.close()
            assert await soon(rig.slot.outcome(), 5) == "answered"
            client.resume()
            while (payload := await soon(client.read_chunk())) != b"data: last\n\n":
                assert payload
            assert await client.read_chunk() == b""

    run(scenario())


def test_a_reader_that_was_given_up_and_never_reads_again_is_hung_up_on() -> None:
    async def scenario() -> None:
        async with make_rig(RelayLimits(client_stall_s=0.2)) as rig:
            descriptors = rig.descriptors()
            client, _, flood = await open_stalled(rig)
            assert await soon(rig.slot.outcome(), 5) == "cancelled"
            await soon(flood)
            # Both ends of the client's connection are in this process; only its own stays.
            await wait_until(lambda: rig.descriptors() <= descriptors + 1, 5)
            client.reset()

    run(scenario())


def test_a_stalled_reader_of_a_large_plain_answer_makes_the_engine_wait() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await rig.ask()
            client.pause()
            size = 32 * MIB
            await side.send(JSON_HEAD + b"Content-Length: %d\r\n\r\n" % size)
            sending = asyncio.create_task(side.send(bytes(size)))
            await wait_until(lambda: side.is_blocked, 10)
            client.resume()
            assert (await client.read_answer()).body == bytes(size)
            await sending

    run(scenario())


def test_an_engine_that_does_not_read_holds_back_its_own_request_only() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            slow = await rig.connect()
            await slow.post(b'{"x":"' + b"y" * (16 * MIB) + b'"}')
            deaf = await rig.engine.accept()
            deaf.pause()
            client, side = await rig.open_stream()
            await side.send(event("b") + END)
            assert await soon(client.read_chunk()) == b"data: b\n\n"
            slow.leave()
            assert await rig.slot.outcome() == "answered"
            assert await soon(rig.slot.outcome()) == "cancelled"
            deaf.close()

    run(scenario())


def held(rig: Rig) -> list[web.RequestHandler]:
    """The clients' connections that the server has not done with."""
    assert rig.runner is not None and rig.runner.server is not None
    return rig.runner.server.connections


PAGE_BYTES = 16 << 20


def add_page(app: web.Application) -> None:
    """A large answer that is the server's own."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(body=b"x" * PAGE_BYTES)

    app.router.add_get("/page", page)


def test_a_client_that_takes_no_end_of_an_answer_is_hung_up_on() -> None:
    """Too little is left for the writer to wait, so the answer is over, and nobody waits for it."""

    async def scenario() -> None:
        limits = RelayLimits(client_stall_s=0.1, keep_alive_s=0.1)
        async with make_rig(limits) as rig:
            client, side = await rig.open_stream()
            client.pause()
            transport = held(rig)[0].transport
            assert transport is not None
            while transport.get_write_buffer_size() < 32 * 1024:
                await side.send(event("x" * 1000))
                await asyncio.sleep(0)
            await side.send(END)
            assert await rig.slot.outcome() == "answered"
            await wait_until(lambda: not held(rig), 10, "the connection is given up")

    run(scenario())


def test_a_client_that_takes_no_page_of_the_server_is_hung_up_on() -> None:
    async def scenario() -> None:
        limits = RelayLimits(client_stall_s=0.1)
        async with make_rig(limits, extra=add_page) as rig:
            client = await rig.connect()
            await client.send(b"GET /page HTTP/1.1\r\nHost: localhost\r\n\r\n")
            client.pause()
            await wait_until(lambda: len(held(rig)) == 1, 2)
            await wait_until(lambda: not held(rig), 10, "the connection is given up")

    run(scenario())


def test_a_client_that_reads_slowly_is_not_hung_up_on() -> None:
    async def scenario() -> None:
        limits = RelayLimits(client_stall_s=0.1)
        async with make_rig(limits, extra=add_page) as rig:
            client = await rig.connect()
            await client.send(b"GET /page HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await client.read_head()
            looks = int(3 * (2 * limits.client_stall_s + CLIENT_STALL_LOOK_S) / 0.1)
            for _ in range(looks):
                await asyncio.sleep(0.1)
                await client.reader.readexactly(PAGE_BYTES // looks)
            await client.reader.readexactly(PAGE_BYTES % looks)

    run(scenario())
