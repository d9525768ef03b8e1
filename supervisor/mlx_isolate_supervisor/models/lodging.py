"""One model's room: when it asks for it, keeps it and leaves, and how long it stays idle.

Stands between a slot and the residency (implements `tenant.Tenant`): what the residency decides
becomes a message in the slot's mailbox, and is judged there by what is true by then.
"""

import asyncio
import math
from collections.abc import Callable
from functools import partial

from mlx_isolate_shared.errors import CapacityError
from mlx_isolate_supervisor.models.devices import gpu_of
from mlx_isolate_supervisor.models.idle import idle_limit_s
from mlx_isolate_supervisor.models.room import Need
from mlx_isolate_supervisor.models.tenant import Tenancy
from mlx_isolate_supervisor.settings.quantities import show_seconds
from mlx_isolate_supervisor.slots.admission import WaitingLine
from mlx_isolate_supervisor.slots.lifecycle import State
from mlx_isolate_supervisor.slots.machine import Machine
from mlx_isolate_supervisor.slots.mender import mend
from mlx_isolate_supervisor.slots.slot_context import SlotContext

Post = Callable[[Callable[[], object]], None]


class Lodging:
    """The room of one slot; all but the answers to the residency happens in the slot's messages.

    Args:
        line: who waits for a place.
        post: puts a message into the slot's mailbox.
        has_callers: whether somebody awaits the outcome of a command.

    Attributes:
        residence: what the residency holds of it.
        loads: a token for each caller that waits until the model is loaded.
        was_refused: somebody was refused since the model failed, so a new try is worth room.
        idle_limit_s: idle seconds after which it is unloaded; None = never.
    """

    def __init__(
        self,
        machine: Machine,
        line: WaitingLine,
        context: SlotContext,
        *,
        post: Post,
        has_callers: Callable[[], bool],
    ) -> None:
        self._machine = machine
        self._line = line
        self._context = context
        self._post = post
        self._has_callers = has_callers
        self._now = context.clock.monotonic
        self.residence = context.residency.enter(self)
        self.loads: set[object] = set()
        self.was_refused = False
        self.idle_limit_s: float | None = None
        self._asked_idle_s: float | None = None
        self._used_s = self._now()
        self._idle_timer: asyncio.TimerHandle | None = None
        self.take_limits()

    # -- What the residency asks and tells (tenant.Tenant) ----------------------------------------

    @property
    def model_id(self) -> str:
        """The id that clients use."""
        return self._machine.spec.id

    def tenancy(self) -> Tenancy:
        """What the residency goes by."""
        machine = self._machine
        return Tenancy(
            measured_bytes=machine.crew.memory_bytes,
            gpu=gpu_of(machine.spec),
            measured_gpu_bytes=machine.crew.gpu_bytes,
            is_idle=self.may_leave,
            has_waiting=self._line.first is not None,
            is_leaving=self.residence.is_evicting or machine.is_going_down,
            is_pinned=machine.spec.pinned,
            is_lasting=self._asked_idle_s is not None and math.isinf(self._asked_idle_s),
            engines=machine.crew.engines,
            used_s=self._used_s,
            turn_s=self.residence.turn_s,
        )

    def take_room(self) -> None:
        """What was asked for is granted."""
        self._post(self._machine.take_room)

    def miss_room(self, make_error: Callable[[], CapacityError] | None) -> None:
        """It is refused, or (None) dropped."""
        self._post(partial(self._miss_room, make_error))

    def make_room(self, reason: str) -> None:
        """Leave, if still idle."""
        self._post(partial(self._make_room, reason))

    def step_aside(self, reason: str) -> None:
        """Leave once what runs is done."""
        self._post(partial(self.go_down, None, reason))

    def look_again(self) -> None:
        """Nobody is held back any more."""
        self._post(_nothing)

    def _miss_room(self, make_error: Callable[[], CapacityError] | None) -> None:
        if make_error is not None:
            self._line.refuse_all(make_error)
        self._machine.miss_room(make_error)

    def _make_room(self, reason: str) -> None:
        if self.may_leave:
            self.go_down(None, reason)
        else:
            self.residence.note_declined()

    # -- What the slot asks -----------------------------------------------------------------------

    @property
    def may_leave(self) -> bool:
        """Whether nobody would be cut or kept waiting by its leaving.

        Connections without an end of their own do not count, as for any drain.
        """
        crew = self._machine.crew
        held = crew.retirees.places_held or (crew.engine is not None and crew.engine.requests)
        return not (held or self.loads or self._has_callers() or self.has_claimant)

    @property
    def has_claimant(self) -> bool:
        """Whether somebody waits who is to be served before this model leaves."""
        first, cutoff_s = self._line.first, self.residence.cutoff_s
        return first is not None and (cutoff_s is None or first.arrived_s <= cutoff_s)

    @property
    def holds_back(self) -> bool:
        """Whether the next in line, or whoever comes now, has to wait for another turn."""
        return self.residence.cutoff_s is not None and not self.has_claimant

    def ask_room(self) -> bool:
        """Whether an engine may be started now; else that is granted or refused later."""
        first, wish = self._line.first, self.residence.wish
        spec = self._machine.spec
        return self.residence.claim(
            self._context.need_of(spec) if wish is None else wish.need,
            self._now() if first is None else first.arrived_s,
            is_urgent=first is not None or bool(self.loads) or self.was_refused,
        )

    def has_space_beside(self) -> bool:
        """Whether the memory budget allows a second engine.

        Those that end for it grow no more: they need what they hold until they are gone.
        """
        claimed, yielding = self.residence.claimed, self._machine.crew.yielding
        yielded = Need(
            bytes=sum(
                max(0, claimed.bytes - (one.memory[0] if one.memory else 0)) for one in yielding
            ),
            gpu_bytes=sum(max(0, claimed.gpu_bytes - one.gpu_bytes) for one in yielding),
        )
        return self.residence.has_space_beside(self._context.need_of(self._machine.spec), yielded)

    def want_up(self) -> None:
        """Load it; one that is to make room comes back by its turn, with a new claim."""
        if not self.residence.is_evicting:
            self._machine.want_up()

    def go_down(self, drain_timeout_s: float | None, reason: str) -> None:
        """Unload it, and forget what was asked of it."""
        self._asked_idle_s = None
        self.take_limits()
        self.residence.withdraw()
        self.residence.is_evicting = self.residence.is_granted
        self._machine.want_down(drain_timeout_s, reason)

    def begin_load(self, load: object) -> None:
        """A caller waits for the load, and will say when it does no more."""
        self.loads.add(load)
        self.want_up()

    def end_load(self, load: object) -> None:
        """It waits no more."""
        self.loads.discard(load)

    def note_ready(self) -> None:
        """An engine has become ready."""
        self._used_s = self._now()
        self.was_refused = False
        self.residence.note_ready()

    def note_used(self) -> None:
        """The last request has ended just now."""
        self._used_s = self._now()

    def settle(self) -> None:
        """After every message of the slot: keep the idle time, give room back or ask for it."""
        state = self._machine.state
        if state is State.READY:
            if self.idle_limit_s is not None and self._idle_timer is None:
                self._watch_idleness()
        elif state is State.STOPPED or state is State.FAILED:
            self._settle_down(state)

    def _settle_down(self, state: State) -> None:
        machine = self._machine
        if machine.deferred is None and machine.crew.is_empty:
            self.residence.release()
        if state is State.FAILED or machine.stop_by is not None:
            return
        if len(self._line) or (self.loads and machine.room_error is None):
            if machine.deferred is None:
                self.want_up()
        elif machine.deferred is not None and self.residence.is_urgent:
            # Whoever wanted it has left.
            self.residence.withdraw()
            machine.want_down()

    def mend(self) -> None:
        """A message has failed half done: a model that serves on is not on its way out."""
        machine = self._machine
        if self.residence.is_evicting and machine.state in (State.STARTING, State.READY):
            self.residence.note_declined()
        mend(machine, has_wish=self.residence.wish is not None, note_ready=self.note_ready)

    def end(self) -> None:
        """The slot is gone for good."""
        self._stop_timer()
        self._context.residency.leave(self)

    # -- Idle time --------------------------------------------------------------------------------

    def keep_alive(self, idle_s: float) -> None:
        """A request asks for so much idle time; infinite = no limit."""
        if idle_s != self._asked_idle_s:
            self._asked_idle_s = idle_s
            self.take_limits()

    def take_limits(self) -> None:
        """What limits the idle time has changed."""
        daemon_s = self._context.residency.limits.ttl_s
        self.idle_limit_s = idle_limit_s(self._machine.spec, daemon_s, self._asked_idle_s)
        self._stop_timer()

    @property
    def ttl_left_s(self) -> float | None:
        """How long it stays if it stays idle; None = no limit, or it is not ready."""
        if self.idle_limit_s is None or self._machine.state is not State.READY:
            return None
        since = self._used_s if self._is_unused else self._now()
        return max(0.0, since + self.idle_limit_s - self._now())

    @property
    def _is_unused(self) -> bool:
        """As `may_leave`, but nobody waits for the room: whatever is open counts as use."""
        engine = self._machine.crew.engine
        return self.may_leave and not (engine is not None and engine.leases)

    def _watch_idleness(self) -> None:
        """One timer a model: it is looked at when it fires, not set anew by every request."""
        left_s = self.ttl_left_s if self._is_unused else None
        if left_s is not None:
            loop = asyncio.get_running_loop()
            self._idle_timer = loop.call_later(left_s, self._post, self._timer_fired)

    def _timer_fired(self) -> None:
        self._stop_timer()
        left_s = self.ttl_left_s
        if left_s is not None and left_s <= 0.0 and self._is_unused:
            self.go_down(None, f"it was idle for {show_seconds(self.idle_limit_s or 0.0)}")

    def _stop_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None


def _nothing() -> None:
    """A message after which free places are given."""
