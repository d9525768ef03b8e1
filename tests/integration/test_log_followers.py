"""Followers of the log that do not read: cut off, and nothing piles up for them."""

import asyncio
import contextlib
import logging
import socket
import tracemalloc
from collections.abc import AsyncGenerator

import pytest
from aiohttp import web

from mlx_isolate_shared.errors import CapacityError
from mlx_isolate_supervisor.pages import log_followers
from mlx_isolate_supervisor.pages.log_followers import LogFollowers
from mlx_isolate_supervisor.telemetry.logs import BOOK_LINES_MAX, LogBook
from tests.waiting import wait_until

FOLLOWERS = 10
# Of each: what its transport holds, one group of lines, and aiohttp's own.
HELD_MAX = FOLLOWERS * 200_000


def full_book() -> LogBook:
    """As many lines as are kept, as long as engines may make them: 8 MB."""
    book = LogBook()
    for _ in range(BOOK_LINES_MAX):
        book.emit(logging.makeLogRecord({"msg": "x" * 4000}))
    return book


@contextlib.asynccontextmanager
async def served(book: LogBook) -> AsyncGenerator[tuple[LogFollowers, int]]:
    """A server of the log alone: its followers and its port."""
    followers = LogFollowers(book)

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await followers.serve(request, BOOK_LINES_MAX, None)
        except CapacityError as error:
            return web.Response(status=error.status)

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield followers, runner.addresses[0][1]
    finally:
        book.end()
        await runner.cleanup()


async def follow(port: int) -> socket.socket:
    """A client that has asked, and reads nothing by itself."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", port))
    await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return client


def test_followers_that_do_not_read_hold_little_and_are_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_followers, "STALLED_FOLLOWER_S", 0.5)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with served(full_book()) as (followers, port):
            tracemalloc.start()
            clients = [await follow(port) for _ in range(FOLLOWERS)]
            heads = [await loop.sock_recv(client, 16) for client in clients]
            assert heads == [b"HTTP/1.1 200 OK\r\n"[:16]] * FOLLOWERS
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert most < HELD_MAX
            await wait_until(lambda: followers.count == 0, 10.0, "they are cut off")
            for client in clients:
                client.close()

    asyncio.run(scenario())


def test_one_more_follower_than_allowed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_followers, "FOLLOWERS_MAX", 1)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with served(LogBook()) as (_, port):
            first = await follow(port)
            assert (await loop.sock_recv(first, 12)).endswith(b"200")
            second = await follow(port)
            assert (await loop.sock_recv(second, 12)).endswith(b"503")
            first.close()
            second.close()

    asyncio.run(scenario())
