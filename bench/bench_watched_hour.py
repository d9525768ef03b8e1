"""What an hour under watch leaves behind: 50 event readers, one open page, steady work, kills.

`python -m bench.bench_watched_hour [--minutes 60] [--json FILE] [--small]`. A daemon over a made-up
engine streams answers all the time; clients hang up on some, ask for models that there are not,
and the engine is killed now and then. Printed every ten seconds: the supervisor's memory, open
files and CPU, the page's heap and nodes, the slowest /status since. The page is a real one where
there is a Chromium, and it never leaves. Not measured: a generating engine's own memory.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil

from bench.leaving import leaving_nothing
from bench.machine import machine
from bench.open_page import NoPage, Page, open_page
from bench.relay_rivals import Rival, engine_of, start_daemon

STATUS_INTERVAL_S = 1.0
# Readers that fell behind are dropped by the daemon and come back with their last event id.
RECONNECT_S = 0.2
# How long the last events may take to reach every reader.
SETTLE_S = 5.0


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much is done. Ten samples are thrown away for warming up, or a sixth if that is less."""

    minutes: float = 60.0
    readers: int = 50
    workers: int = 6
    events: int = 100
    interval_s: float = 0.012
    sample_s: float = 10.0
    kill_s: float = 60.0
    page: bool = True


SMALL = Sizes(
    minutes=0.05, readers=8, events=20, interval_s=0.005, sample_s=0.5, kill_s=1.0, page=False
)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One look: seconds since the start, bytes, share of a core, milliseconds."""

    at_s: float
    memory_bytes: int
    open_files: int
    cpu: float
    status_worst_ms: float
    page_heap_bytes: int = 0
    page_nodes: int = 0


class Counts(msgspec.Struct, kw_only=True):
    """What the bench's own clients did and saw; `broken` are answers that an error event ended."""

    answered: int = 0
    left: int = 0
    broken: int = 0
    refused: int = 0
    kills: int = 0
    reconnects: int = 0
    gaps: int = 0
    errors: dict[str, int] = {}

    def note_error(self, error: aiohttp.ClientError) -> None:
        """Remember what no client of a sound daemon sees: a connection that breaks."""
        name = f"{type(error).__name__}: {error}"
        self.errors[name] = self.errors.get(name, 0) + 1


class Result(msgspec.Struct, kw_only=True):
    """Figures of one run.

    Attributes:
        behind: for each reader, how many events the last one it got is older than the newest.
    """

    sizes: Sizes
    machine: dict[str, str]
    counts: Counts = msgspec.field(default_factory=Counts)
    samples: list[Sample] = []
    status_ms: list[float] = []
    behind: list[int] = []

    @property
    def settled(self) -> list[Sample]:
        """The samples after the warm-up."""
        return self.samples[min(10, len(self.samples) // 6) :]

    @property
    def slope_bytes_per_hour(self) -> float:
        """The straight line through the supervisor's memory."""
        found = self.settled
        line = statistics.linear_regression(
            [sample.at_s for sample in found], [sample.memory_bytes for sample in found]
        )
        return line.slope * 3600

    @property
    def growth_bytes(self) -> float:
        """Median of the last sixth of the samples less that of the first."""
        memory = [sample.memory_bytes for sample in self.settled]
        part = max(1, len(memory) // 6)
        return statistics.median(memory[-part:]) - statistics.median(memory[:part])


class Reader:
    """One reader of /events that comes back when it is dropped."""

    def __init__(self, session: aiohttp.ClientSession, counts: Counts) -> None:
        self._session = session
        self._counts = counts
        self._opened = False
        self.last_id = ""

    @property
    def number(self) -> int:
        """Number of the newest event it has."""
        return int(self.last_id.rpartition("-")[2] or 0)

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            try:
                await self._read()
            except aiohttp.ClientError as error:
                self._counts.note_error(error)
            await asyncio.sleep(RECONNECT_S)

    async def _read(self) -> None:
        headers = {"Last-Event-ID": self.last_id} if self.last_id else {}
        self._counts.reconnects += self._opened
        self._opened = True
        async with self._session.get("/events", headers=headers) as answer:
            async for line in answer.content:
                if line.startswith(b"id:"):
                    self.last_id = line[3:].strip().decode()
                self._counts.gaps += line.startswith(b"event: gap")


class Hour:
    """One run's tasks: workers, readers, the killer, the sampler."""

    def __init__(self, daemon: Rival, session: aiohttp.ClientSession, result: Result) -> None:
        self._daemon = daemon
        self._session = session
        self._result = result
        self._sizes = result.sizes
        self._counts = result.counts
        self._worst_ms = 0.0
        self._random = random.Random(6)

    async def run(self, page: Page) -> None:
        """All of it, for as long as the sizes say."""
        readers = [Reader(self._session, self._counts) for _ in range(self._sizes.readers)]
        watching = self._start(*(reader.run() for reader in readers))
        work = (self._worker() for _ in range(self._sizes.workers))
        busy = self._start(*work, self._poll_status(), self._killer())
        try:
            await self._sample(page)
        finally:
            await self._end(busy)
            newest = await self._newest()
            deadline = time.monotonic() + SETTLE_S
            while min(reader.number for reader in readers) < newest:
                if time.monotonic() > deadline:
                    break
                await asyncio.sleep(RECONNECT_S)
            self._result.behind = sorted(max(0, newest - reader.number) for reader in readers)
            await self._end(watching)

    def _start(self, *runs: Coroutine[Any, Any, None]) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(run) for run in runs]

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _newest(self) -> int:
        """Number of the newest event, as a new reader is greeted with it."""
        async with self._session.get("/events") as answer:
            async for line in answer.content:
                if line.startswith(b"data:"):
                    hello: dict[str, str] = msgspec.json.decode(line[5:])
                    return int(hello["newest"].rpartition("-")[2])
        return 0

    async def _worker(self) -> None:
        while True:
            dice = self._random.random()
            try:
                await self._ask(leaves=dice < 0.1, lost=dice > 0.95)
            except aiohttp.ClientError as error:
                self._counts.note_error(error)

    async def _ask(self, *, leaves: bool, lost: bool) -> None:
        body = {
            "model": f"lost-{self._random.random()}" if lost else "m",
            "stream": True,
            "events": self._sizes.events,
            "interval_s": self._sizes.interval_s,
            "event_bytes": 200,
        }
        async with self._session.post("/v1/chat/completions", json=body) as answer:
            if answer.status != 200:
                self._counts.refused += 1
                await answer.read()
                return
            last = b""
            async for part in answer.content.iter_any():
                last = part
                if leaves:
                    self._counts.left += 1
                    answer.close()
                    return
            if last.endswith(b"[DONE]\n\n"):
                self._counts.answered += 1
            else:
                self._counts.broken += 1

    async def _poll_status(self) -> None:
        while True:
            began = time.perf_counter()
            async with self._session.get("/status") as answer:
                await answer.read()
            took = (time.perf_counter() - began) * 1e3
            self._result.status_ms.append(took)
            self._worst_ms = max(self._worst_ms, took)
            await asyncio.sleep(STATUS_INTERVAL_S)

    async def _killer(self) -> None:
        while True:
            await asyncio.sleep(self._sizes.kill_s)
            async with self._session.get("/status") as answer:
                (model,) = (await answer.json())["models"]
            if model["pid"]:
                os.kill(model["pid"], signal.SIGKILL)
                self._counts.kills += 1

    async def _sample(self, page: Page) -> None:
        began = time.monotonic()
        process = psutil.Process(self._daemon.pid)
        at, cpu = began, self._daemon.cpu_s()
        while at - began < self._sizes.minutes * 60:
            await asyncio.sleep(self._sizes.sample_s)
            heap, nodes = await asyncio.to_thread(page.look)
            now, used = time.monotonic(), self._daemon.cpu_s()
            sample = Sample(
                at_s=now - began,
                memory_bytes=self._daemon.memory_bytes(),
                open_files=process.num_fds(),
                cpu=(used - cpu) / (now - at),
                status_worst_ms=self._worst_ms,
                page_heap_bytes=heap,
                page_nodes=nodes,
            )
            at, cpu, self._worst_ms = now, used, 0.0
            self._result.samples.append(sample)
            print(line_of(sample), flush=True)


def run(sizes: Sizes) -> Result:
    """Start a daemon of its own, watch it, stop it."""
    result = Result(sizes=sizes, machine=machine("aiohttp", "uvloop"))
    with tempfile.TemporaryDirectory(prefix="mi") as folder:
        child = start_daemon(Path(folder))
        try:
            engine_of(child.port)
            url = f"http://127.0.0.1:{child.port}"
            page = open_page(url) if sizes.page else NoPage()
            try:
                asyncio.run(_run(Rival("daemon", child.port, child.pid), url, result, page))
            finally:
                page.close()
        finally:
            child.stop()
    return result


async def _run(daemon: Rival, url: str, result: Result, page: Page) -> None:
    async with aiohttp.ClientSession(
        url,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
    ) as session:
        await Hour(daemon, session, result).run(page)


def line_of(sample: Sample) -> str:
    """One sample as text."""
    return (
        f"{sample.at_s:7.0f} s  {sample.memory_bytes / 1e6:6.2f} MB  {sample.open_files} files  "
        f"{sample.cpu:6.1%} of a core  /status up to {sample.status_worst_ms:.1f} ms  "
        f"page {sample.page_heap_bytes / 1e6:.1f} MB, {sample.page_nodes} nodes"
    )


def lines(result: Result) -> list[str]:
    """The figures as text."""
    status = sorted(result.status_ms)
    found = result.settled
    memory = [sample.memory_bytes / 1e6 for sample in found]
    cpu = [sample.cpu for sample in found]
    return [
        "; ".join(f"{name} {value}" for name, value in result.machine.items()),
        json.dumps(msgspec.to_builtins(result.sizes)),
        json.dumps(msgspec.to_builtins(result.counts)),
        (
            f"memory, MB: {memory[0]:.1f} first, {memory[-1]:.1f} last, {max(memory):.1f} highest; "
            f"growth {result.growth_bytes / 1e6:+.2f}, slope "
            f"{result.slope_bytes_per_hour / 1e6:+.2f} an hour"
        ),
        f"open files: {min(s.open_files for s in found)} to {max(s.open_files for s in found)}",
        f"supervisor CPU: {statistics.median(cpu):.1%} of a core, up to {max(cpu):.1%}",
        (
            f"/status asked {len(status)} times: p50 {statistics.median(status):.1f} ms, "
            f"p99 {status[int(len(status) * 0.99)]:.1f} ms"
        ),
        (
            f"page heap, MB: {found[0].page_heap_bytes / 1e6:.1f} to {found[-1].page_heap_bytes / 1e6:.1f}"
            f"; nodes {found[0].page_nodes} to {found[-1].page_nodes}"
        ),
        f"events that readers lack at the end: {result.behind[0]} to {result.behind[-1]}",
    ]


def main() -> int:
    """Run, print; the exit status says whether every reader has every event and nothing broke."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--json", metavar="FILE", help="write the figures here as well")
    parser.add_argument("--small", action="store_true", help="the size that the tests run")
    args = parser.parse_args()
    result = run(SMALL if args.small else Sizes(minutes=args.minutes))
    print("\n".join(lines(result)))
    if args.json:
        Path(args.json).write_bytes(msgspec.json.encode(result))
    return 1 if any(result.behind) or result.counts.errors else 0


if __name__ == "__main__":
    with leaving_nothing():
        sys.exit(main())
