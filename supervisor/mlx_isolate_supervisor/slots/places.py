"""The places in one model's engine: who gets one, who waits in line for one, and who is refused.

Part of a slot: all but the waiting itself happens in the messages of its mailbox.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from mlx_isolate_shared.errors import CapacityError
from mlx_isolate_supervisor.models.lodging import Lodging
from mlx_isolate_supervisor.slots import causes
from mlx_isolate_supervisor.slots.admission import SlotLease, Waiter, WaitingLine
from mlx_isolate_supervisor.slots.incarnation import Incarnation
from mlx_isolate_supervisor.slots.lease import Lease, Outcome
from mlx_isolate_supervisor.slots.lifecycle import State
from mlx_isolate_supervisor.slots.machine import Machine
from mlx_isolate_supervisor.slots.mailbox import Mailbox
from mlx_isolate_supervisor.slots.slot_context import SlotContext


class Places:
    """What requests have of one slot.

    Args:
        line: who waits.
        lodging: is told that the model is wanted, and used.
        mailbox: of the slot.

    Attributes:
        stop_error: what is told to who waits, or comes, once the slot stops.
    """

    def __init__(
        self,
        machine: Machine,
        line: WaitingLine,
        lodging: Lodging,
        mailbox: Mailbox,
        context: SlotContext,
    ) -> None:
        self._machine = machine
        self._line = line
        self._lodging = lodging
        self._residence = lodging.residence
        self._mailbox = mailbox
        self._settings = context.settings
        self._now = context.clock.monotonic
        self.stop_error: Callable[[], CapacityError] = causes.shutting_down

    async def admit(self, request_id: str) -> Lease:
        """Wait in line for a ready engine with a free place; see `lease.Admission`."""
        if self._mailbox.is_over:
            raise self.stop_error()
        waiter = Waiter(request_id)
        self._mailbox.post(partial(self._arrive, waiter), partial(self._line.refuse, waiter))
        if not waiter.place.done():
            expire = partial(self._mailbox.post, partial(self._expire, waiter))
            loop = asyncio.get_running_loop()
            waiter.timer = loop.call_later(self._settings.queue_timeout_s, expire)
        try:
            return await waiter.wait_place()
        except asyncio.CancelledError:
            self._mailbox.post(partial(self._line.leave, waiter))
            raise

    def describe_wait(self) -> str:
        """What a request that waits is waiting for, one line for its client."""
        machine, engine = self._machine, self._machine.crew.engine
        name = machine.spec.id
        if self._residence.reason is not None:
            return f"{name} waits {self._residence.reason}"
        if machine.state is State.READY:
            match len(self._line):
                case 0:  # it has its place, and nothing of its answer yet
                    return f"{name} is ready"
                case 1:
                    return f"1 request waits for a place in {name}"
                case waiting:
                    return f"{waiting} requests wait for a place in {name}"
        if engine is not None and engine.loading is not None:
            fraction = engine.loading.fraction
            share = "" if fraction is None else f" {fraction:.0%}"
            return f"{name} is loading: {engine.loading.stage}{share}"
        return f"{name} is {machine.state}"

    def waited_in_vain(self) -> CapacityError:
        """503 with what a request has waited for."""
        machine = self._machine
        retry_after_s = machine.next_try_s or 1.0
        if self._residence.reason is not None:
            cause = f"it waits {self._residence.reason}"
        elif machine.state is State.READY:
            cause = f"all {machine.spec.places} places are taken"
        elif machine.past.last_exit is not None and machine.state in (
            State.STARTING,
            State.BACKOFF,
        ):
            cause = f"the engine is {machine.state}, and of its last one: {machine.past.last_exit.reason}"
        else:
            cause = f"the engine is {machine.state}"
        return causes.waited_in_vain(machine.spec.id, cause, retry_after_s)

    def refuse_failed(self) -> None:
        """Refuse everybody who waits, with the cause."""
        self._lodging.was_refused = bool(len(self._line))
        self._line.refuse_all(self._machine.failed_error)

    def refuse_stopping(self) -> None:
        """Refuse everybody who waits, since the slot stops."""
        self._line.refuse_all(self.stop_error)

    def grant(self) -> None:
        """Give free places to those who wait, in their order."""
        while len(self._line) and self._has_place() and not self._lodging.holds_back:
            engine = self._machine.crew.engine
            assert engine is not None
            lease = self._line.grant_first(partial(self._make_lease, engine))
            if lease is None:
                return
            engine.leases.add(lease)

    def _arrive(self, waiter: Waiter) -> None:
        if waiter.place.done():
            return
        machine = self._machine
        machine.look_for_repair()
        if machine.stop_by is not None:
            self._line.refuse(waiter, self.stop_error())
        elif machine.state is State.FAILED and machine.deferred is None:
            self._lodging.was_refused = True
            self._line.refuse(waiter, machine.failed_error())
        elif len(self._line) >= self._settings.queued_requests_max and not self._may_enter():
            self._line.refuse(waiter, causes.queue_full(machine.spec.id, len(self._line)))
        else:
            waiter.arrived_s = self._now()
            self._line.join(waiter)
            self._lodging.want_up()

    def _expire(self, waiter: Waiter) -> None:
        self._line.refuse(waiter, self.waited_in_vain())

    def _has_place(self) -> bool:
        engine = self._machine.crew.engine
        return (
            self._machine.state is State.READY
            and engine is not None
            and not engine.is_dying
            and len(engine.leases) < self._machine.spec.places
        )

    def _may_enter(self) -> bool:
        """Whether a request that comes now gets a place at once."""
        return self._residence.cutoff_s is None and self._has_place()

    def _make_lease(self, engine: Incarnation, waiter: Waiter) -> SlotLease:
        def release(lease: SlotLease, outcome: Outcome) -> None:
            # Whatever fails, the place is free again.
            self._mailbox.post(
                partial(self._give_back, engine, lease, outcome),
                lambda _: engine.leases.discard(lease),
            )

        note_upgrade = partial(self._mailbox.post, partial(self._machine.note_free, engine))
        return SlotLease(engine, waiter.request_id, release, note_upgrade)

    def _give_back(self, engine: Incarnation, lease: SlotLease, outcome: Outcome) -> None:
        engine.leases.discard(lease)
        if not engine.leases:
            self._lodging.note_used()
        if outcome == "answered":
            self._machine.note_completion(engine)
        self._machine.note_free(engine)
