"""docs/kv-format.md is complete: a reader written from it reads what the store writes."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import CacheList

from mlx_isolate_engine.cache import snapshot
from mlx_isolate_engine.cache.ram_tier import Entry
from mlx_isolate_engine.cache.ssd_store import SsdStore, StoreIdentity
from mlx_isolate_engine.cache.token_index import token_key
from tests.fakes.second_reader import Damaged, SecondReader
from tests.fakes.toy_caches import KINDS, TOKENS, feed

IDENTITY = StoreIdentity(
    model="some/model", model_id="m", fingerprint="ab" * 16, tokenizer="cd" * 16
)


def write(root: Path, kind: str, length: int) -> tuple[Path, list[Any]]:
    """A file of the store, and the caches that are in it."""
    cache = KINDS[kind]()
    feed(cache, TOKENS[:length], 0)
    kept = snapshot.keep(cache, length)
    store = SsdStore(root, IDENTITY, bytes_max=1 << 30)
    store.open()
    store.store(
        Entry(
            namespace="n",
            key=token_key(TOKENS[:length]),
            cache=kept,
            bytes=snapshot.bytes_of(kept),
            cuttable=False,
            storable=True,
            kind="assistant",
        ),
        lambda: None,
    )
    (path,) = root.rglob("*.safetensors")
    return path, cache


def assert_state(read: Any, live: Any, length: int) -> None:
    """The same values in the same places; a list may have been read as a mapping of numbers."""
    if isinstance(live, mx.array):
        wanted = np.array(live)
        if wanted.ndim == 4 and wanted.shape[2] > read.shape[2]:
            wanted = wanted[:, :, :length]  # room that is no part of the entry
        assert read.dtype == wanted.dtype and read.shape == wanted.shape
        assert read.tobytes() == wanted.tobytes()
    elif isinstance(live, list | tuple):
        assert sorted(read) == list(range(len(live)))
        for place, each in enumerate(live):
            assert_state(read[place], each, length)
    else:
        assert type(read) is type(live) and read == live


@pytest.mark.parametrize("length", [5, 9, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_written_from_the_page_reads_every_kind(
    kind: str, length: int, tmp_path: Path
) -> None:
    path, cache = write(tmp_path, kind, length)
    file = SecondReader(path)
    assert file.tokens == TOKENS[:length]
    assert file.classes == [type(part).__name__ for part in cache]
    for read, part in zip(file.states, cache, strict=True):
        live = (
            [[list(p.state), type(p).__name__] for p in part.caches]
            if (isinstance(part, CacheList))
            else list(part.state)
        )
        assert_state(read, live, length)
    assert file.metadata["0.mlx_isolate.fingerprint"] == path.parent.parent.name


def test_every_byte_of_a_file_is_under_a_checksum(tmp_path: Path) -> None:
    path, _ = write(tmp_path, "list", 5)
    whole = path.read_bytes()
    data = -(-whole.index(b" " * 64) // 16384) * 16384
    for at in [*range(0, data, 97), *range(data, len(whole), 997), len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises((Damaged, ValueError, KeyError)):
            SecondReader(path)
    for cut in (whole[:-1], whole + b"\0"):
        path.write_bytes(cut)
        with pytest.raises(Damaged):
            SecondReader(path)
