"""Carries each request of the work endpoints to one engine: its slot, its place, its one outcome."""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from mlx_isolate_shared.errors import EngineError, HttpError
from mlx_isolate_supervisor.relay.answer import RelayedAnswer
from mlx_isolate_supervisor.relay.cancellation import take_cancellation
from mlx_isolate_supervisor.relay.company import Company
from mlx_isolate_supervisor.relay.conversation import Conversation
from mlx_isolate_supervisor.relay.edge import ENGINE_PATH, REQUEST_ID
from mlx_isolate_supervisor.relay.exchange import Exchange, RelayObserver, SilentObserver
from mlx_isolate_supervisor.relay.limits import CONNECT_TRIES_MAX, END_RUNNING_S, RelayLimits
from mlx_isolate_supervisor.relay.pool import EnginePool
from mlx_isolate_supervisor.relay.request_body import (
    BodyBudget,
    BodyHold,
    check_head,
    read_body,
    read_idle_s,
    read_routing,
)
from mlx_isolate_supervisor.relay.request_head import asks_for_websocket, request_head
from mlx_isolate_supervisor.relay.target import Target, split_upstream
from mlx_isolate_supervisor.relay.upstream import EngineConnection
from mlx_isolate_supervisor.slots.lease import Admission, Lease, Outcome, Router

WorkHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Relay:
    """Carries requests of the work endpoints.

    Args:
        router: finds a request's slot.
        limits: bounds of bodies and times.
        observer: told of each request's start, lease, first byte and end.
        pool: where connections to engines come from.
    """

    def __init__(
        self,
        router: Router,
        limits: RelayLimits,
        observer: RelayObserver | None = None,
        pool: EnginePool | None = None,
    ) -> None:
        self._router = router
        self._limits = limits
        self._observer = observer or SilentObserver()
        self._pool = pool or EnginePool()
        self._bodies = BodyBudget(limits.bodies_bytes_max)
        self._running: set[asyncio.Task[object]] = set()

    def close(self) -> None:
        """Drop idle connections to engines."""
        self._pool.close()

    async def end_running(self) -> None:
        """Cut off every request, each told that the server shuts down; after the drain."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=END_RUNNING_S)

    def handler(self, engine_path: str) -> WorkHandler:
        """The aiohttp handler for requests that go to `engine_path` on an engine."""
        return functools.partial(self._handle, Target(path=engine_path))

    async def handle_upstream(self, request: web.Request) -> web.StreamResponse:
        """The aiohttp handler for requests whose path names the model and the engine's path."""
        path = request.rel_url.raw_path
        return await self._handle(split_upstream(path, self._router.knows), request)

    async def _handle(self, target: Target, request: web.Request) -> web.StreamResponse:
        """Account for one request from its head to its only outcome."""
        request[ENGINE_PATH] = target.path
        exchange = Exchange(
            request_id=request[REQUEST_ID], path=target.path, started_s=time.monotonic()
        )
        exchange.outcome = "failed"
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        self._observer.started(exchange)
        company = Company(request, target.path, self._limits)
        try:
            with self._bodies.hold() as hold:
                answer = await self._carry(target, exchange, hold, company)
            exchange.status = answer.status
            await self._send_late(request, answer)
            return answer
        except HttpError as error:
            exchange.status, exchange.code = error.status, error.code
            exchange.outcome = "failed" if isinstance(error, EngineError) else "rejected"
            if company.answer is not None:
                exchange.status = company.answer.status
                return company.end(error)
            raise
        except ConnectionError:
            exchange.outcome = "cancelled"
            raise
        except asyncio.CancelledError as error:
            exchange.outcome = "cancelled"
            if company.answer is not None:
                refusal = take_cancellation(request, error)
                exchange.status, exchange.code = company.answer.status, refusal.code
                return company.end(refusal)
            if request.writer.output_size and request.transport is not None:
                # It was answered already, and has not been read: no second answer can follow.
                request.transport.abort()
            refusal = take_cancellation(request, error)
            exchange.status, exchange.code = refusal.status, refusal.code
            raise refusal from None
        finally:
            company.stop()
            self._running.discard(task)
            exchange.ended_s = time.monotonic()
            self._observer.ended(exchange)

    async def _send_late(self, request: web.Request, answer: RelayedAnswer) -> None:
        """Write a whole answer that is not written yet; its engine is not held up any more."""
        if answer.is_begun:
            return
        answer.begin()
        try:
            async with asyncio.timeout(self._limits.client_stall_s):
                await request.writer.drain()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client does not read") from None

    async def _admission(
        self, target: Target, request: web.Request, exchange: Exchange, hold: BodyHold
    ) -> tuple[Admission, bytes]:
        """The slot that a request is for, and its body."""
        check_head(request, self._limits)
        if target.model is not None:
            exchange.model_id = self._router.find(target.model).model_id
            body = await read_body(request, self._limits, hold)
            exchange.bytes_in = len(body)
            # Meanwhile another slot may have come in the place of the first.
            return self._router.find(target.model), body
        body = await read_body(request, self._limits, hold)
        fields = read_routing(body)
        exchange.bytes_in = len(body)
        exchange.stream = bool(fields.stream)
        exchange.keep_alive, exchange.ttl_s = fields.keep_alive, fields.ttl
        admission = self._router.find(fields.model)
        exchange.model_id = admission.model_id
        if fields.keep_alive is not None or fields.ttl is not None:
            idle_s = read_idle_s(fields)
            if idle_s is not None:
                admission.keep_alive(idle_s)
        return admission, body

    async def _carry(
        self, target: Target, exchange: Exchange, hold: BodyHold, company: Company
    ) -> RelayedAnswer:
        request = company.request
        admission, body = await self._admission(target, request, exchange, hold)
        head = request_head(request, exchange.path, exchange.request_id, len(body))
        if exchange.stream and admission.sends_loading_state:
            company.start(admission)
        tries = 0
        while True:
            tries += 1
            lease, connection = await self._reach(admission, exchange)
            exchange.passing = connection
            conversation = Conversation(request, exchange, lease, connection)
            try:
                connection.send(
                    head,
                    body,
                    is_bodiless=request.method == "HEAD",
                    may_upgrade=asks_for_websocket(request),
                )
                lease.on_death(connection.note_death)
                answer = await conversation.wait_head(may_return=tries < CONNECT_TRIES_MAX)
                if answer is None:
                    self._pool.drop(lease.socket_path)
                    exchange.leased_s = None
                    continue
                del body
                hold.release()
                company.stop()
                if answer.status == 101:
                    return await conversation.upgrade(answer, self._limits, self._observer)
                if company.answer is not None and not company.may_continue(answer):
                    return await conversation.tell(answer, company)
                return await conversation.answer(
                    answer, self._limits, self._observer, company.answer
                )
            except (asyncio.CancelledError, ConnectionError):
                conversation.outcome = "cancelled"
                raise
            finally:
                passed = exchange.passing
                exchange.bytes_out = max(exchange.bytes_out, passed.bytes_passed)
                exchange.events = passed.events_passed
                exchange.passing = None
                exchange.outcome = outcome = conversation.outcome
                self._pool.give(lease.socket_path, connection)
                is_proof = target.is_work or outcome != "answered"
                lease.release(outcome if is_proof else "passed")

    async def _reach(
        self, admission: Admission, exchange: Exchange
    ) -> tuple[Lease, EngineConnection]:
        """A place in an engine and an open connection to it.

        An engine that cannot be connected to has not seen the request, so the request waits for
        another place.
        """
        tries = 0
        while True:
            tries += 1
            lease = await admission.admit(exchange.request_id)
            outcome: Outcome = "cancelled"
            try:
                connection = await self._pool.take(lease.socket_path)
            except OSError:
                outcome = "failed"
                reason = await lease.death()
                if tries == CONNECT_TRIES_MAX:
                    raise reason from None
                outcome = "returned"
                continue
            else:
                outcome = "answered"
            finally:
                if outcome != "answered":
                    lease.release(outcome)
            exchange.incarnation = lease.incarnation
            exchange.leased_s = time.monotonic()
            self._observer.leased(exchange)
            return lease, connection
