"""Requests of the drills' own clients, and what each of them saw."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Self

import aiohttp
import msgspec

from mlx_isolate_supervisor.drills.record import reason_of

# Continued for ever by any language model, and short enough to be prefilled at once.
PROMPT = "Counting on and on: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19,"
# More than any context holds: such a request ends by its cancellation or by its engine's death.
ENDLESS = 1_000_000
# For a page, which a supervisor answers from memory; without it one that stands still holds a drill.
PAGE_DEADLINE_S = 30.0


class Seen:
    """What one client saw of its answer so far; times by time.monotonic().

    Attributes:
        status: of the answer, 0 before it.
        code: of the error it was told.
        finish: the finish reason.
        done: whether `[DONE]`, or a whole JSON answer, came.
        events: content events.
        cached: cached prompt tokens by the usage of the answer.
        lost: why there was no proper answer, e.g. a refused connection.
    """

    def __init__(self) -> None:
        self.status = 0
        self.code: str | None = None
        self.retry_after: str | None = None
        self.finish: str | None = None
        self.done = False
        self.events = 0
        self.first_at: float | None = None
        self.ended_at: float | None = None
        self.cached: int | None = None
        self.lost: str | None = None
        self.begun = asyncio.Event()

    def __repr__(self) -> str:
        """All that matters in a verdict."""
        facts = [str(self.status), self.code or self.lost or self.finish or "no end"]
        return f"<{' '.join(facts)}, {self.events} events>"

    @property
    def is_complete(self) -> bool:
        """Whether the answer came to its proper end."""
        return self.status == 200 and self.done and self.code is None and self.lost is None

    @property
    def is_told(self) -> bool:
        """Whether it was told an error."""
        return self.code is not None

    def read(self, value: dict[str, Any]) -> None:
        """Take in one event, or a whole answer."""
        if "error" in value:
            self.code = str((value["error"] or {}).get("code"))
            return
        usage: dict[str, Any] = value.get("usage") or {}
        details: dict[str, Any] = usage.get("prompt_tokens_details") or {}
        self.cached = details.get("cached_tokens", self.cached)
        for choice in value.get("choices", ()):
            self.events += 1
            self.finish = choice.get("finish_reason") or self.finish
        if self.first_at is None and self.events:
            self.first_at = time.monotonic()
            self.begun.set()


class Client:
    """Requests to one daemon. Use as an async context manager.

    Args:
        url: its address.
        api_key: sent as a bearer token.
        fields: what every request to generate has besides (a fake engine's pace).
    """

    def __init__(self, url: str, api_key: str | None, fields: Mapping[str, Any]) -> None:
        self.url = url.rstrip("/")
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._fields = dict(fields)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Open the session."""
        self._session = aiohttp.ClientSession(
            headers=self.headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            connector=aiohttp.TCPConnector(limit=0),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel what still runs and close."""
        await self.leave(*self._tasks)
        await self._session.close()

    async def leave(self, *tasks: "asyncio.Task[None]") -> None:
        """Hang up."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def get(self, path: str) -> bytes:
        """The body of a GET.

        Raises:
            aiohttp.ClientError: no answer, or one that is an error.
            TimeoutError: not within PAGE_DEADLINE_S.
        """
        limit = aiohttp.ClientTimeout(total=PAGE_DEADLINE_S)
        async with self._session.get(
            self.url + path, raise_for_status=True, timeout=limit
        ) as answer:
            return await answer.read()

    async def post(self, path: str, body: object = None) -> tuple[int, Any]:
        """Status and JSON of a POST, which may take as long as a load; who waits has a deadline."""
        async with self._session.post(self.url + path, json=body or {}) as answer:
            return answer.status, msgspec.json.decode(await answer.read())

    async def follow(self, path: str, opened: asyncio.Event) -> AsyncIterator[bytes]:
        """The lines of an answer that may never end, as they come; sets `opened` first."""
        async with self._session.get(self.url + path, raise_for_status=True) as answer:
            opened.set()
            async for line in answer.content:
                yield line

    def body(self, model: str, tokens: int, prompt: str = PROMPT) -> dict[str, Any]:
        """A request to generate, streamed."""
        body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": tokens}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body | self._fields

    def begin(
        self, model: str, tokens: int, prompt: str = PROMPT
    ) -> tuple[Seen, "asyncio.Task[None]"]:
        """Send a request to generate; what it sees while its task runs."""
        seen = Seen()
        task = asyncio.create_task(self._run(self.body(model, tokens, prompt), seen))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return seen, task

    async def answer(self, model: str, tokens: int = 4, prompt: str = PROMPT) -> Seen:
        """Ask for a few tokens and wait for all of them."""
        seen, task = self.begin(model, tokens, prompt)
        await task
        return seen

    async def _run(self, body: dict[str, Any], seen: Seen) -> None:
        try:
            async with self._session.post(self.url + "/v1/completions", json=body) as answer:
                seen.status = answer.status
                seen.retry_after = answer.headers.get("Retry-After")
                if answer.content_type == "text/event-stream":
                    async for line in answer.content:
                        _take_line(line, seen)
                else:
                    seen.read(msgspec.json.decode(await answer.read()))
                    seen.done = seen.code is None
        except aiohttp.ClientPayloadError:
            pass  # closed without the terminator, as after an error event
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            seen.lost = reason_of(error)
        finally:
            seen.ended_at = time.monotonic()


def _take_line(line: bytes, seen: Seen) -> None:
    if not line.startswith(b"data: "):
        return
    data = line[6:].strip()
    if data == b"[DONE]":
        seen.done = True
    else:
        seen.read(msgspec.json.decode(data))
