"""What hundreds of aborted completions leave behind in an engine: nothing."""

import asyncio
import contextlib
import ctypes
import gc
import random
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_isolate_engine.cache.prompt_cache import PromptCache
from mlx_isolate_engine.completion.events import ContentDelta, Event, PrefillProgress
from mlx_isolate_engine.completion.executor import AdmittedCompletion
from mlx_isolate_engine.completion.request import CompletionRequest
from mlx_isolate_engine.device import backend_name
from tests.integration.generation_rig import Rig, rig, run_async, text_request, tokens_request
from tests.waiting import wait_until

PROMPT = [65 + number % 50 for number in range(100)]
# Few, so that the tokenizer has all of them in its cache of words after the first aborts.
TEXTS = "abcd"
WARM_UP = 24
CLIENTS = 12
PLACES_DEADLINE_S = 20.0
IDLE_DEADLINE_S = 10.0
# What fills up once (pools, tables, each thread's freed blocks at hand) grows in one round or the
# other; what is lost with each abort grows in all of them.
ROUNDS = 3
# In the round that grows least. One object an abort would be more.
BLOCKS_MAX = 15
MALLOC_BYTES_MAX = 24 << 10


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def malloc_bytes() -> int:
    """Bytes that this process has allocated and not freed; 0 where they tell nothing.

    Not every C library counts them, and on a GPU they grow with each new shape, whose kernels MLX
    and the driver keep, up to limits of their own.
    """
    tell = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if tell is None or backend_name() != "cpu":
        return 0
    tell.restype = _Mallinfo
    told = tell()
    return int(told.uordblks + told.hblkhd)


class Held:
    """What this process holds at this moment beside MLX's freed buffers.

    Attributes:
        arrays: MLX's, as Python objects.
        mlx_bytes: of MLX's buffers that somebody still has.
        blocks: small objects of Python's, collected by `gc` or not.
        malloc_bytes: everything that is not one of those, from any library.
    """

    def __init__(self) -> None:
        gc.collect()
        mx.clear_cache()
        self.arrays = sum(type(each) is mx.array for each in gc.get_objects())
        self.mlx_bytes = mx.get_active_memory()
        self.blocks = sys.getallocatedblocks()
        self.malloc_bytes = malloc_bytes()

    def growth(self, before: "Held") -> tuple[int, int]:
        """Blocks and bytes of malloc that are more than before."""
        return self.blocks - before.blocks, self.malloc_bytes - before.malloc_bytes


class WatchedCache(PromptCache):
    """A prompt cache that knows whether the generation thread has nothing in its hands."""

    def __init__(self) -> None:
        super().__init__(entries_max=10, bytes_max=20_000_000)
        self.is_idle = False

    def set_idle(self, idle: bool) -> None:
        super().set_idle(idle)
        self.is_idle = idle


class Aborts:
    """Begins completions and leaves them, some clients at once.

    Args:
        subject: where.
    """

    def __init__(self, subject: Rig) -> None:
        self._subject = subject
        self._source = random.Random(11)

    async def leave_prefill(self, count: int) -> None:
        """So many, each while its prompt runs."""
        await self._side_by_side([self._leave_prefill], count)

    async def leave_elsewhere(self, count: int) -> None:
        """So many: while they are prepared, while they wait, after some tokens.

        Their prompts are one token, which needs no prefill: that would tidy up by the way.
        """
        ways = [self._leave_preparation, self._leave_queue, self._leave_decode, self._leave_decode]
        await self._side_by_side(ways, count)

    async def _side_by_side(
        self, ways: Sequence[Callable[[int], Awaitable[None]]], count: int
    ) -> None:
        numbers = iter(range(count))

        async def client() -> None:
            for number in numbers:
                await ways[number % len(ways)](number)

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        await self._subject.wait_idle()

    def _request(self, number: int) -> CompletionRequest:
        return text_request(TEXTS[number % len(TEXTS)], max_tokens=1500)

    async def _leave_preparation(self, number: int) -> None:
        task = asyncio.create_task(self._subject.service.prepare(self._request(number)))
        await asyncio.sleep(0)
        await cancel(task)

    async def _leave_queue(self, number: int) -> None:
        async def sink(event: Event) -> None:
            pass

        prepared = await self._subject.service.prepare(self._request(number))
        task = asyncio.create_task(prepared.execute(sink))
        await asyncio.sleep(0)
        await cancel(task)

    async def _leave_prefill(self, number: int) -> None:
        prompt = [number, *PROMPT]  # one that the prompt cache knows nothing of
        await self._leave_after(tokens_request(prompt, max_tokens=100), PrefillProgress, 1)

    async def _leave_decode(self, number: int) -> None:
        deltas = self._source.randrange(1, 20)
        await self._leave_after(self._request(number), ContentDelta, deltas)

    async def _leave_after(self, request: CompletionRequest, kind: type[Event], count: int) -> None:
        reached = asyncio.Event()
        left = count

        async def watch(event: Event) -> None:
            nonlocal left
            left -= isinstance(event, kind)
            if left <= 0:
                reached.set()

        task = asyncio.create_task(self._subject.run(request, watch))
        await reached.wait()
        await cancel(task)


async def cancel(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        prepared = await task
        if isinstance(prepared, AdmittedCompletion):  # it was too quick to be left
            await prepared.close()


async def fill_all_places(subject: Rig, places: int) -> None:
    """As many completions as there are places, until every one of them generates."""
    begun = [asyncio.Event() for _ in range(places)]

    def watcher(own: asyncio.Event) -> Callable[[Event], Awaitable[None]]:
        async def watch(event: Event) -> None:
            if isinstance(event, ContentDelta):
                own.set()

        return watch

    tasks = [
        asyncio.create_task(subject.run(text_request("all", max_tokens=1900), watcher(own)))
        for own in begun
    ]
    async with asyncio.timeout(PLACES_DEADLINE_S):
        for own in begun:
            await own.wait()
    assert subject.thread.counters.active == places
    for task in tasks:
        await cancel(task)
    await subject.wait_idle()


@pytest.fixture
def is_quickly_collected() -> Iterator[None]:
    """Leaves out of `gc` what is there already: hundreds of thousands of objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.case("11")
@pytest.mark.usefixtures("is_quickly_collected")
@pytest.mark.parametrize(("places", "aborts"), [(8, 300), (1, 90)], ids=["continuous", "serial"])
def test_hundreds_of_aborts_leave_nothing_behind(
    full_model: Path, places: int, aborts: int
) -> None:
    cache = WatchedCache()

    async def test() -> None:
        async with rig(
            full_model,
            decode_concurrency=places,
            prefill_step_size=16,
            make_prompt_cache=lambda _: cache,
        ) as subject:
            clients = Aborts(subject)
            await subject.run(text_request("a", max_tokens=2))

            async def held_after(leave: Callable[[int], Awaitable[None]], count: int) -> Held:
                await leave(count)
                await wait_until(lambda: cache.is_idle, IDLE_DEADLINE_S)
                cache.clear()
                return Held()

            for leave, share in ((clients.leave_prefill, 0.2), (clients.leave_elsewhere, 0.8)):
                count = round(share * aborts / ROUNDS)
                held = [await held_after(leave, WARM_UP)]
                for _ in range(ROUNDS):
                    held.append(await held_after(leave, count))
                assert {each.arrays for each in held} == {held[0].arrays}
                assert {each.mlx_bytes for each in held} == {held[0].mlx_bytes}
                grown = list(map(Held.growth, held[1:], held))
                assert min(blocks for blocks, _ in grown) <= BLOCKS_MAX, grown
                assert min(size for _, size in grown) <= MALLOC_BYTES_MAX, grown
            assert subject.thread.counters.failed == 0
            await fill_all_places(subject, places)

    run_async(test())


@pytest.mark.case("11")
def test_an_engine_at_rest_keeps_no_freed_buffers_and_goes_on_as_before(full_model: Path) -> None:
    async def test() -> None:
        async with rig(full_model, rest_after_s=0.2) as subject:
            answers: list[str] = []
            for _ in range(3):
                answers.append((await subject.run(text_request("hello", max_tokens=20))).text)
                assert mx.get_active_memory() > 0
                await wait_until(lambda: mx.get_cache_memory() == 0, IDLE_DEADLINE_S)
            assert answers == answers[:1] * 3
            # As the prompt cache's writer does, of entries that have been written.
            let_go_later = mx.zeros((1 << 20,))
            mx.eval(let_go_later)
            del let_go_later
            await wait_until(lambda: mx.get_cache_memory() == 0, IDLE_DEADLINE_S)

    run_async(test())
