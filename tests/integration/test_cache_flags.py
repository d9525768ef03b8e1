"""The flags of the SSD tier on a real engine: what is written when, and what stays in RAM."""

import signal
from pathlib import Path

from tests.integration.test_cache_restart import (
    cached,
    chat,
    engine,
    flush,
    prompt_tokens,
    stats,
    text_of,
)
from tests.waiting import wait_for


def own_files(root: Path) -> list[Path]:
    return list(root.rglob("*.safetensors"))


def test_without_write_behind_the_end_of_the_engine_is_the_first_write(
    full_model: Path, tmp_path: Path
) -> None:
    root = tmp_path / "cache"
    with engine(full_model, root, ssd_write_behind=False) as first:
        before = chat(first, "Kept at the end")
        chat(first, "Another one")
        assert stats(first)["pending_snapshots"] == 0
        assert own_files(root) == []
        first.child.send_signal(signal.SIGTERM)
        assert first.wait_exit(40) == 0
    assert own_files(root)
    with engine(full_model, root, ssd_write_behind=False) as second:
        again = chat(second, "Kept at the end")
        assert cached(again) >= prompt_tokens(again) - 1
        assert again["timings"]["cache_tier"] == "ssd"
        assert text_of(again) == text_of(before)


def test_a_spill_queue_of_nothing_drops_what_leaves_ram_and_counts_it(
    full_model: Path, tmp_path: Path
) -> None:
    root = tmp_path / "cache"
    flags = {"ssd_write_behind": False, "ssd_spill_queue_bytes": 0, "prompt_cache_size": 1}
    with engine(full_model, root, **flags) as process:
        for number in range(3):
            chat(process, f"{number} of three")
        wait_for(lambda: stats(process)["dropped_spills"] >= 2, 10)
        assert stats(process)["spills"] >= 2
        assert own_files(root) == []
        flush(process)  # the one that RAM holds
        assert len(own_files(root)) == 1


def test_idleness_moves_entries_from_ram_to_disk(full_model: Path, tmp_path: Path) -> None:
    with engine(full_model, tmp_path / "cache", ssd_demote_idle_s=0.2) as process:
        before = chat(process, "Left alone")
        wait_for(lambda: stats(process)["ram_entries"] == 0, 20)
        assert stats(process)["ssd_entries"] >= 1
        again = chat(process, "Left alone")
        assert cached(again) >= prompt_tokens(again) - 1
        assert again["timings"]["cache_tier"] == "ssd"
        assert text_of(again) == text_of(before)


def test_the_choice_between_restore_and_prefill_is_told(full_model: Path, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    with engine(full_model, root, ssd_restore="never") as process:
        chat(process, "What is chosen")
        flush(process)
    with engine(full_model, root, ssd_restore="never") as process:
        answer = chat(process, "What is chosen")
        assert cached(answer) == 0
        assert stats(process)["restore_choices"] == {}
    with engine(full_model, root, ssd_restore="auto") as process:
        answer = chat(process, "What is chosen")
        reason = answer["timings"]["cache_reason"]
        assert reason in ("no_rates_yet", "restore_cheaper", "prefill_cheaper")
        assert stats(process)["restore_choices"] == {reason: 1}
        assert (cached(answer) > 0) == (reason != "prefill_cheaper")
