"""Damaged files of every kind that is read: refused in a sentence or a miss, never anything else."""

import contextlib
import copy
import importlib.util
import json
import random
import signal
import warnings
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from mlx_isolate_engine.cache import kv_file
from mlx_isolate_engine.cache.cold_side import ColdSettings
from mlx_isolate_engine.cache.damage import Damage
from mlx_isolate_engine.cache.prompt_cache import PromptCache
from mlx_isolate_engine.cache.restore_choice import RestoreChoice
from mlx_isolate_engine.cache.ssd_store import SsdStore, StoreIdentity
from mlx_isolate_engine.model import demo
from mlx_isolate_engine.model.demo import ensure_demo
from mlx_isolate_engine.model.errors import ModelError
from mlx_isolate_engine.model.folder import check_folder
from mlx_isolate_shared.wire import Loading
from tests.fakes.toy_caches import KINDS, TOKENS, assert_same, feed
from tests.material.damaged_bytes import damaged
from tests.material.models import ModelSpec, build_model

IDENTITY = StoreIdentity(model="m", model_id="m", fingerprint="ab" * 16, tokenizer="cd" * 16)
# Longest time for one damaged file; far more than a good one takes.
FILE_S = 20
ANY_SEED = random.SystemRandom().randrange(2**32)


@contextlib.contextmanager
def in_time(what: str) -> Generator[None]:
    """Fails if the block takes longer than FILE_S, even within native code that ends some day."""

    def too_long(_number: int, _frame: object) -> None:
        raise AssertionError(f"hangs: {what}")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(FILE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Cache:
    """A prompt cache over one directory, with one durable entry of twelve tokens."""

    def __init__(self, root: Path, kind: str) -> None:
        self.root = root
        self.live = KINDS[kind]()
        self.tokens = [0, *TOKENS[:11]]
        feed(self.live, self.tokens, 0, 5)
        cache = self.open()
        cache.put(self.tokens, self.live, "n", "assistant")
        assert cache.flush(10).durable
        cache.close(5)
        (self.path,) = root.glob("*/*/*.safetensors")
        self.good = self.path.read_bytes()

    def open(self) -> PromptCache:
        store = SsdStore(self.root, IDENTITY, bytes_max=1 << 30, verify=False)
        store.open()
        cold = ColdSettings(tier=store, choice=RestoreChoice("always"), spill_bytes_max=1 << 28)
        return PromptCache(entries_max=9, bytes_max=1 << 28, cold=cold)

    def take(self, content: bytes) -> Any:
        """What a new engine takes where the file holds `content`."""
        for path in self.root.rglob("*"):
            if path.is_file():
                path.unlink()
        self.path.write_bytes(content)
        cache = self.open()
        try:
            return cache.take([*self.tokens, 99], "n")
        finally:
            cache.close(5)


@pytest.mark.parametrize("kind", ["list", "rotating"])
def test_a_flipped_bit_of_any_byte_of_the_header_is_found(kind: str, tmp_path: Path) -> None:
    raw = Cache(tmp_path / "cache", kind).good
    header = bytearray(raw[: kv_file.header_length(raw[:8])])
    chance = random.Random(1)
    for at in range(len(header)):
        bit = 1 << chance.randrange(8)
        header[at] ^= bit
        with pytest.raises(Damage):
            kv_file.decode_header(bytes(header))
        header[at] ^= bit
    kv_file.decode_header(bytes(header))


def forged(chance: random.Random, raw: bytes) -> bytes:
    """The file with a damaged header whose own checksum is right."""
    length = kv_file.header_length(raw[:8])
    document = json.loads(raw[8:length])
    words: list[Any] = [
        0,
        1,
        -1,
        -4,
        2**31,
        2**63,
        2**70,
        1e999,
        None,
        "",
        "x" * 70_000,
        [],
        {},
        [[]],
        "F32",
    ]
    for _ in range(chance.choice((1, 1, 2, 3))):
        place: Any = document
        key = chance.choice(list(place))
        while isinstance(place[key], dict | list) and place[key] and chance.random() < 0.8:
            place = place[key]
            key = chance.choice(list(place)) if isinstance(place, dict) else 0
        if isinstance(place, dict) and chance.random() < 0.2:
            del place[key]
        else:
            place[key] = copy.deepcopy(chance.choice(words))
    text = json.dumps(document).encode()
    total = -(-(8 + len(text)) // kv_file.DATA_ALIGNMENT) * kv_file.DATA_ALIGNMENT
    header = (total - 8).to_bytes(8, "little") + text.ljust(total - 8)
    found = kv_file._SUM_FIELD.search(header)  # pyright: ignore[reportPrivateUsage]
    if found is not None:
        start, end = found.span(1)
        checksum = zlib.crc32(header[:start] + b"00000000" + header[end:])
        header = header[:start] + b"%08x" % checksum + header[end:]
    return header + raw[length:]


def fuzz_cache(root: Path, examples: int, seed: int) -> None:
    chance = random.Random(seed)
    caches = [Cache(root / kind, kind) for kind in ("list", "rotating", "kv", "arrays")]
    for _ in range(examples):
        cache = chance.choice(caches)
        is_forged = chance.random() < 0.7
        content = forged(chance, cache.good) if is_forged else damaged(chance, cache.good, 4096)
        with in_time(f"seed {seed}"):
            taken, length = cache.take(content)
        if taken is not None and not is_forged:
            assert length == len(cache.tokens)
            assert_same(taken, cache.live)
    # What a file claims leads to no other file: all is still below its own directory.
    assert {path.name for path in root.iterdir()} == {"list", "rotating", "kv", "arrays"}


def test_200_forged_cache_files_are_misses_or_right(tmp_path: Path) -> None:
    fuzz_cache(tmp_path, 200, seed=2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_5000_forged_cache_files_are_misses_or_right(tmp_path: Path) -> None:
    print(f"seed {ANY_SEED}")
    fuzz_cache(tmp_path, 5000, ANY_SEED)


def fuzz_folder(folder: Path, examples: int, seed: int) -> None:
    build_model(folder, ModelSpec(kind="full", hidden=16, layers=1, shards=2))
    files = [folder / "config.json", folder / "model.safetensors.index.json"]
    files += sorted(folder.glob("*.safetensors"))
    good = {path: path.read_bytes() for path in files}
    chance = random.Random(seed)
    refused = 0
    for _ in range(examples):
        path = chance.choice(files)
        if path.suffix == ".safetensors" and chance.random() < 0.5:
            content = lied(chance, good[path])
        else:
            content = damaged(chance, good[path], 2000)
        path.write_bytes(content)
        try:
            with in_time(f"seed {seed}"):
                found = check_folder(folder)
            assert all(one.parent == folder for one in found.weights)
        except ModelError as error:
            refused += 1
            assert error.message
        path.write_bytes(good[path])
    assert refused > examples // 3
    check_folder(folder)


def lied(chance: random.Random, raw: bytes) -> bytes:
    """A weight file whose header is JSON and says odd things."""
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    name = chance.choice([key for key in header if key != "__metadata__"])
    odd = [[0, 1e999], [0, -1], [1, 2, 3], ["0", "9"], [[], {}], None, [0, 2**70], [0, True], {}]
    how = chance.randrange(4)
    if how == 0:
        header["../../" + name] = header.pop(name)
    elif how == 1:
        header[name]["shape"] = [2**40, 2**40]
    else:
        header[name]["data_offsets"] = chance.choice(odd)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + raw[8 + length :]


def test_400_damaged_model_folders_are_refused_in_a_sentence(tmp_path: Path) -> None:
    fuzz_folder(tmp_path / "m", 400, seed=3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_50000_damaged_model_folders_are_refused_in_a_sentence(tmp_path: Path) -> None:
    print(f"seed {ANY_SEED}")
    fuzz_folder(tmp_path / "m", 50_000, ANY_SEED)


def test_an_index_that_names_files_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = build_model(tmp_path / "m", ModelSpec(kind="full", hidden=16, layers=1, shards=2))
    (tmp_path / "secret.safetensors").write_bytes((folder / "config.json").read_bytes())
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    for name in (
        "../secret.safetensors",
        "/etc/passwd",
        "..",
        "model-00001-of-00002.safetensors/..",
    ):
        changed = {**content["weight_map"], next(iter(content["weight_map"])): name}
        index.write_text(json.dumps({**content, "weight_map": changed}))
        with pytest.raises(ModelError):
            check_folder(folder)


def fuzz_gguf(root: Path, examples: int, seed: int) -> None:
    from tests.material.gguf_model import tiny_source, write_gguf

    root.mkdir()
    good_path, path = root / "good.gguf", root / "bad.gguf"
    write_gguf(good_path)
    good = good_path.read_bytes()
    # The header, the vocabulary and the list of tensors; behind it are numbers, any of which will do.
    tensors = good.index(b"output_norm.weight")
    chance = random.Random(seed)
    for number in range(examples):
        upto = chance.choice((24, 400, tensors + 4000))
        start = 0 if upto < 400 else chance.choice((0, 0, max(0, tensors - 2000)))
        path.write_bytes(good[:start] + damaged(chance, good[start:], upto))
        cache = root / f"cache{number}"
        with (
            in_time(f"seed {seed}, number {number}"),
            contextlib.suppress(ModelError),
            warnings.catch_warnings(action="ignore", category=RuntimeWarning),
        ):
            # Damaged weights may be no numbers, of which numpy warns.
            ensure_demo(cache, "float32", ignore, tiny_source(path))
        for made in cache.rglob("*"):
            assert made.is_relative_to(cache) and not made.is_symlink()
    expected = {"good.gguf", "bad.gguf", *(f"cache{number}" for number in range(examples))}
    assert {one.name for one in root.iterdir()} <= expected


def ignore(_: Loading) -> None:
    pass


needs_gguf = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None,
    reason="the demo extra is not installed (pip install -e '.[demo]')",
)


@needs_gguf
def test_30_damaged_demo_sources_are_refused_or_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "check_installed", lambda: None)
    fuzz_gguf(tmp_path / "gguf", 30, seed=4)


@needs_gguf
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_1000_damaged_demo_sources_are_refused_or_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "check_installed", lambda: None)
    print(f"seed {ANY_SEED}")
    fuzz_gguf(tmp_path / "gguf", 1000, ANY_SEED)
