"""A flood of long prompts neither stops a running stream nor holds up a short chat."""

import asyncio
import time
from itertools import pairwise
from pathlib import Path

import pytest

from mlx_isolate_engine.completion.events import ContentDelta, Event
from tests.integration.generation_rig import Rig, rig, run_async, text_request, tokens_request
from tests.material.models import ModelSpec, build_model

MAX_STEP_S = 0.5
LONG = 6000
FIRST_TOKEN_S = 5.0


class Watch:
    """Arrival times of a stream's tokens."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.first = asyncio.Event()
        self.another = asyncio.Event()

    async def __call__(self, event: Event) -> None:
        if isinstance(event, ContentDelta):
            self.times.append(time.perf_counter())
            self.first.set()
            self.another.set()

    async def next_token(self) -> None:
        self.another.clear()
        await self.another.wait()

    def largest_gap(self, begin: float) -> float:
        times = [begin, *(each for each in self.times if each > begin)]
        return max((b - a for a, b in pairwise(times)), default=0.0)


async def flood(subject: Rig, number: int) -> None:
    prompt = [65 + (number * 7 + place) % 50 for place in range(LONG)]
    await subject.run(tokens_request(prompt, max_tokens=2))


async def measure(subject: Rig, prompt_tokens: int) -> tuple[float, float]:
    """The stream's largest gap while so many prompt tokens ran, and the chat's first token."""
    stream, chat = Watch(), Watch()
    running = asyncio.create_task(subject.run(text_request("hello", max_tokens=16000), stream))
    await stream.first.wait()
    begin = time.perf_counter()
    floods = [asyncio.create_task(flood(subject, number)) for number in range(8)]
    await asyncio.sleep(0)
    asked = time.perf_counter()
    await subject.run(text_request("hello world", max_tokens=12), chat)
    while subject.thread.counters.prompt_tokens < prompt_tokens:
        await stream.next_token()
    for task in (running, *floods):
        task.cancel()
    await asyncio.gather(running, *floods, return_exceptions=True)
    return stream.largest_gap(begin), chat.times[0] - asked


@pytest.mark.case("29")
@pytest.mark.alone
@pytest.mark.parametrize(
    "prompt_tokens", [4 * 1024, pytest.param(8 * LONG, marks=pytest.mark.slow)]
)
def test_long_prompts_leave_room_for_a_stream_and_a_short_chat(
    tmp_path: Path, prompt_tokens: int
) -> None:
    folder = build_model(tmp_path / "m", ModelSpec(kind="full", context=16384))

    async def test() -> None:
        async with rig(folder, max_step_s=MAX_STEP_S) as subject:
            gap, first_token = await measure(subject, prompt_tokens)
            print(f"gap {gap:.3f} s, first token {first_token:.3f} s")
            assert gap <= 2 * MAX_STEP_S
            assert first_token < FIRST_TOKEN_S

    run_async(test(), deadline_s=900.0)


@pytest.mark.case("29")
def test_a_long_prompt_changes_no_token_of_a_stream(full_model: Path) -> None:
    async def test() -> None:
        async with rig(full_model) as subject:
            request = text_request("hello", max_tokens=120)
            alone = await subject.run(request)
            stream = Watch()
            running = asyncio.create_task(subject.run(request, stream))
            await stream.first.wait()
            prompt = [65 + place % 50 for place in range(1800)]
            await subject.run(tokens_request(prompt, max_tokens=2))
            assert (await running).text == alone.text

    run_async(test())
