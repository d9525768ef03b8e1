"""One model to everybody else: what they may ask of it, and its status.

Everything that can happen to a slot is a message in its mailbox; nothing else changes a slot or its
machine. Implements `lease.Admission`.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from mlx_isolate_shared.errors import CapacityError
from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.engines.standby_plan import Demand
from mlx_isolate_supervisor.models.lodging import Lodging
from mlx_isolate_supervisor.slots import causes
from mlx_isolate_supervisor.slots.admission import WaitingLine
from mlx_isolate_supervisor.slots.lease import Lease
from mlx_isolate_supervisor.slots.lifecycle import State
from mlx_isolate_supervisor.slots.machine import Machine
from mlx_isolate_supervisor.slots.mailbox import Mailbox
from mlx_isolate_supervisor.slots.places import Places
from mlx_isolate_supervisor.slots.slot_context import SlotContext
from mlx_isolate_supervisor.telemetry.status import ModelStatus

# A respawn due within this time is as good as begun: a spare made now would compete with it.
SOON_S = 5.0


class Slot:
    """One model's slot. Call `start` on the event loop before anything else."""

    def __init__(self, spec: ModelSpec, context: SlotContext) -> None:
        self._now = context.clock.monotonic
        self._mailbox = Mailbox(
            spec.id, self._now, settle=self._settle, mend=lambda: self._lodging.mend()
        )
        self._is_cut = False
        self._line = WaitingLine()
        self._machine = Machine(spec, context, self)
        self._lodging = Lodging(
            self._machine,
            self._line,
            context,
            post=self._mailbox.post,
            has_callers=lambda: self._mailbox.has_callers,
        )
        self._residence = self._lodging.residence
        self._places = Places(self._machine, self._line, self._lodging, self._mailbox, context)

    def __repr__(self) -> str:
        """Id, state, engine and who waits."""
        machine = self._machine
        engine = "no engine" if machine.crew.engine is None else repr(machine.crew.engine)
        return f"<Slot {machine.spec.id} {machine.state} {engine} waiting={len(self._line)}>"

    # -- What others ask for: each posts a message, and awaits its outcome ------------------------

    @property
    def model_id(self) -> str:
        """The id that clients use."""
        return self._machine.spec.id

    @property
    def spec(self) -> ModelSpec:
        """The configuration in force."""
        return self._machine.spec

    def start(self) -> None:
        """Handle messages from the next turn of the loop on; the model stays down until wanted."""
        self._mailbox.open()

    def want_up(self) -> None:
        """Load the model, if it is down; does not wait."""
        self._mailbox.post(self._lodging.want_up)

    @property
    def sends_loading_state(self) -> bool:
        """Whether streaming clients are told what they wait for."""
        return self._machine.spec.send_loading_state

    def describe_wait(self) -> str:
        """What a request that waits is waiting for, one line for its client."""
        return self._places.describe_wait()

    def keep_alive(self, idle_s: float) -> None:
        """Stay loaded for so long after the last request, until another asks for something else.

        0 = unload once idle, infinite = stay. An unload forgets it.
        """
        self._mailbox.post(partial(self._lodging.keep_alive, idle_s))

    def take_limits(self) -> None:
        """The limits of the pool have changed."""
        self._mailbox.post(self._lodging.take_limits)

    async def admit(self, request_id: str) -> Lease:
        """Wait in line for a ready engine with a free place; see `lease.Admission`."""
        return await self._places.admit(request_id)

    async def ensure_ready(self, timeout_s: float) -> None:
        """Want the model up, and wait until it is READY.

        Raises:
            CapacityError: 503 with the cause when it fails, or when `timeout_s` has passed.
        """
        load = object()
        try:
            async with asyncio.timeout(timeout_s):
                await self._mailbox.until(self._is_ready, partial(self._lodging.begin_load, load))
        except TimeoutError:
            raise self._places.waited_in_vain() from None
        finally:
            self._mailbox.post(partial(self._lodging.end_load, load))

    async def unload(self, drain_timeout_s: float | None = None) -> None:
        """Drain, stop, and stay down until wanted again; returns when the engine is gone.

        Requests that wait in line stay there, and bring up another engine.
        """
        machine, number = self._machine, self._machine.crew.spawned
        await self._mailbox.until(
            lambda: (
                machine.crew.is_empty
                or (machine.crew.engine is not None and machine.crew.engine.number > number)
            ),
            partial(self._lodging.go_down, drain_timeout_s, "it was unloaded"),
        )

    async def reload(self, spec: ModelSpec | None = None) -> None:
        """Replace the engine (by one with `spec`); returns once the new one serves, or FAILED.

        Where memory allows, the new one loads beside the old one, which then drains; else the old
        one drains first. A model that is down only takes the new configuration.

        Raises:
            CapacityError: 503, the new one did not come up and the old one serves on.
        """
        number = self._machine.crew.spawned
        await self._mailbox.until(
            lambda: self._is_settled_after(number), partial(self._machine.change_spec, spec)
        )

    def adjust(self, spec: ModelSpec) -> None:
        """Take a configuration that differs only in what the supervisor looks at."""
        self._mailbox.post(partial(self._machine.adjust_spec, spec))
        self._mailbox.post(self._lodging.take_limits)

    def reset(self) -> None:
        """Forget crashes and failures; a FAILED model, or one in BACKOFF, tries again at once."""
        self._mailbox.post(partial(self._machine.reset, "it was reset"))

    async def leave(self, limit_s: float) -> None:
        """As `stop`, for a model that is to be served no longer."""
        self._places.stop_error = partial(causes.removed, self.model_id)
        await self.stop(limit_s)

    async def stop(self, limit_s: float) -> None:
        """Refuse who waits, drain, and stop for good within `limit_s`. Harmless when repeated."""
        if self._mailbox.is_over:
            return
        self._mailbox.post(self._places.refuse_stopping)
        self._mailbox.post(self._residence.withdraw)
        stop_by = self._now() + limit_s
        self._mailbox.post(partial(self._machine.shut_down, stop_by, self._places.stop_error))
        if self._is_cut:
            # A second signal may come before the first has got here.
            self._mailbox.post(self._machine.cut)
        await self._mailbox.until(
            lambda: self._machine.state is State.STOPPED and self._machine.crew.is_empty
        )
        self._machine.timers.cancel_all()
        self._mailbox.close()
        self._lodging.end()

    def cut(self) -> None:
        """Hurry a `stop`, running or about to: kill what is left."""
        self._is_cut = True
        self._mailbox.post(self._machine.cut)

    @property
    def output(self) -> tuple[str, ...]:
        """The last lines of output of this model's engines, oldest first."""
        return tuple(self._machine.crew.output)

    def status(self) -> ModelStatus:
        """A snapshot from memory."""
        machine, engine = self._machine, self._machine.crew.engine
        return ModelStatus(
            id=machine.spec.id,
            aliases=machine.spec.aliases,
            desired="up" if machine.wanted else "down",
            state=machine.state.value,
            pid=engine.process.pid if engine else None,
            incarnation=engine.number if engine else machine.crew.spawned,
            socket=engine.socket_path if engine else None,
            since=machine.since,
            restarts=machine.past.restarts.total(),
            restarts_by_cause=dict(machine.past.restarts),
            last_exit=machine.past.last_exit,
            active=(len(engine.leases) if engine else 0) + machine.crew.retirees.places_held,
            queued=len(self._line),
            load_s=engine.load_s if engine else None,
            bare_load_s=engine.bare_load_s if engine else None,
            memory_bytes=engine.memory[0] if engine and engine.memory else None,
            memory_kind=engine.memory[1] if engine and engine.memory else None,
            facts=engine.facts if engine else None,
            loading=engine.loading if engine else None,
            progress=engine.progress if engine else None,
            failure=machine.failure,
            next_try_s=machine.next_try_s if machine.state is State.BACKOFF else None,
            replacement=machine.crew.replacement,
            pinned=machine.spec.pinned,
            ttl_s=self._lodging.idle_limit_s,
            ttl_left_s=self._lodging.ttl_left_s,
            claimed_bytes=self._residence.claimed.bytes or None,
            gpu_bytes=engine.gpu_bytes or None if engine else None,
            claimed_gpu_bytes=self._residence.claimed.gpu_bytes or None,
            waits_for=self._residence.reason,
        )

    # -- What its machine asks (slot_context.SlotSide) --------------------------------------------

    def post(self, message: Callable[[], object]) -> None:
        """Put a message into the mailbox."""
        self._mailbox.post(message)

    def ask_room(self) -> bool:
        """Whether an engine may be started now; else that is granted or refused later."""
        return self._lodging.ask_room()

    def has_space_beside(self) -> bool:
        """Whether the memory budget allows a second engine."""
        return self._lodging.has_space_beside()

    def note_ready(self) -> None:
        """An engine has become ready."""
        self._lodging.note_ready()

    def refuse_failed(self) -> None:
        """Refuse everybody who waits."""
        self._places.refuse_failed()

    # -- What others read -------------------------------------------------------------------------

    @property
    def is_loading(self) -> bool:
        """Whether an engine of it loads or is about to, a download not counted."""
        machine = self._machine
        if machine.state is State.BACKOFF and (machine.next_try_s or 0.0) < SOON_S:
            return True
        loading = [machine.crew.successor]
        if machine.state is State.STARTING:
            loading.append(machine.crew.engine)
        return any(
            engine is not None
            and engine.facts is None
            and (engine.loading is None or engine.loading.stage != "download")
            for engine in loading
        )

    @property
    def demand(self) -> Demand | None:
        """How much it is used, if it is to be up and can."""
        machine = self._machine
        if not machine.wanted or machine.state is State.FAILED:
            return None
        engine = machine.crew.engine
        busy = (len(engine.leases) if engine else 0) + len(self._line)
        return Demand(machine.spec, busy)

    # -- What holds after every message -----------------------------------------------------------

    def _settle(self) -> None:
        """Nobody waits for nothing, free places are given, callers are told."""
        attempt = self._mailbox.attempt
        attempt(self._lodging.settle)
        attempt(self._places.grant)
        self._mailbox.look_at_conditions()
        attempt(self._residence.note_change)

    # -- What callers wait for --------------------------------------------------------------------

    def _is_ready(self) -> bool | CapacityError:
        if self._machine.stop_by is not None:
            return self._places.stop_error()
        if self._machine.state is State.FAILED and self._machine.deferred is None:
            return self._machine.failed_error()
        if self._machine.room_error is not None and self._machine.state is State.STOPPED:
            return self._machine.room_error()
        return self._machine.state is State.READY

    def _is_settled_after(self, number: int) -> bool | CapacityError:
        machine = self._machine
        replacement = machine.crew.replacement
        if replacement is not None and replacement.error and replacement.incarnation > number:
            return causes.replacement_failed(self.model_id, replacement.error)
        if machine.state is State.READY and machine.crew.engine is not None:
            return machine.crew.engine.number > number
        if machine.state is State.FAILED:
            # Tried again in vain, or there is no room to try it again.
            return machine.deferred is None
        return machine.state is State.STOPPED
