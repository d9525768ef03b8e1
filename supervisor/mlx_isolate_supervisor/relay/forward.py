"""One request to one engine and back."""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable

from aiohttp import HttpVersion11, web

from mlx_isolate_shared.errors import CapacityError, EngineError, HttpError
from mlx_isolate_supervisor.relay.answer import RelayedAnswer
from mlx_isolate_supervisor.relay.company import Company
from mlx_isolate_supervisor.relay.edge import ENGINE_PATH, REQUEST_ID
from mlx_isolate_supervisor.relay.error_wire import error_event
from mlx_isolate_supervisor.relay.exchange import (
    CANCELLED_BY_OPERATOR,
    Exchange,
    RelayObserver,
    SilentObserver,
)
from mlx_isolate_supervisor.relay.frames import FAILED, GOING_AWAY, REFUSED, SERVICE_RESTART
from mlx_isolate_supervisor.relay.framing import AnswerHead, FramingError, frame
from mlx_isolate_supervisor.relay.last_event import error_at_end
from mlx_isolate_supervisor.relay.limits import (
    ANSWER_WHOLE_BYTES_MAX,
    CONNECT_TRIES_MAX,
    END_RUNNING_S,
    RelayLimits,
)
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
from mlx_isolate_supervisor.relay.sink import ClientSink, ClientStalled
from mlx_isolate_supervisor.relay.target import Target, split_upstream
from mlx_isolate_supervisor.relay.tunnel import Tunnel, take_early
from mlx_isolate_supervisor.relay.upstream import (
    ClientGivenUp,
    EngineConnection,
    EngineGone,
    RequestUnread,
)
from mlx_isolate_supervisor.slots.lease import Admission, Lease, Outcome, Router

# A transport with nothing to send takes this and a head without asking its writer to wait.
_AT_ONCE_BYTES_MAX = 32 * 1024

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

    @property
    def body_bytes_held(self) -> int:
        """Bytes of request bodies that no engine has answered to yet."""
        return self._bodies.held

    @property
    def idle_connections(self) -> int:
        """Connections to engines that are kept for the next request."""
        return self._pool.idle_connections

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
            admission = self._router.find(target.model)
            exchange.model_id = admission.model_id
            body = await read_body(request, self._limits, hold)
            exchange.bytes_in = len(body)
            return admission, body
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


def take_cancellation(request: web.Request, error: asyncio.CancelledError) -> HttpError:
    """What to tell a client whose request was cancelled by somebody else.

    Raises:
        CancelledError: the client itself has gone; there is nobody to tell.
    """
    if request.transport is None or request.transport.is_closing():
        raise error
    uncancel()
    if error.args == (CANCELLED_BY_OPERATOR,):
        return HttpError(
            "The request was cancelled by the operator.",
            status=499,
            type="server_error",
            code="request_cancelled",
        )
    return CapacityError(
        "The server is shutting down.", status=503, code="shutting_down", retry_after_s=5.0
    )


def _close_code(reason: EngineError) -> int:
    """How a WebSocket is closed whose engine has gone."""
    if not reason.is_planned:
        return FAILED
    # Where it was stopped for good, as by a shutdown, no other follows.
    return SERVICE_RESTART if reason.code == "engine_died" else GOING_AWAY


def client_stalled() -> EngineError:
    """What a client finds that reads again after it was given up."""
    return EngineError(
        "The client stopped reading.", status=504, code="client_stalled", retry_after_s=None
    )


def uncancel() -> None:
    """Take a cancellation of the running task for dealt with."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


def _outcome_of(head: AnswerHead) -> Outcome:
    """How an answer with this head ends, if all of it comes."""
    return "answered" if head.status < 400 else "rejected" if head.status < 500 else "failed"


class Conversation:
    """The answer's way from one engine to one client, and how it ends.

    Attributes:
        outcome: how it ended, once it has.
    """

    def __init__(
        self, request: web.Request, exchange: Exchange, lease: Lease, connection: EngineConnection
    ) -> None:
        self._request = request
        self._exchange = exchange
        self._lease = lease
        self._connection = connection
        self.outcome: Outcome = "failed"

    async def wait_head(self, *, may_return: bool) -> AnswerHead | None:
        """The engine's answer begins; None if the request goes back to wait for another place.

        It may go back only if the engine never had the whole of it, and so cannot have acted on
        it; no request is ever worked on twice.

        Raises:
            EngineError: the engine died, hung, or does not speak HTTP.
        """
        try:
            return await self._connection.wait_head()
        except RequestUnread as error:
            self._connection.close()
            if may_return:
                self.outcome = "returned"
                return None
            raise await self._reason(error) from None
        except (EngineGone, FramingError) as error:
            raise await self._reason(error) from None

    async def tell(self, head: AnswerHead, company: Company) -> RelayedAnswer:
        """Send what the engine answers as an event, behind comments that have committed a 200.

        Raises:
            EngineError: the engine failed meanwhile.
        """
        if head.length is None or head.length > ANSWER_WHOLE_BYTES_MAX:
            raise await self._reason(FramingError("it is no event stream"))
        try:
            body = await self._connection.read_whole()
        except (EngineGone, FramingError) as error:
            raise await self._reason(error) from None
        self.outcome = _outcome_of(head)
        return company.end_with(body, is_error=head.status >= 400)

    async def answer(
        self,
        head: AnswerHead,
        limits: RelayLimits,
        observer: RelayObserver,
        begun: RelayedAnswer | None = None,
    ) -> RelayedAnswer:
        """Send the client what the engine answers, behind what has been `begun`.

        Raises:
            EngineError: the engine failed before the client was sent a byte.
        """
        ended = _outcome_of(head)
        if begun is None and head.length is not None and head.length <= ANSWER_WHOLE_BYTES_MAX:
            whole = await self._answer_whole(head)
            self._exchange.first_byte_s = time.monotonic()
            observer.first_byte(self._exchange)
            self.outcome = ended
            return whole
        answer = begun or RelayedAnswer(self._request, head)

        def on_first() -> None:
            self._exchange.first_byte_s = time.monotonic()
            observer.first_byte(self._exchange)

        sink = ClientSink(
            self._request,
            answer,
            stall_s=limits.client_stall_s,
            is_unframed=head.length is None and self._request.version < HttpVersion11,
            on_first=on_first,
        )
        try:
            await self._connection.pass_body(sink)
            self.outcome = self._outcome_at_end(head, ended)
        except (EngineGone, FramingError) as error:
            reason = await self._reason(error)
            self._end_early(reason, head, answer, sink)
        except ClientStalled:
            self.outcome = "cancelled"
            self._end_early(client_stalled(), head, answer, sink)
        except asyncio.CancelledError as error:
            self.outcome = "cancelled"
            refusal = take_cancellation(self._request, error)
            self._end_early(refusal, head, answer, sink)
        return answer

    def _outcome_at_end(self, head: AnswerHead, ended: Outcome) -> Outcome:
        """How an answer ended that came to its end; a stream may end with an error event."""
        error = error_at_end(self._connection.last_passed) if head.is_event_stream else None
        if error is None:
            return ended
        self._exchange.code = error.word
        return error.outcome

    async def upgrade(
        self, head: AnswerHead, limits: RelayLimits, observer: RelayObserver
    ) -> RelayedAnswer:
        """Join the two connections after a 101, until one of them ends.

        Raises:
            EngineError: the engine had gone before the client was sent a byte.
        """
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        try:
            engine, early = self._connection.take_over()
        except EngineGone as error:
            raise await self._reason(error) from None
        answer = RelayedAnswer(self._request, head)
        answer.begin()
        said = take_early(self._request.protocol)
        tunnel = Tunnel(transport, engine, early, stall_s=limits.client_stall_s)
        self._exchange.passing = tunnel
        self._exchange.first_byte_s = time.monotonic()
        observer.first_byte(self._exchange)
        self._lease.note_upgrade()
        tunnel.feed_client(said)
        self._lease.on_death(tunnel.note_death)
        try:
            await self._follow(tunnel)
        finally:
            tunnel.abort()
            self._exchange.bytes_in += tunnel.bytes_in
        return answer

    async def _follow(self, tunnel: Tunnel) -> None:
        """Wait for the end of a tunnel, and tell the client why where it can be told."""
        self.outcome = "cancelled"
        try:
            ending = await tunnel.wait_ending()
            if ending == "engine_gone":
                reason = await self._reason(EngineGone())
                self._exchange.code = reason.code
                await tunnel.close(_close_code(reason), reason.message)
            elif ending == "closed":
                await tunnel.close(FAILED, "")
        except asyncio.CancelledError as error:
            if self._request.transport is None or self._request.transport.is_closing():
                # The client has gone; its task need not end as a fault for that.
                uncancel()
            else:
                refusal = take_cancellation(self._request, error)
                self._exchange.code = refusal.code
                is_shutdown = isinstance(refusal, CapacityError)
                await tunnel.close(GOING_AWAY if is_shutdown else REFUSED, refusal.message)
        if tunnel.is_closed_in_form:
            self.outcome = "answered"

    async def _answer_whole(self, head: AnswerHead) -> RelayedAnswer:
        """An answer that is short, written at once if that cannot wait for the client.

        So the client need not wait for the accounting of its request; an answer for which the
        client might have to read first is written after the engine is given back.
        """
        try:
            body = await self._connection.read_whole()
        except (EngineGone, FramingError) as error:
            raise await self._reason(error) from None
        self._exchange.bytes_out = len(body)
        answer = RelayedAnswer(self._request, head, body)
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        if len(body) <= _AT_ONCE_BYTES_MAX and not transport.get_write_buffer_size():
            answer.begin()
        return answer

    def _end_early(
        self, reason: HttpError, head: AnswerHead, answer: RelayedAnswer, sink: ClientSink
    ) -> None:
        """End an answer that was begun: by an error event, or torn where there are no events.

        The event stands behind the last whole event, and the response is then ended in form:
        clients drop what they have buffered when a body is torn, and the event with it. What
        marks the end as an error is the event, the missing finish reason and the missing
        `[DONE]`. The connection is kept: whoever tries again at once does so on it, and would
        meet its end.
        """
        self._connection.close()
        self._exchange.code = reason.code
        if head.is_event_stream:
            sink.write(frame(error_event(reason, self._exchange.path)))
        else:
            sink.close()
        if sink.writing_paused:
            answer.force_close()
            sink.leave_unread()

    async def _reason(self, error: EngineGone | FramingError) -> EngineError:
        self._connection.close()
        reason = (
            await self._lease.death()
            if isinstance(error, EngineGone)
            else EngineError(
                "The engine's answer could not be read.", status=502, code="engine_bad_answer"
            )
        )
        if isinstance(error, ClientGivenUp) and reason.engine_lives:
            self.outcome = "cancelled"
            return client_stalled()
        self.outcome = "failed"
        return reason
