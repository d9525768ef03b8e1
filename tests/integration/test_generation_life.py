"""Cancellation, failures, stalls and admission: what begins also ends, once, and is counted."""

import asyncio
import contextlib
import random
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_isolate_engine.completion.events import ContentDelta, Event, PrefillProgress
from mlx_isolate_engine.completion.request import SamplingRequest
from mlx_isolate_engine.generation import row as row_module
from mlx_isolate_engine.generation import sampling
from mlx_isolate_engine.generation.continuous import ContinuousLane
from mlx_isolate_engine.generation.plan import SamplingPlan
from mlx_isolate_engine.generation.ports import LoadedModel
from mlx_isolate_engine.generation.thread import GenerationThread
from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.errors import CapacityError, EngineError
from tests.integration.generation_rig import (
    Answer,
    Rig,
    chat_request,
    load_tiny,
    rig,
    run_async,
    text_request,
    tokens_request,
)
from tests.waiting import wait_until

LONG_PROMPT = [65 + number % 50 for number in range(3000)]
# Far above a step of these models, far below what is left of them when they are cancelled.
PROMPT_CANCEL_S = 5.0


def stop_when(condition: Callable[[Event], bool]) -> tuple[Any, asyncio.Event]:
    """A watcher that sets the event at the first event that fits."""
    seen = asyncio.Event()

    async def watch(event: Event) -> None:
        if condition(event):
            seen.set()

    return watch, seen


async def cancel(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.case("09")
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_a_cancelled_completion_leaves_every_phase(slow_model: Path, phase: str) -> None:
    async def test() -> None:
        async with rig(slow_model, decode_concurrency=1 if phase == "queued" else 4) as subject:
            counters = subject.thread.counters
            watch, reached = stop_when(
                lambda e: isinstance(e, PrefillProgress if phase == "prefill" else ContentDelta)
            )
            runner = asyncio.create_task(
                subject.run(tokens_request(LONG_PROMPT if phase == "prefill" else [65],
                                           max_tokens=20000), watch)
            )  # fmt: skip
            await reached.wait()
            if phase == "queued":
                waiting = asyncio.create_task(subject.run(text_request("x", max_tokens=20000)))
                await wait_until(lambda: counters.queued == 1, 5.0)
                await cancel(waiting)
                await wait_until(lambda: counters.cancelled == 1, PROMPT_CANCEL_S)
                assert counters.active == 1
            await cancel(runner)
            await subject.wait_idle()
            assert counters.cancelled == (2 if phase == "queued" else 1)
            made = counters.prompt_tokens, counters.generated_tokens
            again = await subject.run(text_request("x", max_tokens=3))
            assert again.end.completion_tokens == 3
            assert counters.generated_tokens == made[1] + 3
            if phase == "prefill":
                assert made[0] < len(LONG_PROMPT)

    run_async(test())


@pytest.mark.case("09")
def test_a_neighbour_of_a_cancelled_completion_is_untouched(slow_model: Path) -> None:
    async def test() -> None:
        async with rig(slow_model) as subject:
            request = text_request("hello", max_tokens=60)
            alone = await subject.run(request)
            watch, reached = stop_when(lambda e: isinstance(e, ContentDelta))
            other = asyncio.create_task(subject.run(text_request("x", max_tokens=20000), watch))
            both = asyncio.create_task(subject.run(request))
            await reached.wait()
            await cancel(other)
            assert (await both).text == alone.text

    run_async(test())


def test_only_a_row_with_company_is_told_in_mid_step(
    full_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lone row's tokens are out before the next step is dispatched (decision 37)."""
    seen: set[tuple[int, bool]] = set()
    original = ContinuousLane.flushes_soon

    def noting(lane: ContinuousLane) -> bool:
        answer = original(lane)
        seen.add((len(lane._decoding), answer))  # pyright: ignore[reportPrivateUsage]
        return answer

    monkeypatch.setattr(ContinuousLane, "flushes_soon", noting)

    async def test() -> None:
        async with rig(full_model) as subject:
            await subject.run(text_request("hello", max_tokens=30))
            assert (1, False) in seen and (1, True) not in seen
            requests = [text_request(text, max_tokens=30) for text in ("hello", "there")]
            await asyncio.gather(*map(subject.run, requests))
            assert (2, True) in seen

    run_async(test())


def test_a_prepared_completion_that_is_closed_gives_its_place_back(full_model: Path) -> None:
    async def test() -> None:
        async with rig(full_model) as subject:
            prepared = await subject.service.prepare(text_request("x"))
            assert prepared.prompt_tokens == 1
            assert subject.service.places_taken == 1
            await prepared.close()
            await prepared.close()
            assert subject.service.places_taken == 0

    run_async(test())


def test_beyond_the_engines_queue_is_429(full_model: Path) -> None:
    async def test() -> None:
        async with rig(full_model, decode_concurrency=2, engine_queue_max=1) as subject:
            held = [await subject.service.prepare(text_request("x")) for _ in range(3)]
            with pytest.raises(CapacityError) as caught:
                await subject.service.prepare(text_request("x"))
            assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
            for prepared in held:
                await prepared.close()
            await (await subject.service.prepare(text_request("x"))).close()

    run_async(test())


def test_a_refused_request_holds_no_place(full_model: Path) -> None:
    from mlx_isolate_shared.errors import RequestError

    async def test() -> None:
        async with rig(full_model) as subject:
            for fields in ({"top_logprobs": 99}, {"max_tokens": 0}):
                with pytest.raises(RequestError):
                    await subject.service.prepare(text_request("x", **fields))
            assert subject.service.places_taken == 0

    run_async(test())


# A request with this penalty and this top_k gets a broken part.
BROKEN = SamplingRequest(temperature=1.0, presence_penalty=13.0, top_k=13)


def break_rows(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def fail(*_: Any) -> Any:
        raise LookupError(where)

    if where == "processor":
        make_processors = sampling.make_processors

        def make(plan: SamplingPlan) -> list[Any]:
            made = make_processors(plan)
            return [sampling.GuardedProcessor(fail)] if plan.presence_penalty == 13 else made

        monkeypatch.setattr(row_module, "make_processors", make)
        return
    if where == "sampler":
        monkeypatch.setattr(sampling, "keep_top_k", fail)
        return
    init = row_module.Row.__init__

    def init_broken(self: Any, ticket: Any, *rest: Any) -> None:
        init(self, ticket, *rest)
        if ticket.plan.sampling.presence_penalty == 13:
            monkeypatch.setattr(self.assembly, "feed", fail)

    monkeypatch.setattr(row_module.Row, "__init__", init_broken)


@pytest.mark.parametrize("where", ["processor", "sampler", "text"])
def test_a_broken_row_fails_alone(
    full_model: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    break_rows(monkeypatch, where)

    async def test() -> None:
        async with rig(full_model) as subject:
            good = text_request("hello", max_tokens=80)
            alone = await subject.run(good)
            bad = text_request("hello", sampling=BROKEN)
            results = await asyncio.gather(
                subject.run(good), subject.run(bad), subject.run(good), return_exceptions=True
            )
            assert isinstance(results[1], EngineError)
            assert results[1].status == 500
            for neighbour in (results[0], results[2]):
                assert isinstance(neighbour, Answer)
                assert neighbour.text == alone.text
            await subject.wait_idle()
            assert subject.thread.counters.failed == 1

    run_async(test())


@pytest.mark.case("01")
def test_a_loop_that_fails_says_so_and_every_completion_ends(
    full_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.generate import BatchGenerator

    errors: list[BaseException] = []

    def next_broken(self: Any) -> Any:
        raise RuntimeError("device lost")

    async def test() -> None:
        async with rig(full_model, on_failure=errors.append) as subject:
            monkeypatch.setattr(BatchGenerator, "next", next_broken)
            results = await asyncio.gather(
                *(subject.run(text_request("x")) for _ in range(3)), return_exceptions=True
            )
            assert [type(result) for result in results] == [EngineError] * 3
            await wait_until(lambda: errors, 5.0)
            assert [str(error) for error in errors] == ["device lost"]
            late = asyncio.create_task(subject.run(text_request("x")))
            with pytest.raises(EngineError):
                await late

    run_async(test())


@pytest.mark.case("x1")
def test_the_thread_that_loads_is_the_one_that_generates(
    full_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.generate import BatchGenerator

    threads: list[int] = []
    step = BatchGenerator.next

    def load(folder: Path) -> LoadedModel:
        threads.append(threading.get_ident())
        return load_tiny(folder)

    def next_noted(self: Any) -> Any:
        threads.append(threading.get_ident())
        return step(self)

    monkeypatch.setattr(BatchGenerator, "next", next_noted)

    async def test() -> None:
        async with rig(full_model, load=load) as subject:
            await asyncio.gather(*(subject.run(text_request("x", max_tokens=3)) for _ in range(3)))
        assert len(threads) > 3
        assert set(threads) == {threads[0]} != {threading.get_ident()}

    run_async(test())


def test_a_failed_load_is_told_to_whoever_started(tmp_path: Path) -> None:
    async def test() -> None:
        with pytest.raises(FileNotFoundError):
            async with rig(tmp_path / "nothing", load=lambda folder: open(folder)):  # type: ignore[arg-type,return-value]
                pass

    run_async(test())


async def stall(subject: Rig, release: Awaitable[Any], request: Any) -> Answer:
    """Run a request whose sink stands still after its first content until `release` is done."""
    has_waited = False

    async def watch(event: Event) -> None:
        nonlocal has_waited
        if isinstance(event, ContentDelta) and not has_waited:
            has_waited = True
            await release

    return await subject.run(request, watch)


@pytest.mark.parametrize("kind", [StopIteration, SystemExit, KeyboardInterrupt])
def test_a_load_that_raises_what_no_future_takes_is_told_all_the_same(
    kind: type[BaseException],
) -> None:
    def load() -> LoadedModel:
        raise kind("of the model's own code")

    async def test() -> None:
        thread = GenerationThread(EngineSettings(), load)
        with pytest.raises(RuntimeError, match=f"{kind.__name__}: of the model's own code"):
            await asyncio.wait_for(thread.start(), 10)

    run_async(test())


def test_a_reader_that_stops_is_parked_and_goes_on_where_it_was(full_model: Path) -> None:
    async def test() -> None:
        seeded = SamplingRequest(temperature=1.0, seed=7)
        request = text_request(
            "hello", max_tokens=250, sampling=seeded, top_logprobs=1, stop=("\x00",)
        )
        async with rig(full_model, stall_buffer_bytes=4000) as subject:
            counters = subject.thread.counters
            alone = await subject.run(request)
            go_on = asyncio.Event()
            stalled = asyncio.create_task(stall(subject, go_on.wait(), request))
            beside = await subject.run(text_request("other", max_tokens=150))
            assert beside.end.completion_tokens == 150
            before = counters.generated_tokens
            await subject.run(text_request("other", max_tokens=20))
            assert counters.generated_tokens == before + 20  # the stalled row does not run
            go_on.set()
            answer = await stalled
            assert answer.text == alone.text
            assert answer.end.completion_tokens == alone.end.completion_tokens
            assert [p.raw for p in answer.logprobs] == [p.raw for p in alone.logprobs]
            await subject.wait_idle()
            assert counters.stalled == 0

    run_async(test())


def test_a_reader_that_never_comes_back_is_cancelled_and_counted(full_model: Path) -> None:
    async def test() -> None:
        async with rig(full_model, stall_timeout_s=0.3, stall_buffer_bytes=2000) as subject:
            never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            with pytest.raises(EngineError) as caught:
                await stall(subject, never, text_request("hello", max_tokens=1900))
            assert caught.value.code == "client_stalled"
            await subject.wait_idle()
            assert subject.thread.counters.stalled == 1
            assert subject.thread.counters.cancelled == 0

    run_async(test())


def test_a_parked_completion_can_be_cancelled(full_model: Path) -> None:
    async def test() -> None:
        async with rig(full_model, stall_buffer_bytes=2000) as subject:
            never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(
                stall(subject, never, text_request("hello", max_tokens=1900))
            )
            await subject.run(text_request("other", max_tokens=100))
            await cancel(task)
            await subject.wait_idle()
            assert subject.thread.counters.cancelled == 1

    run_async(test())


@pytest.mark.case("05")
@pytest.mark.parametrize("seed", range(2))
def test_answers_do_not_leak_between_concurrent_requests(parrot_model: Path, seed: int) -> None:
    source = random.Random(seed)

    async def test() -> None:
        async with rig(parrot_model) as subject:
            words = [f"W{number:02d}-{source.randrange(10**9):09d}" for number in range(16)]

            async def one(word: str) -> Answer:
                letters = source.choices("abcdefghijklmnopqrstuvwxyz", k=source.randrange(10, 300))
                await asyncio.sleep(source.random() * 0.1)
                return await subject.run(
                    chat_request("".join(letters) + " say it", word, "say it", max_tokens=60)
                )

            answers = await asyncio.gather(*map(one, words))
            for word, answer in zip(words, answers, strict=True):
                assert answer.text == word
                assert answer.end.finish_reason == "stop"

    run_async(test())
