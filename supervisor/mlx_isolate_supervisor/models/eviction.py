"""Which models may be loaded now, who has to leave for them, and who can never be: pure.

Wishes are looked at from the one that waits longest to the youngest. What an older wish has been
promised counts as taken for every younger one, so a younger one may go first only where that costs
the older one nothing; nobody starves, and models that alternate get turns.
"""

from collections.abc import Iterable, Sequence

from mlx_isolate_supervisor.config import GroupSpec
from mlx_isolate_supervisor.models.room import Holding, Plan, Refusal, Resident, Rules, Wish

_Member = Resident | Wish


def may_not_share(groups: Iterable[GroupSpec], newcomer: str, other: str) -> bool:
    """Whether `other` has to leave before `newcomer` is loaded, by their groups."""
    mine = next((group for group in groups if newcomer in group.members), None)
    if mine is None:
        return False
    if other in mine.members:
        return mine.swap
    theirs = next((group for group in groups if other in group.members), None)
    return mine.exclusive and not (theirs is not None and theirs.persistent)


def decide(
    rules: Rules, residents: Sequence[Resident], wishes: Sequence[Wish], spare_bytes: int = 0
) -> Plan:
    """The whole decision.

    Args:
        residents: models that have room, in any order.
        wishes: models that want room; none of them is among the residents.
        spare_bytes: what spare engines hold; they leave where they are in the way.
    """
    draft = _Draft(rules, residents, spare_bytes)
    for wish in sorted(wishes, key=lambda wish: (wish.since_s, wish.id)):
        draft.consider(wish)
    draft.shrink()
    return draft.plan()


class _Draft:
    """A plan in the making."""

    def __init__(self, rules: Rules, residents: Sequence[Resident], spare_bytes: int) -> None:
        self._rules = rules
        self._residents = residents
        self._spare_bytes = spare_bytes
        # Who leaves for an older wish, and what older wishes have been promised.
        self._gone = {resident.id for resident in residents if resident.is_leaving}
        self._promised: list[Wish] = []
        self._granted: list[Wish] = []
        self._evictions: dict[str, str] = {}
        self._holds: dict[str, float] = {}
        self._replaced: dict[str, tuple[str, ...]] = {}
        self._refusals: dict[str, Refusal] = {}
        self._dropped: list[str] = []
        self._waits: dict[str, str] = {}
        self._sheds_spares = False
        self._is_over = False

    def plan(self) -> Plan:
        return Plan(
            grants=tuple(wish.id for wish in self._granted),
            evictions=self._evictions,
            holds=self._holds,
            replaced=self._replaced,
            refusals=self._refusals,
            dropped=tuple(self._dropped),
            waits=self._waits,
            sheds_spares=self._sheds_spares,
            is_over=self._is_over,
        )

    # -- One wish ---------------------------------------------------------------------------------

    def consider(self, wish: Wish) -> None:
        older = [other.id for other in self._promised if self._conflict(wish.id, other.id)]
        if older:
            self._wait(wish, f"for {older[0]}, which has waited longer")
            return
        staying = [resident for resident in self._residents if resident.id not in self._gone]
        chosen = self._choose(wish, staying)
        if chosen is None:
            self._deny(wish, staying)
        elif chosen and not wish.is_urgent:
            self._dropped.append(wish.id)
        else:
            self._promised.append(wish)
            self._gone |= {resident.id for resident in chosen}
            self._act(wish, chosen)

    def _conflict(self, newcomer: str, other: str) -> bool:
        groups = self._rules.groups
        return may_not_share(groups, newcomer, other) or may_not_share(groups, other, newcomer)

    def _choose(self, wish: Wish, staying: Sequence[Resident]) -> list[Resident] | None:
        """Who of `staying` leaves for `wish`; None where even all that may leave do not suffice."""
        groups = self._rules.groups
        chosen = [other for other in staying if may_not_share(groups, wish.id, other.id)]
        forced = {other.id for other in chosen}
        candidates = sorted(
            (r for r in staying if not r.is_pinned and r.id not in forced),
            key=lambda r: (not r.is_idle, r.is_lasting, r.used_s if r.is_idle else r.turn_s, r.id),
        )
        for candidate in candidates:
            if self._fits(wish, staying, chosen):
                break
            chosen.append(candidate)
        if not self._fits(wish, staying, chosen):
            return chosen if self._may_be_alone(wish, staying, chosen) else None
        for resident in reversed(chosen):
            rest = [other for other in chosen if other is not resident]
            if resident.id not in forced and self._fits(wish, staying, rest):
                chosen = rest
        return chosen

    def _fits(self, wish: Wish, staying: Sequence[Resident], chosen: Sequence[Resident]) -> bool:
        """Whether `wish` has room once `chosen` have left and all older wishes came true."""
        left = [resident for resident in staying if resident not in chosen]
        present: list[_Member] = [*left, *self._promised, wish]
        return self._is_within(len(present), present)

    def _may_be_alone(
        self, wish: Wish, staying: Sequence[Resident], chosen: Sequence[Resident]
    ) -> bool:
        ceiling, gpu = self._rules.ceiling_bytes, self._rules.gpus.get(wish.gpu)
        return (
            len(chosen) == len(staying)
            and not self._promised
            and (ceiling is None or wish.need_bytes <= ceiling)
            and (gpu is None or wish.gpu_bytes <= gpu.ceiling_bytes)
        )

    def _is_within(self, count: int, present: Sequence[_Member], spare_bytes: int = 0) -> bool:
        """Whether so many models may be loaded, and `present` and spares fit into all memory."""
        rules = self._rules
        return (
            not (rules.models_max and count > rules.models_max)
            and self._fits_machine(present, spare_bytes)
            and all(self._fits_gpu(gpu, present) for gpu in rules.gpus)
        )

    def _fits_machine(self, present: Sequence[_Member], spare_bytes: int = 0) -> bool:
        budget = self._rules.budget_bytes
        return budget is None or spare_bytes + sum(map(_bytes_of, present)) <= budget

    def _fits_gpu(self, gpu: str, present: Sequence[_Member]) -> bool:
        limits = self._rules.gpus.get(gpu)
        held = sum(one.gpu_bytes for one in present if one.gpu == gpu)
        return limits is None or held <= limits.budget_bytes

    def _deny(self, wish: Wish, staying: Sequence[Resident]) -> None:
        if self._promised:
            self._wait(wish, f"for {self._promised[0].id}, which has waited longer")
            return
        pinned = [resident for resident in staying if resident.is_pinned]
        gpu = self._rules.gpus.get(wish.gpu)
        if gpu is None or self._fits_gpu(wish.gpu, [*pinned, wish]):
            need, budget, is_of_gpu = wish.need_bytes, self._rules.budget_bytes, False
            sizes = {one: one.bytes for one in staying}
        else:
            need, budget, is_of_gpu = wish.gpu_bytes, gpu.budget_bytes, True
            sizes = {one: one.gpu_bytes for one in staying if one.gpu == wish.gpu}
        self._refusals[wish.id] = Refusal(
            need_bytes=need,
            budget_bytes=budget,
            models_max=self._rules.models_max,
            held=tuple(
                Holding(id=one.id, bytes=size, is_pinned=one.is_pinned)
                for one, size in sizes.items()
            ),
            is_of_gpu=is_of_gpu,
        )

    def _act(self, wish: Wish, chosen: Sequence[Resident]) -> None:
        if not chosen:
            self._load(wish)
        elif self._rules.may_overlap and self._has_space_beside(wish):
            self._granted.append(wish)
            self._replaced[wish.id] = tuple(resident.id for resident in chosen)
        elif busy := [resident for resident in chosen if not resident.is_idle]:
            # Also one that is idle only since it is held: else it would be taken for busy the next
            # time and for idle again after that, without end.
            for resident in chosen:
                if resident.is_held or not resident.is_idle:
                    self._hold(resident, wish)
            self._wait(wish, f"for running requests of {_names(busy)}")
        else:
            for resident in chosen:
                self._evictions[resident.id] = wish.id
                self._hold(resident, wish)
            self._wait(wish, f"until {_names(chosen)} has made room")

    def _load(self, wish: Wish) -> None:
        """Everybody who has to leave has been told to: load it once they are really gone."""
        going = [resident for resident in self._residents if resident.id in self._gone]
        in_the_way = [r for r in going if may_not_share(self._rules.groups, wish.id, r.id)]
        count = len(self._residents) + len(self._granted) + 1
        if in_the_way or (going and not self._is_within(count, self._present(wish))):
            self._wait(wish, f"until {_names(in_the_way or going)} has made room")
        elif self._spare_bytes and not self._is_within(1, self._present(wish), self._spare_bytes):
            self._sheds_spares = True
            self._wait(wish, "until spare engines have made room")
        else:
            self._granted.append(wish)

    def _present(self, wish: Wish) -> list[_Member]:
        return [*self._residents, *self._granted, wish]

    def _has_space_beside(self, wish: Wish) -> bool:
        """Whether the memory suffices for everything that is there, and one comes at a time."""
        is_alone = len(self._promised) == 1 and not any(r.is_leaving for r in self._residents)
        return is_alone and self._is_within(1, self._present(wish), self._spare_bytes)

    def _hold(self, resident: Resident, wish: Wish) -> None:
        self._holds[resident.id] = max(resident.turn_s, wish.since_s)

    def _wait(self, wish: Wish, why: str) -> None:
        self._waits[wish.id] = why

    # -- Too much in all --------------------------------------------------------------------------

    def shrink(self) -> None:
        """Models that grew, or a limit that was lowered: who is idle leaves, the oldest first."""
        if self._promised:
            return
        staying = [resident for resident in self._residents if resident.id not in self._gone]
        idle = sorted(
            (r for r in staying if r.is_idle and not r.is_pinned),
            key=lambda r: (r.is_lasting, r.used_s, r.id),
        )
        while len(staying) > 1 and not self._is_within(len(staying), staying):
            leaver = next((one for one in idle if self._would_help(one, staying)), None)
            if leaver is None:
                self._is_over = True
                return
            idle.remove(leaver)
            staying.remove(leaver)
            self._evictions[leaver.id] = leaver.id
            self._holds[leaver.id] = leaver.turn_s

    def _would_help(self, leaver: Resident, staying: Sequence[Resident]) -> bool:
        """Whether it takes of what is short: a place, the machine's memory, or its GPU's."""
        if not self._is_within_machine(staying):
            return True
        return bool(leaver.gpu_bytes) and not self._fits_gpu(leaver.gpu, staying)

    def _is_within_machine(self, staying: Sequence[Resident]) -> bool:
        most = self._rules.models_max
        return not (most and len(staying) > most) and self._fits_machine(staying)


def _bytes_of(one: _Member) -> int:
    return one.bytes if isinstance(one, Resident) else one.need_bytes


def _names(residents: Sequence[Resident]) -> str:
    return " and ".join(resident.id for resident in residents)
