"""A fault of the supervisor's own code in whatever it does for a model costs no model for good.

Each function that a slot runs through is made to raise, once or for a while, in the middle of a
life with requests, crashes, a hang, a reload, an unload and a switch of models; in simulated time.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any, Self

import msgspec
import pytest

from mlx_isolate_shared.errors import HttpError
from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.models.lodging import Lodging
from mlx_isolate_supervisor.models.memory_return import MemoryReturn
from mlx_isolate_supervisor.models.pool import Pool
from mlx_isolate_supervisor.models.pool_limits import PoolLimits
from mlx_isolate_supervisor.models.residency import Residency
from mlx_isolate_supervisor.slots import machine, past
from mlx_isolate_supervisor.slots.crew import Crew
from mlx_isolate_supervisor.slots.engine_events import EngineEvents
from mlx_isolate_supervisor.slots.incarnation import Incarnation
from mlx_isolate_supervisor.slots.machine import Machine
from mlx_isolate_supervisor.slots.past import Past
from mlx_isolate_supervisor.slots.places import Places
from mlx_isolate_supervisor.slots.retirees import Retirees
from mlx_isolate_supervisor.slots.slot import Slot
from mlx_isolate_supervisor.slots.slot_settings import SlotSettings
from mlx_isolate_supervisor.slots.timers import Timers
from tests.simulation import Fate, SimulatedLoop, World, simulate, simulated_pool

GB = 1_000_000_000
NEEDS = {"a": 4 * GB, "b": 5 * GB}
SETTINGS = SlotSettings(queue_timeout_s=60.0)
LIMITS = PoolLimits(
    budget_bytes=12 * GB, ceiling_bytes=12 * GB, models_max=1, policy="keep_then_commit"
)
# Whatever went wrong: a load whose report was lost is given up after its silence, and a model is
# tried again after the first pause of the circuit breaker.
PAUSE_S = SETTINGS.start_silence_s + SETTINGS.restart.half_open_s + 10.0
# No request waits longer than its queue timeout, and no command longer than a drain.
OUTCOME_S_MAX = SETTINGS.queue_timeout_s + SETTINGS.report_silence_s + 30.0
COMMAND_S_MAX = SETTINGS.drain_timeout_s + SETTINGS.stop_window_s + 120.0

TARGETS: list[tuple[Any, str]] = [
    *((Places, name) for name in ("_arrive", "grant", "_give_back")),
    *((Slot, name) for name in ("_is_ready", "_is_settled_after")),
    *((Machine, name) for name in ("want_up", "want_down", "change_spec", "reset", "note_free")),
    *((Machine, name) for name in ("apply", "act", "_fire", "_spawn", "_end_engine", "tell")),
    *((EngineEvents, name) for name in ("_hear", "_become_ready", "_exited", "_judge", "watch")),
    *((Past, name) for name in ("judge", "note_spawn", "note_completion")),
    *((Crew, name) for name in ("promote", "signal_engine")),
    *((Retirees, name) for name in ("_end", "note_free", "forget")),
    *((Incarnation, name) for name in ("hear_progress", "look", "last_exit")),
    *((Lodging, name) for name in ("settle", "ask_room", "go_down", "step_aside", "tenancy")),
    *((Residency, name) for name in ("_look", "_carry_out")),
    (MemoryReturn, "note_gone"),
    *((Timers, name) for name in ("set", "take")),
    *((past, "model_fingerprint"), (machine, "log_event")),
]
# Those that everything goes through.
LASTING: list[tuple[Any, str]] = [
    (Places, "grant"),
    *((EngineEvents, name) for name in ("_hear", "_exited")),
    *((Machine, name) for name in ("apply", "_spawn")),
    *((Lodging, "settle"), (Residency, "_look"), (Timers, "set")),
]


class Saboteur:
    """Makes a function raise from its n-th call on, `times` times."""

    def __init__(self, owner: Any, name: str, first: int, times: int) -> None:
        self.calls = 0
        self.raised = 0
        self._owner, self._name = owner, name
        self._real = getattr(owner, name)
        self._first, self._times = first, times

    def __enter__(self) -> Self:
        def sabotaged(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self._first <= self.calls and self.raised < self._times:
                self.raised += 1
                raise ZeroDivisionError(f"{self._name} is sabotaged")
            return self._real(*args, **options)

        setattr(self._owner, self._name, sabotaged)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(self._owner, self._name, self._real)


class Life:
    """What happens to two models of which one may be loaded, and what its clients were told."""

    def __init__(self, pool: Pool, world: World, is_lasting: bool) -> None:
        self.is_lasting = is_lasting
        self.pool = pool
        self.world = world
        self.told: list[str] = []

    async def ask(self, model: str, run_s: float = 0.5) -> str:
        async with asyncio.timeout(OUTCOME_S_MAX):
            outcome = await self._outcome(model, run_s)
        self.told.append(outcome)
        return outcome

    async def _outcome(self, model: str, run_s: float) -> str:
        try:
            lease = await self.pool.find(model).admit("r")
        except HttpError as error:
            assert error.message and error.status in (429, 503, 507), error
            return f"refused {error.status} {error.code}"
        engine = self.world.engine_of(model, lease.incarnation)
        try:
            async with asyncio.timeout(run_s):
                await engine.wait_exit()
            return f"failed {(await lease.death()).status}"
        except TimeoutError:
            return "answered"
        finally:
            lease.release("answered")

    async def command(self, command: Any) -> None:
        try:
            async with asyncio.timeout(COMMAND_S_MAX):
                await command
        except HttpError:
            pass
        except TimeoutError:
            # A command waits for as long as its model needs, but a fault that is over is over.
            assert self.is_lasting

    def be(self, fate: Fate) -> None:
        """What becomes of the next engines."""

        def of(spec: ModelSpec) -> Fate:
            return msgspec.structs.replace(fate, bytes=NEEDS[spec.id])

        self.world.fate = of

    def crash(self) -> None:
        for engine in self.world.alive[:1]:
            engine.end("SIGKILL")

    def freeze(self) -> None:
        for engine in self.world.alive[:1]:
            engine.freeze()

    async def live(self) -> None:
        await asyncio.gather(*(self.ask("a") for _ in range(3)))
        running = asyncio.create_task(self.ask("a", 3.0))
        await asyncio.sleep(1.0)
        self.crash()
        await running
        await self.ask("a")
        running = asyncio.create_task(self.ask("a", 3.0))
        await self.command(self.pool.reload("a"))
        await running
        running = asyncio.create_task(self.ask("a", 30.0))
        await asyncio.sleep(2.0)
        self.freeze()
        await running
        await asyncio.gather(self.ask("a", 5.0), self.ask("b", 1.0), self.ask("a", 1.0))
        await self.command(self.pool.unload("b"))
        self.pool.reset("a")
        await asyncio.gather(self.ask("b"), self.command(self.pool.ensure_ready("a", 30.0)))
        self.be(Fate(load_s=None, end=1, end_after_s=1))
        await self.command(self.pool.reload("a"))
        self.crash()
        await self.ask("a")
        self.be(Fate(term_s=None))
        await asyncio.sleep(SETTINGS.restart.half_open_s + 10.0)
        await self.ask("a")
        self.pool.find("a").keep_alive(1.0)
        await asyncio.sleep(60.0)
        self.be(Fate())


def live_with(make: Callable[[], Saboteur], *, is_lasting: bool = False) -> Saboteur:
    """A life with a fault; afterwards all is as it was, after a lasting one with a reset."""
    saboteurs: list[Saboteur] = []

    async def main(loop: SimulatedLoop) -> None:
        async with simulated_pool(loop, NEEDS, LIMITS, settings=SETTINGS) as (pool, world):
            world.memory_bytes = 64 * GB
            life = Life(pool, world, is_lasting)
            with make() as saboteur:
                saboteurs.append(saboteur)
                await life.live()
            await asyncio.sleep(PAUSE_S)
            if is_lasting:
                for model in NEEDS:
                    pool.reset(model)
            assert len(world.alive) <= 2, world.alive
            for model in ("a", "b", "a"):
                assert await life.ask(model) == "answered", (model, life.told, pool.snapshot())
            assert all((s.active, s.queued) == (0, 0) for s in pool.snapshot())

    simulate(main)
    return saboteurs[0]


@pytest.fixture
def silence() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("owner", "name"), [pytest.param(*t, id=f"{t[0].__name__}.{t[1]}") for t in TARGETS]
)
def test_a_fault_in_it_costs_no_model_for_good(owner: Any, name: str, silence: None) -> None:
    first, seen = 1, 0
    # The later calls are sparser: they are the same in other states.
    while True:
        saboteur = live_with(lambda: Saboteur(owner, name, first, 1))  # noqa: B023
        if not saboteur.raised:
            break
        seen += 1
        first *= 2
    assert seen, f"{name} is never called in this life"


@pytest.mark.parametrize(
    ("owner", "name"), [pytest.param(*t, id=f"{t[0].__name__}.{t[1]}") for t in LASTING]
)
def test_a_lasting_fault_in_it_is_told_and_ends_with_its_cause(
    owner: Any, name: str, silence: None
) -> None:
    saboteur = live_with(lambda: Saboteur(owner, name, 1, 1_000_000), is_lasting=True)
    assert saboteur.raised
