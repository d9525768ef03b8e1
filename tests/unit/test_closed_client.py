"""A client's connection that ends between two turns of the loop is no fault of the engine's."""

import asyncio

from mlx_isolate_supervisor.relay.upstream import EngineConnection

EVENT = b"b\r\ndata: one\n\n\r\n"


def test_an_event_for_a_client_that_has_just_gone_is_dropped() -> None:
    tried: list[bytes] = []

    def write(data: bytes) -> None:
        # What uvloop raises once a transport is closed.
        tried.append(data)
        raise RuntimeError("unable to perform operation; the handler is closed")

    async def scenario() -> None:
        connection = EngineConnection()
        connection._write_event = write  # pyright: ignore[reportPrivateUsage]
        connection.data_received(EVENT)
        connection.data_received(EVENT)

    asyncio.run(scenario())
    assert tried == [EVENT, EVENT]
