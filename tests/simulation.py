"""Time that jumps and engines that are made up: a pool runs for hours in a second, in one process.

The loop's clock moves only when nothing is left to do, straight to the next timer. An engine here
is an object that reports, crashes, hangs and ends as its fate says; slots cannot tell.
"""

import asyncio
import random
import selectors
import signal
import socket
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec

from mlx_isolate_shared import wire
from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.engines.child import Exit
from mlx_isolate_supervisor.engines.command import EngineCommand
from mlx_isolate_supervisor.engines.process import EngineProcess, ProcessListener
from mlx_isolate_supervisor.engines.rundir import RunDirectory
from mlx_isolate_supervisor.models.pool import Pool
from mlx_isolate_supervisor.models.pool_limits import PoolLimits
from mlx_isolate_supervisor.models.projection import PROCESS_BYTES
from mlx_isolate_supervisor.slots.slot_settings import SlotSettings
from mlx_isolate_supervisor.telemetry.status import SlotEvent
from tests.fakes.statuses import FACTS

PROGRESS_S = 0.5


class JumpingSelector(selectors.SelectSelector):
    """Never waits: where the loop would sleep, its clock jumps."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready now."""
        assert timeout is not None, "everybody waits and nothing is due: a deadlock"
        if timeout > 0.0:
            # A little further, or by rounding the timer could stay due in the future for ever.
            self.now += timeout + 1e-9
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop in simulated time; also the clock of what runs in it."""

    def __init__(self) -> None:
        self.jumping = JumpingSelector()
        super().__init__(self.jumping)

    def time(self) -> float:
        """Simulated seconds."""
        return self.jumping.now

    def monotonic(self) -> float:
        """Simulated seconds, as `clock.Clock`."""
        return self.jumping.now

    def wall(self) -> float:
        """Simulated seconds, as `clock.Clock`."""
        return self.jumping.now


def simulate(main: Callable[[SimulatedLoop], Coroutine[Any, Any, None]]) -> None:
    """Run `main` in simulated time; nothing may be left running."""
    loop = SimulatedLoop()
    try:
        loop.run_until_complete(main(loop))
        left = asyncio.all_tasks(loop)
        assert not left, left
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of one engine.

    Attributes:
        load_s: time until it is ready; None = it never is, and says nothing.
        end: how it ends by itself: an exit code, or a signal's name.
        end_after_s: when, counted from its start; None = it does not.
        report_ends_s: when its report pipe ends before it is ready; None = it does not.
        term_s: how long SIGTERM takes; None = it ignores it.
        bytes: what it holds.
    """

    load_s: float | None = 1.0
    end: int | str = "SIGKILL"
    end_after_s: float | None = None
    report_ends_s: float | None = None
    term_s: float | None = 0.1
    bytes: int = 0


class SimulatedEngine:
    """One made-up engine process; has what slots use of an `EngineProcess`."""

    def __init__(
        self,
        world: "World",
        spec: ModelSpec,
        incarnation: int,
        listener: ProcessListener,
        fate: Fate,
    ) -> None:
        self.world = world
        self.model_id = spec.id
        self.incarnation = incarnation
        self.spec = spec
        self.fate = fate
        self.pid = 10_000_000 + len(world.engines)
        self.socket_path = str(world.socket_path)
        self.failure: wire.Failed | None = None
        self.dying: Exit | None = None
        self.is_ready = False
        self.is_frozen = False
        self.tokens = 0
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[Exit] = self._loop.create_future()
        self._timers: list[asyncio.TimerHandle] = []
        self.began_at = self._loop.time()
        self.ended_at: float | None = None
        if fate.load_s is not None:
            self._later(fate.load_s, self._become_ready)
        if fate.report_ends_s is not None:
            self._later(fate.report_ends_s, listener.on_report_end, self.process)
        if fate.end_after_s is not None:
            self._later(fate.end_after_s, self.end, fate.end)

    @property
    def process(self) -> EngineProcess:
        """Itself, as slots know engines."""
        return cast(EngineProcess, self)

    @property
    def is_alive(self) -> bool:
        return not self._exited.done()

    def _later(self, delay_s: float, call: Callable[..., object], *arguments: object) -> None:
        self._timers.append(self._loop.call_later(delay_s, call, *arguments))

    def _become_ready(self) -> None:
        if not self.is_frozen:
            self.is_ready = True
            load_s = self.fate.load_s or 0.0
            ready = wire.Ready(
                pid=self.pid, socket_path=self.socket_path, load_s=load_s, facts=FACTS
            )
            self._listener.on_report(self.process, ready)
            self._progress()

    def _progress(self) -> None:
        if not self.is_frozen:
            self.tokens += 1
            # All but a bare process is prompt cache, so that measurements change no projection.
            cache = wire.CacheFigures(ram_bytes=max(0, self.fate.bytes - PROCESS_BYTES))
            line = wire.Progress(
                generated_tokens=self.tokens, footprint_bytes=self.fate.bytes, cache=cache
            )
            self._listener.on_report(self.process, line)
        self._timers = [timer for timer in self._timers if not timer.cancelled()]
        self._later(PROGRESS_S, self._progress)

    def end(self, how: int | str) -> None:
        """End now, by an exit code or a signal."""
        if self._exited.done():
            return
        for timer in self._timers:
            timer.cancel()
        self.ended_at = self._loop.time()
        code, name = (how, None) if isinstance(how, int) else (None, how)
        exit = Exit(code=code, signal=name)
        self._exited.set_result(exit)
        self._listener.on_exit(self.process, exit)

    def freeze(self) -> None:
        """Stand still, as after SIGSTOP."""
        self.is_frozen = True

    # -- What slots use ---------------------------------------------------------------------------

    @property
    def has_exited(self) -> bool:
        return self._exited.done()

    def expect_exit(self) -> None:
        """Ends are told at once here."""

    async def wait_exit(self) -> Exit:
        return await asyncio.shield(self._exited)

    def tail(self, lines: int) -> tuple[str, ...]:
        return ()[:lines]

    def send_signal(self, number: signal.Signals) -> None:
        """Ends come a moment later, as in life."""
        if number is signal.SIGKILL:
            self._later(0.001, self.end, number.name)
        elif number is signal.SIGABRT:
            self._later(0.01, self.end, number.name)
        elif number is signal.SIGTERM and self.fate.term_s is not None:
            self._later(self.fate.term_s, self.end, 0)


class World:
    """Where simulated engines come from; an `EngineSource`.

    Attributes:
        fate: what becomes of the next engine of a model.
        engines: all there have been.
        memory_bytes: of the made-up machine.
        return_lag_s: how long the memory of an ended engine stays lost.
    """

    def __init__(self, folder: Path, fate: Callable[[ModelSpec], Fate]) -> None:
        self.fate = fate
        self.engines: list[SimulatedEngine] = []
        self.memory_bytes = 0
        self.return_lag_s = 0.0
        # Slots look whether an engine's socket is there; all made-up engines share one.
        self.socket_path = folder / "s"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self.socket_path))

    def close(self) -> None:
        self._socket.close()

    @property
    def alive(self) -> list[SimulatedEngine]:
        return [engine for engine in self.engines[-200:] if engine.is_alive]

    def available_bytes(self) -> int | None:
        now = asyncio.get_running_loop().time()
        held = sum(
            engine.fate.bytes
            for engine in self.engines[-200:]
            if engine.ended_at is None or now - engine.ended_at < self.return_lag_s
        )
        return self.memory_bytes - held

    def engine_of(self, model_id: str, incarnation: int) -> SimulatedEngine:
        return next(
            engine
            for engine in reversed(self.engines)
            if engine.model_id == model_id and engine.incarnation == incarnation
        )

    def spawn(
        self,
        spec: ModelSpec,
        incarnation: int,
        *,
        listener: ProcessListener,
        output: deque[str],
        use_standby: bool,
    ) -> EngineProcess:
        """A made-up engine; `output` and `use_standby` change nothing."""
        engine = SimulatedEngine(self, spec, incarnation, listener, self.fate(spec))
        self.engines.append(engine)
        return engine.process


@asynccontextmanager
async def simulated_pool(
    loop: SimulatedLoop,
    needs: Mapping[str, int],
    limits: PoolLimits,
    *,
    settings: SlotSettings,
    places: int = 2,
    on_event: Callable[[SlotEvent], None] | None = None,
) -> AsyncGenerator[tuple[Pool, World]]:
    """A started pool of models that need so many bytes, each at least a process's.

    Its engines are well and hold what they need, until the world is given another fate; afterwards
    none may be left.
    """
    with tempfile.TemporaryDirectory(prefix="mi", dir="/tmp") as folder:
        world = World(Path(folder), lambda spec: Fate(bytes=needs[spec.id]))
        directory = RunDirectory.acquire(Path(folder) / "run")
        specs = [
            ModelSpec(
                id=id,
                model=f"/nowhere/{id}",
                engine=EngineSettings(
                    decode_concurrency=places, prompt_cache_bytes=need - PROCESS_BYTES
                ),
            )
            for id, need in needs.items()
        ]
        pool = Pool(
            specs,
            command=EngineCommand(),
            settings=settings,
            run_directory=directory,
            clock=loop,
            on_event=on_event,
            limits=limits,
            source=world,
            available_bytes=world.available_bytes,
        )
        pool.start()
        try:
            yield pool, world
            await pool.stop(5.0)
            assert world.alive == []
        finally:
            directory.release()
            world.close()


def pick(rng: random.Random, weighted: list[tuple[float, Any]]) -> Any:
    """One of the values, by weight."""
    return rng.choices([value for _, value in weighted], [weight for weight, _ in weighted])[0]
