"""A disk that is full, limited or not writable costs entries and one warning, never an answer."""

import errno
import logging
import os
import resource
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mlx_lm.models.cache import KVCache

from mlx_isolate_engine.cache.cold_side import ColdSettings
from mlx_isolate_engine.cache.directory import CacheDirectory
from mlx_isolate_engine.cache.kv_check import verify
from mlx_isolate_engine.cache.prompt_cache import PromptCache
from mlx_isolate_engine.cache.restore_choice import RestoreChoice
from mlx_isolate_engine.cache.ssd_store import SsdStore, StoreIdentity
from mlx_isolate_engine.cache.trouble import trouble_of
from tests.fakes.toy_caches import assert_same, feed

IDENTITY = StoreIdentity(model="m", model_id="m", fingerprint="ab" * 16, tokenizer="cd" * 16)
LENGTH = 600


def tier(root: Path) -> SsdStore:
    return SsdStore(root, IDENTITY, bytes_max=1 << 30, verify=True)


@contextmanager
def cache_over(store: SsdStore) -> Generator[PromptCache]:
    cold = ColdSettings(
        tier=store, choice=RestoreChoice("always"), spill_bytes_max=1 << 28, debounce_s=0.0
    )
    cache = PromptCache(entries_max=50, bytes_max=1 << 28, cold=cold)
    try:
        yield cache
    finally:
        cache.close(10)


def tokens_of(number: int) -> list[int]:
    return [number, *range(LENGTH - 1)]


def filled(number: int) -> list[KVCache]:
    live = [KVCache()]
    feed(live, tokens_of(number), 0, LENGTH)
    return live


def put(cache: PromptCache, number: int) -> None:
    cache.put(tokens_of(number), filled(number), "n", "assistant")


@contextmanager
def file_size_limit(size: int) -> Generator[None]:
    """No file of this process may grow beyond `size` bytes; a write in the middle fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.case("22")
def test_a_write_that_fails_in_the_middle_leaves_nothing_and_is_made_up_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "cache"
    store = tier(root)
    store.open()
    with cache_over(store) as cache, caplog.at_level(logging.INFO):
        with file_size_limit(200_000):  # a header and a part of the first tensor
            for number in range(5):
                put(cache, number)
                assert not cache.flush(20).durable
            assert list(CacheDirectory(root).files()) == []
            taken, reused = cache.take([*tokens_of(0), 7], "n")
            assert taken is not None and reused == LENGTH, "RAM serves on"
        assert caplog.text.count("cache.write_failed") == 1
        evidence = cache.flush(20)
        assert evidence.durable
        assert evidence.failed_writes >= 5
        assert caplog.text.count("cache.writes_resumed") == 1
    reopened = tier(root)
    reopened.open()
    assert reopened.stats().entries == 5
    for file in CacheDirectory(root).files():
        verify(file.path)
    with cache_over(reopened) as cache:
        taken, _ = cache.take([*tokens_of(3), 7], "n")
        assert taken is not None
        assert_same(taken, filled(3))


@pytest.mark.case("22")
def test_a_directory_that_cannot_be_made_switches_off_until_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = tmp_path / "cache"
    in_the_way.write_text("a file")
    store = tier(in_the_way)
    with pytest.raises(OSError):
        store.open()
    with cache_over(store) as cache, caplog.at_level(logging.INFO):
        put(cache, 1)
        told = cache.flush(20).trouble
        assert told == cache.figures().ssd_trouble == store.stats().trouble
        assert told.startswith(f"{in_the_way} cannot be written (")
        assert "make it a folder that this user can write to, or choose another" in told
        assert cache.take([*tokens_of(1), 7], "n")[1] == LENGTH
        in_the_way.unlink()
        evidence = cache.flush(20)
        assert (evidence.durable, evidence.trouble) == (True, "")
    assert caplog.text.count("cache.write_failed") == 1
    assert store.stats().entries == 1


@pytest.mark.case("22")
def test_a_read_only_directory_is_told_at_the_start_and_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tier(tmp_path)
    first.open()
    with cache_over(first) as cache:
        put(cache, 1)
        assert cache.flush(20).durable
    store = SsdStore(tmp_path, IDENTITY, bytes_max=1000)

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as disk:
        # What a read-only file system refuses; a folder's mode would not stop a privileged user.
        disk.setattr(os, "unlink", read_only)
        disk.setattr(tempfile, "TemporaryFile", read_only)
        with pytest.raises(OSError):
            store.open()
        assert "(Read-only file system)" in store.stats().trouble
        assert store.stats().entries == 1, "above the cap, and not to be removed"
        with cache_over(store) as cache:
            assert cache.take([*tokens_of(1), 7], "n")[1] == LENGTH
            assert "(Read-only file system)" in cache.flush(20).trouble
            disk.undo()
            assert cache.flush(20).trouble == "", "with nothing to write it is looked at"
    store.open()
    assert (store.stats().trouble, store.stats().entries) == ("", 0)


def test_a_folder_within_that_cannot_be_written_is_named() -> None:
    error = PermissionError(errno.EACCES, "Permission denied", "/c/model/namespace/x.1-2.tmp")
    assert "/c cannot be written (Permission denied: /c/model/namespace)," in trouble_of(
        error, Path("/c")
    )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_told_with_its_remedy(number: int) -> None:
    told = trouble_of(OSError(number, os.strerror(number)), Path("/c"))
    assert told.startswith(f"/c cannot be written ({os.strerror(number)}), so prompts are kept in")
    assert "free some room on its disk" in told


def test_a_directory_deleted_under_a_running_engine_is_made_anew(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    store = tier(root)
    store.open()
    with cache_over(store) as cache:
        put(cache, 1)
        assert cache.flush(20).durable
        cache.trim_to(0)
        for file in CacheDirectory(root).files():
            CacheDirectory(root).remove(file.path)
        root.rmdir()
        assert cache.take([*tokens_of(1), 7], "n") == (None, 0)
        put(cache, 2)
        assert cache.flush(20).durable
        assert store.stats().entries == 1
