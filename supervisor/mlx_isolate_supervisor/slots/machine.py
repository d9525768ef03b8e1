"""The state of one model: applies the lifecycle table and does its actions on the crew.

Every method is called as a message of its slot, which makes the machine the single writer of what
it holds. It never waits: what takes time comes back as a message through `post`.
"""

import logging
import signal
from collections.abc import Callable
from functools import partial
from typing import assert_never

import msgspec

from mlx_isolate_shared.errors import CapacityError
from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.slots import causes
from mlx_isolate_supervisor.slots.crew import Crew
from mlx_isolate_supervisor.slots.engine_events import EngineEvents
from mlx_isolate_supervisor.slots.incarnation import Incarnation
from mlx_isolate_supervisor.slots.lifecycle import UNASKED, Action, Event, State, step
from mlx_isolate_supervisor.slots.overlap import has_room_for_two
from mlx_isolate_supervisor.slots.past import Past
from mlx_isolate_supervisor.slots.slot_context import SlotContext, SlotSide
from mlx_isolate_supervisor.slots.timers import Timers
from mlx_isolate_supervisor.telemetry.logs import log_event
from mlx_isolate_supervisor.telemetry.status import Failure, SlotEvent, Transition


class Machine:
    """One model's lifecycle.

    Args:
        side: the slot.

    Attributes:
        wanted: the desired state, up or down.
        deferred: the event that would start an engine, while there is no room for one.
        room_error: why there can be no room; None once it is asked for anew.
        stop_by: when a shutdown must be done, monotonic seconds; None while none runs.
        crew: its processes.
        past: what became of earlier ones.
        events: what befalls them.
    """

    def __init__(self, spec: ModelSpec, context: SlotContext, side: SlotSide) -> None:
        self.spec = spec
        self._context = context
        self._settings = context.settings
        self._now = context.clock.monotonic
        self._side = side
        self._post = post = side.post
        self.timers = Timers(
            lambda name, ticket: post(partial(self._fire, name, ticket)), self._now
        )
        self.state = State.STOPPED
        self.since = context.clock.wall()
        self.wanted = False
        self.stop_by: float | None = None
        self.deferred: Event | None = None
        self.room_error: Callable[[], CapacityError] | None = None
        self.crew = Crew(context.source, context.settings, now=self._now, post=post)
        self.past = Past(context)
        self.events = EngineEvents(self, context, side)
        self._drain_s = self._settings.drain_timeout_s

    # -- What the slot tells it -------------------------------------------------------------------

    def want_up(self) -> None:
        """Something wants the model."""
        if self.stop_by is None:
            self.wanted = True
            self.room_error = None
            self.look_for_repair()
            self.apply(Event.WANT_UP)

    def want_down(self, drain_timeout_s: float | None = None, reason: str = "") -> None:
        """Unload, draining for at most so long (None: as configured)."""
        self.wanted = False
        self.deferred = None
        limit = self._settings.drain_timeout_s
        self._drain_s = limit if drain_timeout_s is None else drain_timeout_s
        self.apply(Event.WANT_DOWN, reason)

    def take_room(self) -> None:
        """There is room now for what was deferred."""
        event, self.deferred = self.deferred, None
        if event is not None:
            self.apply(event)

    def miss_room(self, make_error: Callable[[], CapacityError] | None) -> None:
        """There can be no room (with the reason), or nobody waits for it so urgently.

        What is down stays down until it is asked for again, and so does a failed model whose past
        was forgotten; else that is tried again later, since who asks for it meanwhile is refused.
        """
        event, self.deferred = self.deferred, None
        if event is None:
            return
        self.room_error = make_error
        if self.state is not State.FAILED or event is not Event.BACKOFF_ELAPSED:
            self.wanted = False
            # What fits nowhere is to be seen on a terminal, which shows no more than warnings.
            level = logging.INFO if make_error is None else logging.WARNING
            log_event(
                "model.not_loaded", level, model=self.spec.id, reason=_room_reason(make_error)
            )
            self.apply(Event.WANT_DOWN, "there is no room to try it again")
        else:
            self.timers.set("try", max(self.past.try_delay_s, self._settings.restart.half_open_s))

    def change_spec(self, spec: ModelSpec | None) -> None:
        """Another configuration, or (None) a reload with the same."""
        self.spec = spec or self.spec
        self._drain_s = self._settings.drain_timeout_s
        self.apply(Event.REPLACE if self._has_room_for_two() else Event.SPEC_CHANGED)

    def adjust_spec(self, spec: ModelSpec) -> None:
        """Another configuration, equal in all that an engine sees."""
        self.spec = spec

    def reset(self, reason: str) -> None:
        """Forget the past."""
        self.past.forget_cause()
        self.apply(Event.RESET, reason)

    def shut_down(self, stop_by: float, stop_error: Callable[[], CapacityError]) -> None:
        """Go down for good, at the latest at `stop_by`; who is cut is told `stop_error`."""
        self.stop_by = stop_by
        self.wanted = False
        self.deferred = None
        self.crew.note_stop(stop_error)
        self.crew.retirees.shut_down(stop_by, self._drain_limit_s())
        self.apply(Event.WANT_DOWN)

    def cut(self) -> None:
        """End a drain, and the window of a stop, now."""
        self.apply(Event.DRAINED)
        self.apply(Event.STOP_TIMEOUT)
        self.crew.retirees.kill()

    def note_completion(self, engine: Incarnation) -> None:
        """`engine` completed a completion."""
        engine.completed = True
        self.past.note_completion()

    def note_free(self, engine: Incarnation) -> None:
        """`engine` gave a place back."""
        if engine is not self.crew.engine:
            self.crew.retirees.note_free(engine)
        elif not engine.requests:
            self.apply(Event.DRAINED)

    def look_for_repair(self) -> None:
        """A model that cannot work is tried again when its files have changed."""
        is_final = self.state is State.FAILED and self.past.is_final
        if is_final and self.past.has_other_files(self.spec):
            self.reset("its files changed")

    @property
    def is_going_down(self) -> bool:
        """Whether its engine is on its way out, and no other is to follow."""
        return not self.wanted and self.state in (State.DRAINING, State.STOPPING)

    # -- What others read -------------------------------------------------------------------------

    @property
    def next_try_s(self) -> float | None:
        """Time to the next try, None where none is due."""
        return self.timers.left_s("try")

    @property
    def failure(self) -> Failure | None:
        """Why the model is FAILED; None where it is not."""
        if self.past.failure is None:
            return None
        return msgspec.structs.replace(self.past.failure, retry_in_s=self.next_try_s)

    def failed_error(self) -> CapacityError:
        """503 with the cause, for a FAILED model."""
        failure = self.failure
        assert failure is not None
        retry_in_s = failure.retry_in_s
        if failure.cause == "circuit_open" and retry_in_s is None:
            # On the way into FAILED, before the timer is set.
            retry_in_s = self.past.try_delay_s
        return causes.failed(self.spec.id, failure, retry_in_s)

    # -- Transitions ------------------------------------------------------------------------------

    def _fire(self, name: str, ticket: int) -> None:
        if not self.timers.take(name, ticket):
            return
        match name:
            case "try":
                self.apply(Event.BACKOFF_ELAPSED)
            case "drain":
                self.apply(Event.DRAINED, "the drain timeout passed")
            case "stop":
                self.apply(Event.STOP_TIMEOUT)
            case "watch":
                self.events.watch()
            case _:
                self.events.end_report_grace(int(name.removeprefix("report_end ")))

    def apply(self, event: Event, reason: str = "") -> None:
        """Do what the lifecycle table says of `event`; a start waits until there is room."""
        cell = step(self.state, event)
        if cell is None:
            return
        if Action.SPAWN in cell.actions and not self._side.ask_room():
            self.deferred = event
            for action in cell.actions:
                if action is not Action.SPAWN:
                    self.act(action)
            return
        if cell.state is not self.state or Action.SPAWN in cell.actions:
            self.deferred = None
        before, self.state = self.state, cell.state
        wall = self._context.clock.wall()
        if cell.state is not before:
            self.since = wall
        for action in cell.actions:
            self.act(action)
        moved = Transition(
            model=self.spec.id,
            incarnation=self.crew.engine.number if self.crew.engine else self.crew.spawned,
            pid=self.crew.engine.process.pid if self.crew.engine else None,
            before=before.value,
            event=event.value,
            after=cell.state.value,
            reason=reason,
            at=wall,
            is_planned=event is Event.LOST and self.past.is_end_planned,
        )
        _log_transition(moved)
        self.tell(moved)

    def tell(self, event: SlotEvent) -> None:
        """Tell whoever watches."""
        if self._context.on_event is not None:
            self._context.on_event(event)

    def act(self, action: Action) -> None:
        """Do one action of the table."""
        match action:
            case Action.SPAWN:
                self._spawn()
            case Action.DRAIN:
                self._drain()
            case Action.TERMINATE:
                self._end_engine(signal.SIGTERM, self._settings.stop_window_s)
            case Action.ABORT:
                self._end_engine(signal.SIGABRT, self._settings.abort_window_s)
            case Action.KILL:
                self.crew.signal_engine(signal.SIGKILL)
            case Action.LIMIT_STOP:
                left = self.timers.left_s("stop")
                if left is not None:
                    self.timers.set("stop", self._within_stop(left))
            case Action.SCHEDULE_TRY:
                self.timers.set("try", self.past.try_delay_s)
            case Action.CANCEL_TRY:
                self.timers.cancel("try")
            case Action.FORGET_CRASHES:
                self.past.forget_crashes()
            case Action.REFUSE_WAITERS:
                self._side.refuse_failed()
            case Action.SPAWN_SUCCESSOR:
                self.past.note_files(self.spec)
                self.crew.spawn_successor(self.spec, self.events)
            case Action.END_SUCCESSOR:
                self.crew.end_successor()
            case Action.SWITCH:
                self.crew.promote(self._drain_s)
            case Action.PROMOTE:
                self._promote()
            case _:
                assert_never(action)

    def _spawn(self) -> None:
        self.past.note_spawn(self.spec)
        try:
            self.crew.spawn(self.spec, self.events, use_standby=self.past.deserves_standby)
        except OSError as error:
            reason = f"it could not be spawned: {error.strerror}"
            self._post(partial(self.events.note_spawn_failed, self.crew.spawned, reason))
            return
        self.events.begin_watch()

    def _promote(self) -> None:
        engine = self.crew.promote(self._drain_s)
        self.events.begin_watch()
        if engine.facts is not None:
            self._post(partial(self.apply, Event.READY))

    def _has_room_for_two(self) -> bool:
        engine = self.crew.engine
        return has_room_for_two(
            self._context.residency.limits.policy,
            fits_budget=self._side.has_space_beside,
            footprint=engine.memory[0] if engine and engine.memory else None,
            available=self._context.available_bytes(),
            gpu=engine.gpu_room if engine else None,
        )

    def _drain_limit_s(self) -> float:
        if self.stop_by is None:
            return self._drain_s
        # Half of what a short shutdown has is left for the engine's own end.
        left = self.stop_by - self._now()
        return left - min(self._settings.stop_window_s, left / 2)

    def _drain(self) -> None:
        self.timers.set("drain", self._drain_limit_s())
        if self.crew.engine is None or not self.crew.engine.requests:
            self._post(partial(self.apply, Event.DRAINED))

    def _end_engine(self, number: signal.Signals, window_s: float) -> None:
        self.timers.cancel("drain")
        self.timers.set("stop", self._within_stop(window_s))
        if self.crew.engine is not None:
            self.crew.engine.planned = number is signal.SIGTERM
            self.crew.signal_engine(number)

    def _within_stop(self, window_s: float) -> float:
        """A window before SIGKILL, as long as a shutdown leaves it."""
        return window_s if self.stop_by is None else min(window_s, self.stop_by - self._now())


def _room_reason(make_error: Callable[[], CapacityError] | None) -> str:
    return "others would have to leave for it" if make_error is None else make_error().message


def _level_of(moved: Transition) -> int:
    """How loud a step is told: what serves nobody any more, and what nobody asked for, stand out."""
    if moved.after == "failed" and moved.before != "failed":
        return logging.ERROR
    is_unasked = moved.event in UNASKED and not moved.is_planned
    return logging.WARNING if is_unasked else logging.INFO


def _log_transition(moved: Transition) -> None:
    log_event(
        "model.moved",
        _level_of(moved),
        model=moved.model,
        before=moved.before,
        after=moved.after,
        cause=moved.event,
        incarnation=moved.incarnation,
        pid=moved.pid,
        reason=moved.reason or None,
    )
