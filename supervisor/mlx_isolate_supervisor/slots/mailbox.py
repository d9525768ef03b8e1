"""The mailbox of one slot: messages handled one after the other, and callers told of what they await.

Each is handled by whoever posts while none is handled. Knows nothing of models: what has to hold
after a message, and how a record is mended that a failed one has left half changed, is the slot's.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from mlx_isolate_shared.errors import CapacityError
from mlx_isolate_supervisor.slots import causes
from mlx_isolate_supervisor.telemetry.logs import log_failure

# After faults of our own the record is mended at once, but no more often than this.
MEND_INTERVAL_S = 1.0

# Not yet (False), now (True), or never (the reason).
Condition = Callable[[], bool | CapacityError]
# Told that a message failed.
OnFault = Callable[[CapacityError], object]


class Mailbox:
    """Messages of one slot.

    Args:
        model_id: whose, for the log and for callers.
        now: monotonic seconds.
        settle: called after every message.
        mend: called after messages that have failed, once no other is left.

    Attributes:
        is_over: closed for good; what is posted is not handled any more.
    """

    def __init__(
        self,
        model_id: str,
        now: Callable[[], float],
        *,
        settle: Callable[[], None],
        mend: Callable[[], None],
    ) -> None:
        self._model_id = model_id
        self._now = now
        self._settle = settle
        self._mend = mend
        self._messages: deque[tuple[Callable[[], object], OnFault | None]] = deque()
        self._conditions: list[tuple[Condition, asyncio.Future[None]]] = []
        self._is_open = False
        self._is_handling = False
        self.is_over = False
        # A message has failed since the record was last mended, and when it may be mended again.
        self._is_suspect = False
        self._mend_at = 0.0
        self._is_mend_due = False

    def open(self) -> None:
        """Handle messages from the next turn of the loop on."""
        asyncio.get_running_loop().call_soon(self._open)

    def close(self) -> None:
        """Handle none any more, for good."""
        self.is_over = True

    def post(self, message: Callable[[], object], on_fault: OnFault | None = None) -> None:
        """Handle `message` after every one that was posted before it.

        At once, where no other is being handled: a request that finds a free place does not wait
        for a turn of the loop. What is posted while a message is handled, as a consequence of it,
        comes after it, so that none ever meets the state that another has half changed.

        Args:
            message: what to do.
            on_fault: told if it fails by a fault of our own.
        """
        self._messages.append((message, on_fault))
        if self._is_open and not self._is_handling:
            self._handle()

    def attempt(self, act: Callable[[], object], on_fault: OnFault | None = None) -> None:
        """Do it; a fault of our own must cost neither the front end nor the model for good."""
        try:
            act()
        except Exception as error:  # noqa: BLE001
            self._is_suspect = True
            log_failure("slot.message_failed", error, model=self._model_id)
            if on_fault is not None:
                on_fault(causes.not_done(self._model_id))

    async def until(self, condition: Condition, act: Callable[[], object] | None = None) -> None:
        """Do `act` as a message, then wait for `condition`.

        Raises:
            CapacityError: it can never hold, or a fault of our own came between.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if act is not None:
            self.post(act, partial(_refuse, future))
        self.post(partial(self._conditions.append, (condition, future)))
        await future

    @property
    def has_callers(self) -> bool:
        """Whether somebody waits for a condition."""
        return bool(self._conditions)

    def look_at_conditions(self) -> None:
        """Tell those whose condition holds now, or never will."""
        for entry in tuple(self._conditions):
            condition, future = entry
            self.attempt(partial(_look_at, condition, future), partial(_refuse, future))
            if future.done():
                self._conditions.remove(entry)

    def _open(self) -> None:
        self._is_open = True
        self._handle()

    def _handle(self) -> None:
        self._is_handling = True
        try:
            while not self.is_over:
                if self._messages:
                    self.attempt(*self._messages.popleft())
                elif self._is_suspect:
                    # Only now: the exit of an engine that is missed may have been in a message.
                    self._is_suspect = False
                    if not self._mend_or_wait():
                        break
                else:
                    break
                self._settle()
        finally:
            # Whatever came through, the next message must not find the mailbox shut for ever.
            self._is_handling = False

    def _mend_or_wait(self) -> bool:
        """Something failed half done: have the record mended now; False = only later."""
        wait_s = self._mend_at - self._now()
        if wait_s > 0.0:
            if not self._is_mend_due:
                self._is_mend_due = True
                asyncio.get_running_loop().call_later(wait_s, self.post, self._suspect)
            return False
        self._mend_at = self._now() + MEND_INTERVAL_S
        self.attempt(self._mend)
        return True

    def _suspect(self) -> None:
        self._is_suspect, self._is_mend_due = True, False


def _look_at(condition: Condition, future: asyncio.Future[None]) -> None:
    verdict = False if future.done() else condition()
    if isinstance(verdict, CapacityError):
        future.set_exception(verdict)
    elif verdict:
        future.set_result(None)


def _refuse(future: asyncio.Future[None], error: CapacityError) -> None:
    if not future.done():
        future.set_exception(error)
