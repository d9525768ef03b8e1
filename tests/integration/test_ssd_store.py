"""The SSD store on real files: every kind of cache, byte for byte, and who leaves at the cap."""

import hashlib
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, load_prompt_cache, save_prompt_cache

from mlx_isolate_engine.cache import array_codec, kinds, snapshot
from mlx_isolate_engine.cache.damage import Damage
from mlx_isolate_engine.cache.kv_check import read_header, verify
from mlx_isolate_engine.cache.ram_tier import Entry
from mlx_isolate_engine.cache.ssd_store import SsdStore, StoreIdentity
from mlx_isolate_engine.cache.token_index import token_key
from tests.fakes.toy_caches import CUTTABLE_WHEN_LONG, KINDS, TOKENS, assert_same, feed

IDENTITY = StoreIdentity(
    model="some/model", model_id="m", fingerprint="ab" * 16, tokenizer="cd" * 16
)
# Rings that are empty, part full, full to the last row and turned round.
LENGTHS = [1, 5, 8, 9, 12, 20]


def open_store(root: Path, bytes_max: int = 1 << 30, **options: Any) -> SsdStore:
    store = SsdStore(root, IDENTITY, bytes_max=bytes_max, **options)
    store.open()
    return store


def filled(kind: str, length: int, chunk: int = 1) -> list[Any]:
    cache = KINDS[kind]()
    feed(cache, TOKENS[:length], 0, chunk)
    return cache


def entry_of(
    cache: list[Any], tokens: list[int], namespace: str = "n", fixed: bool = False
) -> Entry:
    kept = snapshot.keep(cache, len(tokens))
    return Entry(
        namespace=namespace,
        key=token_key(tokens),
        cache=kept,
        bytes=snapshot.bytes_of(kept),
        cuttable=kinds.can_cut(kept) and not fixed,
        storable=kinds.can_store(kept),
        kind="assistant",
    )


def never_waits() -> None:
    pass


def put(store: SsdStore, cache: list[Any], tokens: list[int], namespace: str = "n") -> Path:
    before = set(store.directory.root.rglob("*.safetensors"))
    store.store(entry_of(cache, tokens, namespace), never_waits)
    (path,) = set(store.directory.root.rglob("*.safetensors")) - before
    return path


def get(store: SsdStore, prompt: list[int], length_max: int | None = None) -> list[Any] | None:
    found = store.find("n", token_key(prompt), length_max=length_max or len(prompt) - 1)
    if found is None:
        return None
    steps = store.restore(found, room_for=len(prompt))
    while True:
        try:
            next(steps)
        except StopIteration as end:
            restored: list[Any] = end.value
            return restored


def content_hash(path: Path) -> str:
    """All that a file says, without the time at which it was made."""
    header = read_header(path)
    digest = hashlib.sha256(path.read_bytes()[header.data_start :])
    facts = header.facts
    for fact in (facts.key, facts.classes, facts.scalars, sorted(facts.rounded), header.tensors):
        digest.update(repr(fact).encode())
    return digest.hexdigest()


@pytest.mark.parametrize("chunk", [1, 7], ids=["token by token", "in chunks"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_save_restore_save_gives_the_same_bytes(
    tmp_path: Path, kind: str, length: int, chunk: int
) -> None:
    live = filled(kind, length, chunk)
    path = put(open_store(tmp_path / "a"), live, TOKENS[:length])
    restored = get(open_store(tmp_path / "a"), [*TOKENS[:length], 99])
    assert restored is not None
    assert_same(restored, live)
    again = put(open_store(tmp_path / "b"), restored, TOKENS[:length])
    assert content_hash(again) == content_hash(path)
    verify(again)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_cache_continues_like_one_never_saved(
    tmp_path: Path, kind: str, length: int
) -> None:
    live = filled(kind, length, 3)
    put(open_store(tmp_path), live, TOKENS[:length])
    restored = get(open_store(tmp_path), [*TOKENS[:length], 99])
    assert restored is not None
    for more in ([7], [8, 9, 10], [11], [1] * 9, [12]):
        feed(live, more, length)
        feed(restored, more, length)
        length += len(more)
        assert_same(restored, live)


@pytest.mark.parametrize("kind", KINDS)
def test_mlx_lm_opens_the_file(tmp_path: Path, kind: str) -> None:
    live = filled(kind, 12, 5)
    path = put(open_store(tmp_path), live, TOKENS[:12])
    loaded, metadata = load_prompt_cache(str(path), return_metadata=True)
    assert metadata["model"] == "some/model"
    assert metadata["tokenizer_config"] == "{}"
    assert_same(loaded, live)
    save_prompt_cache(str(tmp_path / "theirs.safetensors"), live, {"model": "m"})
    theirs: Any = mx.load(str(tmp_path / "theirs.safetensors"))
    ours: Any = mx.load(str(path))
    assert {n: a.dtype for n, a in ours.items()} == {n: a.dtype for n, a in theirs.items()}


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_every_float_type_keeps_its_bits(tmp_path: Path, dtype: mx.Dtype) -> None:
    live = KVCache()
    rows = mx.random.normal((1, 2, 300, 64), key=mx.random.key(1)).astype(dtype)
    live.update_and_fetch(rows, rows * 2)
    tokens = list(range(300))
    put(open_store(tmp_path), [live], tokens)
    restored = get(open_store(tmp_path), [*tokens, 1])
    assert restored is not None
    assert restored[0].keys.dtype == dtype
    assert mx.array_equal(restored[0].keys[..., :300, :], rows).item()
    assert mx.array_equal(restored[0].values[..., :300, :], rows * 2).item()


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (1, 2, 70_000)])
@pytest.mark.parametrize("name", array_codec.DTYPES.values())
def test_every_type_is_filled_byte_for_byte_small_and_large(
    name: str, shape: tuple[int, ...]
) -> None:
    filling = array_codec.ArrayBuffers().new(name, shape)
    size = len(filling.view)
    data = bytes(at % 2 if name == "BOOL" else at * 7 % 251 for at in range(size))
    filling.view[:] = data
    array = filling.finish()
    mx.eval(array)
    assert array_codec.DTYPES[array.dtype] == name
    assert tuple(array.shape) == shape
    assert memoryview(array).tobytes() == data


def test_layout_is_padded_large_first_and_scalars_last(tmp_path: Path) -> None:
    path = put(open_store(tmp_path), filled("list", 12), TOKENS[:12])
    header = read_header(path)
    assert header.data_start % (16 * 1024) == 0
    sizes = [t.bytes for t in header.tensors]
    assert sizes == sorted(sizes, reverse=True)
    assert header.tensors[-1].shape in ((), (0,))
    data = path.read_bytes()[header.data_start :]
    for tensor in header.tensors:
        assert zlib.crc32(data[tensor.start : tensor.end]) == header.sums[tensor.name]


@pytest.mark.parametrize("length", [255, 256, 257])
def test_a_restored_kv_cache_has_room_for_the_next_token(tmp_path: Path, length: int) -> None:
    live = KVCache()
    feed([live], list(range(length)), 0, 64)
    put(open_store(tmp_path), [live], list(range(length)))
    (restored,) = get(open_store(tmp_path), [*range(length), 1]) or []
    room = restored.keys.shape[2]
    assert room > length
    feed([restored], [1], length)
    assert restored.keys.shape[2] == room, "the first step had to move the rows"


@pytest.mark.parametrize("kind", sorted(CUTTABLE_WHEN_LONG))
def test_a_longer_file_is_cut_while_it_is_read(tmp_path: Path, kind: str) -> None:
    put(open_store(tmp_path), filled(kind, 20), TOKENS)
    prompt = [*TOKENS[:7], 90, 91]
    restored = get(open_store(tmp_path), prompt)
    assert restored is not None
    cold = filled(kind, 7)
    assert_same(restored, cold)
    feed(restored, prompt[7:], 7)
    feed(cold, prompt[7:], 7)
    assert_same(restored, cold)


def test_a_window_that_has_not_wrapped_is_cut_from_disk(tmp_path: Path) -> None:
    live: list[Any] = [RotatingKVCache(max_size=16), KVCache()]
    feed(live, TOKENS[:13], 0, 5)
    put(open_store(tmp_path), live, TOKENS[:13])
    restored = get(open_store(tmp_path), [*TOKENS[:6], 90])
    assert restored is not None
    cold: list[Any] = [RotatingKVCache(max_size=16), KVCache()]
    feed(cold, TOKENS[:6], 0)
    for length in range(6, 30):
        feed(restored, [length], length)
        feed(cold, [length], length)
        assert_same(restored, cold)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - CUTTABLE_WHEN_LONG))
def test_a_fixed_file_does_not_serve_a_shorter_prompt(tmp_path: Path, kind: str) -> None:
    put(open_store(tmp_path), filled(kind, 20), TOKENS)
    assert get(open_store(tmp_path), [*TOKENS[:9], 90]) is None


def test_rows_beyond_the_tokens_are_written_as_zeros(tmp_path: Path) -> None:
    live = filled("kv", 12)
    for part in live:
        part.trim(4)
    trimmed = put(open_store(tmp_path / "a"), live, TOKENS[:8])
    fresh = put(open_store(tmp_path / "b"), filled("kv", 8), TOKENS[:8])
    assert content_hash(trimmed) == content_hash(fresh)


def test_a_longer_cuttable_entry_replaces_its_prefixes_on_disk(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    short = put(store, filled("kv", 6), TOKENS[:6])
    other = put(store, filled("kv", 6), TOKENS[:6], namespace="another")
    put(store, filled("kv", 9), TOKENS[:9])
    assert not short.exists()
    assert other.exists()
    assert store.stats().entries == 2


def test_namespaces_share_nothing_on_disk(tmp_path: Path) -> None:
    put(open_store(tmp_path), filled("kv", 9), TOKENS[:9], namespace="adapter")
    assert get(open_store(tmp_path), TOKENS) is None


# --- the cap -----------------------------------------------------------------------------------


def many(store: SsdStore, count: int, start: int = 0) -> list[Path]:
    """Entries of one size, none a prefix of another, oldest first."""
    paths: list[Path] = []
    for n in range(start, start + count):
        tokens = [n, *TOKENS[:9]]
        cache = KINDS["kv"]()
        feed(cache, tokens, 0, 10)
        paths.append(put(store, cache, tokens))
    return paths


def total(root: Path) -> int:
    return sum(p.lstat().st_size for p in root.rglob("*.safetensors") if not p.is_symlink())


@pytest.mark.case("23")
def test_the_least_recently_used_file_leaves_first(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    paths = many(store, 4)
    size = paths[0].stat().st_size
    assert get(store, [0, *TOKENS[:9], 50]) is not None  # a use of the oldest
    store.bytes_max = 4 * size
    (newest,) = many(store, 1, start=9)
    assert [p.exists() for p in paths] == [True, False, True, True]
    assert newest.exists()
    assert store.stats().evicted == 1


@pytest.mark.case("23")
def test_a_cap_halved_at_restart_holds_at_once(tmp_path: Path) -> None:
    paths = many(open_store(tmp_path), 6)
    cap = total(tmp_path) // 2
    reopened = open_store(tmp_path, bytes_max=cap)
    assert total(tmp_path) <= cap
    assert [p.exists() for p in paths] == [False] * 3 + [True] * 3
    many(reopened, 8, start=20)
    assert total(tmp_path) <= cap
    assert reopened.stats().bytes == total(tmp_path)


@pytest.mark.case("23")
def test_foreign_files_and_links_are_never_touched(tmp_path: Path) -> None:
    root, outside = tmp_path / "cache", tmp_path / "outside"
    outside.mkdir()
    (outside / f"{'1' * 32}.safetensors").write_bytes(b"x" * 100)
    store = open_store(root)
    (path,) = many(store, 1)
    folder = path.parent
    foreign = [
        root / "notes.txt",
        folder / "notes.safetensors",
        folder / f"{'2' * 32}.safetensors.bak",
        root / "deadbeef.safetensors",
    ]
    for each in foreign:
        each.write_bytes(b"y" * 1000)
    (folder / f"{'3' * 32}.safetensors").symlink_to(outside / f"{'1' * 32}.safetensors")
    (root / ("4" * 32)).symlink_to(outside, target_is_directory=True)
    (folder.parent / ("5" * 32)).symlink_to(outside, target_is_directory=True)
    reopened = open_store(root, bytes_max=1)
    assert not path.exists()
    assert reopened.stats().entries == 0
    assert all(each.read_bytes() == b"y" * 1000 for each in foreign)
    assert (folder / f"{'3' * 32}.safetensors").is_symlink()
    assert (outside / f"{'1' * 32}.safetensors").read_bytes() == b"x" * 100


def test_an_entry_above_the_cap_is_refused_and_evicts_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    (path,) = many(store, 1)
    store.bytes_max = path.stat().st_size
    large = KVCache()
    feed([large], list(range(600)), 0, 600)
    with pytest.raises(Exception, match="above the cap"):
        store.store(entry_of([large], list(range(600))), never_waits)
    assert path.exists()


def test_a_clock_set_back_does_not_make_new_files_the_oldest(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    paths = many(store, 3)
    ahead = paths[-1].stat().st_mtime_ns + 3600 * 10**9
    for at, path in enumerate(paths):
        os.utime(path, ns=(ahead + at, ahead + at))
    size = paths[0].stat().st_size
    reopened = open_store(tmp_path, bytes_max=3 * size)
    (new,) = many(reopened, 1, start=9)
    assert new.exists()
    assert [p.exists() for p in paths] == [False, True, True]


# --- others in the same directory --------------------------------------------------------------


def test_what_another_engine_writes_is_found_without_a_restart(tmp_path: Path) -> None:
    mine, theirs = open_store(tmp_path), open_store(tmp_path)
    assert get(mine, TOKENS) is None
    put(theirs, filled("kv", 9), TOKENS[:9])
    assert get(mine, TOKENS) is not None


def test_a_file_that_another_engine_evicted_is_a_miss(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    path = put(store, filled("kv", 9), TOKENS[:9])
    found = store.find("n", token_key(TOKENS), length_max=8)
    assert found is not None
    path.unlink()
    with pytest.raises(Damage, match="vanished"):
        next(store.restore(found, room_for=20))
    assert store.find("n", token_key(TOKENS), length_max=8) is None
    assert store.stats().quarantined == 0


def test_temporary_files_of_dead_writers_are_removed_and_those_of_live_ones_kept(
    tmp_path: Path,
) -> None:
    store = open_store(tmp_path)
    folder = put(store, filled("kv", 9), TOKENS[:9]).parent
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait(timeout=30)
    dead = folder / f"{'0' * 32}.{child.pid}-1.tmp"
    recycled = folder / f"{'1' * 32}.{os.getpid()}-1.tmp"
    live, _ = store.directory.new_names(folder)
    for path in (dead, recycled, live):
        path.write_bytes(b"part")
    open_store(tmp_path)
    assert [path.exists() for path in (dead, recycled, live)] == [False, False, True]


def test_the_directory_is_made_private(tmp_path: Path) -> None:
    open_store(tmp_path / "cache")
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
