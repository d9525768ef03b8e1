"""The clients of a soak: each sends one request and ends in one outcome."""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from bench.soak_http import Broken, Exchange
from bench.soak_plan import Request
from bench.soak_wire import (
    PATHS,
    Heard,
    hear_event,
    hear_whole,
    malformed,
    request_body,
    tool_call_text,
)

# Longest time without a byte: above the daemon's own limits that could end it. As long as something
# comes, an answer may take its time.
SILENCE_S_MAX = 180.0
STALLED_RECEIVE_BYTES = 4096
Ending = Literal["right", "wrong", "told", "left", "refused", "torn", "none"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one request ended, in seconds since the start of the soak.

    Attributes:
        ending: right or wrong (a complete answer), told (an honest error), left (by itself),
            refused (nonsense, properly), torn (an answer that is no stream ended in its midst),
            none (no outcome).
        code: of the error it was told.
        detail: what is wrong.
    """

    request: Request
    ending: Ending
    status: int = 0
    code: str = ""
    detail: str = ""
    began_s: float
    ended_s: float


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What a model says to one prompt when it is asked cold.

    Attributes:
        pieces: the text that each token adds.
        tokens_max: so many tokens may be asked for: beyond them the choice is too close for
            arithmetic in another order, or nothing is known.
        whole: the whole answer, where it ends by itself.
    """

    pieces: tuple[str, ...]
    tokens_max: int
    whole: str | None = None

    def text(self, tokens: int) -> str:
        """The text of an answer that is cut off after so many tokens, or ends before."""
        if self.whole is not None and tokens > len(self.pieces):
            return self.whole
        return "".join(self.pieces[:tokens])


class Clients:
    """Runs requests against the daemon.

    Args:
        port: of the daemon.
        prompts: of each model.
        expected: by model, `chat` or `completions`, and the number of the prompt.
        now: seconds since the start.
    """

    def __init__(
        self,
        port: int,
        prompts: Mapping[str, tuple[str, ...]],
        expected: Mapping[tuple[str, str, int], Expected],
        now: Callable[[], float],
    ) -> None:
        self._port = port
        self._prompts = prompts
        self._expected = expected
        self._now = now
        self.outcomes: list[Outcome] = []

    async def run(self, request: Request) -> None:
        """Send it and note its outcome."""
        began_s = self._now()
        status = 0
        ending: Ending
        try:
            if request.kind == "malformed":
                ending, status, code, detail = await self._nonsense(request)
            else:
                ending, status, code, detail = await self._ask(request)
        except TimeoutError:
            ending, code, detail = "none", "", f"nothing within {SILENCE_S_MAX} s"
        except (OSError, ValueError, KeyError, TypeError) as error:
            ending, code, detail = "none", "", repr(error)
        self.outcomes.append(
            Outcome(
                request=request,
                ending=ending,
                status=status,
                code=code,
                detail=detail,
                began_s=round(began_s, 3),
                ended_s=round(self._now(), 3),
            )
        )

    async def _nonsense(self, request: Request) -> tuple[Ending, int, str, str]:
        data, statuses = malformed(request.variant, request.model)
        exchange = await Exchange.connect(self._port)
        try:
            exchange.send_raw(data)
            if 0 in statuses:
                exchange.end_sending()
            try:
                async with asyncio.timeout(SILENCE_S_MAX):
                    status = await exchange.head()
                    body = await exchange.body()
            except Broken as broken:
                right = 0 in statuses
                return "refused" if right else "none", 0, "", "" if right else str(broken)
            code = str(json.loads(body)["error"].get("code"))
            if status in statuses:
                return "refused", status, code, ""
            if status >= 500:
                return "told", status, code, ""
            return "wrong", status, code, f"expected one of {statuses}"
        finally:
            exchange.close()

    async def _ask(self, request: Request) -> tuple[Ending, int, str, str]:
        is_stalled = request.kind == "stalled"
        exchange = await Exchange.connect(self._port, STALLED_RECEIVE_BYTES if is_stalled else None)
        leaves = request.kind == "aborted"
        try:
            body = request_body(request, self._prompt(request), self._tokens(request))
            exchange.send("POST", PATHS[request.api], body)
            if leaves:
                return await self._leave(exchange, request)
            return await self._read(exchange, request)
        finally:
            exchange.close(resets=leaves and request.resets)

    async def _leave(self, exchange: Exchange, request: Request) -> tuple[Ending, int, str, str]:
        """Read a few events and go, whatever was heard."""
        status = 0
        try:
            async with asyncio.timeout(request.pause_s):
                status = await exchange.head()
                for _ in range(request.events):
                    await exchange.piece()
        except (TimeoutError, Broken):
            pass
        return "left", status, "", ""

    async def _read(self, exchange: Exchange, request: Request) -> tuple[Ending, int, str, str]:
        heard = Heard()
        status = 0
        try:
            async with asyncio.timeout(SILENCE_S_MAX):
                status = await exchange.head()
            is_stream = exchange.headers["content-type"].startswith("text/event-stream")
            if not is_stream:
                async with asyncio.timeout(SILENCE_S_MAX):
                    hear_whole(heard, json.loads(await exchange.body()))
            while is_stream:
                async with asyncio.timeout(SILENCE_S_MAX):
                    if not (piece := await exchange.piece()):
                        break
                for line in piece.decode().splitlines():
                    hear_event(heard, line)
                if request.kind == "stalled" and heard.events == request.events:
                    await asyncio.sleep(request.pause_s)
        except Broken as broken:
            if not heard.errors:
                torn = status == 200 and not request.stream
                return "torn" if torn else "none", status, "", f"{broken} after {heard}"
        return self._judge(request, status, heard)

    def _judge(self, request: Request, status: int, heard: Heard) -> tuple[Ending, int, str, str]:
        if heard.errors:
            honest = not heard.is_done and not heard.has_finished and len(heard.errors) == 1
            return (
                "told" if honest else "wrong",
                status,
                heard.errors[0],
                "" if honest else f"{heard}",
            )
        if status != 200 or not (heard.is_done and heard.has_finished):
            return "none", status, "", f"neither an end nor an error: {heard}"
        if request.kind == "tools":
            number = request.variant
            right = (heard.call, heard.text.strip()) == ("add", "") and (
                json.loads(heard.arguments) == {"a": number}
            )
            return "right" if right else "wrong", status, "", "" if right else f"{heard}"
        wanted = self._known(request).text(self._tokens(request))
        right = heard.text == wanted
        return (
            "right" if right else "wrong",
            status,
            "",
            "" if right else f"{heard}, not {wanted!r}",
        )

    def _known(self, request: Request) -> Expected:
        way = "completions" if request.api == "completions" else "chat"
        return self._expected[request.model, way, request.prompt]

    def _tokens(self, request: Request) -> int:
        if request.kind == "tools":
            return request.tokens
        return min(request.tokens, self._known(request).tokens_max)

    def _prompt(self, request: Request) -> str:
        if request.kind == "tools":
            return tool_call_text(request.variant)
        return self._prompts[request.model][request.prompt]
