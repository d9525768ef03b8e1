"""One request from parsed to answered: prepare every completion, run them, format their events.

The only place that joins a wire protocol with the execution seam. Every exchange ends in exactly one
of: answered, rejected, failed, cancelled; the resources of its completions are given back in each.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from aiohttp import web

from mlx_isolate_engine.answers import JSON_HEADERS, internal_error
from mlx_isolate_engine.completion.events import CompletionSummary, Event, PrefillProgress
from mlx_isolate_engine.completion.seam import CompletionService, PreparedCompletion
from mlx_isolate_engine.event_stream import EventStream
from mlx_isolate_engine.protocols.contract import Streamer, WireRequest
from mlx_isolate_engine.protocols.transcript import Transcript
from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.errors import EngineError, HttpError

log = logging.getLogger("engine.exchange")

# What a client that is told of a failure may take to read it; one that has stalled never does.
_LAST_WORDS_S = 1.0
# What of the request is not held though it is answered.
WARNING_HEADER = "x-mlx-isolate-warning"
_Run = Callable[[int, PreparedCompletion], Awaitable[None]]


class Exchange:
    """One parsed request with its HTTP request; run once."""

    def __init__(
        self,
        request: web.Request,
        wire: WireRequest,
        headers: dict[str, str],
        settings: EngineSettings,
        on_completed: Callable[[], None],
    ) -> None:
        self._request = request
        self._wire = wire
        self._headers = headers
        self._settings = settings
        self._on_completed = on_completed
        self._task: asyncio.Task[object] | None = None
        self._cut_by: EngineError | None = None

    def cut(self, error: EngineError) -> None:
        """End it now; the client is told `error`."""
        if self._task is not None and self._cut_by is None:
            self._cut_by = error
            self._task.cancel()

    async def run(self, service: CompletionService) -> web.StreamResponse:
        """Answer the request.

        Raises:
            HttpError: before any byte was sent.
            ConnectionError: the client is gone.
        """
        self._task = asyncio.current_task()
        prepared: list[PreparedCompletion] = []
        try:
            for completion in self._wire.completions:
                prepared.append(await service.prepare(completion))
            if notices := {notice for each in prepared for notice in each.notices}:
                self._headers[WARNING_HEADER] = " ".join(sorted(notices))
            if self._wire.stream:
                return await self._stream(prepared)
            return await self._collect(prepared)
        except asyncio.CancelledError:
            raise self._cut_error() from None
        finally:
            self._task = None
            # Its own task, so that a second cancel cannot interrupt it.
            await asyncio.shield(asyncio.ensure_future(_close_all(prepared)))

    async def _collect(self, prepared: Sequence[PreparedCompletion]) -> web.Response:
        transcripts = [Transcript() for _ in prepared]

        async def run(index: int, completion: PreparedCompletion) -> None:
            transcript = transcripts[index]

            async def sink(event: Event) -> None:
                transcript.add(event)

            transcript.end(await completion.execute(sink))
            self._on_completed()

        await _run_all(prepared, run)
        headers = {**JSON_HEADERS, **self._headers}
        response = web.Response(body=self._wire.body(transcripts), headers=headers)
        async with _hang_up_after(self._settings.stall_timeout_s, self._request):
            await response.prepare(self._request)
            await response.write_eof()
        return response

    async def _stream(self, prepared: Sequence[PreparedCompletion]) -> web.StreamResponse:
        streamer = self._wire.streamer()
        stream = EventStream(
            self._request, self._headers, self._settings.sse_ping_interval_s, streamer.keepalive
        )
        answer = _StreamedAnswer(
            stream,
            streamer,
            prompt_tokens=prepared[0].prompt_tokens,
            patience_s=self._settings.stall_timeout_s,
            on_completed=self._on_completed,
        )
        stream.start_keepalives(prepared[0].prompt_tokens)
        try:
            await _run_all(prepared, answer.run)
            async with _hang_up_after(self._settings.stall_timeout_s, self._request):
                return await answer.end()
        except HttpError as error:
            return await self._fail(answer, error)
        except asyncio.CancelledError:
            return await self._fail(answer, self._cut_error())
        except ConnectionError:
            raise
        except Exception:
            # A fault of ours; where headers are out, the server can no longer say so.
            log.exception(
                "request.failed request=%s path=%s",
                self._headers.get("x-request-id"),
                self._request.path,
            )
            if not stream.has_begun:
                raise
            return await self._fail(answer, internal_error())
        finally:
            stream.stop_keepalives()

    async def _fail(
        self, answer: "_StreamedAnswer", error: HttpError | asyncio.CancelledError
    ) -> web.StreamResponse:
        transport = self._request.transport
        async with _hang_up_after(_LAST_WORDS_S, self._request):
            response = await answer.fail(error)
        if transport is not None:
            # It closes now, but by itself only once its buffer is empty: when its client reads.
            asyncio.get_running_loop().call_later(_LAST_WORDS_S, transport.abort)
        return response

    def _cut_error(self) -> HttpError | asyncio.CancelledError:
        """What a cancellation means: cut by us, or the client is gone."""
        if self._cut_by is None:
            return asyncio.CancelledError()
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        return self._cut_by


class _StreamedAnswer:
    """Carries events of several completions into one stream."""

    def __init__(
        self,
        stream: EventStream,
        streamer: Streamer,
        *,
        prompt_tokens: int,
        patience_s: float,
        on_completed: Callable[[], None],
    ) -> None:
        self._stream = stream
        self._patience_s = patience_s
        self._on_completed = on_completed
        self._streamer = streamer
        self._prompt_tokens = prompt_tokens
        self._has_begun = False
        self._begin_lock = asyncio.Lock()

    async def run(self, index: int, completion: PreparedCompletion) -> None:
        """Run one completion to its end."""

        async def sink(event: Event) -> None:
            if isinstance(event, PrefillProgress):
                self._stream.note_progress(event.done, event.total)
                return
            if not self._has_begun:
                await self._begin()
            for chunk in self._streamer.delta(index, event):
                await self._stream.send(chunk)

        summary: CompletionSummary = await completion.execute(sink)
        self._on_completed()
        async with _hang_up_after(self._patience_s, self._stream.request):
            await self._begin()
            for chunk in self._streamer.finish(index, summary):
                await self._stream.send(chunk)

    async def end(self) -> web.StreamResponse:
        """All completions have ended."""
        for chunk in self._streamer.end():
            await self._stream.send(chunk)
        return await self._stream.end()

    async def fail(self, error: HttpError | asyncio.CancelledError) -> web.StreamResponse:
        """End with an error event, or raise while the answer can still be a plain status."""
        if isinstance(error, asyncio.CancelledError) or not self._stream.has_begun:
            raise error
        await self._stream.send(self._streamer.error(error))
        return await self._stream.end(close_connection=True)

    async def _begin(self) -> None:
        async with self._begin_lock:
            if not self._has_begun:
                for chunk in self._streamer.begin(self._prompt_tokens):
                    await self._stream.send(chunk)
                self._has_begun = True


async def _run_all(prepared: Sequence[PreparedCompletion], run: _Run) -> None:
    """Run the completions side by side; the first failure ends the others and is raised."""
    if len(prepared) == 1:
        await run(0, prepared[0])
        return
    # Not a TaskGroup: in early 3.11 it leaves its task marked as being cancelled, and no
    # asyncio.timeout in it works from then on.
    tasks = [
        asyncio.ensure_future(_as_coroutine(run(index, completion)))
        for index, completion in enumerate(prepared)
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


@contextlib.asynccontextmanager
async def _hang_up_after(seconds: float, request: web.Request) -> AsyncGenerator[None, None]:
    """Bound the writing of what is left when nobody watches over a client that does not read.

    Raises:
        ConnectionError: the time is over and the connection closed.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client stopped reading") from None


async def _as_coroutine(awaitable: Awaitable[None]) -> None:
    await awaitable


async def _close_all(prepared: Sequence[PreparedCompletion]) -> None:
    for completion in prepared:
        await completion.close()
