"""The state of one model: applies the lifecycle table and does its actions on the crew.

Every method is called as a message of its slot, which makes the machine the single writer of what
it holds. It never waits: what takes time comes back as a message through `post`.
"""

import logging
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import assert_never

import msgspec

from mlx_isolate_shared import wire
from mlx_isolate_shared.config import EXIT_CANNOT_WORK
from mlx_isolate_shared.errors import CapacityError
from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.engines.child import Exit
from mlx_isolate_supervisor.engines.process import EngineProcess
from mlx_isolate_supervisor.models.footprints import footprint_key
from mlx_isolate_supervisor.models.model_files import Fingerprint, model_fingerprint
from mlx_isolate_supervisor.models.residency import RETURN_BYTES_MIN
from mlx_isolate_supervisor.slots import causes
from mlx_isolate_supervisor.slots.crew import Crew
from mlx_isolate_supervisor.slots.incarnation import Incarnation
from mlx_isolate_supervisor.slots.lifecycle import UNASKED, Action, Event, State, step
from mlx_isolate_supervisor.slots.mending import PAUSE_S, Condition, Repair, diagnose
from mlx_isolate_supervisor.slots.overlap import has_room_for_two
from mlx_isolate_supervisor.slots.restart import Ending, RestartBudget, after_completion, judge
from mlx_isolate_supervisor.slots.slot_context import SlotContext, SlotSide
from mlx_isolate_supervisor.slots.timers import Timers
from mlx_isolate_supervisor.telemetry.logs import log_event
from mlx_isolate_supervisor.telemetry.status import (
    Failure,
    LastExit,
    LoadStep,
    SlotEvent,
    Transition,
)

# Between the end of the report pipe and the exit that it announces; an engine that lives on after
# that has failed to start.
REPORT_END_GRACE_S = 1.0
# Files of a model that cannot work are looked at no more often than this, however many ask.
FILES_LOOK_S = 0.2

# After more deaths in a row than this a model's engines are spawned afresh: a crash loop must not
# eat the spare that another model may need.
STANDBY_STREAK_MAX = 1


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
        restarts: respawns after an end that nobody asked for, by cause.
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
        self.last_exit: LastExit | None = None
        self.restarts: Counter[str] = Counter()
        self._drain_s = self._settings.drain_timeout_s
        self._files: Fingerprint = ()
        self._files_looked_at = 0.0
        self._budget = RestartBudget()
        self._try_delay_s = 0.0
        self._failure: Failure | None = None
        self._respawn_cause: str | None = None
        # Engines lost to faults of our own code since the last completion.
        self._lost_to_faults = 0

    # -- What the slot tells it -------------------------------------------------------------------

    def want_up(self) -> None:
        """Something wants the model."""
        if self.stop_by is None:
            self.wanted = True
            self.room_error = None
            self.look_for_repair()
            self._apply(Event.WANT_UP)

    def want_down(self, drain_timeout_s: float | None = None, reason: str = "") -> None:
        """Unload, draining for at most so long (None: as configured)."""
        self.wanted = False
        self.deferred = None
        limit = self._settings.drain_timeout_s
        self._drain_s = limit if drain_timeout_s is None else drain_timeout_s
        self._apply(Event.WANT_DOWN, reason)

    def take_room(self) -> None:
        """There is room now for what was deferred."""
        event, self.deferred = self.deferred, None
        if event is not None:
            self._apply(event)

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
            log_event("model.not_loaded", model=self.spec.id, reason=_room_reason(make_error))
            self._apply(Event.WANT_DOWN, "there is no room to try it again")
        else:
            self.timers.set("try", max(self._try_delay_s, self._settings.restart.half_open_s))

    def change_spec(self, spec: ModelSpec | None) -> None:
        """Another configuration, or (None) a reload with the same."""
        self.spec = spec or self.spec
        self._drain_s = self._settings.drain_timeout_s
        self._apply(Event.REPLACE if self._has_room_for_two() else Event.SPEC_CHANGED)

    def adjust_spec(self, spec: ModelSpec) -> None:
        """Another configuration, equal in all that an engine sees."""
        self.spec = spec

    def reset(self, reason: str) -> None:
        """Forget the past."""
        self._respawn_cause = None
        self._apply(Event.RESET, reason)

    def shut_down(self, stop_by: float, stop_error: Callable[[], CapacityError]) -> None:
        """Go down for good, at the latest at `stop_by`; who is cut is told `stop_error`."""
        self.stop_by = stop_by
        self.wanted = False
        self.deferred = None
        self.crew.note_stop(stop_error)
        self.crew.retirees.shut_down(stop_by, self._drain_limit_s())
        self._apply(Event.WANT_DOWN)

    def cut(self) -> None:
        """End a drain, and the window of a stop, now."""
        self._apply(Event.DRAINED)
        self._apply(Event.STOP_TIMEOUT)
        self.crew.retirees.kill()

    def note_completion(self, engine: Incarnation) -> None:
        """`engine` completed a completion."""
        engine.completed = True
        self._lost_to_faults = 0
        self._budget = after_completion(self._budget)

    def note_free(self, engine: Incarnation) -> None:
        """`engine` gave a place back."""
        if engine is not self.crew.engine:
            self.crew.retirees.note_free(engine)
        elif not engine.requests:
            self._apply(Event.DRAINED)

    def look_for_repair(self) -> None:
        """A model that cannot work is tried again when its files have changed."""
        failure, now = self._failure, self._now()
        if self.state is not State.FAILED or failure is None or failure.cause != "cannot_work":
            return
        if now - self._files_looked_at >= FILES_LOOK_S:
            self._files_looked_at = now
            if model_fingerprint(self.spec) != self._files:
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
        if self._failure is None:
            return None
        return msgspec.structs.replace(self._failure, retry_in_s=self.next_try_s)

    def failed_error(self) -> CapacityError:
        """503 with the cause, for a FAILED model."""
        failure = self.failure
        assert failure is not None
        retry_in_s = failure.retry_in_s
        if failure.cause == "circuit_open" and retry_in_s is None:
            # On the way into FAILED, before the timer is set.
            retry_in_s = self._try_delay_s
        return causes.failed(self.spec.id, failure, retry_in_s)

    # -- What the engine does (process.ProcessListener) -------------------------------------------

    def on_report(self, process: EngineProcess, message: wire.Report) -> None:
        """A report line came."""
        self._post(partial(self._hear, process, message))

    def on_report_end(self, process: EngineProcess) -> None:
        """The report pipe ended."""
        self._post(partial(self._report_ended, process))

    def on_dying(self, process: EngineProcess) -> None:
        """Nothing of the process runs any more; its exit follows when the kernel is done."""
        self._post(partial(self._dying, process))

    def on_exit(self, process: EngineProcess, exit: Exit) -> None:
        """The process is reaped."""
        self._post(partial(self._exited, process, exit))

    def _is_loading(self, engine: Incarnation) -> bool:
        return engine is self.crew.successor or (
            engine is self.crew.engine and self.state is State.STARTING
        )

    def _hear(self, process: EngineProcess, message: wire.Report) -> None:
        if (engine := self.crew.find(process)) is None:
            return
        match message:
            case wire.Loading() if self._is_loading(engine):
                engine.hear_loading(message, self._now())
                self._tell_load_step(engine, message)
            case wire.Ready() if self._is_loading(engine) and engine.facts is None:
                self._become_ready(engine, message)
            case wire.Progress() if engine.facts is not None:
                engine.hear_progress(message, self._now())
                if message.completed and not engine.completed:
                    self.note_completion(engine)
            case wire.Failed():
                log_event(
                    "engine.failed",
                    logging.WARNING,
                    model=self.spec.id,
                    incarnation=engine.number,
                    code=message.code,
                    reason=message.message,
                )
            case wire.Loading() | wire.Ready() | wire.Progress():
                # Out of place: a second ready, a load step after it. Nothing depends on them.
                pass
            case _:
                assert_never(message)

    def _become_ready(self, engine: Incarnation, ready: wire.Ready) -> None:
        if engine.process.has_exited:
            # Its exit is on the way, and has taken the socket with it.
            return
        if not engine.has_socket():
            self._fail_start(engine, "it called itself ready without a socket")
            return
        engine.become_ready(ready, self._now())
        self._context.note_facts(self.spec, ready.facts)
        event = Event.SUCCESSOR_READY if engine is self.crew.successor else Event.READY
        self._apply(event, f"loaded in {engine.load_s:.2f} s")
        self._side.note_ready()

    def _fail_start(self, engine: Incarnation, why: str) -> None:
        fault = ("start_failed", why)
        if engine is self.crew.successor:
            self.crew.lose_successor(fault)
            self._apply(Event.SUCCESSOR_LOST, why)
        else:
            engine.fault = fault
            self._apply(Event.START_FAILED, why)

    def _report_ended(self, process: EngineProcess) -> None:
        engine = self.crew.find(process)
        if engine is not None and self._is_loading(engine) and engine.facts is None:
            self.timers.set(f"report_end {engine.number}", REPORT_END_GRACE_S)

    def _dying(self, process: EngineProcess) -> None:
        if (engine := self.crew.find(process)) is not None:
            engine.tell_death()

    def _exited(self, process: EngineProcess, exit: Exit) -> None:
        if (engine := self.crew.find(process)) is None:
            return
        self.timers.cancel(f"report_end {engine.number}")
        last_exit = engine.last_exit(exit, self._context.clock.wall())
        if engine.own_bytes_max:
            self._context.footprints.note(
                footprint_key(self.spec), engine.own_bytes_max, engine.own_gpu_bytes_max
            )
        if engine.memory is not None:
            self._context.residency.note_gone(
                self.spec.id, engine.memory[0], engine.available_before
            )
        if engine is self.crew.engine:
            self.crew.engine = None
            self.last_exit = last_exit
            ending = engine.ending(exit, wanted=self.wanted)
            self._judge(ending, last_exit, process.failure)
        elif engine is self.crew.successor:
            self.crew.successor = None
            self.crew.note_lost(engine, last_exit.reason)
            self._apply(Event.SUCCESSOR_LOST, last_exit.reason)
        else:
            self.crew.retirees.forget(engine)

    def _spawn_failed(self, incarnation: int, reason: str) -> None:
        self.last_exit = LastExit(
            incarnation=incarnation,
            code=None,
            signal=None,
            reason=reason,
            cause="spawn_failed",
            stderr_tail=(),
            at=self._context.clock.wall(),
        )
        ending = Ending(wanted=self.wanted, planned=False, code=None, completed=False)
        self._judge(ending, self.last_exit, None)

    def _judge(self, ending: Ending, exit: LastExit, reported: wire.Failed | None) -> None:
        for name in ("watch", "drain", "stop"):
            self.timers.cancel(name)
        if self.crew.successor is not None and self.wanted:
            self._apply(Event.SUCCEEDED, exit.reason)
            return
        judgement = judge(
            ending,
            self._budget,
            now=self._now(),
            jitter=self._context.jitter(),
            settings=self._settings.restart,
        )
        self._budget = judgement.budget
        self._try_delay_s = judgement.delay_s or 0.0
        self._respawn_cause = None if ending.planned else exit.cause
        self._failure = causes.failure_of(judgement, exit, reported)
        self._apply(judgement.event, exit.reason)

    # -- Mending ----------------------------------------------------------------------------------

    def condition(self, *, has_wish: bool) -> Condition:
        """What there is of the model; `has_wish`: whether the residency knows of a deferred start."""
        engine, successor = self.crew.engine, self.crew.successor
        return Condition(
            state=self.state,
            is_wanted=self.wanted,
            has_engine=engine is not None,
            is_engine_gone=engine is not None and engine.process.has_exited,
            is_engine_ready=engine is not None and engine.facts is not None,
            is_engine_busy=engine is not None and engine.requests > 0,
            has_successor=successor is not None,
            is_successor_gone=successor is not None and successor.process.has_exited,
            is_successor_ready=successor is not None and successor.facts is not None,
            timers=self.timers.names,
            is_deferred=self.deferred is not None,
            has_wish=has_wish,
            is_final=self._failure is not None and self._failure.cause == "cannot_work",
            has_failure=self._failure is not None,
        )

    def mend(self, *, has_wish: bool) -> None:
        """A message has failed half done: make all agree again, at the engine's cost if it must be."""
        self.crew.retirees.mend()
        # One after the other, since each may change what the next one would be.
        done: set[Repair] = set()
        while left := [r for r in diagnose(self.condition(has_wish=has_wish)) if r not in done]:
            done.add(left[0])
            log_event("model.mended", logging.WARNING, model=self.spec.id, repair=left[0].value)
            self._mend(left[0])

    def _mend(self, repair: Repair) -> None:
        match repair:
            case Repair.DROP_ENGINE:
                self.crew.engine = None
            case Repair.DROP_SUCCESSOR:
                self.crew.successor = None
            case Repair.END_ENGINE:
                self.crew.end_all()
            case Repair.GO_DOWN:
                self._apply(Event.WANT_DOWN)
            case Repair.GIVE_UP:
                self._give_up()
            case Repair.PROMOTE:
                self._promote()
                self._apply(Event.SUCCEEDED)
            case Repair.NOTE_READY:
                self._apply(Event.READY)
                self._side.note_ready()
            case Repair.NOTE_SUCCESSOR:
                self._apply(Event.SUCCESSOR_READY)
                self._side.note_ready()
            case Repair.WATCH:
                self.timers.set("watch", self._settings.watchdog_interval_s)
            case Repair.DRAIN:
                self._drain()
            case Repair.KILL:
                self.crew.signal_engine(signal.SIGKILL)
            case Repair.TRY:
                self.timers.set("try", self._try_delay_s)
            case Repair.ASK_ROOM:
                self.take_room()
            case _:
                assert_never(repair)

    def _give_up(self) -> None:
        """There is no engine where there should be one: refuse who waits, and try again soon."""
        self._try_delay_s = min(
            PAUSE_S * 2.0 ** min(self._lost_to_faults, 32), self._settings.restart.half_open_max_s
        )
        self._lost_to_faults += 1
        self._failure = causes.own_fault()
        if self.state is State.FAILED:
            self.timers.set("try", self._try_delay_s)
        else:
            self._apply(Event.CIRCUIT_OPENED if self.wanted else Event.EXITED, "our own fault")

    # -- Transitions ------------------------------------------------------------------------------

    def _fire(self, name: str, ticket: int) -> None:
        if not self.timers.take(name, ticket):
            return
        match name:
            case "try":
                self._apply(Event.BACKOFF_ELAPSED)
            case "drain":
                self._apply(Event.DRAINED, "the drain timeout passed")
            case "stop":
                self._apply(Event.STOP_TIMEOUT)
            case "watch":
                self._watch()
            case _:
                self._report_end_grace_over(int(name.removeprefix("report_end ")))

    def _report_end_grace_over(self, number: int) -> None:
        for engine in (self.crew.engine, self.crew.successor):
            # One that was told to end meanwhile does not fail to start.
            if engine is not None and engine.number == number and self._is_loading(engine):
                self._fail_start(engine, "it closed its report pipe before it was ready")

    def _watch(self) -> None:
        engine, successor, now = self.crew.engine, self.crew.successor, self._now()
        if not self.crew.is_empty:
            self.timers.set("watch", self._settings.watchdog_interval_s)
        if engine is not None and engine.memory and engine.memory[0] >= RETURN_BYTES_MIN:
            engine.available_before = self._context.available_bytes()
        if engine is not None and self.state is State.STARTING:
            verdict = engine.look_at_load(now, self._settings)
            if verdict is not None:
                engine.fault = ("start_timeout", verdict)
                self._apply(Event.START_TIMEOUT, verdict)
        elif engine is not None and self.state in (State.READY, State.DRAINING):
            verdict = engine.look(now, self._settings)
            if verdict is not None:
                engine.fault = ("hung", verdict)
                self._apply(Event.HUNG, verdict)
        if successor is not None and successor.facts is None:
            verdict = successor.look_at_load(now, self._settings)
            if verdict is not None:
                self.crew.lose_successor(("start_timeout", verdict))
                self._apply(Event.SUCCESSOR_LOST, verdict)
        self.crew.retirees.watch()

    def _apply(self, event: Event, reason: str = "") -> None:
        cell = step(self.state, event)
        if cell is None:
            return
        if Action.SPAWN in cell.actions and not self._side.ask_room():
            self.deferred = event
            for action in cell.actions:
                if action is not Action.SPAWN:
                    self._act(action)
            return
        if cell.state is not self.state or Action.SPAWN in cell.actions:
            self.deferred = None
        before, self.state = self.state, cell.state
        wall = self._context.clock.wall()
        if cell.state is not before:
            self.since = wall
        for action in cell.actions:
            self._act(action)
        moved = Transition(
            model=self.spec.id,
            incarnation=self.crew.engine.number if self.crew.engine else self.crew.spawned,
            pid=self.crew.engine.process.pid if self.crew.engine else None,
            before=before.value,
            event=event.value,
            after=cell.state.value,
            reason=reason,
            at=wall,
        )
        _log_transition(moved)
        self._tell(moved)

    def _tell(self, event: SlotEvent) -> None:
        if self._context.on_event is not None:
            self._context.on_event(event)

    def _tell_load_step(self, engine: Incarnation, loading: wire.Loading) -> None:
        at = self._context.clock.wall()
        self._tell(LoadStep(model=self.spec.id, incarnation=engine.number, loading=loading, at=at))

    def _act(self, action: Action) -> None:
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
                self.timers.set("try", self._try_delay_s)
            case Action.CANCEL_TRY:
                self.timers.cancel("try")
            case Action.FORGET_CRASHES:
                self._budget = RestartBudget()
            case Action.REFUSE_WAITERS:
                self._side.refuse_failed()
            case Action.SPAWN_SUCCESSOR:
                self._files = model_fingerprint(self.spec)
                self.crew.spawn_successor(self.spec, self)
            case Action.END_SUCCESSOR:
                self.crew.end_successor()
            case Action.SWITCH:
                self.crew.promote(self._drain_s)
            case Action.PROMOTE:
                self._promote()
            case _:
                assert_never(action)

    def _spawn(self) -> None:
        if self._respawn_cause is not None:
            self.restarts[self._respawn_cause] += 1
            self._respawn_cause = None
        self._failure = None
        self._files = model_fingerprint(self.spec)
        try:
            self.crew.spawn(self.spec, self, use_standby=self._deserves_standby())
        except OSError as error:
            reason = f"it could not be spawned: {error.strerror}"
            self._post(partial(self._spawn_failed, self.crew.spawned, reason))
            return
        self.timers.set("watch", self._settings.watchdog_interval_s)

    def _deserves_standby(self) -> bool:
        """Not in a crash loop, nor after exit 78: it would only use them up."""
        could_work = self.last_exit is None or self.last_exit.code != EXIT_CANNOT_WORK
        return could_work and self._budget.streak <= STANDBY_STREAK_MAX

    def _promote(self) -> None:
        engine = self.crew.promote(self._drain_s)
        self.timers.set("watch", self._settings.watchdog_interval_s)
        if engine.facts is not None:
            self._post(partial(self._apply, Event.READY))

    def _has_room_for_two(self) -> bool:
        engine = self.crew.engine
        return has_room_for_two(
            self._context.residency.limits.policy,
            fits_budget=self._side.has_space_beside(),
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
            self._post(partial(self._apply, Event.DRAINED))

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
    return logging.WARNING if moved.event in UNASKED else logging.INFO


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
