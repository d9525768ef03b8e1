"""Who may be loaded: keeps the models' claims to memory, and carries out what `eviction` decides.

One for all slots, on their loop. It owns claims and wishes and nothing else: a slot is asked for
facts and told what was decided, and refuses an eviction that has become wrong meanwhile.
"""

import asyncio
import math
from collections.abc import Callable
from functools import partial

from mlx_isolate_shared.errors import CapacityError
from mlx_isolate_supervisor.engines import memory
from mlx_isolate_supervisor.models.eviction import decide
from mlx_isolate_supervisor.models.memory_return import MemoryReturn
from mlx_isolate_supervisor.models.pool_limits import PoolLimits
from mlx_isolate_supervisor.models.room import Need, Plan, Resident, Rules, Wish
from mlx_isolate_supervisor.models.tenant import Spares, Tenant
from mlx_isolate_supervisor.slots import causes

# How often it is looked whether models grew over the budget, or memory came back.
LOOK_INTERVAL_S = 2.0
RETURN_POLL_S = 0.05
NOTHING = Need(bytes=0)


class Residence:
    """One slot's place in the residency.

    Attributes:
        cutoff_s: requests that came after it wait, since the model is to leave; None = none.
        reason: why its wish waits, a phrase; None where none does.
        claimed: what it was granted room for; nothing without a claim.
        turn_s: when it was first ready with this claim, infinite before that. A respawn begins no
            new turn, or a model that crashes now and then would keep its place for ever.
    """

    def __init__(self, residency: "Residency", tenant: Tenant) -> None:
        self._residency = residency
        self.tenant = tenant
        self.cutoff_s: float | None = None
        self.reason: str | None = None
        self.claimed = NOTHING
        self.turn_s = math.inf
        self.is_granted = False
        self.wish: Wish | None = None
        self.is_evicting = False

    @property
    def is_urgent(self) -> bool:
        """Whether somebody waits for its wish."""
        return self.wish is not None and self.wish.is_urgent

    def claim(self, need: Need, since_s: float, *, is_urgent: bool) -> bool:
        """Whether an engine may be started now; else that is granted or refused later."""
        suffices = need.bytes <= self.claimed.bytes and need.gpu_bytes <= self.claimed.gpu_bytes
        if self.is_granted and suffices and not self._residency.returning.is_owed(need.bytes):
            return True
        self.wish = Wish(
            id=self.tenant.model_id,
            need_bytes=need.bytes,
            gpu=need.gpu,
            gpu_bytes=need.gpu_bytes,
            since_s=since_s if self.wish is None else min(since_s, self.wish.since_s),
            is_urgent=is_urgent or (self.wish is not None and self.wish.is_urgent),
        )
        if self.is_granted and not suffices:
            self._forget_claim()
        self._residency.is_contended = True
        return self._residency.look_at(self)

    def withdraw(self) -> None:
        """Nothing is wished for any more."""
        if self.wish is not None:
            self.wish, self.reason = None, None
            self._residency.note_change()

    def release(self) -> None:
        """Nothing is left of it: its claim is over."""
        if self.is_granted:
            self._forget_claim()
            self._residency.note_change()

    def _forget_claim(self) -> None:
        self.is_granted, self.claimed, self.turn_s = False, NOTHING, math.inf
        self.cutoff_s, self.is_evicting = None, False
        self._residency.forget(self)

    def note_declined(self) -> None:
        """It was to leave, and is in use again."""
        self.is_evicting = False
        self._residency.note_change()

    def note_ready(self) -> None:
        """Its engine serves now."""
        self._residency.note_ready(self)
        if self.turn_s == math.inf:
            self.turn_s = self._residency.now()

    def note_change(self) -> None:
        """Something about it may have changed; it matters only while somebody waits for room."""
        if self._residency.is_contended:
            self._residency.note_change()

    def has_space_beside(self, need: Need, yielded: Need) -> bool:
        """Whether the budget allows another engine of the model, where `yielded` is given up."""
        return self._residency.has_space(need, yielded)


class Residency:
    """The claims of all slots.

    Args:
        now: as below.
        available_bytes: memory that is free for another engine; None if unknown.

    Attributes:
        now: monotonic seconds.
        limits: in force.
        returning: memory of engines that have ended.
        is_contended: somebody waits for room, or too much is held; else nobody's use matters.
    """

    def __init__(
        self,
        limits: PoolLimits,
        *,
        now: Callable[[], float],
        available_bytes: Callable[[], int | None] = memory.available_bytes,
    ) -> None:
        self.limits = limits
        self.now = now
        self.returning = MemoryReturn(now, available_bytes)
        self._residences: dict[Tenant, Residence] = {}
        # By the residence that replaces them, once it is ready: those that leave then.
        self._replaced: dict[Residence, tuple[Residence, ...]] = {}
        self._spares: Spares | None = None
        self._is_looking = False
        self._is_due = False
        self.is_contended = False
        self._is_over = False
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, tenant: Tenant) -> Residence:
        """A place for one more slot."""
        residence = Residence(self, tenant)
        self._residences[tenant] = residence
        return residence

    def leave(self, tenant: Tenant) -> None:
        """A slot is gone for good."""
        self._residences.pop(tenant).release()
        self.note_change()

    def start(self, spares: Spares | None) -> None:
        """Look at the budget from time to time."""
        self._spares = spares
        self._arm(LOOK_INTERVAL_S)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def adopt(self, limits: PoolLimits) -> None:
        """Other limits, from now on."""
        self.limits = limits
        self.note_change()

    # -- What others ask --------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """What all models hold or have been promised, and the spares."""
        spares = 0 if self._spares is None else self._spares.held_bytes
        return spares + sum(resident.bytes for resident in self._residents())

    def held_gpu_bytes(self, gpu: str) -> int:
        """The same of a GPU's own memory."""
        return sum(one.gpu_bytes for one in self._residents() if one.gpu == gpu)

    def has_space(self, need: Need, yielded: Need = NOTHING) -> bool:
        """Whether so much fits into the budget beside all but `yielded`, and nobody waits for it."""
        if self.returning.is_owed(need.bytes) or self._wishes():
            return False
        budget, gpu = self.limits.budget_bytes, self.limits.gpus.get(need.gpu)
        held_there = self.held_gpu_bytes(need.gpu) - yielded.gpu_bytes
        if gpu is not None and held_there + need.gpu_bytes > gpu.budget_bytes:
            return False
        return budget is None or self.held_bytes - yielded.bytes + need.bytes <= budget

    def look_at(self, asker: Residence) -> bool:
        """Decide anew, because of `asker`'s wish; whether it has come true."""
        if self._is_looking:
            self.note_change()
            return False
        self._look(asker)
        return asker.is_granted and asker.wish is None

    def note_change(self) -> None:
        """Something has changed that the decision depends on: decide anew soon."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._look_again)

    def note_ready(self, residence: Residence) -> None:
        """What `residence` replaces leaves now."""
        for other in self._replaced.pop(residence, ()):
            other.tenant.step_aside(f"{residence.tenant.model_id} has replaced it")

    def forget(self, residence: Residence) -> None:
        """`residence` has no claim any more, so it neither replaces nor is replaced."""
        self._replaced.pop(residence, None)
        for newcomer, others in self._replaced.items():
            self._replaced[newcomer] = tuple(other for other in others if other is not residence)

    def _wishes(self) -> list[Wish]:
        return [r.wish for r in self._residences.values() if r.wish is not None]

    # -- Deciding ---------------------------------------------------------------------------------

    def _look_again(self) -> None:
        self._is_due = False
        self._look(None)

    def _on_timer(self) -> None:
        self._timer = None
        try:
            self.returning.look()
            self._look(None)
        finally:
            if self._timer is None:
                self._arm(LOOK_INTERVAL_S)

    def _arm(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _look(self, asker: Residence | None) -> None:
        self._is_looking = True
        told: list[Callable[[], None]] = []
        try:
            if not self._has_come_back():
                self._arm(RETURN_POLL_S)
                return
            for residence in self._residences.values():
                if residence.is_granted and residence.wish is not None:
                    # A respawn, which only had to wait for memory.
                    self._grant(residence, told, asker)
            self._carry_out(self._decide(), told, asker)
        finally:
            # What has been decided is told, also where the rest could not be.
            for tell in told:
                tell()
            self._is_looking = False
            self.is_contended = self._is_over or bool(self._wishes())

    def _has_come_back(self) -> bool:
        wishes = self._wishes()
        if not wishes:
            return True
        debtor = self.returning.debtor(max(wish.need_bytes for wish in wishes))
        if debtor is None:
            return True
        for residence in self._residences.values():
            if residence.wish is not None:
                residence.reason = f"until the memory of {debtor} has come back"
        return False

    def _decide(self) -> Plan:
        limits = self.limits
        wishes = [
            residence.wish
            for residence in self._residences.values()
            if residence.wish is not None and not residence.is_granted
        ]
        rules = Rules(
            budget_bytes=limits.budget_bytes,
            ceiling_bytes=limits.ceiling_bytes,
            gpus=limits.gpus,
            models_max=limits.models_max,
            groups=limits.groups,
            may_overlap=limits.policy == "keep_then_commit",
        )
        spares = 0 if self._spares is None else self._spares.held_bytes
        return decide(rules, self._residents(), wishes, spares)

    def _residents(self) -> list[Resident]:
        leaving = {other for others in self._replaced.values() for other in others}
        return [
            self._resident(residence, residence in leaving)
            for residence in self._residences.values()
            if residence.is_granted
        ]

    def _resident(self, residence: Residence, is_replaced: bool) -> Resident:
        facts, claimed = residence.tenant.tenancy(), residence.claimed
        return Resident(
            id=residence.tenant.model_id,
            bytes=max(claimed.bytes * facts.engines, facts.measured_bytes),
            gpu=facts.gpu,
            gpu_bytes=max(claimed.gpu_bytes * facts.engines, facts.measured_gpu_bytes),
            is_idle=facts.is_idle,
            is_held=residence.cutoff_s is not None and facts.has_waiting,
            is_leaving=facts.is_leaving or is_replaced,
            is_pinned=facts.is_pinned,
            is_lasting=facts.is_lasting,
            used_s=facts.used_s,
            turn_s=facts.turn_s,
        )

    def _carry_out(
        self, plan: Plan, told: list[Callable[[], None]], asker: Residence | None
    ) -> None:
        by_id = {r.tenant.model_id: r for r in self._residences.values()}
        self._is_over = plan.is_over
        if plan.sheds_spares and self._spares is not None:
            told.append(self._spares.shed)
        for residence in by_id.values():
            id = residence.tenant.model_id
            before, residence.cutoff_s = residence.cutoff_s, plan.holds.get(id)
            residence.reason = plan.waits.get(id)
            if before is not None and residence.cutoff_s is None:
                told.append(residence.tenant.look_again)
        for id in plan.grants:
            self._grant(by_id[id], told, asker)
        for id, others in plan.replaced.items():
            self._replaced[by_id[id]] = tuple(by_id[other] for other in others)
        for id, refusal in plan.refusals.items():
            self._miss(by_id[id], partial(causes.no_room, id, refusal), told)
        for id in plan.dropped:
            self._miss(by_id[id], None, told)
        for id, for_id in plan.evictions.items():
            self._evict(by_id[id], for_id, told)

    def _grant(
        self, residence: Residence, told: list[Callable[[], None]], asker: Residence | None
    ) -> None:
        assert residence.wish is not None
        if not residence.is_granted:
            residence.is_granted = True
            residence.claimed = residence.wish.need
        residence.wish, residence.reason = None, None
        if residence is not asker:
            told.append(residence.tenant.take_room)

    def _miss(
        self,
        residence: Residence,
        make_error: Callable[[], CapacityError] | None,
        told: list[Callable[[], None]],
    ) -> None:
        residence.wish, residence.reason = None, None
        told.append(partial(residence.tenant.miss_room, make_error))

    def _evict(self, residence: Residence, for_id: str, told: list[Callable[[], None]]) -> None:
        if residence.is_evicting:
            return
        residence.is_evicting = True
        if for_id == residence.tenant.model_id:
            reason = "all models together hold more than they may"
        else:
            reason = f"it makes room for {for_id}"
        told.append(partial(residence.tenant.make_room, reason))
