"""How long an engine with a full cache directory takes to know it, and what that costs afterwards.

Legs, for 10 to 10,000 files of one model: opening the directory (the headers of all files are read),
the first look after somebody has written there (the folder is listed again), the look after that
(nothing has changed), and one write with the cap in reach (everything is counted). Rivals in the
same run: reading as many bytes of as many files as the headers have, and listing the files alone.

Run `python -m bench.bench_cache_start` (`--files 10 100 1000 10000`, `--tokens N` a file). Does not
measure: files whose pages are not in memory (a start after the machine's own adds the disk's time
for 16 KiB or more a file), data (it is never read at a start; here files are sparse).
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.bench_cache import IDENTITY
from bench.leaving import leaving_nothing
from bench.machine import machine
from mlx_isolate_engine.cache.kv_check import read_header
from mlx_isolate_engine.cache.kv_file import EntryFacts, encode_header, lay_out
from mlx_isolate_engine.cache.ssd_store import SsdStore
from mlx_isolate_engine.cache.token_index import token_key

NAMESPACE = "n"
LAYERS = 16


def facts_of(number: int, tokens: int) -> EntryFacts:
    """An entry of as many tokens as asked for, which begins like no other."""
    return EntryFacts(
        model=IDENTITY.model,
        tokenizer_config="{}",
        model_id=IDENTITY.model_id,
        namespace=NAMESPACE,
        fingerprint=IDENTITY.fingerprint,
        tokenizer=IDENTITY.tokenizer,
        key=token_key([number, *range(tokens - 1)]),
        kind="assistant",
        cuttable=True,
        created=0.0,
        classes=("KVCache",) * LAYERS,
        scalars=tuple((f"{at}.2", "scalar") for at in range(LAYERS)),
        rounded=frozenset(f"{at}.{side}" for at in range(LAYERS) for side in (0, 1)),
    )


def fill(store: SsdStore, count: int, tokens: int) -> None:
    """Write files whose data is a hole; headers are true."""
    shape = (1, 8, (tokens // 256 + 1) * 256, 128)
    rows = [(f"{at}.{side}", "BF16", shape) for at in range(LAYERS) for side in (0, 1)]
    tensors = lay_out([*rows, *((f"{at}.2", "I32", ()) for at in range(LAYERS))])
    folder = store.directory.make_folder(IDENTITY.fingerprint, NAMESPACE)
    for number in range(count):
        raw = encode_header(facts_of(number, tokens), tensors, {})
        _, path = store.directory.new_names(folder)
        path.write_bytes(raw)
        os.truncate(path, len(raw) + tensors[-1].end)


def timed(act: Callable[[], Any], runs: int) -> float:
    """Median seconds."""
    found: list[float] = []
    for _ in range(runs):
        start = time.perf_counter()
        act()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def run(count: int, tokens: int, runs: int) -> dict[str, Any]:
    """All legs for so many files; times in seconds."""
    with tempfile.TemporaryDirectory(prefix="mi") as name:
        root = Path(name) / "cache"
        store = SsdStore(root, IDENTITY, bytes_max=1 << 50)
        store.open()
        fill(store, count, tokens)
        folder = store.directory.folder(IDENTITY.fingerprint, NAMESPACE)
        paths = sorted(folder.iterdir())

        def start() -> None:
            nonlocal store
            store = SsdStore(root, IDENTITY, bytes_max=1 << 50)
            store.open()

        prompt = token_key([count + 1, 1, 2])

        def look() -> None:
            store.find(NAMESPACE, prompt, length_max=2)

        def look_again() -> None:
            # A time that differs each run and lies well before now, as after a while.
            moved = time.time_ns() - 10_000_000_000
            os.utime(folder, ns=(moved, moved))
            look()

        header_bytes = read_header(paths[0]).data_start

        def read() -> None:
            for path in paths:
                descriptor = os.open(path, os.O_RDONLY)
                os.pread(descriptor, header_bytes, 0)
                os.close(descriptor)

        start_s = timed(start, runs)
        assert store.stats().entries == count, store.damage
        look_again()
        return {
            "files": count,
            "header_bytes": header_bytes,
            "start_s": start_s,
            "start_us_a_file": start_s / count * 1e6,
            "plain_read_s": timed(read, runs),
            "list_s": timed(lambda: list(store.directory.files()), runs),
            "look_s": timed(look, runs),
            "look_after_a_write_s": timed(look_again, runs),
            "make_room_s": timed(lambda: store.directory.make_room(1, 1 << 50), runs),
        }


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each number of files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--files",
        type=int,
        nargs="+",
        default=[10, 100, 1000, 10_000],
        help="numbers of files (default 10 100 1000 10000)",
    )
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of a file (default 2000)")
    parser.add_argument("--runs", type=int, default=3, help="times each leg runs (default 3)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args(argv)
    results = [run(count, arguments.tokens, arguments.runs) for count in arguments.files]
    facts = machine("mlx-lm")
    if arguments.json:
        print(json.dumps({"machine": facts, "tokens": arguments.tokens, "results": results}))
        return
    print("; ".join(f"{name} {value}" for name, value in facts.items()))
    print(f"{arguments.tokens} tokens a file; median of {arguments.runs}")
    names = list(results[0])
    print("  ".join(f"{name:>20}" for name in names))
    for each in results:
        cells = (f"{v:.4f}" if isinstance(v, float) else str(v) for v in each.values())
        print("  ".join(f"{cell:>20}" for cell in cells))


if __name__ == "__main__":
    with leaving_nothing():
        main()
