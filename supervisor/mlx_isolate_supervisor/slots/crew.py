"""The processes of one slot: its engine, the successor that loads beside it, and the retirees.

Knows who is who and how they change places; when they do is decided by the machine. Called as
a message of its slot only.
"""

import signal
from collections import deque
from collections.abc import Callable

from mlx_isolate_shared.errors import CapacityError
from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.engines.process import OUTPUT_LINES_MAX, EngineProcess, ProcessListener
from mlx_isolate_supervisor.engines.spawner import EngineSource
from mlx_isolate_supervisor.slots.incarnation import Incarnation
from mlx_isolate_supervisor.slots.retirees import Retirees
from mlx_isolate_supervisor.slots.slot_settings import SlotSettings
from mlx_isolate_supervisor.telemetry.status import Replacement


class Crew:
    """Who works for one slot.

    Attributes:
        engine: the incarnation that serves, or is to serve once it has loaded.
        successor: the incarnation that loads beside it, to replace it.
        retirees: replaced ones that still drain or end.
        spawned: how many incarnations there have been.
        output: last lines of stdout and stderr of all of them, oldest first.
        lost: the last successor that did not come up, until the next spawn.
    """

    def __init__(
        self,
        source: EngineSource,
        settings: SlotSettings,
        *,
        now: Callable[[], float],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._source = source
        self._now = now
        self.engine: Incarnation | None = None
        self.successor: Incarnation | None = None
        self.retirees = Retirees(settings, now, post)
        self.spawned = 0
        self.output: deque[str] = deque(maxlen=OUTPUT_LINES_MAX)
        self.lost: Replacement | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no process is left."""
        return self.engine is None and self.successor is None and not self.retirees

    @property
    def engines(self) -> int:
        """Engines that it has or is to have at once: one that serves, one that loads, retirees."""
        return 1 + (self.successor is not None) + len(self.retirees)

    @property
    def yielding(self) -> list[Incarnation]:
        """Of these, those that a new successor takes the room of: who is ending, or ends for it."""
        return [*([] if self.successor is None else [self.successor]), *self.retirees.ending]

    @property
    def memory_bytes(self) -> int:
        """What its processes held at the last look, all together."""
        members = [self.engine, self.successor, *self.retirees]
        return sum(one.memory[0] for one in members if one is not None and one.memory)

    @property
    def gpu_bytes(self) -> int:
        """The same of a GPU's own memory."""
        members = [self.engine, self.successor, *self.retirees]
        return sum(one.gpu_bytes for one in members if one is not None)

    @property
    def replacement(self) -> Replacement | None:
        """The successor that loads, or the last one that failed while its predecessor serves."""
        successor = self.successor
        if successor is None:
            return self.lost
        pid, loading = successor.process.pid, successor.loading
        return Replacement(incarnation=successor.number, pid=pid, loading=loading)

    def find(self, process: EngineProcess) -> Incarnation | None:
        """Whoever that process is; None if it has been forgotten."""
        for engine in (self.engine, self.successor):
            if engine is not None and engine.process is process:
                return engine
        return self.retirees.find(process)

    def spawn(self, spec: ModelSpec, listener: ProcessListener, *, use_standby: bool) -> None:
        """Start an engine, where there is none; `use_standby`: out of a standby if one fits.

        Raises:
            OSError: it cannot be started.
        """
        assert self.engine is None, self.engine
        self.lost = None
        self.engine = self._new(spec, listener, use_standby=use_standby)

    def spawn_successor(self, spec: ModelSpec, listener: ProcessListener) -> None:
        """Start a successor, instead of one that is loading."""
        self.end_successor()
        self.lost = None
        try:
            self.successor = self._new(spec, listener, use_standby=True)
        except OSError as error:
            why = f"it could not be spawned: {error.strerror}"
            self.lost = Replacement(incarnation=self.spawned, pid=None, error=why)

    def _new(self, spec: ModelSpec, listener: ProcessListener, *, use_standby: bool) -> Incarnation:
        self.spawned += 1
        process = self._source.spawn(
            spec, self.spawned, listener=listener, output=self.output, use_standby=use_standby
        )
        return Incarnation(process, self._now())

    def note_stop(self, stop_error: Callable[[], CapacityError]) -> None:
        """The model is stopped for good; whoever is cut is told so."""
        for one in (self.engine, self.successor, *self.retirees):
            if one is not None:
                one.stop_error = stop_error

    def end_successor(self) -> None:
        """End the successor, if there is one."""
        successor, self.successor = self.successor, None
        if successor is not None:
            self.retirees.terminate(successor)

    def end_all(self) -> None:
        """Kill whoever still works, where nobody should."""
        engine, self.engine = self.engine, None
        successor, self.successor = self.successor, None
        for one in (engine, successor):
            if one is not None:
                self.retirees.terminate(one)
        self.retirees.kill()

    def lose_successor(self, fault: tuple[str, str]) -> None:
        """The successor does not come up: end it."""
        successor, self.successor = self.successor, None
        assert successor is not None
        self.retirees.abort(successor, fault)
        self.note_lost(successor, fault[1])

    def note_lost(self, successor: Incarnation, why: str) -> None:
        """Remember for operators why a successor did not come up."""
        self.lost = Replacement(
            incarnation=successor.number, pid=None, loading=successor.loading, error=why
        )

    def promote(self, drain_s: float) -> Incarnation:
        """The successor is the engine now; the old one, if it is there, drains and ends."""
        successor, self.successor = self.successor, None
        assert successor is not None
        old, self.engine = self.engine, successor
        if old is not None:
            self.retirees.drain(old, drain_s)
        return successor

    def signal_engine(self, number: signal.Signals) -> None:
        """Signal the engine, if there is one."""
        if self.engine is not None:
            self.engine.process.send_signal(number)
