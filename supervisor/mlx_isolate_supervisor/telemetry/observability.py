"""Everything that watches the supervisor, wired together: events, metrics, charts, running requests.

The composition root makes one, hands `requests` to the relay and `slot_event` to the pool, and
mounts it with `add_ui_routes`.
"""

import asyncio
import contextlib
from collections.abc import Callable

from mlx_isolate_shared.clock import Clock, SystemClock
from mlx_isolate_supervisor.slots.lifecycle import Event
from mlx_isolate_supervisor.telemetry.events import EventHub
from mlx_isolate_supervisor.telemetry.history import History
from mlx_isolate_supervisor.telemetry.inflight import Requests
from mlx_isolate_supervisor.telemetry.metrics import Metrics
from mlx_isolate_supervisor.telemetry.sampler import Sampler
from mlx_isolate_supervisor.telemetry.status import ModelStatus, SlotEvent, Status, Transition

# Lines of an engine's output that go with the event of its end.
STDERR_LINES_MAX = 20
# Lifecycle events that tell the end of an engine process.
ENDS = frozenset({Event.EXITED, Event.LOST, Event.CIRCUIT_OPENED, Event.CANNOT_WORK})


class Observability:
    """Watches; changes nothing.

    Args:
        status: a snapshot from memory; not called before the first request.
        models: the models of it, which are looked at every second; not called before the first
            event or tick.
        clock: the same as the relay's.
    """

    def __init__(
        self,
        status: Callable[[], Status],
        models: Callable[[], tuple[ModelStatus, ...]],
        clock: Clock | None = None,
    ) -> None:
        clock = clock or SystemClock()
        self.clock = clock
        self.status = status
        self._models = models
        self.events = EventHub(clock)
        self.metrics = Metrics()
        self.history = History()
        self.requests = Requests(clock, self.metrics, self.events)
        self._sampler = Sampler(
            clock, self.metrics, self.history, self.requests.first_tokens, models
        )
        self._sampling: asyncio.Task[None] | None = None

    def slot_event(self, event: SlotEvent) -> None:
        """The pool's listener: tell the step on, and count what the engine had done."""
        if not isinstance(event, Transition):
            self.events.publish(
                "engine.loading",
                model=event.model,
                incarnation=event.incarnation,
                stage=event.loading.stage,
                fraction=event.loading.fraction,
                text=event.loading.detail,
            )
            return
        models = self._models()
        self._sampler.fold(models)
        model = next((model for model in models if model.id == event.model), None)
        fields: dict[str, object] = {}
        if model is not None:
            fields = _facts(model, event)
        self.events.publish(
            "engine." + event.event,
            model=event.model,
            incarnation=event.incarnation,
            before=event.before,
            after=event.after,
            reason=event.reason,
            **fields,
        )

    def start(self) -> None:
        """Begin to sample; on the running loop."""
        self.events.publish("supervisor.started")
        self._sampling = asyncio.create_task(self._sampler.run(), name="sampler")

    async def stop(self) -> None:
        """End the sampling and every reader of events."""
        self.events.close()
        if self._sampling is not None:
            self._sampling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sampling


def _facts(model: ModelStatus, event: Transition) -> dict[str, object]:
    """What a person wants to know beside the transition itself."""
    facts: dict[str, object] = {}
    ended = model.last_exit
    if event.event in ENDS and ended is not None and ended.incarnation == event.incarnation:
        facts |= {"cause": ended.cause, "code": ended.code, "signal": ended.signal}
        facts["detail"] = list(ended.stderr_tail[-STDERR_LINES_MAX:])
    if event.after == "ready":
        facts |= {"pid": model.pid, "load_s": model.load_s}
    if event.after == "backoff":
        facts["next_try_s"] = model.next_try_s
    if event.after == "failed" and model.failure is not None:
        facts |= {"failure": model.failure.cause, "message": model.failure.message}
    return facts
