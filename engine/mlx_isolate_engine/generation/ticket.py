"""The handle of one running completion that event loop and generation thread share."""

from mlx_isolate_engine.generation.outbox import Outbox
from mlx_isolate_engine.generation.plan import CompletionPlan, EndKind


class Ticket:
    """One submitted completion.

    `give_up` is written by the event loop and read by the generation thread, `is_parked` the other
    way round; everything else belongs to the generation thread.
    """

    def __init__(self, plan: CompletionPlan) -> None:
        self.plan = plan
        self.outbox = Outbox()
        self.give_up: EndKind | None = None
        self.is_parked = False

    def __repr__(self) -> str:
        """Its request id and state, for logs and tests."""
        state = self.give_up or ("parked" if self.is_parked else "live")
        return f"Ticket({self.plan.request_id!r}, {state})"
