"""WebSockets of a whole daemon: a real client, a real engine process, and every way to end."""

import asyncio
import signal
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest
from aiohttp import WSMsgType

from tests.running_daemon import RunningDaemon, fake_model
from tests.waiting import wait_for

# What one stalled connection may cost the supervisor.
STALLED_BYTES_MAX = 2 << 20


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    with RunningDaemon(
        tmp_path / "home", str(fake_model(tmp_path / "m")), "--watchdog-timeout", "1"
    ) as running:
        yield running


@asynccontextmanager
async def open_socket(
    daemon: RunningDaemon, model: str = "m", headers: dict[str, str] | None = None
) -> AsyncGenerator[aiohttp.ClientWebSocketResponse]:
    url = f"{daemon.url}/upstream/{model}/ws"
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(url, protocols=("fake",), headers=headers, autoping=False) as socket,
    ):
        yield socket


def transport_of(socket: aiohttp.ClientWebSocketResponse) -> asyncio.Transport:
    """The connection below, to ill-treat it."""
    connection = socket._response.connection  # pyright: ignore[reportPrivateUsage]
    assert connection is not None and connection.transport is not None
    return connection.transport


def sockets_of(daemon: RunningDaemon) -> int:
    """WebSockets that the engine has open."""
    count: int = daemon.get("/upstream/m/sockets")["sockets"]
    return count


def test_texts_bytes_pings_and_close_codes_pass(daemon: RunningDaemon) -> None:
    async def scenario() -> None:
        async with open_socket(daemon) as socket:
            assert socket.protocol == "fake"
            for size in (0, 125, 126, 65536, 1 << 20):
                await socket.send_bytes(b"\x00" * size)
                assert await socket.receive_bytes(timeout=5) == b"\x00" * size
            await socket.send_str("grüße")
            assert await socket.receive_str(timeout=5) == "grüße"
            await socket.ping(b"are you there")
            pong = await socket.receive(timeout=5)
            assert (pong.type, pong.data) == (WSMsgType.PONG, b"are you there")
            await socket.send_str("close 4321 enough of that")
            last = await socket.receive(timeout=5)
            assert (last.type, last.data, last.extra) == (WSMsgType.CLOSE, 4321, "enough of that")
        async with open_socket(daemon) as socket:
            assert await socket.close(code=4001)
            assert socket.close_code == 4001

    asyncio.run(scenario())
    wait_for(lambda: not sockets_of(daemon), 5, "the engine has no socket left")


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV", "exit:1"])
def test_a_death_is_told_by_1011_with_its_cause(daemon: RunningDaemon, how: str) -> None:
    async def scenario() -> None:
        async with open_socket(daemon) as socket, open_socket(daemon) as other:
            await socket.send_str("send 20 1000")
            for _ in range(20):
                await socket.receive_bytes(timeout=5)
            began = time.monotonic()
            await other.send_str(f"die {how}")
            for one in (socket, other):
                last = await one.receive(timeout=5)
                assert (last.type, last.data) == (WSMsgType.CLOSE, 1011)
                assert ("code 1" if how == "exit:1" else how) in (last.extra or "")
            assert time.monotonic() - began < 1.0

    old = daemon.wait_state("ready")["pid"]
    asyncio.run(scenario())
    # The end is told before the engine is reaped, so for a moment it still shows as ready.
    wait_for(lambda: daemon.status()["models"][0]["pid"] != old, 10.0, "the engine is gone")
    daemon.wait_state("ready")
    assert daemon.chat().status == 200


def test_a_death_within_a_message_ends_the_connection_without_a_close(
    daemon: RunningDaemon,
) -> None:
    async def scenario() -> None:
        async with open_socket(daemon) as socket:
            await socket.send_str("half SIGKILL")
            last = await socket.receive(timeout=5)
            assert last.type in (WSMsgType.CLOSED, WSMsgType.ERROR)
            assert socket.close_code in (None, 1006)

    asyncio.run(scenario())


def test_an_engine_that_ends_the_connection_without_a_close_is_said_to_have_failed(
    daemon: RunningDaemon,
) -> None:
    async def scenario() -> None:
        async with open_socket(daemon) as socket:
            await socket.send_str("drop")
            last = await socket.receive(timeout=5)
            assert (last.type, last.data) == (WSMsgType.CLOSE, 1011)

    asyncio.run(scenario())
    assert daemon.status()["models"][0]["incarnation"] == 1


def test_a_client_that_leaves_closes_the_engines_end(daemon: RunningDaemon) -> None:
    async def scenario() -> None:
        async with open_socket(daemon) as socket:
            await socket.send_str("x")
            await socket.receive_str(timeout=5)
            assert await asyncio.to_thread(sockets_of, daemon) == 1
            transport_of(socket).abort()

    asyncio.run(scenario())
    wait_for(lambda: not sockets_of(daemon), 5, "the engine's end is closed")


def test_a_silent_socket_is_no_hang_and_holds_up_no_unload(daemon: RunningDaemon) -> None:
    async def scenario() -> None:
        async with open_socket(daemon) as socket:
            await socket.send_str("x")
            await socket.receive_str(timeout=5)
            # More than the watchdog's timeout in which nothing moves.
            with pytest.raises(asyncio.TimeoutError):
                await socket.receive(timeout=2.5)
        async with open_socket(daemon) as socket:
            await socket.send_str("x")
            await socket.receive_str(timeout=5)
            began = time.monotonic()
            unloading = asyncio.to_thread(daemon.ask, "POST", "/models/unload", {"model": "m"})
            task = asyncio.ensure_future(unloading)
            last = await socket.receive(timeout=5)
            assert (last.type, last.data) == (WSMsgType.CLOSE, 1012)
            assert (await task).status == 200
            assert time.monotonic() - began < 5

    asyncio.run(scenario())
    assert daemon.status()["models"][0]["incarnation"] == 1


def test_the_end_of_the_daemon_is_told_and_not_held_up(daemon: RunningDaemon) -> None:
    async def scenario() -> None:
        async with open_socket(daemon) as socket:
            await socket.send_str("x")
            await socket.receive_str(timeout=5)
            daemon.process.send_signal(signal.SIGTERM)
            last = await socket.receive(timeout=5)
            assert last.type is WSMsgType.CLOSE
            assert last.data in (1001, 1012)

    asyncio.run(scenario())
    assert daemon.wait_end(5) == 0


def test_slow_readers_on_both_sides_cost_little(daemon: RunningDaemon) -> None:
    """A client that reads nothing of a flood, and an engine that reads nothing of another."""
    process = psutil.Process(daemon.process.pid)

    async def scenario() -> None:
        async with open_socket(daemon) as slow, open_socket(daemon) as deaf:
            before = process.memory_info().rss
            transport_of(slow).pause_reading()
            await slow.send_str("send 100000 10000")
            await deaf.send_str("deaf")
            sending = asyncio.ensure_future(flood(deaf))
            await asyncio.wait({sending}, timeout=2)
            assert not sending.done(), "a gigabyte has gone somewhere"
            assert process.memory_info().rss - before < 2 * STALLED_BYTES_MAX
            # Others are not slowed.
            async with open_socket(daemon) as quick:
                began = time.monotonic()
                for number in range(100):
                    await quick.send_str(str(number))
                    assert await quick.receive_str(timeout=5) == str(number)
                assert time.monotonic() - began < 5
            sending.cancel()
            transport_of(slow).abort()
            transport_of(deaf).abort()

    async def flood(socket: aiohttp.ClientWebSocketResponse) -> None:
        for _ in range(100_000):
            await socket.send_bytes(b"x" * 10_000)

    asyncio.run(scenario())


def test_a_model_whose_name_has_a_slash_is_loaded_on_demand(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    first, second = (fake_model(tmp_path / name) for name in ("a", "b"))
    config.write_text(
        f"models:\n  a:\n    path: {first}\n  org/b:\n    path: {second}\n    aliases: [bee]\n"
    )
    with RunningDaemon(tmp_path / "home", "--config", str(config)) as daemon:
        assert [m["state"] for m in daemon.status()["models"]] == ["stopped", "stopped"]
        for name in ("org/b", "org%2Fb", "bee"):
            answer = daemon.get(f"/upstream/{name}/some/where?x=1")
            assert answer["path"] == "/some/where?x=1"
        assert [m["state"] for m in daemon.status()["models"]] == ["stopped", "ready"]
        assert daemon.ask("PUT", "/upstream/org/b/x", {"y": 1}).json()["method"] == "PUT"
        assert daemon.ask("GET", "/upstream/nobody/x").status == 404

        async def scenario() -> None:
            async with open_socket(daemon, "org/b") as socket:
                await socket.send_str("hello")
                assert await socket.receive_str(timeout=5) == "hello"

        asyncio.run(scenario())


def test_keys_and_origins_guard_sockets_too(tmp_path: Path) -> None:
    model = str(fake_model(tmp_path / "m"))
    with RunningDaemon(tmp_path / "home", model, "--api-key", "secret") as daemon:

        async def status(headers: dict[str, str]) -> int:
            try:
                async with open_socket(daemon, headers=headers):
                    return 101
            except aiohttp.WSServerHandshakeError as error:
                return error.status

        key = {"Authorization": "Bearer secret"}
        evil = {"Origin": "https://evil.example"}
        assert asyncio.run(status({})) == 401
        assert asyncio.run(status(key)) == 101
        assert asyncio.run(status(key | evil)) == 403
        assert daemon.ask("GET", "/upstream/m/x").status == 401
