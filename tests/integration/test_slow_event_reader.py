"""A reader of /events that does not read: dropped, and never buffered without bound."""

import asyncio
import socket
import tracemalloc

import pytest
from aiohttp import web

from mlx_isolate_shared.clock import SystemClock
from mlx_isolate_supervisor.pages import ui_routes
from mlx_isolate_supervisor.pages.ui_routes import add_ui_routes
from mlx_isolate_supervisor.telemetry.observability import Observability
from mlx_isolate_supervisor.telemetry.status import Status, SupervisorStatus
from tests.waiting import wait_until

TEXT = "x" * 4000
EVENTS = 3000  # 12 MB, many times what any buffer on the way holds
BUFFERED_MAX = 6_000_000  # both rings at this event size, with room to spare

STATUS = Status(
    supervisor=SupervisorStatus(
        pid=1, version="0", uptime_s=0.0, memory_bytes=1, memory_kind="rss", run_dir=""
    ),
    models=(),
)


def test_reader_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    # A twentieth of the default, so that the test does not stand still for ten seconds.
    monkeypatch.setattr(ui_routes, "STALLED_READER_S", 0.5)

    async def scenario() -> None:
        watch = Observability(lambda: STATUS, lambda: STATUS.models, SystemClock())
        app = web.Application()
        add_ui_routes(app, watch)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port: int = runner.addresses[0][1]
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await wait_until(lambda: watch.events.readers == 1, 5.0, "the reader")
        tracemalloc.start()
        for number in range(EVENTS):
            watch.events.publish("engine.noise", text=TEXT)
            if number % 10 == 0:
                await asyncio.sleep(0)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held < BUFFERED_MAX
        await wait_until(lambda: watch.events.readers == 0, 5.0, "it is dropped")
        assert watch.events.dropped_readers == 1
        client.close()
        await runner.cleanup()

    asyncio.run(scenario())
