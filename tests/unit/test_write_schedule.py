"""Debounce, coalescing, the spill cap and retries, with a clock that stands still."""

from mlx_isolate_engine.cache.ram_tier import Entry
from mlx_isolate_engine.cache.token_index import token_key
from mlx_isolate_engine.cache.write_schedule import RETRY_FIRST_S, RETRY_MAX_S, WriteSchedule


def entry(*tokens: int, size: int = 10) -> Entry:
    return Entry(
        namespace="n",
        key=token_key(tokens),
        cache=[],
        bytes=size,
        cuttable=True,
        storable=True,
        kind="assistant",
    )


def schedule(spill_bytes_max: int = 100) -> WriteSchedule:
    return WriteSchedule(debounce_s=1.0, spill_bytes_max=spill_bytes_max)


def test_a_snapshot_waits_for_the_debounce() -> None:
    plan = schedule()
    plan.snapshot(entry(1), now=10.0)
    assert plan.next(10.9) is None
    assert plan.wait_s(10.25) == 0.75
    assert plan.next(11.0) is not None


def test_the_same_tokens_coalesce_into_the_newest() -> None:
    plan = schedule()
    old, new = entry(1), entry(1)
    plan.snapshot(old, now=10.0)
    plan.snapshot(new, now=10.9)
    assert plan.next(11.0) is None
    item = plan.next(11.9)
    assert item is not None and item.entry is new
    plan.written()
    assert plan.pending_snapshots == 0


def test_a_snapshot_counts_as_pending_until_it_is_written() -> None:
    plan = schedule()
    plan.snapshot(entry(1), now=0.0)
    assert plan.next(1.0) is not None
    assert plan.pending_snapshots == 1
    assert plan.next(99.0) is None, "one write at a time"
    plan.written()
    assert plan.pending_snapshots == 0


def test_spills_go_before_snapshots() -> None:
    plan = schedule()
    plan.snapshot(entry(1), now=0.0)
    plan.spill(entry(2), now=5.0)
    item = plan.next(9.0)
    assert item is not None and item.spilled


def test_above_the_cap_the_oldest_spill_is_dropped_and_counted() -> None:
    plan = schedule(spill_bytes_max=25)
    for n in range(4):
        plan.spill(entry(n), now=float(n))
    assert plan.spill_bytes == 20
    assert plan.dropped_spills == 2
    item = plan.next(9.0)
    assert item is not None and item.entry.key == token_key([2])


def test_a_spill_above_the_cap_by_itself_is_dropped() -> None:
    plan = schedule(spill_bytes_max=5)
    plan.spill(entry(1), now=0.0)
    assert (plan.pending_spills, plan.dropped_spills) == (0, 1)


def test_an_entry_evicted_while_its_snapshot_waits_becomes_a_spill() -> None:
    plan = schedule()
    one = entry(1)
    plan.snapshot(one, now=0.0)
    plan.spill(one, now=0.5)
    assert (plan.pending_snapshots, plan.pending_spills) == (0, 1)
    assert plan.next(0.5) is not None, "no debounce for what RAM has let go"


def test_an_entry_evicted_while_it_is_written_is_not_written_twice() -> None:
    plan = schedule()
    one = entry(1)
    plan.snapshot(one, now=0.0)
    plan.next(1.0)
    plan.spill(one, now=1.1)
    assert (plan.pending_snapshots, plan.pending_spills) == (0, 1)
    plan.written()
    assert plan.next(99.0) is None


def test_an_entry_asked_for_while_it_is_written_is_not_written_twice() -> None:
    plan = schedule()
    plan.snapshot(one := entry(1), 0.0, at_once=True)
    assert plan.next(0.0) is not None
    plan.snapshot(one, 0.1, at_once=True)
    plan.begin_flush(0.1)
    assert plan.pending_snapshots == 1
    plan.written()
    assert plan.is_flushed
    assert plan.next(9.0) is None


def test_a_failed_snapshot_stays_dirty_and_is_retried_with_growing_pauses() -> None:
    plan = schedule()
    plan.snapshot(entry(1), now=0.0)
    now, pause = 1.0, RETRY_FIRST_S
    for _ in range(10):
        assert plan.next(now) is not None
        plan.failed(now)
        assert plan.pending_snapshots == 1
        assert plan.next(now + pause * 0.99) is None
        now, pause = now + pause, min(RETRY_MAX_S, pause * 2)
    assert plan.failed_writes == 10
    plan.next(now)
    plan.written()
    plan.snapshot(entry(2), now=now)
    plan.next(now + 1)
    plan.failed(now + 1)
    assert plan.wait_s(now + 1) == RETRY_FIRST_S, "a success resets the pause"


def test_a_failed_spill_is_dropped_and_counted() -> None:
    plan = schedule()
    plan.spill(entry(1), now=0.0)
    plan.next(0.0)
    plan.failed(0.0)
    assert (plan.pending_spills, plan.dropped_spills, plan.failed_writes) == (0, 1, 1)


def test_a_flush_tries_everything_once_whatever_failed_before() -> None:
    plan = schedule()
    for n in range(3):
        plan.snapshot(entry(n), now=0.0)
    plan.begin_flush(now=0.1)
    for _ in range(2):
        assert not plan.is_flushed
        assert plan.next(0.1) is not None
        plan.failed(0.1)
    assert plan.next(0.1) is not None
    plan.written()
    assert plan.is_flushed
    assert plan.next(0.1) is None, "back to pauses"
    plan.begin_flush(now=0.2)
    assert not plan.is_flushed
    assert plan.next(0.2) is not None


def test_what_comes_during_a_flush_is_not_waited_for() -> None:
    plan = schedule()
    plan.snapshot(entry(1), now=0.0)
    plan.begin_flush(now=0.1)
    plan.next(0.1)
    plan.snapshot(entry(2), now=0.1)
    plan.written()
    assert plan.is_flushed
    assert plan.pending_snapshots == 1


def test_a_flush_waits_for_what_takes_the_place_of_a_waiting_entry() -> None:
    plan = schedule()
    plan.snapshot(entry(1), now=0.0)
    plan.begin_flush(now=0.1)
    plan.snapshot(entry(1, 2), now=0.2, replaces=[("n", token_key([1]))])
    assert not plan.is_flushed
    item = plan.next(0.2)
    assert item is not None and item.entry.key == token_key([1, 2]), "due at once"


def test_a_newer_entry_is_not_overwritten_by_an_older_failure() -> None:
    plan = schedule()
    old, new = entry(1), entry(1)
    plan.snapshot(old, now=0.0)
    plan.next(1.0)
    plan.snapshot(new, now=1.5)
    plan.failed(1.6)
    item = plan.next(99.0)
    assert item is not None and item.entry is new
