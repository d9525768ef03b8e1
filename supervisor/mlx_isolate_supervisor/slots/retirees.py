"""Engines that no longer serve their slot: each drains what it holds, is told to end, and goes.

A retiree takes no new request and decides nothing about its slot; it only must not be cut before
its time, and not stay after it. Called as messages of its slot only.
"""

import signal
from collections.abc import Callable, Iterator
from functools import partial

from mlx_isolate_supervisor.engines.process import EngineProcess
from mlx_isolate_supervisor.slots.incarnation import Incarnation
from mlx_isolate_supervisor.slots.slot_settings import SlotSettings
from mlx_isolate_supervisor.slots.timers import Timers
from mlx_isolate_supervisor.telemetry.logs import log_event


class Retirees:
    """The engines of one slot that are on their way out.

    Args:
        now: monotonic seconds.
        post: puts a message into the slot's mailbox.
    """

    def __init__(
        self,
        settings: SlotSettings,
        now: Callable[[], float],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._settings = settings
        self._now = now
        self._engines: dict[int, Incarnation] = {}
        self._stop_by: float | None = None
        self._timers = Timers(lambda name, ticket: post(partial(self._fire, name, ticket)), now)

    def __len__(self) -> int:
        """How many are still there."""
        return len(self._engines)

    def __iter__(self) -> Iterator[Incarnation]:
        """From the oldest to the youngest."""
        return iter(tuple(self._engines.values()))

    @property
    def places_held(self) -> int:
        """Requests that still run in them."""
        return sum(len(engine.leases) for engine in self)

    @property
    def ending(self) -> list[Incarnation]:
        """Those that have been told to end."""
        return [one for one in self if self._timers.left_s(f"drain {one.number}") is None]

    def find(self, process: EngineProcess) -> Incarnation | None:
        """The retiree of `process`, if it is one."""
        return next((engine for engine in self if engine.process is process), None)

    def drain(self, engine: Incarnation, drain_s: float) -> None:
        """Let `engine` finish what it holds, for at most so long, then end it."""
        self._engines[engine.number] = engine
        if engine.requests:
            self._timers.set(f"drain {engine.number}", self._within_stop(drain_s))
        else:
            self.terminate(engine)

    def terminate(self, engine: Incarnation) -> None:
        """End `engine` now: SIGTERM, and SIGKILL after the stop window."""
        self._engines[engine.number] = engine
        engine.planned = engine.fault is None
        self._end(engine, signal.SIGTERM, self._settings.stop_window_s)

    def abort(self, engine: Incarnation, fault: tuple[str, str]) -> None:
        """End `engine` for a fault: SIGABRT, and SIGKILL after the abort window."""
        self._engines[engine.number] = engine
        engine.fault = fault
        self._end(engine, signal.SIGABRT, self._settings.abort_window_s)

    def note_free(self, engine: Incarnation) -> None:
        """`engine` gave a place back."""
        is_draining = self._timers.left_s(f"drain {engine.number}") is not None
        if engine.number in self._engines and is_draining and not engine.requests:
            self.terminate(engine)

    def watch(self) -> None:
        """Look for hangs among those that still drain."""
        for engine in self:
            if self._timers.left_s(f"drain {engine.number}") is not None:
                verdict = engine.look(self._now(), self._settings)
                if verdict is not None:
                    self.abort(engine, ("hung", verdict))

    def shut_down(self, stop_by: float, drain_s: float) -> None:
        """A shutdown leaves them only so much time."""
        self._stop_by = stop_by
        for engine in self:
            for name, limit in (("drain", drain_s), ("stop", stop_by - self._now())):
                timer = f"{name} {engine.number}"
                left = self._timers.left_s(timer)
                if left is not None:
                    self._timers.set(timer, min(left, limit))

    def kill(self) -> None:
        """End all of them at once."""
        for engine in self:
            engine.planned = engine.fault is None
            engine.process.send_signal(signal.SIGKILL)

    def mend(self) -> None:
        """A message has failed half done: let go of who is gone, end who would stay for ever."""
        for engine in self:
            left = [self._timers.left_s(f"{what} {engine.number}") for what in ("drain", "stop")]
            if engine.process.has_exited:
                self.forget(engine)
            elif left == [None, None]:
                self.terminate(engine)

    def forget(self, engine: Incarnation) -> None:
        """`engine` is gone."""
        del self._engines[engine.number]
        for name in ("drain", "stop"):
            self._timers.cancel(f"{name} {engine.number}")
        log_event("engine.retired", model=engine.process.model_id, incarnation=engine.number)

    def _end(self, engine: Incarnation, number: signal.Signals, window_s: float) -> None:
        self._timers.cancel(f"drain {engine.number}")
        self._timers.set(f"stop {engine.number}", self._within_stop(window_s))
        engine.process.send_signal(number)

    def _within_stop(self, window_s: float) -> float:
        return window_s if self._stop_by is None else min(window_s, self._stop_by - self._now())

    def _fire(self, name: str, ticket: int) -> None:
        if not self._timers.take(name, ticket):
            return
        what, _, number = name.partition(" ")
        engine = self._engines[int(number)]
        if what == "drain":
            self.terminate(engine)
        else:
            engine.process.send_signal(signal.SIGKILL)
