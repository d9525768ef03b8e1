"""The vocabulary that grammars are compiled for: made once, when first needed, on a thread of its own.

Making it takes seconds for a large one. Who needs it waits on the event loop, so that no worker
thread stands still for it, and nobody who gives up stops it for those who come later.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

from llguidance import LLTokenizer


class LateVocabulary:
    """One vocabulary.

    Args:
        make: makes it; blocking.
    """

    def __init__(self, make: Callable[[], LLTokenizer]) -> None:
        self._make = make
        self._made: Future[LLTokenizer] | None = None

    async def wait(self, timeout_s: float) -> None:
        """Until it has been made, or has turned out to be impossible.

        Raises:
            TimeoutError: it takes longer; it is still being made.
        """
        if self._made is None or _has_failed(self._made):
            made: Future[LLTokenizer] = Future()
            threading.Thread(target=self._run, args=(made,), name="vocabulary", daemon=True).start()
            self._made = made  # only now: of a thread that could not be started nothing comes
        if self._made.done():
            return
        result = asyncio.wrap_future(self._made)
        # Not wait_for, which would cancel it for all.
        done, _ = await asyncio.wait({result}, timeout=timeout_s)
        if not done:
            raise TimeoutError
        result.exception()  # told to who takes it

    def result(self) -> LLTokenizer:
        """The vocabulary, which has been waited for.

        Raises:
            ValueError: there is none for this tokenizer.
        """
        assert self._made is not None, "nobody has waited for it"
        return self._made.result(timeout=0)

    def _run(self, made: Future[LLTokenizer]) -> None:
        try:
            made.set_result(self._make())
        except BaseException as error:  # noqa: BLE001 - the top frame of this thread
            made.set_exception(error)


def _has_failed(made: Future[LLTokenizer]) -> bool:
    """Whether it is worth another try: it ended, by something else than the tokenizer's kind."""
    error = made.exception() if made.done() else None
    return error is not None and not isinstance(error, ValueError)
