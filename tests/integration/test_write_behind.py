"""Write-behind, spills, demotion and flush: what becomes durable when, and on which thread."""

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlx_isolate_engine.cache.cold_side import ColdSettings
from mlx_isolate_engine.cache.prompt_cache import PromptCache
from mlx_isolate_engine.cache.restore_choice import RestoreChoice
from mlx_isolate_engine.cache.write_behind import FlushEvidence
from mlx_isolate_shared.errors import CacheError
from tests.fakes.fake_cold_tier import TENSORS, FakeColdTier
from tests.fakes.toy_caches import KINDS, TOKENS, feed
from tests.waiting import wait_for

Build = Callable[..., PromptCache]


@pytest.fixture
def tier() -> FakeColdTier:
    return FakeColdTier()


@pytest.fixture
def build(tier: FakeColdTier) -> Iterator[Build]:
    made: list[PromptCache] = []

    def make(entries_max: int = 20, **options: Any) -> PromptCache:
        options = {"spill_bytes_max": 1 << 20, "debounce_s": 0.0} | options
        cold = ColdSettings(tier=tier, choice=RestoreChoice("always"), **options)
        made.append(PromptCache(entries_max=entries_max, bytes_max=1 << 24, cold=cold))
        return made[-1]

    yield make
    tier.error = None
    for cache in made:
        cache.set_idle(True)
        cache.close(5)


def put(cache: PromptCache, first: int = 0, kind: str = "arrays") -> list[int]:
    tokens = [first, *TOKENS[:5]]
    live = KINDS[kind]()
    feed(live, tokens, 0)
    cache.put(tokens, live, "n", "assistant")
    return tokens


def test_a_completion_becomes_durable_by_itself(build: Build, tier: FakeColdTier) -> None:
    cache = build()
    put(cache)
    wait_for(lambda: len(tier.entries) == 1, 10)


def test_a_flush_ends_the_debounce_and_gives_evidence(build: Build) -> None:
    cache = build(debounce_s=3600.0)
    put(cache, 1)
    put(cache, 2)
    assert cache.figures().pending_snapshots == 2
    evidence = cache.flush(10)
    assert evidence.durable
    assert (evidence.pending_snapshots, evidence.entries) == (0, 2)
    assert evidence.longest_durable_prefix == 6


def test_nothing_is_written_while_anybody_generates(build: Build, tier: FakeColdTier) -> None:
    cache = build()
    cache.set_idle(False)
    put(cache)
    evidence = cache.flush(0.2)
    assert not evidence.durable
    assert evidence.pending_snapshots == 1
    assert tier.attempts == 0
    cache.set_idle(True)
    assert cache.flush(10).durable


def test_a_write_pauses_between_tensors_and_goes_on_when_idle(
    build: Build, tier: FakeColdTier
) -> None:
    cache = build()

    def work_comes() -> None:
        if tier.steps == 2:
            cache.set_idle(False)

    tier.on_step = work_comes
    put(cache)
    wait_for(lambda: tier.steps == 2, 10)
    assert not cache.flush(0.2).durable
    assert tier.steps == 2, "asked before every tensor"
    cache.set_idle(True)
    assert cache.flush(10).durable
    assert tier.steps == TENSORS
    assert tier.attempts == 1


def test_the_generation_thread_never_writes(build: Build, tier: FakeColdTier) -> None:
    cache = build(entries_max=2)
    for first in range(6):
        cache.take(put(cache, first), "n")
    assert cache.flush(10).durable
    assert len(tier.entries) == 6
    assert threading.get_ident() not in tier.store_threads


def test_a_due_snapshot_does_not_hold_up_a_take(build: Build, tier: FakeColdTier) -> None:
    cache = build()
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert release.wait(10)

    tier.on_step = hold
    tokens = put(cache)
    assert held.wait(10)
    cache.set_idle(False)
    taken, _ = cache.take([*tokens, 1], "n")
    assert taken is not None
    put(cache, 7)
    release.set()
    cache.set_idle(True)


def test_evicted_entries_spill(build: Build, tier: FakeColdTier) -> None:
    cache = build(entries_max=1, write_behind=False)
    first = put(cache, 1)
    put(cache, 2)
    assert cache.flush(10).durable
    assert cache.figures().spills == 1
    taken, reused = cache.take([*first, 9], "n")
    assert taken is not None and reused == len(first)
    assert cache.last_take.tier == "ssd"


def test_without_write_behind_only_what_leaves_ram_is_written_by_itself(
    build: Build, tier: FakeColdTier
) -> None:
    cache = build(write_behind=False, entries_max=1)
    put(cache, 1)
    assert cache.figures().pending_snapshots == 0
    put(cache, 2)
    wait_for(lambda: len(tier.entries) == 1, 10)
    assert cache.figures().pending_snapshots == 0
    assert tier.attempts == 1


def test_without_write_behind_a_flush_makes_all_of_ram_durable(
    build: Build, tier: FakeColdTier
) -> None:
    cache = build(write_behind=False)
    for first in range(3):
        put(cache, first)
    evidence = cache.flush(10)
    assert evidence.durable
    assert evidence.entries == len(tier.entries) == 3
    assert tier.attempts == 3


def test_a_flush_during_a_write_does_not_write_again(build: Build, tier: FakeColdTier) -> None:
    cache = build()
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert release.wait(10)

    tier.on_step = hold
    put(cache)
    assert held.wait(10)
    done: list[FlushEvidence] = []
    flushing = threading.Thread(target=lambda: done.append(cache.flush(10)))
    flushing.start()
    release.set()
    flushing.join(20)
    assert done[0].durable
    assert tier.attempts == 1


def test_what_can_never_be_written_is_not_called_durable(build: Build, tier: FakeColdTier) -> None:
    cache = build()
    tier.error = CacheError("above the cap of the directory")
    put(cache)
    for times in (1, 2):
        evidence = cache.flush(10)
        assert not evidence.durable
        assert evidence.refused_writes >= times
    tier.error = None
    assert cache.flush(10).durable


def test_a_close_ends_those_who_wait_for_a_flush(build: Build, tier: FakeColdTier) -> None:
    cache = build()
    tier.tensors = 10**9
    put(cache, 1)
    put(cache, 2)
    flushing = threading.Thread(target=lambda: cache.flush(3600), daemon=True)
    flushing.start()
    assert not cache.close(0.2).durable
    flushing.join(10)
    assert not flushing.is_alive()


@pytest.mark.parametrize("is_idle", [True, False])
def test_what_is_being_written_while_all_is_cleared_does_not_come_back(
    is_idle: bool, build: Build, tier: FakeColdTier
) -> None:
    cache = build()
    at_two = threading.Event()

    def step() -> None:
        if tier.steps == 2:
            cache.set_idle(is_idle)
            at_two.set()

    tier.on_step = step
    tier.tensors = 10**9
    tokens = put(cache)
    assert at_two.wait(10)
    cache.clear()
    tier.tensors = TENSORS
    cache.set_idle(True)
    evidence = cache.flush(10)
    assert (evidence.entries, evidence.pending_snapshots, evidence.failed_writes) == (0, 0, 0)
    assert cache.take([*tokens, 1], "n") == (None, 0)
    put(cache, 3)
    assert cache.flush(10).entries == 1, "the writer goes on"


def test_closing_writes_what_is_only_in_ram(build: Build, tier: FakeColdTier) -> None:
    cache = build(write_behind=False)
    put(cache)
    cache.set_idle(False)  # a generation that does not end
    assert cache.close(1).durable
    assert len(tier.entries) == 1


def test_closing_waits_for_a_completion_that_is_just_being_kept(
    build: Build, tier: FakeColdTier
) -> None:
    cache = build()
    cache.set_idle(False)
    closing = threading.Thread(target=lambda: cache.close(20))
    closing.start()
    put(cache)
    cache.set_idle(True)
    closing.join(20)
    assert len(tier.entries) == 1


def test_a_close_that_runs_out_of_time_says_what_is_lost(
    build: Build, tier: FakeColdTier, caplog: pytest.LogCaptureFixture
) -> None:
    cache = build()
    tier.tensors = 10**9
    put(cache)
    with caplog.at_level(logging.WARNING):
        assert not cache.close(0.1).durable
    assert "cache.closed lost=1" in caplog.text
    assert tier.entries == {}


def test_long_idleness_gives_ram_back(build: Build, tier: FakeColdTier) -> None:
    cache = build(write_behind=False, demote_idle_s=0.05)
    cache.set_idle(False)  # else a slow machine has been idle for so long before anything is there
    tokens = put(cache)
    cache.set_idle(True)
    wait_for(lambda: cache.figures().ram_entries == 0, 10)
    assert len(tier.entries) == 1
    assert cache.take([*tokens, 1], "n")[1] == len(tokens)


def test_nothing_is_demoted_while_anybody_generates(build: Build, tier: FakeColdTier) -> None:
    cache = build(write_behind=False, demote_idle_s=0.01)
    cache.set_idle(False)
    put(cache)
    assert not cache.flush(0.2).durable
    assert cache.figures().ram_entries == 1
    assert tier.attempts == 0


def test_a_flush_waits_for_a_completion_that_is_just_being_kept(
    build: Build, tier: FakeColdTier
) -> None:
    """Its client has its answer already, and may ask for the flush before the entry is there."""
    cache = build()
    cache.set_idle(False)
    done: list[FlushEvidence] = []
    flushing = threading.Thread(target=lambda: done.append(cache.flush(20)))
    flushing.start()
    put(cache)
    assert not done
    cache.set_idle(True)
    flushing.join(20)
    assert done[0].durable
    assert done[0].entries == 1


def test_what_cannot_be_written_stays_in_ram_through_idleness(
    build: Build, tier: FakeColdTier
) -> None:
    cache = build(write_behind=False, demote_idle_s=0.01)
    tier.error = OSError(errno.ENOSPC, "No space left on device")
    cache.set_idle(False)
    put(cache)
    cache.set_idle(True)
    wait_for(lambda: tier.attempts > 0, 10)
    assert cache.figures().ram_entries == 1


@pytest.mark.case("22")
def test_a_full_disk_warns_once_and_writes_resume(
    build: Build, tier: FakeColdTier, caplog: pytest.LogCaptureFixture
) -> None:
    cache = build()
    tier.error = OSError(errno.ENOSPC, "No space left on device")
    with caplog.at_level(logging.WARNING):
        for first in range(5):
            put(cache, first)
            assert not cache.flush(10).durable
    assert caplog.text.count("cache.write_failed") == 1
    assert cache.figures().failed_writes >= 5
    tier.error = None
    assert cache.flush(10).durable
    assert len(tier.entries) == 5


def test_a_longer_cuttable_entry_takes_the_place_of_a_waiting_one(
    build: Build, tier: FakeColdTier
) -> None:
    cache = build(debounce_s=3600.0)
    live = KINDS["kv"]()
    for length in (4, 8, 12):
        feed(live, TOKENS[length - 4 : length], length - 4)
        cache.put(TOKENS[:length], live, "n", "assistant")
    assert cache.figures().pending_snapshots == 1
    assert cache.flush(10).durable
    assert len(tier.entries) == 1


def test_without_a_cold_tier_nothing_of_it_runs() -> None:
    before = threading.active_count()
    cache = PromptCache(entries_max=9, bytes_max=None)
    put(cache)
    assert threading.active_count() == before
    assert not cache.has_cold_tier
    assert not cache.figures().ssd_enabled


def test_clearing_forgets_both_tiers_and_what_waits(build: Build, tier: FakeColdTier) -> None:
    cache = build()
    tokens = put(cache, 1)
    assert cache.flush(10).durable
    cache.set_idle(False)
    put(cache, 2)
    assert cache.clear() == 3
    cache.set_idle(True)
    assert cache.flush(10).entries == 0
    assert cache.take([*tokens, 1], "n") == (None, 0)
