"""What watching costs the supervisor: 50 event readers and an open page, beside nobody looking.

`python -m bench.bench_watching [--rounds N] [--json FILE] [--small]`. A daemon over a made-up
engine streams answers at a fixed rate; rounds with and without watchers alternate. The page is a
reader that also asks for /status every second and for /history every five, as the real one does.
Not measured: a browser's own drawing, networks other than loopback, a generating engine's
competition for the cores.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import aiohttp
import msgspec

from bench.leaving import leaving_nothing
from bench.machine import machine
from bench.relay_rivals import Rival, engine_of, start_daemon

# As often as a page asks, while the cost is measured.
STATUS_INTERVAL_S = 1.0
# In the last round, for the times alone: of a handful the 99th percentile is the worst one.
STATUS_DENSE_INTERVAL_S = 0.05
# How long the last events may take to reach every reader.
SETTLE_S = 5.0


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much is done: streams as long as answers are, one ending about every second."""

    readers: int = 50
    rounds: int = 6
    streams: int = 16
    events: int = 4000
    parallel: int = 4
    interval_s: float = 0.001


SMALL = Sizes(readers=10, rounds=1, streams=8, events=100)


class Result(msgspec.Struct, kw_only=True):
    """Figures of one run; times in microseconds or milliseconds as named, memory in bytes."""

    sizes: Sizes
    machine: dict[str, str]
    published: int
    alone_us_per_event: list[float] = []
    watched_us_per_event: list[float] = []
    status_ms: list[float] = []
    memory: list[int] = []
    delivered: list[int] = []

    @property
    def ratios(self) -> list[float]:
        """CPU per relayed event with watchers, over without, of each pair of rounds."""
        pairs = zip(self.watched_us_per_event, self.alone_us_per_event, strict=True)
        return [watched / alone for watched, alone in pairs]

    @property
    def growth(self) -> int:
        """Memory after the last round less that after the first pair."""
        return self.memory[-1] - self.memory[0]


class Load:
    """Streams answers through the daemon and reads the CPU it used."""

    def __init__(self, daemon: Rival, session: aiohttp.ClientSession, sizes: Sizes) -> None:
        self._daemon = daemon
        self._session = session
        self._sizes = sizes

    async def round(self) -> float:
        """One round of streams; the supervisor's CPU in microseconds for each relayed event."""
        before = self._daemon.cpu_s()
        turns = iter(range(self._sizes.streams))
        await asyncio.gather(*(self._worker(turns) for _ in range(self._sizes.parallel)))
        used = self._daemon.cpu_s() - before
        return used / (self._sizes.streams * self._sizes.events) * 1e6

    async def _worker(self, turns: Iterator[int]) -> None:
        body = {
            "stream": True,
            "events": self._sizes.events,
            "interval_s": self._sizes.interval_s,
            "event_bytes": 200,
        }
        for _ in turns:
            async with self._session.post("/v1/chat/completions", json=body) as answer:
                answer.raise_for_status()
                async for _ in answer.content.iter_any():
                    pass


class Watchers:
    """Event readers and one page; counts what they are told.

    Args:
        expected: events after which every reader has all of them.
        status_interval_s: how often the page asks for /status.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        count: int,
        expected: int,
        status_interval_s: float = STATUS_INTERVAL_S,
    ) -> None:
        self._session = session
        self._status_interval_s = status_interval_s
        self._expected = expected
        self.delivered = [0] * count
        self.status_ms: list[float] = []
        self._has_all = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Connect all readers."""
        opened = [asyncio.Event() for _ in self.delivered]
        self._tasks = [
            asyncio.create_task(self._read(number, event)) for number, event in enumerate(opened)
        ]
        await asyncio.gather(*(event.wait() for event in opened))
        self._tasks += [
            asyncio.create_task(self._poll("/status", self._status_interval_s)),
            asyncio.create_task(self._poll("/history", 5.0)),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Give the last events time to come, then leave."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_all.wait(), SETTLE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self, number: int, opened: asyncio.Event) -> None:
        async with self._session.get("/events") as answer:
            async for part in answer.content.iter_any():
                opened.set()
                self.delivered[number] += part.count(b"event: request.ended")
                if min(self.delivered) >= self._expected:
                    self._has_all.set()

    async def _poll(self, path: str, interval_s: float) -> None:
        while True:
            began = time.perf_counter()
            async with self._session.get(path) as answer:
                await answer.read()
            if path == "/status":
                self.status_ms.append((time.perf_counter() - began) * 1e3)
            await asyncio.sleep(interval_s)


async def _measure(daemon: Rival, sizes: Sizes) -> Result:
    session = aiohttp.ClientSession(
        f"http://127.0.0.1:{daemon.address}",
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
    )
    result = Result(
        sizes=sizes, machine=machine("aiohttp", "uvloop"), published=sizes.rounds * sizes.streams
    )
    result.delivered = [0] * sizes.readers
    async with session:
        load = Load(daemon, session, sizes)
        await load.round()  # warms up both processes
        for _ in range(sizes.rounds):
            result.alone_us_per_event.append(await load.round())
            async with Watchers(session, sizes.readers, sizes.streams) as watchers:
                result.watched_us_per_event.append(await load.round())
            for number, count in enumerate(watchers.delivered):
                result.delivered[number] += count
            result.memory.append(daemon.memory_bytes())
        dense = STATUS_DENSE_INTERVAL_S
        async with Watchers(session, sizes.readers, sizes.streams, dense) as watchers:
            await load.round()
        result.status_ms = watchers.status_ms
    return result


def run(sizes: Sizes) -> Result:
    """Start a daemon of its own, measure, stop it."""
    with tempfile.TemporaryDirectory(prefix="mi") as folder:
        child = start_daemon(Path(folder))
        try:
            engine_of(child.port)
            return asyncio.run(_measure(Rival("daemon", child.port, child.pid), sizes))
        finally:
            child.stop()


def lines(result: Result) -> list[str]:
    """The figures as text."""
    status = sorted(result.status_ms)
    p50, p99 = statistics.median(status), status[int(len(status) * 0.99)]
    percentiles = f"p50 {p50:.1f} ms, p99 {p99:.1f} ms"
    memory = [size / 1e6 for size in result.memory]
    return [
        "; ".join(f"{name} {value}" for name, value in result.machine.items()),
        json.dumps(msgspec.to_builtins(result.sizes)),
        f"supervisor CPU per relayed event, nobody looking: {_spread(result.alone_us_per_event)} us",
        f"the same, watched: {_spread(result.watched_us_per_event)} us",
        f"ratio of each pair: {_spread(result.ratios, 2)}",
        f"/status, watched, asked {len(status)} times: {percentiles}",
        f"memory after each pair of rounds, MB: {', '.join(f'{size:.1f}' for size in memory)}",
        f"{result.published} events; readers got {min(result.delivered)} to {max(result.delivered)}",
    ]


def _spread(values: list[float], digits: int = 1) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def main() -> int:
    """Run, print, and say by the exit status whether every reader got every event."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures here as well")
    parser.add_argument(
        "--rounds", type=int, default=Sizes().rounds, help="pairs of rounds (default %(default)s)"
    )
    parser.add_argument("--small", action="store_true", help="the size that the tests run")
    args = parser.parse_args()
    result = run(SMALL if args.small else Sizes(rounds=args.rounds))
    print("\n".join(lines(result)))
    if args.json:
        Path(args.json).write_bytes(msgspec.json.encode(result))
    return 0 if set(result.delivered) == {result.published} else 1


if __name__ == "__main__":
    with leaving_nothing():
        sys.exit(main())
