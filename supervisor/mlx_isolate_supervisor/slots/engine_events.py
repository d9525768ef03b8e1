"""What befalls the engines of one slot, as events of its lifecycle: reports, ends, hangs.

Hears the engine processes and looks at them from time to time; what an event leads to is the
machine's business. All but the calls of a process happens in messages of the slot.
"""

import logging
from functools import partial
from typing import Protocol, assert_never

from mlx_isolate_shared import wire
from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.engines.child import Exit
from mlx_isolate_supervisor.engines.process import EngineProcess
from mlx_isolate_supervisor.models.footprints import footprint_key
from mlx_isolate_supervisor.models.memory_return import RETURN_BYTES_MIN
from mlx_isolate_supervisor.slots.crew import Crew
from mlx_isolate_supervisor.slots.incarnation import Incarnation
from mlx_isolate_supervisor.slots.lifecycle import Event, State
from mlx_isolate_supervisor.slots.past import Past
from mlx_isolate_supervisor.slots.restart import Ending
from mlx_isolate_supervisor.slots.slot_context import SlotContext, SlotSide
from mlx_isolate_supervisor.slots.timers import Timers
from mlx_isolate_supervisor.telemetry.logs import log_event
from mlx_isolate_supervisor.telemetry.status import LastExit, LoadStep, SlotEvent

# Between the end of the report pipe and the exit that it announces; an engine that lives on after
# that has failed to start.
REPORT_END_GRACE_S = 1.0


class Owner(Protocol):
    """The machine whose engines these are."""

    spec: ModelSpec
    state: State
    wanted: bool
    timers: Timers
    crew: Crew
    past: Past

    def apply(self, event: Event, reason: str = "") -> None:
        """Do what the lifecycle table says of `event`."""
        ...

    def note_completion(self, engine: Incarnation) -> None:
        """`engine` completed a completion."""
        ...

    def tell(self, event: SlotEvent) -> None:
        """Tell whoever watches."""
        ...


class EngineEvents:
    """Listens to the engines of one slot; implements `process.ProcessListener`."""

    def __init__(self, owner: Owner, context: SlotContext, side: SlotSide) -> None:
        self._owner = owner
        self._crew = owner.crew
        self._timers = owner.timers
        self._context = context
        self._settings = context.settings
        self._now = context.clock.monotonic
        self._side = side

    # -- What a process tells ---------------------------------------------------------------------

    def on_report(self, process: EngineProcess, message: wire.Report) -> None:
        """A report line came."""
        self._side.post(partial(self._hear, process, message))

    def on_report_end(self, process: EngineProcess) -> None:
        """The report pipe ended."""
        self._side.post(partial(self._report_ended, process))

    def on_dying(self, process: EngineProcess) -> None:
        """Nothing of the process runs any more; its exit follows when the kernel is done."""
        self._side.post(partial(self._dying, process))

    def on_exit(self, process: EngineProcess, exit: Exit) -> None:
        """The process is reaped."""
        self._side.post(partial(self._exited, process, exit))

    # -- Reports ----------------------------------------------------------------------------------

    def _is_loading(self, engine: Incarnation) -> bool:
        return engine is self._crew.successor or (
            engine is self._crew.engine and self._owner.state is State.STARTING
        )

    def _hear(self, process: EngineProcess, message: wire.Report) -> None:
        if (engine := self._crew.find(process)) is None:
            return
        match message:
            case wire.Loading() if self._is_loading(engine):
                engine.hear_loading(message, self._now())
                self._tell_load_step(engine, message)
            case wire.Ready() if self._is_loading(engine) and engine.facts is None:
                self._become_ready(engine, message)
            case wire.Progress() if engine.facts is not None:
                self._tell_cache_trouble(engine, message.cache.ssd_trouble)
                engine.hear_progress(message, self._now())
                if message.completed and not engine.completed:
                    self._owner.note_completion(engine)
            case wire.Failed():
                log_event(
                    "engine.failed",
                    logging.WARNING,
                    model=self._owner.spec.id,
                    incarnation=engine.number,
                    code=message.code,
                    reason=message.message,
                )
            case wire.Loading() | wire.Ready() | wire.Progress():
                # Out of place: a second ready, a load step after it. Nothing depends on them.
                pass
            case _:
                assert_never(message)

    def _tell_cache_trouble(self, engine: Incarnation, trouble: str) -> None:
        """Log once that the SSD tier cannot be written, and once that it can be again."""
        before = "" if engine.progress is None else engine.progress.cache.ssd_trouble
        if bool(trouble) == bool(before):
            return
        event, level = ("cache.written_again", logging.INFO)
        if trouble:
            event, level = ("cache.not_written", logging.WARNING)
        log_event(
            event,
            level,
            model=self._owner.spec.id,
            incarnation=engine.number,
            reason=trouble or None,
        )

    def _tell_load_step(self, engine: Incarnation, loading: wire.Loading) -> None:
        model, at = self._owner.spec.id, self._context.clock.wall()
        self._owner.tell(LoadStep(model=model, incarnation=engine.number, loading=loading, at=at))

    def _become_ready(self, engine: Incarnation, ready: wire.Ready) -> None:
        if engine.process.has_exited:
            # Its exit is on the way, and has taken the socket with it.
            return
        if not engine.has_socket():
            self._fail_start(engine, "it called itself ready without a socket")
            return
        engine.become_ready(ready, self._now())
        self._context.note_facts(self._owner.spec, ready.facts)
        event = Event.SUCCESSOR_READY if engine is self._crew.successor else Event.READY
        self._owner.apply(event, f"loaded in {engine.load_s:.2f} s")
        self._side.note_ready()

    def _fail_start(self, engine: Incarnation, why: str) -> None:
        fault = ("start_failed", why)
        if engine is self._crew.successor:
            self._crew.lose_successor(fault)
            self._owner.apply(Event.SUCCESSOR_LOST, why)
        else:
            engine.fault = fault
            self._owner.apply(Event.START_FAILED, why)

    def _report_ended(self, process: EngineProcess) -> None:
        engine = self._crew.find(process)
        if engine is not None and self._is_loading(engine) and engine.facts is None:
            self._timers.set(f"report_end {engine.number}", REPORT_END_GRACE_S)

    def end_report_grace(self, number: int) -> None:
        """An incarnation that closed its report pipe should have ended by now."""
        for engine in (self._crew.engine, self._crew.successor):
            # One that was told to end meanwhile does not fail to start.
            if engine is not None and engine.number == number and self._is_loading(engine):
                self._fail_start(engine, "it closed its report pipe before it was ready")

    # -- Ends -------------------------------------------------------------------------------------

    def _dying(self, process: EngineProcess) -> None:
        if (engine := self._crew.find(process)) is not None:
            engine.tell_death()

    def _exited(self, process: EngineProcess, exit: Exit) -> None:
        if (engine := self._crew.find(process)) is None:
            return
        self._timers.cancel(f"report_end {engine.number}")
        last_exit = engine.last_exit(exit, self._context.clock.wall())
        self._note_memory(engine)
        if engine is self._crew.engine:
            self._crew.engine = None
            self._owner.past.last_exit = last_exit
            ending = engine.ending(exit, wanted=self._owner.wanted)
            self._judge(ending, last_exit, process.failure)
        elif engine is self._crew.successor:
            self._crew.successor = None
            self._crew.note_lost(engine, last_exit.reason)
            self._owner.apply(Event.SUCCESSOR_LOST, last_exit.reason)
        else:
            self._crew.retirees.forget(engine)

    def _note_memory(self, engine: Incarnation) -> None:
        """It holds none any more; what it held helps to judge the next one."""
        spec = self._owner.spec
        if engine.own_bytes_max:
            self._context.footprints.note(
                footprint_key(spec), engine.own_bytes_max, engine.own_gpu_bytes_max
            )
        if engine.memory is not None:
            self._context.residency.returning.note_gone(
                spec.id, engine.memory[0], engine.available_before
            )

    def note_spawn_failed(self, incarnation: int, reason: str) -> None:
        """No process could be started for an incarnation."""
        self._owner.past.last_exit = last_exit = LastExit(
            incarnation=incarnation,
            code=None,
            signal=None,
            reason=reason,
            cause="spawn_failed",
            stderr_tail=(),
            at=self._context.clock.wall(),
        )
        ending = Ending(wanted=self._owner.wanted, planned=False, code=None, completed=False)
        self._judge(ending, last_exit, None)

    def _judge(self, ending: Ending, exit: LastExit, reported: wire.Failed | None) -> None:
        for name in ("watch", "drain", "stop"):
            self._timers.cancel(name)
        if self._crew.successor is not None and self._owner.wanted:
            event = Event.SUCCEEDED
        else:
            event = self._owner.past.judge(ending, exit, reported)
        self._owner.apply(event, exit.reason)

    # -- Hangs ------------------------------------------------------------------------------------

    def begin_watch(self) -> None:
        """Look at them from time to time, as long as there are any."""
        self._timers.set("watch", self._settings.watchdog_interval_s)

    def watch(self) -> None:
        """Look at all of them: who hangs, or does not come up."""
        engine, successor, now = self._crew.engine, self._crew.successor, self._now()
        if not self._crew.is_empty:
            self.begin_watch()
        if engine is not None:
            self._watch_engine(engine, now)
        if successor is not None and successor.facts is None:
            verdict = successor.look_at_load(now, self._settings)
            if verdict is not None:
                self._crew.lose_successor(("start_timeout", verdict))
                self._owner.apply(Event.SUCCESSOR_LOST, verdict)
        self._crew.retirees.watch()

    def _watch_engine(self, engine: Incarnation, now: float) -> None:
        state = self._owner.state
        if engine.memory and engine.memory[0] >= RETURN_BYTES_MIN:
            engine.available_before = self._context.available_bytes()
        if state is State.STARTING:
            verdict = engine.look_at_load(now, self._settings)
            if verdict is not None:
                engine.fault = ("start_timeout", verdict)
                self._owner.apply(Event.START_TIMEOUT, verdict)
        elif state in (State.READY, State.DRAINING):
            verdict = engine.look(now, self._settings)
            if verdict is not None:
                engine.fault = ("hung", verdict)
                self._owner.apply(Event.HUNG, verdict)
