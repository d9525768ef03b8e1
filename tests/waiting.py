"""Bounded waiting for an observable condition; the only place where a test polls."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

POLL_INTERVAL_S = 0.01

T = TypeVar("T")


def wait_for(condition: Callable[[], T], deadline_s: float, what: str = "") -> T:
    """Poll `condition` until it is true and return its value.

    Args:
        condition: called every POLL_INTERVAL_S; any true value ends the wait.
        deadline_s: seconds from now; what is awaited must hold by then.
        what: what is awaited, for the failure message.

    Raises:
        AssertionError: the deadline passed.
    """
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= end:
            raise AssertionError(f"not within {deadline_s} s: {what or condition}")
        time.sleep(POLL_INTERVAL_S)


async def wait_until(condition: Callable[[], T], deadline_s: float, what: str = "") -> T:
    """As `wait_for`, without blocking the event loop."""

    async def ask() -> T:
        return condition()

    return await wait_until_answer(ask, deadline_s, what)


async def wait_until_answer(
    question: Callable[[], Awaitable[T]], deadline_s: float, what: str = ""
) -> T:
    """As `wait_until`, for a condition that is itself awaited (e.g. an HTTP request)."""
    end = time.monotonic() + deadline_s
    while True:
        value = await question()
        if value:
            return value
        if time.monotonic() >= end:
            raise AssertionError(f"not within {deadline_s} s: {what or question}")
        await asyncio.sleep(POLL_INTERVAL_S)
