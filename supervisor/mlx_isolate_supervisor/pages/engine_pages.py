"""Endpoints that ask engines about themselves: their prompt caches, and the one-token probe.

The supervisor never waits for an engine to answer anything else.
"""

import asyncio
import time
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from mlx_isolate_shared.errors import CapacityError, EngineError, RequestError
from mlx_isolate_shared.response_id import is_response_of
from mlx_isolate_supervisor.models.pool import Pool
from mlx_isolate_supervisor.pages.asked import asked_of_all, query_timeout, seconds
from mlx_isolate_supervisor.pages.json_answer import json_answer
from mlx_isolate_supervisor.relay.edge import REQUEST_ID
from mlx_isolate_supervisor.slots.lease import Outcome
from mlx_isolate_supervisor.telemetry.status import ModelStatus

# An engine's answer; without it a lying engine fills memory.
ANSWER_BYTES_MAX = 8 << 20
# What an engine may take beyond the time that it was given itself.
GRACE_S = 5.0
FLUSH_TIMEOUT_S = 30.0
ASK_TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 30.0

_PROBE = msgspec.json.encode({"prompt": "a", "max_tokens": 1, "temperature": 0})


class EngineAnswer(msgspec.Struct, frozen=True):
    """Status and JSON of an engine's answer."""

    status: int
    body: Any


async def ask_engine(
    socket_path: str, method: str, target: str, *, body: bytes | None = None, timeout_s: float
) -> EngineAnswer:
    """One request to an engine on a connection of its own.

    Raises:
        EngineError: it died, did not answer in time, or answered nonsense.
    """
    limit = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.UnixConnector(path=socket_path)
    headers = {"Content-Type": "application/json"} if body is not None else {}
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=limit) as session,
            session.request(method, f"http://engine{target}", data=body, headers=headers) as answer,
        ):
            found = bytearray()
            async for chunk in answer.content.iter_any():
                found += chunk
                if len(found) > ANSWER_BYTES_MAX:
                    raise _broken("The engine's answer is too large.")
            return EngineAnswer(answer.status, msgspec.json.decode(found))
    except TimeoutError as error:
        raise EngineError(
            "The engine did not answer in time.", status=504, code="engine_timeout"
        ) from error
    except (aiohttp.ClientError, OSError) as error:
        raise _broken("The engine ended before it had answered.") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise _broken("The engine's answer was not JSON.") from error


def _broken(message: str) -> EngineError:
    return EngineError(message, status=502, code="engine_died")


class EnginePages:
    """Handlers that talk to engines.

    Args:
        pool: finds engines.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def add_to(self, app: web.Application) -> None:
        """Mount every endpoint."""
        app.router.add_get("/health_generate", self.probe)
        app.router.add_post("/admin/cache/flush", self.flush)
        app.router.add_get("/v1/cache/stats", self.stats)
        app.router.add_get("/v1/cache", self.entries)
        app.router.add_delete("/v1/cache", self.clear)
        app.router.add_get("/v1/responses/{id}", self.response)
        app.router.add_delete("/v1/responses/{id}", self.response)
        app.router.add_get("/v1/responses/{id}/{part:input_items}", self.response)

    async def probe(self, request: web.Request) -> web.Response:
        """Generate one token with `?model=` (default: the first) within `?timeout_s=`."""
        slot = self._pool.find(request.query.get("model"))
        timeout_s = seconds(query_timeout(request), PROBE_TIMEOUT_S)
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                lease = await slot.admit(request[REQUEST_ID])
        except TimeoutError:
            raise CapacityError(
                f"No engine of {slot.model_id} was free within {timeout_s:g} s.",
                status=503,
                code="probe_timeout",
                retry_after_s=1.0,
            ) from None
        outcome: Outcome = "failed"
        try:
            left_s = timeout_s - (time.monotonic() - began)
            answer = await ask_engine(
                lease.socket_path, "POST", "/v1/completions", body=_PROBE, timeout_s=left_s
            )
            outcome = "answered" if answer.status == 200 else "failed"
        finally:
            lease.release(outcome)
        took_s = round(time.monotonic() - began, 3)
        if answer.status != 200:
            return json_answer(
                {"status": "failed", "model": slot.model_id, "engine": answer.body}, 503
            )
        return json_answer({"status": "ok", "model": slot.model_id, "seconds": took_s})

    async def flush(self, request: web.Request) -> web.Response:
        """Make the prompt caches durable within `timeout_s`: the named model's, or all loaded ones'.

        200 only when everything that was dirty is on disk; the evidence comes either way.
        """
        asked = await asked_of_all(request)
        timeout_s = seconds(asked.timeout_s, FLUSH_TIMEOUT_S)
        answers = await self._ask_all(
            asked.model,
            "POST",
            f"/admin/cache/flush?timeout_s={timeout_s:g}",
            timeout_s + GRACE_S,
        )
        status = max((answer.status for answer in answers.values()), default=200)
        shown = {model: answer.body for model, answer in answers.items()}
        return json_answer({"durable": status == 200, "models": shown}, status)

    async def stats(self, request: web.Request) -> web.Response:
        """Both tiers in numbers, from the engines' last reports."""
        asked = await asked_of_all(request)
        shown = {
            model.id: model.progress.cache
            for model in self._loaded(asked.model)
            if model.progress is not None
        }
        return json_answer({"models": shown})

    async def entries(self, request: web.Request) -> web.Response:
        """What the engines' caches hold."""
        asked = await asked_of_all(request)
        answers = await self._ask_all(asked.model, "GET", "/v1/cache", ASK_TIMEOUT_S)
        return self._shown(answers)

    async def clear(self, request: web.Request) -> web.Response:
        """Forget what the engines' caches hold, in both tiers."""
        asked = await asked_of_all(request)
        answers = await self._ask_all(asked.model, "DELETE", "/v1/cache", ASK_TIMEOUT_S)
        return self._shown(answers)

    async def response(self, request: web.Request) -> web.Response:
        """A response that an engine keeps, shown or forgotten; it is gone with its engine."""
        response_id = request.match_info["id"]
        part = "/input_items" if "part" in request.match_info else ""
        target = f"/v1/responses/{response_id}{part}?{request.rel_url.raw_query_string}"
        for model in self._pool.snapshot():
            if model.socket is None or model.state not in ("ready", "draining"):
                continue
            if is_response_of(response_id, model.id):
                answer = await ask_engine(
                    model.socket, request.method, target, timeout_s=ASK_TIMEOUT_S
                )
                return json_answer(answer.body, answer.status)
        raise RequestError(
            "There is no such response (any more).", status=404, code="response_not_found"
        )

    def _shown(self, answers: dict[str, EngineAnswer]) -> web.Response:
        status = max((answer.status for answer in answers.values()), default=200)
        return json_answer({"models": {model: a.body for model, a in answers.items()}}, status)

    def _loaded(self, name: str | None) -> list[ModelStatus]:
        """Models with an engine that serves: the one of this name, or all.

        Raises:
            RequestError: 404 unknown model, 409 the named one is not loaded.
        """
        wanted = None if name is None else self._pool.find(name).model_id
        loaded = [
            model
            for model in self._pool.snapshot()
            if model.state in ("ready", "draining") and wanted in (None, model.id)
        ]
        if wanted is not None and not loaded:
            raise RequestError(
                f"The model {wanted} is not loaded.", status=409, code="model_not_loaded"
            )
        return loaded

    async def _ask_all(
        self, name: str | None, method: str, target: str, timeout_s: float
    ) -> dict[str, EngineAnswer]:
        async def ask(socket_path: str) -> EngineAnswer:
            try:
                return await ask_engine(socket_path, method, target, timeout_s=timeout_s)
            except EngineError as error:
                return EngineAnswer(error.status, error.envelope())

        loaded = self._loaded(name)
        sockets = {m.id: m.socket for m in loaded if m.socket is not None}
        answers = await asyncio.gather(*(ask(path) for path in sockets.values()))
        return dict(zip(sockets, answers, strict=True))
