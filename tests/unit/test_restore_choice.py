"""Restore or run again: by measured rates, with a way back from a bad first measurement."""

import pytest

from mlx_isolate_engine.cache.restore_choice import REFUSALS_MAX, Mode, RestoreChoice


def rates(restore: float, prefill: float) -> RestoreChoice:
    choice = RestoreChoice("auto")
    choice.note_restore(int(restore), 1.0)
    choice.note_prefill(int(prefill), 1.0)
    return choice


@pytest.mark.parametrize("mode", ["always", "never"])
def test_a_fixed_mode_ignores_rates(mode: Mode) -> None:
    choice = RestoreChoice(mode)
    choice.note_restore(1, 1000.0)
    choice.note_prefill(10**9, 1.0)
    assert choice.choose(tokens_gained=1, size=10**9).restore == (mode == "always")


def test_without_rates_it_restores() -> None:
    assert RestoreChoice("auto").choose(tokens_gained=1, size=10**12).reason == "no_rates_yet"


def test_before_the_first_restore_a_plain_disk_is_assumed() -> None:
    choice = RestoreChoice("auto")
    choice.note_prefill(25_000, 1.0)
    # 32k tokens of an 8B model: 4.3 GB, or 1.3 s of a large GPU; of a 1B model: 1 GB.
    assert choice.choose(tokens_gained=32_000, size=4_300_000_000).reason == "prefill_cheaper"
    assert choice.choose(tokens_gained=32_000, size=1_000_000_000).reason == "restore_cheaper"


def test_a_short_prompt_says_little_about_the_rate() -> None:
    choice = RestoreChoice("auto")
    choice.note_prefill(8000, 0.2)
    choice.note_prefill(20, 0.02)
    assert choice.prefill_tokens_per_s == pytest.approx(35_000, rel=0.1)


def test_the_cheaper_way_is_taken() -> None:
    choice = rates(restore=1e9, prefill=1000)
    assert choice.choose(tokens_gained=1000, size=500_000_000).reason == "restore_cheaper"
    assert choice.choose(tokens_gained=100, size=500_000_000).reason == "prefill_cheaper"


def test_a_rate_follows_what_is_measured() -> None:
    choice = rates(restore=1000, prefill=1000)
    for _ in range(30):
        choice.note_restore(10**9, 1.0)
    assert choice.restore_bytes_per_s == pytest.approx(10**9, rel=0.01)


def test_one_restore_is_tried_after_many_refusals() -> None:
    choice = rates(restore=1, prefill=10**6)
    taken = [choice.choose(tokens_gained=1, size=10**6).restore for _ in range(REFUSALS_MAX + 1)]
    assert taken == [False] * REFUSALS_MAX + [True]


def test_choices_are_counted_by_their_reason() -> None:
    choice = RestoreChoice("auto")
    choice.choose(tokens_gained=1000, size=1000)
    choice.note_prefill(1000, 0.001)
    choice.note_restore(1000, 1.0)
    choice.choose(tokens_gained=1000, size=10**9)
    choice.choose(tokens_gained=1000, size=10**9)
    assert choice.made == {"no_rates_yet": 1, "prefill_cheaper": 2}


def test_nothing_is_learnt_from_nothing() -> None:
    choice = RestoreChoice("auto")
    choice.note_restore(0, 1.0)
    choice.note_prefill(5, 0.0)
    assert choice.restore_bytes_per_s is None
    assert choice.prefill_tokens_per_s is None
