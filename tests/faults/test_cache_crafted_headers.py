"""Headers whose checksums are right and whose content is wrong never raise: they are misses.

A checksum says that a file is as its writer made it, not that the writer meant well. What describes
another cache of the right structure cannot be told from ours; what does not is a miss.
"""

import copy
import json
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_isolate_engine.cache import kinds, kv_file, snapshot
from mlx_isolate_engine.cache.cold_side import ColdSettings
from mlx_isolate_engine.cache.kv_check import read_header
from mlx_isolate_engine.cache.prompt_cache import PromptCache
from mlx_isolate_engine.cache.ram_tier import Entry
from mlx_isolate_engine.cache.restore_choice import RestoreChoice
from mlx_isolate_engine.cache.ssd_store import SsdStore, StoreIdentity
from mlx_isolate_engine.cache.token_index import token_key
from tests.fakes.toy_caches import KINDS, TOKENS, feed

IDENTITY = StoreIdentity(model="m", model_id="m", fingerprint="ab" * 16, tokenizer="cd" * 16)
SEED = 11
LENGTH = 12
OURS = "0.mlx_isolate."

Json = dict[str, Any]


def live(kind: str) -> list[Any]:
    cache = KINDS[kind]()
    feed(cache, TOKENS[:LENGTH], 0, 5)
    return cache


def write(root: Path, kind: str) -> Path:
    kept = snapshot.keep(live(kind), LENGTH)
    store = SsdStore(root, IDENTITY, bytes_max=1 << 30)
    entry = Entry(
        namespace="n",
        key=token_key(TOKENS[:LENGTH]),
        cache=kept,
        bytes=snapshot.bytes_of(kept),
        cuttable=kinds.can_cut(kept),
        storable=True,
        kind="assistant",
    )
    return store.store(entry, lambda: None)


def with_text(path: Path, text: bytes) -> None:
    """Put another JSON text in the header's place, padded, with its checksum made right."""
    data = path.read_bytes()
    body = data[kv_file.header_length(data[:8]) :]
    total = -(-(8 + len(text)) // kv_file.DATA_ALIGNMENT) * kv_file.DATA_ALIGNMENT
    raw = struct.pack("<Q", total - 8) + text + b" " * (total - 8 - len(text))
    mark = f'"{OURS}header_sum":"'.encode()
    at = raw.find(mark) + len(mark)
    zeroed = raw[:at] + b"00000000" + raw[at + 8 :]
    path.write_bytes(raw[:at] + f"{zlib.crc32(zeroed):08x}".encode() + raw[at + 8 :] + body)


def document_of(path: Path) -> Json:
    data = path.read_bytes()
    found: Json = json.loads(data[8 : kv_file.header_length(data[:8])])
    return found


def with_document(path: Path, document: Json) -> None:
    with_text(path, json.dumps(document, separators=(",", ":")).encode())


def take(root: Path, prompt: list[int]) -> tuple[list[Any] | None, int]:
    store = SsdStore(root, IDENTITY, bytes_max=1 << 30)
    store.open()
    cold = ColdSettings(tier=store, choice=RestoreChoice("always"), write_behind=False)
    cache = PromptCache(entries_max=9, bytes_max=None, cold=cold)
    try:
        return cache.take(prompt, "n")
    finally:
        cache.close(5)


def tensors(document: Json) -> list[str]:
    return [name for name in document if name != "__metadata__"]


def of_tensor(field: str, value: Any) -> Callable[[Json], object]:
    return lambda d: d[tensors(d)[0]].__setitem__(field, value)


def of_ours(field: str, value: Any) -> Callable[[Json], object]:
    return lambda d: d["__metadata__"].__setitem__(OURS + field, value)


CHANGES: dict[str, Callable[[Json], object]] = {
    "a shape of words": of_tensor("shape", ["a", "b"]),
    "a shape that is a word": of_tensor("shape", "abc"),
    "a shape that is a number": of_tensor("shape", 7),
    "a negative shape": lambda d: d[tensors(d)[0]]["shape"].__setitem__(
        slice(0, 2), [-n for n in d[tensors(d)[0]]["shape"][:2]]
    ),
    "a broken shape": lambda d: d[tensors(d)[0]]["shape"].__setitem__(0, 1.0),
    "a shape of too many axes": lambda d: d[tensors(d)[0]].__setitem__(
        "shape", [1] * 40 + d[tensors(d)[0]]["shape"]
    ),
    "a flat shape": lambda d: d[tensors(d)[0]].__setitem__("shape", [_elements(d)]),
    "a shape turned round": lambda d: d[tensors(d)[0]]["shape"].reverse(),
    "an empty axis": of_tensor("shape", [0, 4, 256, 64]),
    "a huge axis": of_tensor("shape", [1 << 62, 4, 256, 64]),
    "an unknown type": of_tensor("dtype", "F8"),
    "a type that is no word": of_tensor("dtype", [1]),
    "offsets of words": of_tensor("data_offsets", ["a", "b"]),
    "one offset": of_tensor("data_offsets", [0]),
    "offsets turned round": lambda d: d[tensors(d)[0]]["data_offsets"].reverse(),
    "negative offsets": of_tensor("data_offsets", [-4, 0]),
    "offsets that overlap": lambda d: d[tensors(d)[1]].__setitem__(
        "data_offsets", d[tensors(d)[0]]["data_offsets"]
    ),
    "huge offsets": of_tensor("data_offsets", [0, 1 << 63]),
    "a tensor that is a number": lambda d: d.__setitem__(tensors(d)[0], 7),
    "no tensors": lambda d: [d.pop(name) for name in tensors(d)],
    "metadata that is a list": lambda d: d.__setitem__("__metadata__", [OURS + "header_sum"]),
    "no metadata": lambda d: d.__setitem__("__metadata__", {OURS + "header_sum": "00000000"}),
    "tokens that are no base64": of_ours("tokens", "%%%"),
    "tokens of three bytes": of_ours("tokens", "AAAA"),
    "no tokens": of_ours("tokens", ""),
    "more tokens": of_ours("tokens", "AAAAAAAA" * 1000),
    "tokens that are a list": of_ours("tokens", [1, 2]),
    "no checksums": of_ours("tensor_sums", "{}"),
    "checksums that are a list": of_ours("tensor_sums", "[]"),
    "checksums that are numbers": lambda d: d["__metadata__"].__setitem__(
        OURS + "tensor_sums", json.dumps(dict.fromkeys(tensors(d), 7))
    ),
    "rounded that is a number": of_ours("rounded", "7"),
    "rounded that is deep": of_ours("rounded", "[" * 100_000),
    "everything rounded": lambda d: d["__metadata__"].__setitem__(
        OURS + "rounded", json.dumps(tensors(d))
    ),
    "nothing rounded": of_ours("rounded", "[]"),
    "a creation that is a word": of_ours("created", "yesterday"),
    "a version that is a list": of_ours("version", [1]),
    "a class that is a number": lambda d: d["__metadata__"].__setitem__("1.0", 7),
    "another class": lambda d: d["__metadata__"].__setitem__("1.0", "RotatingKVCache"),
    "an outer class": lambda d: d["__metadata__"].__setitem__("1.0", "CacheList"),
    "a value of an unknown kind": lambda d: d["__metadata__"].update(
        {"2.1.0": tensors(d)[0], "2.1.1": "pickle"}
    ),
    "rows that are a value": lambda d: d["__metadata__"].update(
        {"2.1.0": tensors(d)[0], "2.1.1": "scalar"}
    ),
    "rows that are a word": lambda d: d["__metadata__"].update(
        {"2.1.0": tensors(d)[0], "2.1.1": "string"}
    ),
    "rows that are nothing": lambda d: d["__metadata__"].update(
        {"2.1.0": tensors(d)[0], "2.1.1": "none"}
    ),
    "a value that is not there": lambda d: d["__metadata__"].update(
        {"2.1.0": "77.7", "2.1.1": "scalar"}
    ),
    "a name that is no path": lambda d: _rename(d, "a..b"),
    "a name far away": lambda d: _rename(d, "900.0"),
    "a name below another": lambda d: _rename(d, tensors(d)[1] + ".0"),
    "cuttable": of_ours("cuttable", "1"),
}


def _elements(document: Json) -> int:
    size = 1
    for each in document[tensors(document)[0]]["shape"]:
        size *= each
    return size


def _rename(document: Json, name: str) -> None:
    document[name] = document.pop(tensors(document)[0])


@pytest.mark.parametrize("kind", ["kv", "rotating", "arrays", "list"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_header_that_lies_with_a_right_checksum_raises_nothing(
    name: str, kind: str, tmp_path: Path
) -> None:
    path = write(tmp_path, kind)
    document = document_of(path)
    CHANGES[name](document)
    with_document(path, document)
    taken, reused = take(tmp_path, [*TOKENS[:LENGTH], 99])
    assert reused == (LENGTH if taken is not None else 0)


@pytest.mark.parametrize("text", [b"[" * 200_000, b'{"a":' * 100_000, b"[]", b"7", b"\xff", b""])
def test_a_header_that_is_no_object_is_a_miss(text: bytes, tmp_path: Path) -> None:
    path = write(tmp_path, "kv")
    with_text(path, b'{"' + OURS.encode() + b'header_sum":"00000000",' + text)
    assert take(tmp_path, [*TOKENS[:LENGTH], 99]) == (None, 0)


VALUES: list[Any] = [None, True, -1, 0, 1, 1 << 40, 1.5, "", "x", [], [0], {}, {"a": 1}, [[0, 1]]]


def mutated(document: Json, source: random.Random) -> Json:
    """The document with a few values at random places replaced, removed or exchanged."""
    changed = copy.deepcopy(document)
    for _ in range(source.randint(1, 3)):
        holder: Any = changed
        while True:
            keys: list[Any] = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = source.choice(keys)
            inner = holder[key]
            if isinstance(inner, dict | list) and inner and source.random() < 0.8:
                holder = inner
                continue
            if isinstance(holder, dict) and key == OURS + "header_sum":
                break
            holder[key] = source.choice(VALUES)
            if isinstance(holder, dict) and source.random() < 0.3:
                del holder[key]
            break
    return changed


@pytest.mark.parametrize("kind", ["kv", "quantized", "rotating", "chunked", "arrays", "list"])
def test_random_headers_with_right_checksums_are_misses_or_caches(
    kind: str, tmp_path: Path
) -> None:
    path = write(tmp_path, kind)
    data = path.read_bytes()
    document = document_of(path)
    for number in range(60):
        source = random.Random(f"{SEED} {kind} {number}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        with_document(path, mutated(document, source))
        taken, reused = take(tmp_path, [*TOKENS[:LENGTH], 99])
        assert reused == (LENGTH if taken is not None else 0), f"seed {SEED} {kind} {number}"


def test_the_changes_are_seen(tmp_path: Path) -> None:
    path = write(tmp_path, "kv")
    with_document(path, document_of(path))
    assert read_header(path).facts.length == LENGTH
    taken, reused = take(tmp_path, [*TOKENS[:LENGTH], 99])
    assert taken is not None and reused == LENGTH
