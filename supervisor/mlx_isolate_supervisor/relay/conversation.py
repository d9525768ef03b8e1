"""The way of one answer from an engine to a client, and how it ends.

Begins when the request is on its way; who sent it, and what becomes of the place in the engine, is
forward's business.
"""

import asyncio
import time

from aiohttp import HttpVersion11, web

from mlx_isolate_shared.errors import CapacityError, EngineError, HttpError
from mlx_isolate_supervisor.relay.answer import RelayedAnswer
from mlx_isolate_supervisor.relay.answer_head import AnswerHead
from mlx_isolate_supervisor.relay.cancellation import take_cancellation, uncancel
from mlx_isolate_supervisor.relay.company import Company
from mlx_isolate_supervisor.relay.engine_gone import ClientGivenUp, EngineGone, RequestUnread
from mlx_isolate_supervisor.relay.error_wire import error_event
from mlx_isolate_supervisor.relay.exchange import Exchange, RelayObserver
from mlx_isolate_supervisor.relay.frames import FAILED, GOING_AWAY, REFUSED, SERVICE_RESTART
from mlx_isolate_supervisor.relay.framing import FramingError, frame
from mlx_isolate_supervisor.relay.last_event import error_at_end
from mlx_isolate_supervisor.relay.limits import ANSWER_WHOLE_BYTES_MAX, RelayLimits
from mlx_isolate_supervisor.relay.sink import ClientSink, ClientStalled
from mlx_isolate_supervisor.relay.tunnel import Tunnel, take_early
from mlx_isolate_supervisor.relay.upstream import EngineConnection
from mlx_isolate_supervisor.slots.lease import Lease, Outcome

# A transport with nothing to send takes this and a head without asking its writer to wait.
_AT_ONCE_BYTES_MAX = 32 * 1024


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
                if reason.is_planned:
                    # It has no end of its own, so a stop of its engine is a way to end.
                    self.outcome = "cancelled"
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


def _outcome_of(head: AnswerHead) -> Outcome:
    """How an answer with this head ends, if all of it comes."""
    return "answered" if head.status < 400 else "rejected" if head.status < 500 else "failed"


def client_stalled() -> EngineError:
    """What a client finds that reads again after it was given up."""
    return EngineError(
        "The client stopped reading.", status=504, code="client_stalled", retry_after_s=None
    )


def _close_code(reason: EngineError) -> int:
    """How a WebSocket is closed whose engine has gone."""
    if not reason.is_planned:
        return FAILED
    # Where it was stopped for good, as by a shutdown, no other follows.
    return SERVICE_RESTART if reason.code == "engine_died" else GOING_AWAY
