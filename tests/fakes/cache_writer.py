"""A process that does nothing but write cache entries, to be killed while it does.

Run as `python -P tests/fakes/cache_writer.py`. It imports once and then forks a writer for every
line `DIRECTORY SEED` on stdin, whose pid it prints; the writer prints one `.` before every tensor
and piece of one, so that its reader knows where it is. The forking process reaps.
"""

import os
import random
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mlx_isolate_engine.cache import kinds, snapshot
from mlx_isolate_engine.cache.ram_tier import Entry
from mlx_isolate_engine.cache.ssd_store import SsdStore, StoreIdentity
from mlx_isolate_engine.cache.token_index import token_key
from tests.fakes.toy_caches import KINDS, feed

IDENTITY = StoreIdentity(model="m", model_id="m", fingerprint="ab" * 16, tokenizer="cd" * 16)
NAMES = sorted(KINDS)


def tokens_of(number: int) -> list[int]:
    """Some tokens, told apart by their first; the same number gives the same ones."""
    source = random.Random(number)
    return [number % 1000, *(source.randrange(500) for _ in range(source.randrange(3, 30)))]


def kind_of(number: int) -> str:
    return NAMES[number % len(NAMES)]


def entry_of(number: int) -> Entry:
    tokens = tokens_of(number)
    cache = KINDS[kind_of(number)]()
    feed(cache, tokens, 0, 7)
    kept = snapshot.keep(cache, len(tokens))
    return Entry(
        namespace=kind_of(number),
        key=token_key(tokens),
        cache=kept,
        bytes=snapshot.bytes_of(kept),
        cuttable=kinds.can_cut(kept),
        storable=True,
        kind="assistant",
    )


def say_where() -> None:
    os.write(1, b".")


def write_for_ever(root: Path, seed: int) -> None:
    store = SsdStore(root, IDENTITY, bytes_max=3_000_000)
    store.open()
    source = random.Random(seed)
    while True:
        store.store(entry_of(source.randrange(200)), say_where)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        root, _, seed = line.strip().rpartition(" ")
        pid = os.fork()
        if pid == 0:
            write_for_ever(Path(root), int(seed))
        os.write(1, f"\n{pid}\n".encode())


if __name__ == "__main__":
    main()
