"""Runs one admitted completion: feeds its sink, holds it to the stall limit, cleans up once."""

import asyncio
from collections.abc import Callable

from mlx_isolate_engine.completion.events import CompletionSummary
from mlx_isolate_engine.completion.seam import Sink
from mlx_isolate_engine.generation.outbox import RESUME_SHARE, weigh
from mlx_isolate_engine.generation.plan import CompletionPlan
from mlx_isolate_engine.generation.thread import GenerationThread
from mlx_isolate_engine.generation.ticket import Ticket
from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.errors import EngineError


class AdmittedCompletion:
    """Implements `PreparedCompletion`: holds one place until it is executed or closed.

    Counted as coming by whoever made it, until then.

    Args:
        plan: what to run.
        thread: where to run it.
        settings: the stall limits.
        release: gives the place back; called exactly once.
        notices: see `PreparedCompletion.notices`.
    """

    def __init__(
        self,
        plan: CompletionPlan,
        thread: GenerationThread,
        settings: EngineSettings,
        release: Callable[[], None],
        notices: tuple[str, ...] = (),
    ) -> None:
        self._ticket = Ticket(plan)
        self._thread = thread
        self._resume_bytes = settings.stall_buffer_bytes * RESUME_SHARE
        self._stall_timeout_s = settings.stall_timeout_s
        self._release: Callable[[], None] | None = release
        self._notices = notices
        self._is_started = False
        self._is_coming = True
        self._sink_since: float | None = None

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self._ticket.plan.prompt.tokens)

    @property
    def notices(self) -> tuple[str, ...]:
        """See `PreparedCompletion.notices`."""
        return self._notices

    async def execute(self, sink: Sink) -> CompletionSummary:
        """See `PreparedCompletion.execute`."""
        assert not self._is_started and self._release is not None, "a completion runs once"
        self._is_started = True
        self._arrive()  # first: nobody needs to wait for it once it can be seen
        self._thread.submit(self._ticket)
        limit = asyncio.timeout(None)
        try:
            async with limit:
                watch = _StallWatch(self, limit)
                try:
                    return await self._run(sink)
                finally:
                    watch.close()
        except TimeoutError as error:
            if not limit.expired():
                raise  # The sink's own.
            self._thread.give_up(self._ticket, "stalled")
            raise EngineError(
                "The client stopped reading.", status=504, code="client_stalled"
            ) from error
        except BaseException:
            self._thread.give_up(self._ticket, "cancelled")
            raise
        finally:
            self._give_back()

    async def close(self) -> None:
        """See `PreparedCompletion.close`."""
        if not self._is_started:
            self._give_back()

    async def _run(self, sink: Sink) -> CompletionSummary:
        ticket, outbox, clock = self._ticket, self._ticket.outbox, asyncio.get_running_loop().time
        while True:
            end = await outbox.wait_end_or_event()
            while (event := outbox.pop()) is not None:
                self._sink_since = clock()
                await sink(event)
                self._sink_since = None
                outbox.read += weigh(event)
                if ticket.is_parked and outbox.unread_bytes <= self._resume_bytes:
                    self._thread.resume(ticket)
            match end:
                case None:
                    continue
                case CompletionSummary():
                    return end
                case EngineError():
                    raise end

    def _arrive(self) -> None:
        if self._is_coming:
            self._is_coming = False
            self._thread.counters.coming -= 1

    def _give_back(self) -> None:
        self._arrive()
        if self._release is not None:
            release, self._release = self._release, None
            release()

    @property
    def stall_timeout_s(self) -> float:
        """Longest time that the sink may take for one event."""
        return self._stall_timeout_s

    @property
    def sink_since(self) -> float | None:
        """When the sink got the event that it has not taken yet (loop time)."""
        return self._sink_since


class _StallWatch:
    """Ends an execution whose sink has not taken an event for too long.

    It looks again only when the limit could have been reached: a timer for each event would cost
    more than the event.
    """

    def __init__(self, completion: AdmittedCompletion, limit: asyncio.Timeout) -> None:
        self._completion = completion
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(completion.stall_timeout_s, self._look)

    def _look(self) -> None:
        since = self._completion.sink_since
        now = self._loop.time()
        due = (now if since is None else since) + self._completion.stall_timeout_s
        if since is not None and due <= now:
            self._limit.reschedule(now)
        else:
            self._timer = self._loop.call_at(due, self._look)

    def close(self) -> None:
        self._timer.cancel()
