"""WebSockets through the relay whose one side does not read: the other waits, and it ends."""

import asyncio

from mlx_isolate_supervisor.relay.limits import RelayLimits
from tests.fakes.fake_websocket import CLOSE, TEXT, frame
from tests.integration.relay.client_side import Client
from tests.integration.relay.engine_side import EngineSide, whole
from tests.integration.relay.rig import Rig, make_rig, run, soon
from tests.integration.relay.sockets import ACCEPT, ASK, BLOCK, ON_THE_WAY_MAX, open_socket
from tests.waiting import wait_until


def test_a_client_that_does_not_read_holds_up_the_engine_and_nothing_is_lost() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await open_socket(rig)
            client.pause()
            sent = 0

            async def send() -> None:
                nonlocal sent
                while sent < 4 * ON_THE_WAY_MAX:
                    await side.send(BLOCK)
                    sent += len(BLOCK)
                await side.send(frame(CLOSE, b"\x03\xe8"))
                side.close()

            sending = asyncio.create_task(send())
            await wait_until(lambda: side.is_blocked, 10, "the engine is held up")
            assert sent < ON_THE_WAY_MAX
            client.resume()
            got = await client.reader.read(len(BLOCK))
            while not got.endswith(b"\x88\x02\x03\xe8"):
                got = got[-3:] + await client.reader.read(1 << 20)
            await sending
            client.leave()
            assert await rig.slot.outcome() == "passed"
            assert rig.recorder.ended_ones[0].bytes_out == sent + 4

    run(scenario())


async def open_full_socket(rig: Rig) -> tuple[Client, EngineSide]:
    """As `open_socket`, to a client that has left earlier answers unread."""
    client = await rig.connect()
    client.pause()
    side: EngineSide | None = None
    while not rig.unsent_bytes():
        await client.send(b"GET /upstream/m/x HTTP/1.1\r\nHost: localhost\r\n\r\n")
        side = side or await rig.engine.accept()
        await side.read_head()
        await side.send(whole(b"x" * 16 * 1024))
        await soon(rig.recorder.all_ended.wait())
    assert side is not None
    await client.send(ASK + b"\r\n")
    await side.read_head()
    await side.send(ACCEPT)
    return client, side


def test_a_client_that_was_full_before_its_upgrade_is_cut_likewise() -> None:
    async def scenario() -> None:
        async with make_rig(RelayLimits(client_stall_s=0.2)) as rig:
            _, side = await open_full_socket(rig)
            flood = asyncio.create_task(side.flood_with(BLOCK))
            await soon(rig.recorder.all_ended.wait(), 5)
            assert rig.recorder.ended_ones[-1].outcome == "cancelled"
            assert side.flooded_bytes < ON_THE_WAY_MAX
            await flood

    run(scenario())


def test_a_client_that_was_full_before_its_upgrade_and_reads_again_is_as_any_other() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await open_full_socket(rig)
            await wait_until(lambda: rig.connections()[0].writing_paused, 5, "it is full")
            client.resume()
            await side.send(frame(TEXT, b"hello"))
            await soon(client.reader.readuntil(frame(TEXT, b"hello")))
            # aiohttp's handler too knows that it reads: it would be hung up on else.
            assert not rig.connections()[0].writing_paused
            client.reset()

    run(scenario())


def test_an_engine_that_does_not_read_holds_up_the_client() -> None:
    async def scenario() -> None:
        async with make_rig() as rig:
            client, side = await open_socket(rig)
            side.pause()
            sent = 0

            async def send() -> None:
                nonlocal sent
                while sent < 4 * ON_THE_WAY_MAX:
                    await client.send(BLOCK)
                    sent += len(BLOCK)

            sending = asyncio.create_task(send())

            await wait_until(lambda: is_blocked(client), 10, "the client is held up")
            assert sent < ON_THE_WAY_MAX
            side.resume()
            await side.read_exactly(4 * ON_THE_WAY_MAX)
            await sending
            client.reset()
            await rig.slot.outcome()

    run(scenario())


def test_a_client_that_reads_nothing_for_too_long_is_cut() -> None:
    async def scenario() -> None:
        async with make_rig(RelayLimits(client_stall_s=0.2)) as rig:
            client, side = await open_socket(rig)
            client.pause()
            await soon(side.flood_with(BLOCK), 10)
            assert await rig.slot.outcome() == "cancelled"

    run(scenario())


def test_a_client_that_breaks_off_while_its_engine_does_not_read_is_not_waited_for() -> None:
    async def scenario() -> None:
        async with make_rig(RelayLimits(client_stall_s=0.1)) as rig:
            client, side = await open_socket(rig)
            side.pause()
            sending = asyncio.create_task(send_for_ever(client))
            await wait_until(lambda: is_blocked(client), 10, "the client is held up")
            sending.cancel()
            client.reset()
            assert await soon(rig.slot.outcome(), 5) == "cancelled"

    run(scenario())


async def send_for_ever(client: Client) -> None:
    while True:
        await client.send(BLOCK)


def is_blocked(client: Client) -> bool:
    return client.writer.transport.get_write_buffer_size() > 0
