"""Every kind of damage to a cache file is a miss with its reason, and never an answer."""

import dataclasses
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_isolate_engine.cache import kv_file
from mlx_isolate_engine.cache.cold_side import ColdSettings
from mlx_isolate_engine.cache.directory import QUARANTINED_MAX
from mlx_isolate_engine.cache.kv_check import read_header
from mlx_isolate_engine.cache.prompt_cache import PromptCache
from mlx_isolate_engine.cache.restore_choice import RestoreChoice
from mlx_isolate_engine.cache.ssd_store import SsdStore, StoreIdentity
from tests.fakes.toy_caches import KINDS, TOKENS, assert_same, feed

IDENTITY = StoreIdentity(model="m", model_id="m", fingerprint="ab" * 16, tokenizer="cd" * 16)
SEED = 3


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def opened(root: Path) -> Iterator[Callable[..., tuple[PromptCache, SsdStore]]]:
    made: list[PromptCache] = []

    def build(
        identity: StoreIdentity = IDENTITY, verify: bool = True
    ) -> tuple[PromptCache, SsdStore]:
        store = SsdStore(root, identity, bytes_max=1 << 30, verify=verify)
        store.open()
        cold = ColdSettings(tier=store, choice=RestoreChoice("always"), spill_bytes_max=1 << 28)
        made.append(PromptCache(entries_max=9, bytes_max=1 << 28, cold=cold))
        return made[-1], store

    yield build
    for cache in made:
        cache.close(5)


Opened = Callable[..., tuple[PromptCache, SsdStore]]


def written(opened: Opened, root: Path, kind: str = "list", first: int = 0) -> Path:
    """One durable entry of 12 tokens; returns its file."""
    cache, _ = opened()
    before = set(root.glob("*/*/*.safetensors"))
    live = KINDS[kind]()
    tokens = [first, *TOKENS[:11]]
    feed(live, tokens, 0, 5)
    cache.put(tokens, live, "n", "assistant")
    assert cache.flush(10).durable
    (path,) = set(root.glob("*/*/*.safetensors")) - before
    return path


def rewrite(path: Path, change: Callable[[bytearray], bytes | bytearray]) -> None:
    path.write_bytes(change(bytearray(path.read_bytes())))


def flip(data: bytearray, at: int) -> bytearray:
    data[at] ^= 1 << random.Random(SEED + at).randrange(8)
    return data


def header_end(data: bytearray) -> int:
    return kv_file.header_length(bytes(data[:8]))


def with_facts(path: Path, **changes: Any) -> None:
    """Write the header anew, checksums and all, with other facts."""
    header = read_header(path)
    facts = dataclasses.replace(header.facts, **changes)
    raw = kv_file.encode_header(facts, header.tensors, header.sums)
    path.write_bytes(raw + path.read_bytes()[header.data_start :])


def other_version(path: Path) -> None:
    data = path.read_bytes()
    header = read_header(path)
    current, kv_file.LAYOUT_VERSION = kv_file.LAYOUT_VERSION, 999
    try:
        raw = kv_file.encode_header(header.facts, header.tensors, header.sums)
    finally:
        kv_file.LAYOUT_VERSION = current
    path.write_bytes(raw + data[header.data_start :])


Damage = Callable[[Path], object]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "empty": (lambda p: p.write_bytes(b""), "length"),
    "four bytes": (lambda p: rewrite(p, lambda d: d[:4]), "length"),
    "cut in the header": (lambda p: rewrite(p, lambda d: d[:9000]), "length"),
    "cut in the data": (lambda p: rewrite(p, lambda d: d[:-2000]), "length"),
    "one byte short": (lambda p: rewrite(p, lambda d: d[:-1]), "length"),
    "one byte long": (lambda p: rewrite(p, lambda d: d + b"x"), "length"),
    "header length of 4 EB": (lambda p: rewrite(p, lambda d: flip(d, 7)), "header"),
    "header length off by one": (lambda p: rewrite(p, lambda d: flip(d, 0)), "header"),
    "flipped in the JSON": (lambda p: rewrite(p, lambda d: flip(d, 200)), "header"),
    "flipped in the tokens": (
        lambda p: rewrite(p, lambda d: flip(d, d.find(b"mlx_isolate.tokens") + 24)),
        "header",
    ),
    "flipped in the padding": (
        lambda p: rewrite(p, lambda d: flip(d, header_end(d) - 5)),
        "header",
    ),
    "zeros": (lambda p: rewrite(p, lambda d: bytes(len(d))), "header"),
    "another format": (lambda p: p.write_text(json.dumps({"a": 1}) * 9000), "header"),
    "another version": (other_version, "version"),
    "another model's": (lambda p: with_facts(p, fingerprint="ef" * 16), "fingerprint"),
    "another tokenizer's": (lambda p: with_facts(p, tokenizer="ef" * 16), "fingerprint"),
    "another namespace's": (lambda p: with_facts(p, namespace="adapter"), "fingerprint"),
    "unknown class": (lambda p: with_facts(p, classes=("Strange",)), "structure"),
    "batch class": (lambda p: with_facts(p, classes=("BatchKVCache",)), "structure"),
    "one class too many": (lambda p: with_facts(p, classes=("CacheList",) * 2), "structure"),
    "tokens of another length": (lambda p: with_facts(p, key=bytes(4) + bytes(40)), "structure"),
}


def assert_miss(cache: PromptCache, prompt: list[int]) -> None:
    assert cache.take(prompt, "n") == (None, 0)


PROMPT = [0, *TOKENS[:11], 99]


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_found_at_the_start_is_a_miss(name: str, opened: Opened, root: Path) -> None:
    path = written(opened, root)
    act, reason = DAMAGES[name]
    act(path)
    cache, store = opened()
    prompt = PROMPT if name != "tokens of another length" else [0] * 12
    assert_miss(cache, prompt)
    assert dict(store.damage) == {reason: 1}
    assert not path.exists(), "set aside, so that it is not met again"
    assert cache.figures().quarantined == 1


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_after_the_start_is_a_miss(name: str, opened: Opened, root: Path) -> None:
    path = written(opened, root)
    cache, store = opened()
    act, reason = DAMAGES[name]
    act(path)
    assert_miss(cache, PROMPT)
    # A file whose facts changed under the index is another file, whatever else is wrong with it.
    exchanged = "fingerprint" if name == "tokens of another length" else reason
    assert dict(store.damage) == {exchanged: 1}
    assert cache.figures().miss_reasons == {f"ssd_{exchanged}": 1}
    assert_miss(cache, PROMPT)


@pytest.mark.parametrize("kind", ["kv", "list", "rotating", "arrays"])
def test_a_flipped_byte_of_any_tensor_is_a_miss_when_data_is_checked(
    kind: str, opened: Opened, root: Path
) -> None:
    path = written(opened, root, kind)
    header = read_header(path)
    original = path.read_bytes()
    for tensor in header.tensors:
        if tensor.bytes == 0:
            continue
        at = header.data_start + random.Random(SEED).randrange(tensor.start, tensor.end)
        path.write_bytes(flip(bytearray(original), at))
        cache, store = opened(verify=True)
        assert_miss(cache, PROMPT)
        assert dict(store.damage) == {"data": 1}, tensor.name


def test_swapped_files_answer_with_their_own_tokens(opened: Opened, root: Path) -> None:
    one, two = written(opened, root, first=1), written(opened, root, first=2)
    spare = root / "spare"
    one.rename(spare)
    two.rename(one)
    spare.rename(two)
    cache, _ = opened()
    for first in (1, 2):
        taken, reused = cache.take([first, *TOKENS[:11], 99], "n")
        assert taken is not None and reused == 12
        cold = KINDS["list"]()
        feed(cold, [first, *TOKENS[:11]], 0, 5)
        assert_same(taken, cold)


def test_files_swapped_under_a_running_engine_are_misses(opened: Opened, root: Path) -> None:
    one, two = written(opened, root, first=1), written(opened, root, first=2)
    cache, store = opened()
    spare = root / "spare"
    one.rename(spare)
    two.rename(one)
    spare.rename(two)
    for first in (1, 2):
        taken, reused = cache.take([first, *TOKENS[:11], 99], "n")
        if taken is not None:  # set aside, then read anew: then it must be the right one
            assert reused == 12
            cold = KINDS["list"]()
            feed(cold, [first, *TOKENS[:11]], 0, 5)
            assert_same(taken, cold)
    assert store.damage["fingerprint"] >= 1


def test_data_of_one_file_in_another_is_a_miss(opened: Opened, root: Path) -> None:
    one, two = written(opened, root, first=1), written(opened, root, first=2)
    start = read_header(one).data_start
    one.write_bytes(one.read_bytes()[:start] + two.read_bytes()[start:])
    cache, store = opened()
    assert_miss(cache, [1, *TOKENS[:11], 99])
    assert dict(store.damage) == {"data": 1}


def test_a_file_of_another_model_in_our_folder_is_a_miss(opened: Opened, root: Path) -> None:
    path = written(opened, root)
    other = dataclasses.replace(IDENTITY, fingerprint="12" * 16)
    folder = root / other.fingerprint / path.parent.name
    folder.mkdir(parents=True)
    shutil.copy(path, folder / path.name)
    cache, store = opened(other)
    assert_miss(cache, PROMPT)
    assert dict(store.damage) == {"fingerprint": 1}
    assert path.exists()


def test_a_link_in_the_place_of_a_file_is_not_followed(
    opened: Opened, root: Path, tmp_path: Path
) -> None:
    path = written(opened, root)
    cache, _ = opened()
    outside = tmp_path / "outside.safetensors"
    path.rename(outside)
    path.symlink_to(outside)
    assert_miss(cache, PROMPT)
    assert outside.exists()
    assert path.is_symlink()


def test_the_quarantine_is_bounded(opened: Opened, root: Path) -> None:
    for first in range(QUARANTINED_MAX + 3):
        rewrite(written(opened, root, first=first), lambda d: d[:-1])
    opened()
    kept = list((root / "quarantine").iterdir())
    assert len(kept) == QUARANTINED_MAX


def test_an_entry_is_written_again_after_its_file_was_damaged(opened: Opened, root: Path) -> None:
    rewrite(written(opened, root), lambda d: flip(d, 200))
    cache, _ = opened()
    assert_miss(cache, PROMPT)
    written(opened, root)
    again, _ = opened()
    assert again.take(PROMPT, "n")[1] == 12


def test_length_and_header_are_checked_without_data_checks(opened: Opened, root: Path) -> None:
    path = written(opened, root)
    rewrite(path, lambda d: d[:-1])
    cache, store = opened(verify=False)
    assert_miss(cache, PROMPT)
    assert dict(store.damage) == {"length": 1}


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_a_miss_and_stays(opened: Opened, root: Path) -> None:
    path = written(opened, root)
    cache, store = opened()
    path.chmod(0)
    assert_miss(cache, PROMPT)
    assert dict(store.damage) == {"unreadable": 1}
    assert path.exists()
