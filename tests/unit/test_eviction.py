"""Who is loaded, who waits and who leaves, decided on made-up facts."""

from typing import Any

import msgspec
import pytest

from mlx_isolate_supervisor.config import GroupSpec
from mlx_isolate_supervisor.models.eviction import decide, may_not_share
from mlx_isolate_supervisor.models.room import GpuLimits, Plan, Resident, Rules, Wish

ONE = Rules(models_max=1)
TEN = Rules(budget_bytes=10, ceiling_bytes=10)


def resident(id: str, bytes: int = 1, *, busy: bool = False, **facts: Any) -> Resident:
    return Resident(id=id, bytes=bytes, is_idle=not busy, **facts)


def wish(id: str, need: int = 1, since: float = 100.0, **facts: Any) -> Wish:
    return Wish(id=id, need_bytes=need, since_s=since, **facts)


def test_what_fits_is_loaded() -> None:
    assert decide(TEN, [resident("a", 4)], [wish("b", 6)]) == Plan(grants=("b",))


def test_an_idle_model_leaves_and_the_newcomer_waits_until_it_is_gone() -> None:
    plan = decide(TEN, [resident("a", 5)], [wish("b", 6)])
    assert plan.evictions == {"a": "b"} and plan.grants == ()
    assert plan.waits == {"b": "until a has made room"}
    leaving = decide(TEN, [resident("a", 5, is_leaving=True)], [wish("b", 6)])
    assert leaving == Plan(waits={"b": "until a has made room"})
    assert decide(TEN, [], [wish("b", 6)]) == Plan(grants=("b",))


def test_the_least_recently_used_leaves() -> None:
    held = [resident("a", 4, used_s=9.0), resident("b", 4, used_s=3.0)]
    assert decide(TEN, held, [wish("c", 4)]).evictions == {"b": "c"}


def test_nobody_leaves_in_vain() -> None:
    held = [resident("small", 1, used_s=1.0), resident("large", 8, used_s=2.0)]
    assert decide(TEN, held, [wish("c", 7)]).evictions == {"large": "c"}


def test_as_many_leave_as_must_and_no_more() -> None:
    held = [resident("s1", 1, used_s=1.0), resident("s2", 1, used_s=2.0)]
    held.append(resident("large", 8, used_s=3.0))
    assert decide(TEN, held, [wish("c", 9)]).evictions == {"s1": "c", "large": "c"}


def test_who_is_on_the_way_out_counts_until_it_is_gone() -> None:
    rules = Rules(models_max=3)
    held = [resident("a", is_leaving=True), resident("b", busy=True)]
    plan = decide(rules, held, [wish("c", since=1.0), wish("d", since=2.0)])
    assert plan == Plan(grants=("c",), waits={"d": "until a has made room"})


def test_of_two_wishes_that_exclude_each_other_the_older_one_comes_true() -> None:
    rules = Rules(groups=(GroupSpec(id="g", members=("x",)),))
    for older, younger in (("x", "y"), ("y", "x")):
        plan = decide(rules, [], [wish(older, since=1.0), wish(younger, since=2.0)])
        assert plan.grants == (older,)
        assert plan.waits == {younger: f"for {older}, which has waited longer"}


def test_idle_models_leave_before_busy_ones_are_waited_for() -> None:
    held = [resident("a", 5, busy=True, used_s=0.0), resident("b", 5, used_s=50.0)]
    assert decide(TEN, held, [wish("c", 5)]).evictions == {"b": "c"}


def test_a_busy_model_is_waited_for_and_takes_nobody_who_came_later() -> None:
    held = [resident("a", busy=True, turn_s=20.0)]
    plan = decide(ONE, held, [wish("b", since=30.0)])
    assert plan == Plan(holds={"a": 30.0}, waits={"b": "for running requests of a"})


def test_everybody_who_came_before_a_models_turn_is_served_in_it() -> None:
    held = [resident("a", busy=True, turn_s=40.0)]
    assert decide(ONE, held, [wish("b", since=30.0)]).holds == {"a": 40.0}


def test_an_idle_model_serves_on_while_another_is_waited_for() -> None:
    held = [resident("a", 5, used_s=1.0), resident("b", 5, busy=True, turn_s=7.0)]
    plan = decide(TEN, held, [wish("c", 9, since=30.0)])
    assert plan.evictions == {} and plan.holds == {"b": 30.0}


def test_a_model_whose_requests_are_held_back_stays_held_until_the_others_are_done() -> None:
    held = [resident("a", 5, is_held=True, turn_s=3.0), resident("b", 5, busy=True, turn_s=7.0)]
    plan = decide(TEN, held, [wish("c", 9, since=30.0)])
    assert plan.holds == {"a": 30.0, "b": 30.0}


def test_the_longest_wait_comes_first() -> None:
    wishes = [wish("c", since=2.0), wish("b", since=1.0)]
    plan = decide(ONE, [], wishes)
    assert plan.grants == ("b",)
    assert plan.waits == {"c": "for b, which has waited longer"}


def test_a_younger_wish_goes_first_only_where_that_delays_nobody() -> None:
    held = [resident("a", 6, busy=True)]
    wishes = [wish("big", 8, since=1.0), wish("tiny", 2, since=2.0), wish("small", 3, since=3.0)]
    plan = decide(TEN, held, wishes)
    assert plan.grants == ("tiny",)
    assert plan.waits["small"] == "for big, which has waited longer"


def test_a_pinned_model_makes_room_for_nobody() -> None:
    plan = decide(TEN, [resident("a", 6, is_pinned=True)], [wish("b", 5)])
    refusal = plan.refusals["b"]
    assert (refusal.need_bytes, refusal.budget_bytes) == (5, 10)
    assert [(one.id, one.bytes, one.is_pinned) for one in refusal.held] == [("a", 6, True)]


def test_a_model_that_a_client_wants_kept_leaves_last() -> None:
    held = [resident("a", 5, used_s=1.0, is_lasting=True), resident("b", 5, used_s=9.0)]
    assert decide(TEN, held, [wish("c", 5)]).evictions == {"b": "c"}
    assert decide(TEN, held[:1], [wish("c", 6)]).evictions == {"a": "c"}


def test_more_than_an_asked_for_budget_is_refused() -> None:
    assert set(decide(TEN, [], [wish("a", 11)]).refusals) == {"a"}


def test_more_than_the_default_budget_is_loaded_alone() -> None:
    rules = Rules(budget_bytes=10, ceiling_bytes=14)
    assert decide(rules, [], [wish("a", 11)]).grants == ("a",)
    beside = decide(rules, [resident("b", 1)], [wish("a", 11)])
    assert beside.evictions == {"b": "a"} and not beside.grants
    assert set(decide(rules, [resident("b", 1, is_pinned=True)], [wish("a", 11)]).refusals) == {"a"}
    assert decide(rules, [], [wish("a", 14)]).grants == ("a",)
    assert set(decide(rules, [], [wish("a", 15)]).refusals) == {"a"}


def test_a_preload_makes_nobody_leave() -> None:
    assert decide(ONE, [resident("a")], [wish("b", is_urgent=False)]) == Plan(dropped=("b",))


def test_spare_engines_leave_before_models_do() -> None:
    plan = decide(TEN, [resident("a", 4)], [wish("b", 6)], spare_bytes=1)
    assert plan.sheds_spares and not plan.grants and not plan.evictions


def test_models_that_grew_over_the_budget_make_the_oldest_idle_one_leave() -> None:
    held = [resident("a", 6, used_s=1.0), resident("b", 6, used_s=2.0)]
    assert decide(TEN, held, []).evictions == {"a": "a"}
    busy = [resident("a", 6, busy=True), resident("b", 6, busy=True)]
    assert decide(TEN, busy, []) == Plan(is_over=True)
    assert decide(TEN, [resident("a", 60)], []) == Plan()


@pytest.mark.parametrize(
    ("newcomer", "other", "excluded"),
    [
        ("a1", "a2", True),
        ("b1", "b2", False),
        ("a1", "b1", False),
        ("a1", "loner", True),
        ("b1", "a1", False),
        ("c1", "a1", True),
        ("c1", "b1", False),
        ("loner", "a1", False),
    ],
)
def test_groups(newcomer: str, other: str, excluded: bool) -> None:
    groups = [
        GroupSpec(id="a", members=("a1", "a2")),
        GroupSpec(id="b", members=("b1", "b2"), swap=False, exclusive=False, persistent=True),
        GroupSpec(id="c", members=("c1",)),
    ]
    assert may_not_share(groups, newcomer, other) is excluded


def test_a_member_leaves_for_another_of_its_group_though_memory_would_suffice() -> None:
    rules = Rules(groups=(GroupSpec(id="g", members=("a", "b"), exclusive=False),))
    held = [resident("a"), resident("x")]
    plan = decide(rules, held, [wish("b")])
    assert plan.evictions == {"a": "b"}
    assert decide(rules, [resident("a", is_leaving=True)], [wish("b")]).grants == ()


def test_a_persistent_member_leaves_for_its_own_group_only() -> None:
    group = GroupSpec(id="g", members=("a", "b"), persistent=True)
    pinned = [resident("a", 8, is_pinned=True)]
    rules = Rules(budget_bytes=10, ceiling_bytes=10, groups=(group,))
    assert decide(rules, pinned, [wish("b", 8)]).evictions == {"a": "b"}
    assert set(decide(rules, pinned, [wish("x", 8)]).refusals) == {"x"}


def test_a_newcomer_loads_beside_what_it_replaces_where_the_memory_suffices() -> None:
    rules = Rules(models_max=1, budget_bytes=10, ceiling_bytes=10, may_overlap=True)
    plan = decide(rules, [resident("a", 5, busy=True)], [wish("b", 5)])
    assert plan.grants == ("b",) and plan.replaced == {"b": ("a",)} and not plan.holds
    assert decide(rules, [resident("a", 6, busy=True)], [wish("b", 5)]).grants == ()
    replacing = [resident("a", 3, is_leaving=True), resident("b", 3)]
    assert decide(rules, replacing, [wish("c", 3)]).grants == ()


GPU = Rules(
    budget_bytes=100, ceiling_bytes=100, gpus={"": GpuLimits(budget_bytes=10, ceiling_bytes=12)}
)


def test_a_gpus_own_memory_is_kept_to_though_the_machine_has_plenty() -> None:
    held = [resident("a", 1, gpu_bytes=6, used_s=1.0), resident("b", 1, used_s=0.0)]
    assert decide(GPU, held, [wish("c", 1, gpu_bytes=4)]).grants == ("c",)
    plan = decide(GPU, held, [wish("c", 1, gpu_bytes=5)])
    assert plan.evictions == {"a": "c"}, "the one that is on the GPU leaves, not the older one"
    leaving = decide(
        GPU, [resident("a", 1, gpu_bytes=6, is_leaving=True)], [wish("c", gpu_bytes=5)]
    )
    assert leaving == Plan(waits={"c": "until a has made room"})


def test_what_another_gpu_holds_is_in_nobodys_way() -> None:
    gpus = {"0": GpuLimits(budget_bytes=10, ceiling_bytes=10)}
    gpus["1"] = GpuLimits(budget_bytes=20, ceiling_bytes=20)
    rules = Rules(budget_bytes=100, gpus=gpus)
    held = [resident("a", gpu="0", gpu_bytes=10), resident("b", gpu="1", gpu_bytes=10)]
    assert decide(rules, held, [wish("c", gpu="1", gpu_bytes=10)]).grants == ("c",)
    assert decide(rules, held, [wish("c", gpu="1", gpu_bytes=11)]).evictions == {"b": "c"}
    unknown = wish("c", gpu="2", gpu_bytes=50)
    assert decide(rules, held, [unknown]).grants == ("c",), "nothing is known of that one"


def test_a_model_alone_may_take_more_than_the_share_of_a_gpu_and_no_more_than_all_of_it() -> None:
    assert decide(GPU, [], [wish("a", gpu_bytes=12)]).grants == ("a",)
    refusal = decide(GPU, [], [wish("a", 3, gpu_bytes=13)]).refusals["a"]
    assert (refusal.need_bytes, refusal.budget_bytes, refusal.is_of_gpu) == (13, 10, True)


def test_a_refusal_names_the_memory_that_lacks() -> None:
    held = [resident("p", 90, gpu_bytes=8, is_pinned=True), resident("other", 1, gpu="1")]
    of_gpu = decide(GPU, held, [wish("a", 3, gpu_bytes=5)]).refusals["a"]
    assert of_gpu.is_of_gpu and [(one.id, one.bytes) for one in of_gpu.held] == [("p", 8)]
    of_machine = decide(GPU, held, [wish("a", 30, gpu_bytes=1)]).refusals["a"]
    assert not of_machine.is_of_gpu
    assert [(one.id, one.bytes) for one in of_machine.held] == [("p", 90), ("other", 1)]


def test_models_that_outgrew_a_gpu_shrink_there_and_nowhere_else() -> None:
    held = [
        resident("old", 1, used_s=0.0),
        resident("a", 1, gpu_bytes=6, used_s=1.0),
        resident("b", 1, gpu_bytes=6, used_s=2.0),
    ]
    assert decide(GPU, held, []).evictions == {"a": "a"}
    full = msgspec.structs.replace(GPU, models_max=3)
    assert decide(full, held, []).evictions == {"a": "a"}
    busy = [resident("a", gpu_bytes=6, busy=True), resident("b", gpu_bytes=6, busy=True)]
    assert decide(GPU, [*busy, resident("old")], []) == Plan(is_over=True)


def test_a_newcomer_loads_beside_only_where_the_gpu_holds_both() -> None:
    rules = Rules(models_max=1, may_overlap=True, gpus=GPU.gpus)
    held = [resident("a", gpu_bytes=5)]
    assert decide(rules, held, [wish("b", gpu_bytes=5)]).replaced == {"b": ("a",)}
    assert decide(rules, held, [wish("b", gpu_bytes=6)]).evictions == {"a": "b"}
