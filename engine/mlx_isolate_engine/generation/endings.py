"""How completions end: each exactly once, counted, and told to whoever still listens."""

import logging

from mlx_isolate_engine.completion.events import FinishReason, Placement
from mlx_isolate_engine.generation.counters import Counters
from mlx_isolate_engine.generation.outbox import Deliveries
from mlx_isolate_engine.generation.row import Row
from mlx_isolate_engine.generation.ticket import Ticket
from mlx_isolate_shared.errors import EngineError

log = logging.getLogger(__name__)


class Endings:
    """Ends completions of one lane.

    Args:
        placement: the lane.
        counters: told of every end.
        deliveries: brings summaries and errors to the event loop.
    """

    def __init__(self, placement: Placement, counters: Counters, deliveries: Deliveries) -> None:
        self._placement: Placement = placement
        self._counters = counters
        self._deliveries = deliveries

    def complete(self, row: Row, reason: FinishReason) -> None:
        """It ended by itself."""
        self._deliveries.end(row.ticket.outbox, row.summary(reason, self._placement))
        self._counters.count_end("completed")

    def drop(self, ticket: Ticket) -> None:
        """Its reader has gone, or has been given up: nobody waits for this end."""
        kind = ticket.give_up or "cancelled"
        self._counters.count_end(kind)
        log.info("completion.%s request=%s", kind, ticket.plan.request_id)

    def fail(self, ticket: Ticket, error: Exception) -> None:
        """One of its own parts has failed; its neighbours go on."""
        log.error("completion.failed request=%s", ticket.plan.request_id, exc_info=error)
        message = "Generation of this completion failed inside the engine."
        self.refuse(
            ticket, EngineError(message, status=500, code="generation_failed", retry_after_s=None)
        )

    def refuse(self, ticket: Ticket, error: EngineError) -> None:
        """It cannot go on, for a reason that is not its own."""
        self._deliveries.end(ticket.outbox, error)
        self._counters.count_end("failed")
