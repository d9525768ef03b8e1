"""Several engines, people and tools at one cache directory at once: nothing durable is lost."""

import errno
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_isolate_engine.cache import kinds, kv_io, snapshot
from mlx_isolate_engine.cache.array_codec import ArrayBuffers
from mlx_isolate_engine.cache.cold_side import ColdSettings
from mlx_isolate_engine.cache.damage import Damage
from mlx_isolate_engine.cache.directory import CacheDirectory
from mlx_isolate_engine.cache.prompt_cache import PromptCache
from mlx_isolate_engine.cache.ram_tier import Entry
from mlx_isolate_engine.cache.restore_choice import RestoreChoice
from mlx_isolate_engine.cache.ssd_store import SsdStore, StoreIdentity
from mlx_isolate_engine.cache.token_index import token_key
from tests.fakes.toy_caches import KINDS, TOKENS, assert_same, feed

IDENTITY = StoreIdentity(model="m", model_id="m", fingerprint="ab" * 16, tokenizer="cd" * 16)


def open_store(root: Path, bytes_max: int = 1 << 30) -> SsdStore:
    store = SsdStore(root, IDENTITY, bytes_max=bytes_max)
    store.open()
    return store


def entry_of(tokens: list[int], kind: str = "arrays") -> Entry:
    live = KINDS[kind]()
    feed(live, tokens, 0)
    kept = snapshot.keep(live, len(tokens))
    return Entry(
        namespace="n",
        key=token_key(tokens),
        cache=kept,
        bytes=snapshot.bytes_of(kept),
        cuttable=kinds.can_cut(kept),
        storable=True,
        kind="assistant",
    )


def never_waits() -> None:
    pass


def restored(store: SsdStore, tokens: list[int]) -> tuple[int, list[Any]] | None:
    """Tokens found and their cache; None where there is none, or it has just gone."""
    found = store.find("n", token_key([*tokens, 99]), length_max=len(tokens))
    if found is None:
        return None
    steps = store.restore(found, room_for=0)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return found.length, end.value
        except Damage as damage:
            assert damage.reason == "vanished"
            return None


def finds(store: SsdStore, tokens: list[int]) -> bool:
    return (restored(store, tokens) or (0,))[0] == len(tokens)


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.safetensors"))


@pytest.mark.parametrize("kind", ["kv", "arrays"])
def test_an_entry_that_is_looked_for_while_it_becomes_durable_stays(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has its name before the writer has noted it, and a request may see it first."""
    store = open_store(tmp_path)
    tokens = TOKENS[:6]
    seen: list[bool] = []
    sync = kv_io._sync_folder  # pyright: ignore[reportPrivateUsage]

    def sync_seen(folder: Path) -> None:
        seen.append(finds(store, tokens))
        sync(folder)

    monkeypatch.setattr(kv_io, "_sync_folder", sync_seen)
    written = store.store(entry_of(tokens, kind), never_waits)
    assert seen == [True]
    assert files(tmp_path) == [written]
    assert store.has("n", token_key(tokens), cuttable=kind == "kv")
    assert finds(store, tokens) and finds(open_store(tmp_path), tokens)


def test_of_two_files_of_the_same_tokens_two_engines_keep_the_same_one(tmp_path: Path) -> None:
    one, other = open_store(tmp_path), open_store(tmp_path)
    tokens = TOKENS[:6]
    one.store(entry_of(tokens), never_waits)
    other.store(entry_of(tokens), never_waits)
    # Each has seen both before either has removed one.
    listed = files(tmp_path)
    copies = {path: path.read_bytes() for path in listed}
    assert finds(one, tokens)
    survivors = set(files(tmp_path))
    for path, data in copies.items():
        path.write_bytes(data)
    assert finds(other, tokens)
    assert survivors & set(files(tmp_path)), "what one kept the other removed"


@pytest.mark.parametrize("times", [1, 2])
def test_a_folder_that_another_engine_removes_before_the_write_is_made_again(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = open_store(tmp_path), open_store(tmp_path)
    make = CacheDirectory.make_folder
    left = times

    def make_and_lose(self: CacheDirectory, fingerprint: str, namespace: str) -> Path:
        nonlocal left
        folder = make(self, fingerprint, namespace)
        if left:
            left -= 1
            other.directory.remove(folder / f"{'0' * 32}.safetensors")
            assert not folder.exists()
        return folder

    monkeypatch.setattr(CacheDirectory, "make_folder", make_and_lose)
    store.store(entry_of(TOKENS[:6]), never_waits)
    assert finds(other, TOKENS[:6])


def test_a_file_that_somebody_removes_while_it_is_written_is_written_again(tmp_path: Path) -> None:
    """In another container the writer's process cannot be seen, so its file seems left behind."""
    store = open_store(tmp_path)
    left = 2

    def gate() -> None:
        nonlocal left
        unfinished = list(tmp_path.rglob("*.tmp"))
        if left and unfinished:
            left -= 1
            unfinished[0].unlink()

    store.store(entry_of(TOKENS[:6]), gate)
    assert left == 0
    assert finds(store, TOKENS[:6]) and finds(open_store(tmp_path), TOKENS[:6])
    assert not list(tmp_path.rglob("*.tmp"))


def test_engines_at_one_directory_lose_nothing_and_answer_nothing_wrong(tmp_path: Path) -> None:
    """Three stores, six threads, entries that replace, supersede and look for each other."""
    stores = [open_store(tmp_path) for _ in range(3)]
    keys = [[first, *TOKENS[:length]] for first in range(3) for length in (3, 6, 9)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        source = random.Random(number)
        store = stores[number % 3]
        try:
            for _ in range(25):
                key = source.choice(keys)
                if source.random() < 0.5:
                    store.store(entry_of(key, "kv"), never_waits)
                else:
                    taken = restored(store, key)
                    if taken is not None:
                        cold = KINDS["kv"]()
                        feed(cold, key[: taken[0]], 0)
                        assert_same(taken[1], cold)
        except BaseException as failure:  # noqa: BLE001 - told on the main thread
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for first in range(3):
        longest = [first, *TOKENS[:9]]
        stores[first].store(entry_of(longest, "kv"), never_waits)
    for store in (*stores, open_store(tmp_path)):
        assert all(finds(store, key) for key in keys)
        assert set(store.damage) <= {"vanished"}


def test_a_folder_of_ours_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    root, outside = tmp_path / "cache", tmp_path / "outside"
    outside.mkdir()
    root.mkdir()
    (root / IDENTITY.fingerprint).symlink_to(outside)
    store = open_store(root)
    with pytest.raises(OSError):
        store.store(entry_of(TOKENS[:6]), never_waits)
    assert list(outside.iterdir()) == []
    assert not finds(store, TOKENS[:6])


def test_a_namespace_folder_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    root, outside = tmp_path / "cache", tmp_path / "outside"
    outside.mkdir()
    store = open_store(root)
    folder = store.directory.folder(IDENTITY.fingerprint, "n")
    folder.parent.mkdir()
    folder.symlink_to(outside)
    with pytest.raises(OSError):
        store.store(entry_of(TOKENS[:6]), never_waits)
    assert list(outside.iterdir()) == []


def test_a_pipe_in_the_place_of_a_file_does_not_hold_a_restore_up(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    path = store.store(entry_of(TOKENS[:6]), never_waits)
    found = store.find("n", token_key([*TOKENS[:6], 99]), length_max=6)
    assert found is not None
    path.unlink()
    os.mkfifo(path)
    done: list[str] = []

    def look() -> None:
        try:
            for _ in store.restore(found, room_for=0):
                pass
        except Damage as damage:
            done.append(damage.reason)

    looker = threading.Thread(target=look, daemon=True)
    looker.start()
    looker.join(10)
    assert done and done[0] != "vanished"


def put_nothing(root: Path) -> None:
    pass


def put_a_file(root: Path) -> None:
    root.write_text("x")


def put_a_dangling_link(root: Path) -> None:
    root.symlink_to(root / "no")


# What stands in the place of the removed directory.
BREAKS: dict[str, Callable[[Path], None]] = {
    "removed": put_nothing,
    "a file": put_a_file,
    "a link to nowhere": put_a_dangling_link,
}


@pytest.fixture
def cache(tmp_path: Path) -> Any:
    store = SsdStore(tmp_path / "cache", IDENTITY, bytes_max=1 << 30)
    store.open()
    cold = ColdSettings(
        tier=store, choice=RestoreChoice("always"), spill_bytes_max=1 << 28, debounce_s=0.0
    )
    made = PromptCache(entries_max=50, bytes_max=1 << 28, cold=cold)
    yield made
    made.close(5)


def put(cache: PromptCache, tokens: list[int]) -> None:
    live = KINDS["list"]()
    feed(live, tokens, 0)
    cache.put(tokens, live, "n", "assistant")


@pytest.mark.parametrize("name", BREAKS)
def test_a_directory_that_goes_away_costs_misses_and_comes_back(
    name: str, cache: PromptCache, tmp_path: Path
) -> None:
    root = tmp_path / "cache"
    put(cache, TOKENS[:6])
    assert cache.flush(10).durable
    shutil.rmtree(root)
    BREAKS[name](root)
    assert cache.take([*TOKENS[:6], 99], "n")[1] == 6, "RAM serves on"
    put(cache, TOKENS[:9])
    evidence = cache.flush(10)
    assert evidence.durable == root.is_dir()
    if root.is_symlink() or root.is_file():
        root.unlink()
    evidence = cache.flush(10)
    assert evidence.durable
    # What lay in the old directory is still in RAM, so a flush makes it durable again.
    assert evidence.entries == len(files(root)) == 2
    cache.trim_to(0)
    assert cache.take([*TOKENS[:6], 99], "n")[1] == 6


@pytest.mark.parametrize("call", ["scandir", "posix_fadvise", "utime", "open", "preadv", "stat"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EINVAL])
def test_a_disk_that_fails_a_call_is_a_miss(
    call: str, number: int, cache: PromptCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, TOKENS[:6])
    assert cache.flush(10).durable
    cache.trim_to(0)
    # So that the next look reads the folder again.
    folder = files(tmp_path)[0].parent
    (folder / "notes").write_text("x")
    real = getattr(os, call)

    def fail(*arguments: Any, **options: Any) -> Any:
        if call != "stat" or arguments[0] == folder:
            raise OSError(number, os.strerror(number))
        return real(*arguments, **options)

    with monkeypatch.context() as broken:
        broken.setattr(os, call, fail)
        taken, reused = cache.take([*TOKENS[:6], 99], "n")
        assert (taken is None) == (reused == 0)
    put(cache, TOKENS[:7])
    assert cache.flush(10).durable
    cache.trim_to(0)
    assert cache.take([*TOKENS[:7], 99], "n")[1] == 7


@pytest.mark.parametrize("error", [RuntimeError("unable to allocate"), MemoryError()])
def test_an_entry_for_which_there_is_no_memory_is_a_miss_and_its_file_stays(
    error: Exception, cache: PromptCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, TOKENS[:6])
    assert cache.flush(10).durable
    cache.trim_to(0)

    def no_memory(*_: object) -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(ArrayBuffers, "new", no_memory)
        assert cache.take([*TOKENS[:6], 99], "n") == (None, 0)
    assert cache.figures().miss_reasons == {"ssd_unreadable": 1}
    assert finds(open_store(tmp_path / "cache"), TOKENS[:6])


def test_a_flush_does_not_count_on_a_file_that_somebody_removed(
    cache: PromptCache, tmp_path: Path
) -> None:
    put(cache, TOKENS[:6])
    assert cache.flush(10).durable
    for path in files(tmp_path):
        path.unlink()
    evidence = cache.flush(10)
    assert evidence.durable
    assert len(files(tmp_path)) == evidence.entries == 1


def test_idleness_does_not_give_up_what_is_in_ram_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    cold = ColdSettings(
        tier=store, choice=RestoreChoice("always"), spill_bytes_max=1 << 28, debounce_s=0.0,
        demote_idle_s=3600.0,
    )  # fmt: skip
    cache = PromptCache(entries_max=50, bytes_max=1 << 28, cold=cold)
    put(cache, TOKENS[:6])
    assert cache.flush(10).durable
    for path in files(tmp_path):
        path.unlink()
    cache._demote()  # pyright: ignore[reportPrivateUsage]
    assert cache.take([*TOKENS[:6], 99], "n")[1] == 6
    cache.close(5)
