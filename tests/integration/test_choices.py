"""Choices of one request share one prefill, and each says what it would say alone."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlx_isolate_engine.cache.prompt_cache import PromptCache
from mlx_isolate_engine.completion.events import Event, PrefillProgress
from mlx_isolate_engine.completion.request import CompletionRequest, SamplingRequest
from mlx_isolate_engine.protocols.fields import same_prompt
from tests.fakes.simulated_device import FAST_GPU, SimulatedLane
from tests.integration.generation_rig import Rig, rig, run_async, text_request
from tests.material.models import (
    CACHE_LIST,
    FULL,
    HYBRID,
    RECURRENT,
    SLIDING,
    SLOW,
    ModelSpec,
)

Folder = Callable[[ModelSpec], Path]

PROMPT = "hello world and the code " * 6
SEEDED = SamplingRequest(temperature=0.9, seed=7)


def choices(count: int, **fields: Any) -> tuple[CompletionRequest, ...]:
    request = text_request(PROMPT, **{"max_tokens": 12, **fields})
    return same_prompt(request, SEEDED, count, "group")


async def texts_of(subject: Rig, requests: tuple[CompletionRequest, ...]) -> list[str]:
    answers = await asyncio.gather(*(subject.run(request) for request in requests))
    return [answer.text for answer in answers]


async def texts_alone(subject: Rig, requests: tuple[CompletionRequest, ...]) -> list[str]:
    texts: list[str] = []
    for request in requests:
        alone = msgspec.structs.replace(request, group=None, choices=1)
        texts.append((await subject.run(alone)).text)
    return texts


@pytest.mark.parametrize("with_cache", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize(
    "spec", [FULL, SLIDING, RECURRENT, HYBRID, CACHE_LIST], ids=lambda spec: spec.kind
)
def test_choices_share_one_prefill_and_say_what_they_say_alone(
    model_folder: Folder, spec: ModelSpec, with_cache: bool
) -> None:
    def make_prompt_cache(_: Any) -> PromptCache:
        return PromptCache(entries_max=10, bytes_max=None)

    async def test() -> None:
        folder = model_folder(spec)
        make = make_prompt_cache if with_cache else None
        async with rig(folder, make_prompt_cache=make) as subject:
            together = await texts_of(subject, choices(4))
            await subject.wait_idle()
            ran = subject.thread.counters.prompt_tokens
            length = await subject.service.count_tokens(text_request(PROMPT))
            assert ran == length + 3  # and each choice's last token
            assert len(set(together)) == 4
        async with rig(folder) as subject:
            assert together == await texts_alone(subject, choices(4))

    run_async(test())


def test_more_choices_than_rows_still_share_one_prefill(model_folder: Folder) -> None:
    async def test() -> None:
        async with rig(model_folder(FULL), decode_concurrency=2) as subject:
            together = await texts_of(subject, choices(6))
            length = await subject.service.count_tokens(text_request(PROMPT))
            assert subject.thread.counters.prompt_tokens == length + 5
            assert together == await texts_alone(subject, choices(6))

    run_async(test())


def test_choices_go_on_when_the_one_that_runs_the_prompt_is_cancelled(
    model_folder: Folder,
) -> None:
    async def test() -> None:
        async with rig(model_folder(SLOW), prefill_step_size=16) as subject:
            first, *others = choices(3)
            began = asyncio.Event()

            async def watch(event: Event) -> None:
                if isinstance(event, PrefillProgress):
                    began.set()

            leader = asyncio.create_task(subject.run(first, watch))
            rest = [asyncio.create_task(subject.run(each)) for each in others]
            await began.wait()
            leader.cancel()
            answers = await asyncio.gather(*rest)
            assert [answer.text for answer in answers] == await texts_alone(subject, tuple(others))
            await subject.wait_idle()

    run_async(test())


def test_a_prompt_of_several_choices_is_run_once(tmp_path: Path) -> None:
    lane = SimulatedLane(tmp_path, FAST_GPU, rehearsed=True)
    lane.finish(*[lane.ask(1000, group="one", choices=5) for _ in range(5)])
    assert lane.prefills == [(1, 999)]


def test_two_requests_with_several_choices_do_not_mix(tmp_path: Path) -> None:
    lane = SimulatedLane(tmp_path, FAST_GPU, rehearsed=True)
    asked = [lane.ask(1000, group=name, choices=3) for name in ("one", "two") * 3]
    lane.finish(*asked)
    assert lane.prefills == [(2, 999)]


@pytest.mark.parametrize("is_left", [False, True], ids=["ends", "is left"])
def test_a_choice_that_never_comes_leaves_nothing_behind(tmp_path: Path, is_left: bool) -> None:
    lane = SimulatedLane(tmp_path, FAST_GPU, rehearsed=True)
    asked = lane.ask(1000, group="one", choices=3)
    shared = lane.lane._shared  # pyright: ignore[reportPrivateUsage]
    while not shared:
        lane.step()
    if is_left:
        lane.lane.drop(asked.ticket)
    else:
        lane.finish(asked)
    assert len(shared) == 0
    assert not lane.lane.has_work()
