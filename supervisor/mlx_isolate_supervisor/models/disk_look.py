"""Looks at a model's files from the event loop: a network disk may never answer."""

import logging
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import TypeVar

from mlx_isolate_supervisor.telemetry.logs import log_event

T = TypeVar("T")

# A disk that works answers within milliseconds.
LOOK_S = 0.25

_under_way: dict[Hashable, Future[object]] = {}


def look(what: Hashable, ask: Callable[[], T], otherwise: T) -> T:
    """What `ask` returns, if it does so soon.

    Nobody asks for the same again before an earlier call has returned, so that a disk that is gone
    costs one thread and one wait.

    Args:
        what: names the question, in the log too.
        otherwise: returned where the disk does not answer.
    """
    earlier = _under_way.get(what)
    if earlier is not None:
        if not earlier.done():
            return otherwise
        del _under_way[what]
    answer: Future[T] = Future()
    try:
        threading.Thread(target=_ask, args=(ask, answer), name="disk look", daemon=True).start()
    except RuntimeError:  # no more threads
        return otherwise
    try:
        return answer.result(LOOK_S)
    except TimeoutError:
        _under_way[what] = answer  # type: ignore[assignment]  # only asked whether it is done
        log_event("disk.silent", logging.WARNING, what=str(what))
        return otherwise


def _ask(ask: Callable[[], T], answer: Future[T]) -> None:
    try:
        answer.set_result(ask())
    except BaseException as error:  # noqa: BLE001 - the top frame of this thread
        answer.set_exception(error)
