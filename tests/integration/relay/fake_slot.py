"""Places in an engine that are given, refused and told to be dead as a test says."""

import asyncio
from collections.abc import Callable

from mlx_isolate_shared.errors import EngineError, HttpError, RequestError
from mlx_isolate_supervisor.slots.lease import Outcome
from tests.integration.relay.engine_side import ScriptedEngine


class FakeLease:
    """A place that remembers how it was given back."""

    def __init__(self, admission: "FakeSlot", socket_path: str, incarnation: int) -> None:
        self._admission = admission
        self.socket_path = socket_path
        self.incarnation = incarnation
        self.outcomes: list[Outcome] = []
        self.is_upgraded = False
        self._on_death: Callable[[], None] | None = None

    def on_death(self, call: Callable[[], None]) -> None:
        self._on_death = call

    @property
    def is_watched(self) -> bool:
        """Whether the relay, its request sent, waits to be told of a death."""
        return self._on_death is not None

    def tell_death(self) -> None:
        """As when the engine is known to be dying while its sockets are still open."""
        assert self._on_death is not None
        self._on_death()

    async def death(self) -> EngineError:
        self._admission.dying += 1
        await self._admission.death_known.wait()
        return self._admission.reason

    def note_upgrade(self) -> None:
        self.is_upgraded = True

    def release(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._admission.released.put_nowait(outcome)


class FakeSlot:
    """An admission that is under the test's control.

    Attributes:
        may_enter: requests wait in `admit` until this is set.
        death_known: `death()` waits until this is set.
        refusal: raised by `admit` instead of giving a lease.
        kept_alive: what requests asked for, in seconds.
        sends_loading_state, waits_for: what streaming clients are told while they wait.
    """

    def __init__(self, model_id: str, engine: ScriptedEngine) -> None:
        self.model_id = model_id
        self.engine = engine
        self.incarnation = 1
        self.may_enter = asyncio.Event()
        self.may_enter.set()
        self.death_known = asyncio.Event()
        self.death_known.set()
        self.reason = EngineError(
            "The engine died (SIGKILL).", status=502, code="engine_died", retry_after_s=1.0
        )
        self.refusal: HttpError | None = None
        self.waiting = 0
        self.dying = 0
        self.leases: list[FakeLease] = []
        self.released: asyncio.Queue[Outcome] = asyncio.Queue()
        self.kept_alive: list[float] = []
        self.sends_loading_state = False
        self.waits_for = "m is loading"

    def describe_wait(self) -> str:
        """See `lease.Admission`."""
        return self.waits_for

    def keep_alive(self, idle_s: float) -> None:
        """See `lease.Admission`."""
        self.kept_alive.append(idle_s)

    async def admit(self, request_id: str) -> FakeLease:
        self.waiting += 1
        try:
            await self.may_enter.wait()
        finally:
            self.waiting -= 1
        if self.refusal is not None:
            raise self.refusal
        lease = FakeLease(self, self.engine.path, self.incarnation)
        self.leases.append(lease)
        return lease

    async def outcome(self) -> Outcome:
        """The next outcome that a lease was given back with."""
        return await self.released.get()

    def assert_all_released_once(self) -> None:
        assert all(len(lease.outcomes) == 1 for lease in self.leases), [
            lease.outcomes for lease in self.leases
        ]


class FakeRouter:
    """One slot, which a test may replace."""

    def __init__(self, slot: FakeSlot) -> None:
        self.slot = slot

    def knows(self, model: str) -> bool:
        return model == self.slot.model_id

    def find(self, model: str | None) -> FakeSlot:
        if model is None or model == self.slot.model_id:
            return self.slot
        raise RequestError(
            f"There is no model {model!r}; there is: {self.slot.model_id}.",
            status=404,
            code="model_not_found",
            param="model",
        )
