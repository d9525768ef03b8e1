"""What a slot knows of one incarnation: its process, its word so far, and who holds a place."""

import asyncio
import os
import stat
from collections.abc import Callable

from mlx_isolate_shared import wire
from mlx_isolate_shared.errors import CapacityError, EngineError
from mlx_isolate_shared.footprint import MemoryKind
from mlx_isolate_supervisor.engines.child import Exit
from mlx_isolate_supervisor.engines.memory import footprint
from mlx_isolate_supervisor.engines.process import EngineProcess
from mlx_isolate_supervisor.models.devices import device_of
from mlx_isolate_supervisor.slots import causes, watchdog
from mlx_isolate_supervisor.slots.admission import SlotLease
from mlx_isolate_supervisor.slots.overlap import GpuRoom
from mlx_isolate_supervisor.slots.restart import Ending
from mlx_isolate_supervisor.slots.slot_settings import SlotSettings
from mlx_isolate_supervisor.telemetry.status import LastExit

# After a connection broke, the engine's end is awaited for so long before the request is told that
# only the connection broke.
DEATH_WAIT_S = 0.75
# Lines of output that are kept with the record of an exit.
TAIL_LINES = 40
# A socket may be gone for so long because its engine is ending by itself.
SOCKET_GONE_S = 1.2


class Incarnation:
    """One spawned engine, seen from its slot; only the slot's messages change it.

    Attributes:
        number: from 1, counted over the slot's life.
        planned: it was told to end by an unload, a reload or a shutdown.
        stop_error: what waiting requests are told, once its model is stopped for good.
        fault: why it was ended otherwise, as (stable word, sentence): `hung`, `start_timeout`, ...
        completed: it completed at least one completion.
        own_bytes_max: the most that it held without its prompt cache; 0 before it reported.
        gpu_bytes, own_gpu_bytes_max: what it holds, and held at most, of a GPU's own memory.
        available_before: memory that was free beside it at the last look, None if unknown.
    """

    def __init__(self, process: EngineProcess, now: float) -> None:
        self.process = process
        self.number = process.incarnation
        self.leases: set[SlotLease] = set()
        self.spawned_at = now
        self.load_pulse = watchdog.begin_load(now)
        self.pulse = watchdog.begin_service(now)
        self.loading: wire.Loading | None = None
        self.facts: wire.ModelFacts | None = None
        self.load_s: float | None = None
        self.bare_load_s: float | None = None
        self.progress: wire.Progress | None = None
        self.memory: tuple[int, MemoryKind] | None = None
        self.planned = False
        self.stop_error: Callable[[], CapacityError] | None = None
        self.fault: tuple[str, str] | None = None
        self.completed = False
        self.own_bytes_max = 0
        self.gpu_bytes = 0
        self.own_gpu_bytes_max = 0
        self.available_before: int | None = None
        self._socket_gone_at: float | None = None

    def __repr__(self) -> str:
        """Number, pid and how many places are held."""
        return f"<Incarnation {self.number} pid={self.process.pid} leases={len(self.leases)}>"

    @property
    def socket_path(self) -> str:
        """Where it listens."""
        return self.process.socket_path

    @property
    def requests(self) -> int:
        """Places held by requests that will end by themselves."""
        return sum(not lease.is_upgraded for lease in self.leases)

    def has_socket(self) -> bool:
        """Whether its socket is really there, whatever it reports."""
        try:
            return stat.S_ISSOCK(os.lstat(self.socket_path).st_mode)
        except OSError:
            return False

    def become_ready(self, ready: wire.Ready, now: float) -> None:
        """It listens; from now on the watchdog expects progress."""
        self.facts = ready.facts
        self.load_s = now - self.spawned_at
        self.bare_load_s = ready.load_s
        self.pulse = watchdog.begin_service(now)
        self.loading = None

    def hear_loading(self, loading: wire.Loading, now: float) -> None:
        """A load that moves."""
        self.loading = loading
        self.load_pulse = watchdog.hear_loading(self.load_pulse, loading, now)

    def hear_progress(self, progress: wire.Progress, now: float) -> None:
        """Counters came."""
        self.progress = progress
        self.pulse = watchdog.hear_progress(self.pulse, progress, now)
        if progress.footprint_bytes:
            self.memory = (progress.footprint_bytes, progress.footprint_kind)
            cache_bytes = progress.cache.ram_bytes
            if self._has_own_gpu_memory:
                # The prompt cache lies there too.
                self.gpu_bytes = progress.mlx_active_bytes + progress.mlx_cache_bytes
                # A long prompt takes more for a moment than anything leaves behind.
                own_bytes = max(self.gpu_bytes, progress.mlx_peak_bytes) - cache_bytes
                self.own_gpu_bytes_max = max(self.own_gpu_bytes_max, own_bytes)
                cache_bytes = 0
            own_bytes = progress.footprint_bytes - cache_bytes
            self.own_bytes_max = max(self.own_bytes_max, own_bytes)

    @property
    def gpu_room(self) -> GpuRoom | None:
        """Its GPU's own memory, as it last reported; None where there is none."""
        if not self._has_own_gpu_memory:
            return None
        free = 0 if self.progress is None else self.progress.device_free_bytes
        return GpuRoom(held_bytes=self.gpu_bytes, free_bytes=free)

    @property
    def _has_own_gpu_memory(self) -> bool:
        return self.facts is not None and device_of(self.facts).has_own_memory

    def look_at_load(self, now: float, settings: SlotSettings) -> str | None:
        """Why the load has failed, or None."""
        self.memory = footprint(self.process.pid) or self.memory
        self.load_pulse, verdict = watchdog.look_at_load(self.load_pulse, now, settings)
        return verdict

    def look(self, now: float, settings: SlotSettings) -> str | None:
        """Why it is hung, or None."""
        if self._is_unreachable(now):
            return f"its socket {self.socket_path} was removed"
        self.pulse, verdict = watchdog.look(self.pulse, now, held=self.requests, settings=settings)
        return verdict

    def _is_unreachable(self, now: float) -> bool:
        if self.process.has_exited or self.has_socket():
            self._socket_gone_at = None
            return False
        self._socket_gone_at = now if self._socket_gone_at is None else self._socket_gone_at
        return now - self._socket_gone_at >= SOCKET_GONE_S

    @property
    def is_dying(self) -> bool:
        """Whether nothing of it runs any more, though it may not be reaped yet."""
        return self.process.dying is not None

    def tell_death(self) -> None:
        """Let everybody who holds a place know that it is dying."""
        for lease in self.leases:
            lease.tell_death()

    async def death(self) -> EngineError:
        """What to tell a request whose connection to this engine broke."""
        exit = self.process.dying
        if self.fault is None and exit is None:
            self.process.expect_exit()
        try:
            if self.fault is None and exit is None:
                async with asyncio.timeout(DEATH_WAIT_S):
                    exit = await self.process.wait_exit()
        except TimeoutError:
            pass
        if self.fault is not None:
            return causes.hung(self.fault[1])
        if self.planned and self.stop_error is not None:
            return causes.cut(self.stop_error())
        return causes.died(exit, planned=self.planned)

    def ending(self, exit: Exit, *, wanted: bool) -> Ending:
        """Its exit, as the restart policy judges it."""
        return Ending(wanted=wanted, planned=self.planned, code=exit.code, completed=self.completed)

    def last_exit(self, exit: Exit, at: float) -> LastExit:
        """The record of its exit, for operators."""
        failure = self.process.failure
        if self.fault is not None:
            cause, reason = self.fault[0], f"it was ended because {self.fault[1]}"
        elif self.planned:
            cause, reason = "planned", f"it was told to stop and {causes.describe_exit(exit)}"
        elif failure is not None:
            cause, reason = failure.code, failure.message
        else:
            cause = "signal" if exit.signal is not None else "exit"
            reason = f"it {causes.describe_exit(exit)}"
        return LastExit(
            incarnation=self.number,
            code=exit.code,
            signal=exit.signal,
            reason=reason,
            cause=cause,
            stderr_tail=self.process.tail(TAIL_LINES),
            at=at,
        )
