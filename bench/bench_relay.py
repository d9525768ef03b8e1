"""What does the relay cost between a client and an engine, beside nginx and beside no relay at all?

`python -m bench.bench_relay [--json FILE] [--rounds N]`. The engine is a made-up source of SSE
events in a process of its own; the rivals take turns within every round. Not measured: networks
other than loopback, TLS, a generating engine's competition for the cores (status pages aside).
"""

import argparse
import asyncio
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

import aiohttp
import msgspec
import uvloop

from bench.relay_rivals import Rival, find_nginx, start_nginx, start_relay, start_source

REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
)
EVENT_END = b"\n\n"
STREAM_END = b"[DONE]\n\n\r\n0\r\n\r\n"


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured.

    Attributes:
        rounds: turns that each rival takes.
        stream_s: length of one stream.
        rate_one: events a second of the single stream.
        rate_many: events a second of each of the 16 streams.
        event_bytes: size of an event.
        requests: small requests, and first tokens, of one turn.
    """

    rounds: int = 7
    stream_s: float = 2.0
    rate_one: float = 200.0
    rate_many: float = 60.0
    event_bytes: int = 200
    requests: int = 150


SMALL = Sizes(rounds=1, stream_s=0.3, requests=20)


class Reading(msgspec.Struct, kw_only=True):
    """What one rival was measured at, one value a turn.

    Attributes:
        cpu_one_us: CPU time of the rival per event, one stream.
        cpu_many_us: the same with 16 streams.
        request_ms: median of small requests, sequential on one connection.
        first_ms: median time to first event.
        rate: events a second that the client saw, of one stream.
        reads_per_event: reads of the client's socket per event, one stream.
    """

    cpu_one_us: list[float] = []
    cpu_many_us: list[float] = []
    request_ms: list[float] = []
    first_ms: list[float] = []
    rate: list[float] = []
    reads_per_event: list[float] = []


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
    rate = sizes.rate_one if streams == 1 else sizes.rate_many
    events = max(10, int(rate * sizes.stream_s))
    body = stream_body(events, 1 / rate, sizes.event_bytes)
    readers = [await connect(rival) for _ in range(streams)]
    asked = asyncio.gather(*(reader.ask(body, STREAM_END) for reader in readers))
    # Neither the requests' own cost nor their ends belong to an event.
    await asyncio.gather(*(reader.wait_events(events // 10) for reader in readers))
    spent, passed = rival.cpu_s(), sum(reader.events for reader in readers)
    await asyncio.gather(*(reader.wait_events(events - 3) for reader in readers))
    spent, passed = rival.cpu_s() - spent, sum(reader.events for reader in readers) - passed
    await asked
    (into.cpu_one_us if streams == 1 else into.cpu_many_us).append(spent / passed * 1e6)
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
        began = time.perf_counter()
        await reader.ask(b'{"model":"m"}', b'"total_tokens":9}}')
        plain.append(time.perf_counter() - began)
    body = stream_body(1, 0.0005, sizes.event_bytes)
    for _ in range(sizes.requests):
        began = time.perf_counter()
        await reader.ask(body, STREAM_END)
        first.append(reader.first_at - began)
    reader.close()
    into.request_ms.append(statistics.median(plain) * 1000)
    into.first_ms.append(statistics.median(first) * 1000)


async def measure_pages(rival: Rival, sizes: Sizes) -> list[float]:
    """Times of a status page in ms, while eight streams run."""
    readers = [await connect(rival) for _ in range(8)]
    events = int(sizes.rate_many * max(1.0, sizes.stream_s))
    body = stream_body(events, 1 / sizes.rate_many, sizes.event_bytes)
    running = asyncio.gather(*(reader.ask(body, STREAM_END) for reader in readers))
    times: list[float] = []
    async with aiohttp.ClientSession() as session:
        while not running.done():
            began = time.perf_counter()
            async with session.get(f"http://127.0.0.1:{rival.address}/health") as answer:
                assert answer.status == 200
                await answer.read()
            times.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(0.005)
    await running
    for reader in readers:
        reader.close()
    return times


class Result(msgspec.Struct, kw_only=True):
    """Everything that one run found."""

    machine: dict[str, str]
    sizes: Sizes
    readings: dict[str, Reading]
    pages_ms: list[float] = []
    start_s: list[float] = []
    idle_memory_bytes: int = 0


async def measure(rivals: list[Rival], sizes: Sizes, result: Result) -> None:
    """All turns of all rivals."""
    for rival in rivals:  # the first use of a path is not what is asked
        await measure_latency(rival, msgspec.structs.replace(sizes, requests=10), Reading())
    for turn in range(sizes.rounds):
        for rival in rivals[turn % len(rivals) :] + rivals[: turn % len(rivals)]:
            into = result.readings[rival.name]
            await measure_streams(rival, sizes, 1, into)
            await measure_streams(rival, sizes, 16, into)
            await measure_latency(rival, sizes, into)
    result.pages_ms = await measure_pages(next(r for r in rivals if r.name == "relay"), sizes)


def run(sizes: Sizes) -> Result:
    """Start everything, measure, end everything."""
    folder = Path(tempfile.mkdtemp(prefix="mi"))
    rivals: list[Rival] = []
    try:
        source = start_source(folder)
        rivals.append(source)
        engine = str(source.address)
        starts: list[float] = []
        for _ in range(min(5, sizes.rounds)):
            trial = start_relay(engine)
            starts.append(trial.start_s)
            trial.stop()
        relay = start_relay(engine)
        rivals.append(relay)
        nginx = start_nginx(folder, engine)
        if nginx is not None:
            rivals.append(nginx)
        result = Result(
            machine=describe_machine(),
            sizes=sizes,
            readings={rival.name: Reading() for rival in rivals},
            start_s=[*starts, relay.start_s],
            idle_memory_bytes=relay.memory_bytes(),
        )
        uvloop.run(measure(rivals, sizes, result))
        return result
    finally:
        for rival in rivals:
            rival.stop()
        shutil.rmtree(folder)


def describe_machine() -> dict[str, str]:
    """Processor, system and versions."""
    program = find_nginx()
    nginx = "not installed"
    if program is not None:
        shown = subprocess.run([program, "-v"], capture_output=True, text=True, check=True)
        nginx = shown.stderr.strip().rpartition("/")[2]
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cpu": model,
        "cores": str(len(__import__("os").sched_getaffinity(0))),
        "system": platform.platform(),
        "python": platform.python_version(),
        "aiohttp": aiohttp.__version__,
        "uvloop": uvloop.__version__,
        "nginx": nginx,
    }


if __name__ == "__main__":
    r = run(Sizes(rounds=int(sys.argv[1])))
    for n, x in r.readings.items():
        print(
            n,
            {
                k: (round(statistics.median(v), 3), round(min(v), 3), round(max(v), 3))
                for k, v in msgspec.structs.asdict(x).items()
            },
        )
    print(r.start_s, r.idle_memory_bytes, sorted(r.pages_ms)[int(len(r.pages_ms) * 0.99)])
