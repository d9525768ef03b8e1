"""What the relay costs between a client and an engine, beside nginx, haproxy and no relay at all.

`python -m bench.bench_relay [--json FILE] [--rounds N]`. The engine is a made-up source of SSE
events in a process of its own; the rivals take turns within every round. Not measured: networks
other than loopback, TLS, a generating engine's competition for the cores (status pages aside).
"""

import argparse
import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

import aiohttp
import msgspec
import uvloop

from bench.leaving import leaving_nothing
from bench.relay_report import SMALL, Reading, Result, Sizes, facts, judge, show
from bench.relay_rivals import Child, Rival, engine_of, start_daemon, start_haproxy, start_nginx

REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
)
EVENT_END = b"\n\n"
STREAM_END = b"[DONE]\n\n\r\n0\r\n\r\n"


class Reader(asyncio.Protocol):
    """A client's connection: sends requests, counts what comes back."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._end = b""
        self._tail = b""
        self._awaited: tuple[int, asyncio.Future[None]] | None = None
        self.reads = 0
        self.events = 0
        self.first_at = 0.0
        self.last_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)

    async def ask(self, body: bytes, end: bytes) -> None:
        """Send one request and wait until `end` is the last that has come."""
        assert self._transport is not None
        self._end, self._tail = end, b""
        self.reads = self.events = 0
        self.first_at = 0.0
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(REQUEST % (len(body), body))
        await self._done

    async def wait_events(self, count: int) -> None:
        """Wait until so many events of the running stream have come."""
        if self.events < count:
            reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._awaited = (count, reached)
            await reached

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        events = (self._tail[-1:] + data).count(EVENT_END)
        if events:
            self.last_at = time.perf_counter()
            self.first_at = self.first_at or self.last_at
            self.reads += 1
            self.events += events
            if self._awaited is not None and self.events >= self._awaited[0]:
                self._awaited[1].set_result(None)
                self._awaited = None
        self._tail = (self._tail + data)[-128:]
        if self._tail.endswith(self._end) and self._done is not None and not self._done.done():
            self._done.set_result(None)

    def close(self) -> None:
        """Close the connection."""
        assert self._transport is not None
        self._transport.close()


async def connect(rival: Rival) -> Reader:
    """A new connection to a rival."""
    loop = asyncio.get_running_loop()
    if isinstance(rival.address, str):
        _, reader = await loop.create_unix_connection(Reader, rival.address)
    else:
        _, reader = await loop.create_connection(Reader, "127.0.0.1", rival.address)
    return reader


def stream_body(events: int, interval_s: float, event_bytes: int) -> bytes:
    """The body that asks the source for a stream."""
    return msgspec.json.encode(
        {
            "model": "m",
            "stream": True,
            "events": events,
            "interval_s": interval_s,
            "event_bytes": event_bytes,
        }
    )


async def measure_streams(rival: Rival, sizes: Sizes, streams: int, into: Reading) -> None:
    """CPU per event of `streams` streams; of a single one also its rate and reads."""
    rate = sizes.rates[streams]
    events = max(10, int(rate * sizes.stream_s))
    body = stream_body(events, 1 / rate, sizes.event_bytes)
    readers = [await connect(rival) for _ in range(streams)]
    asked = asyncio.gather(*(reader.ask(body, STREAM_END) for reader in readers))
    # Neither the requests' own cost nor their ends belong to an event.
    await asyncio.gather(*(reader.wait_events(events // 10) for reader in readers))
    assert all(reader.events < events for reader in readers), "they did not run side by side"
    began, spent = time.perf_counter(), rival.cpu_s()
    passed = sum(reader.events for reader in readers)
    await asyncio.gather(*(reader.wait_events(events - 3) for reader in readers))
    idle = into.idle_ms_per_s / 1000 * (time.perf_counter() - began)
    spent, passed = rival.cpu_s() - spent - idle, sum(r.events for r in readers) - passed
    await asked
    into.cpu_us.setdefault(streams, []).append(spent / passed * 1e6)
    if streams == 1:
        (reader,) = readers
        into.reads_per_event.append(reader.reads / reader.events)
        into.rate.append((reader.events - 1) / (reader.last_at - reader.first_at))
    for reader in readers:
        reader.close()


async def measure_latency(rival: Rival, sizes: Sizes, into: Reading) -> None:
    """Small requests, then first events, one after the other on one connection."""
    reader = await connect(rival)
    plain: list[float] = []
    first: list[float] = []
    for _ in range(sizes.requests):
        await asyncio.sleep(sizes.pause_s)
        began = time.perf_counter()
        await reader.ask(b'{"model":"m"}', b'"total_tokens":9}}')
        plain.append(time.perf_counter() - began)
    body = stream_body(1, 0.0005, sizes.event_bytes)
    for _ in range(sizes.requests):
        await asyncio.sleep(sizes.pause_s)
        began = time.perf_counter()
        await reader.ask(body, STREAM_END)
        first.append(reader.first_at - began)
    reader.close()
    into.request_ms.append(statistics.median(plain) * 1000)
    into.first_ms.append(statistics.median(first) * 1000)


async def measure_pages(rival: Rival, sizes: Sizes) -> list[float]:
    """Times of a status page in ms, while eight streams run."""
    readers = [await connect(rival) for _ in range(8)]
    events = int(sizes.rates[16] * max(1.0, sizes.stream_s))
    body = stream_body(events, 1 / sizes.rates[16], sizes.event_bytes)
    running = asyncio.gather(*(reader.ask(body, STREAM_END) for reader in readers))
    times: list[float] = []
    async with aiohttp.ClientSession() as session:
        while not running.done():
            began = time.perf_counter()
            async with session.get(f"http://127.0.0.1:{rival.address}/status") as answer:
                assert answer.status == 200
                await answer.read()
            times.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(0.005)
    await running
    for reader in readers:
        reader.close()
    return times


async def measure(rivals: list[Rival], sizes: Sizes, result: Result) -> None:
    """All turns of all rivals."""
    for rival in rivals:  # the first use of a path is not what is asked
        await measure_latency(rival, msgspec.structs.replace(sizes, requests=10), Reading())
    before = {rival.name: rival.cpu_s() for rival in rivals}
    await asyncio.sleep(sizes.idle_s)
    for rival in rivals:
        spent = rival.cpu_s() - before[rival.name]
        result.readings[rival.name].idle_ms_per_s = spent / sizes.idle_s * 1000
    for turn in range(sizes.rounds):
        for rival in rivals[turn % len(rivals) :] + rivals[: turn % len(rivals)]:
            into = result.readings[rival.name]
            for streams in sizes.rates:
                await measure_streams(rival, sizes, streams, into)
            await measure_latency(rival, sizes, into)
    result.pages_ms = await measure_pages(next(r for r in rivals if r.name == "relay"), sizes)


def run(sizes: Sizes) -> Result:
    """Start everything, measure, end everything."""
    folder = Path(tempfile.mkdtemp(prefix="mi"))
    children: list[Child] = []
    starts: list[float] = []
    try:
        for _ in range(min(5, sizes.rounds)):
            trial = start_daemon(folder)
            starts.append(trial.start_s)
            engine_of(trial.port)
            trial.stop()
        daemon = start_daemon(folder)
        children.append(daemon)
        path, engine_pid = engine_of(daemon.port)
        relay = Rival("relay", daemon.port, daemon.pid)
        rivals = [Rival("direct", path, engine_pid), relay]
        for name, start in (("nginx", start_nginx), ("haproxy", start_haproxy)):
            rival = start(folder, path)
            if rival is not None:
                children.append(rival)
                rivals.append(Rival(name, rival.port, rival.pid))
        result = Result(
            machine=facts(),
            sizes=sizes,
            readings={rival.name: Reading() for rival in rivals},
            start_s=starts,
            idle_memory_bytes=relay.memory_bytes(),
        )
        uvloop.run(measure(rivals, sizes, result))
        result.rows = judge(result)
        return result
    finally:
        for child in reversed(children):
            child.stop()
        shutil.rmtree(folder)


def main() -> int:
    """Measure, print, write; 1 when a bound is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write everything that was found here")
    parser.add_argument(
        "--rounds",
        type=int,
        default=Sizes().rounds,
        help="turns of each rival (default %(default)s)",
    )
    parser.add_argument("--small", action="store_true", help="seconds instead of minutes")
    given = parser.parse_args()
    sizes = SMALL if given.small else Sizes(rounds=given.rounds)
    result = run(sizes)
    print(show(result))
    if given.json is not None:
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2))
    return int(any(row.holds is False for row in result.rows))


if __name__ == "__main__":
    with leaving_nothing():
        sys.exit(main())
