"""Blocking work beside an event loop, on a thread of its own that nobody has to wait for."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_own_thread(act: Callable[[], T], name: str) -> T:
    """What `act` returns or raises; cancelled, it is left to end by itself.

    Not from a pool: its few threads could be used up by work that never ends, a disk that does not
    answer among it, and the end of the process would wait for them.

    Args:
        name: of the thread.

    Raises:
        RuntimeError: there is no thread to be had.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not result.done():  # it was given up
            set_it(value)

    def run() -> None:
        outcome: tuple[Callable[[Any], None], Any]
        try:
            outcome = (result.set_result, act())
        except Exception as error:  # noqa: BLE001 - the top frame of the thread
            outcome = (result.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await result
