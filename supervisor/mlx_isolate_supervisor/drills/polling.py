"""Polling of a condition that nobody tells us about; whoever waits sets the deadline."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.005


async def poll(condition: Callable[[], T]) -> T:
    """The first true value of `condition`."""
    while True:
        value = condition()
        if value:
            return value
        await asyncio.sleep(POLL_S)


async def poll_answer(question: Callable[[], Awaitable[T]], holds: Callable[[T], bool]) -> T:
    """The first answer of `question` that `holds`."""
    while True:
        answer = await question()
        if holds(answer):
            return answer
        await asyncio.sleep(POLL_S)
