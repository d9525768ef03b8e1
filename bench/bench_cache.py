"""How much of a prefill the prompt cache gives back, and what a restore costs.

Legs: cold prefill, RAM hit, SSD hit in the same process (RAM emptied), restart (a new store over
the same directory, after a flush whose evidence is printed); and the first, second and fourth with
the SSD tier off, so that what it costs and what it saves stand side by side. Rivals in the same
run, on the same entry: mlx-lm's save_prompt_cache and load_prompt_cache, and a plain sequential
read of the file.

Run `python -m bench.bench_cache` (seconds) or with `--real` (a larger model and a long prompt),
`--model FOLDER` for one of your own. Does not measure: the HTTP path, several rows at once, other
disks than the one the folder lies on (the page cache is dropped for the file before each read, as
far as the system allows).
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

import mlx.core as mx
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.utils import load_model
from tests.material.models import FULL, ModelSpec, build_model

from bench.leaving import leaving_nothing
from bench.machine import machine
from mlx_isolate_engine.cache.cold_side import ColdSettings
from mlx_isolate_engine.cache.prompt_cache import PromptCache
from mlx_isolate_engine.cache.restore_choice import RestoreChoice
from mlx_isolate_engine.cache.ssd_store import SsdStore, StoreIdentity

SMALL = FULL
REAL = ModelSpec(kind="full", hidden=512, layers=12, context=16384)
# mlx-lm prefills in steps of this size by default.
CHUNK = 2048
IDENTITY = StoreIdentity(model="m", model_id="m", fingerprint="ab" * 16, tokenizer="cd" * 16)


def drop_pages(path: Path) -> None:
    """Ask the system to forget a file's pages, so that a read goes to the disk."""
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class Bench:
    """One model, one prompt, one directory."""

    def __init__(self, folder: Path, tokens: int, root: Path) -> None:
        self.model: Any = load_model(folder)[0]
        self.prompt = [32 + (n * 7919) % 95 for n in range(tokens)]
        self.root = root
        self.step_s = 0.0

    def open_off(self) -> PromptCache:
        """A prompt cache without the SSD tier, as an engine makes it at its start."""
        return PromptCache(entries_max=9, bytes_max=1 << 36)

    def open(self, choice: RestoreChoice | None = None) -> tuple[PromptCache, SsdStore]:
        """A prompt cache over the directory, as an engine makes it at its start.

        Restores always unless a choice is given.
        """
        store = SsdStore(self.root, IDENTITY, bytes_max=1 << 40)
        store.open()
        cold = ColdSettings(
            tier=store, choice=choice or RestoreChoice("always"), spill_bytes_max=1 << 34
        )
        return PromptCache(entries_max=9, bytes_max=1 << 36, cold=cold), store

    def first_token(self, cache: PromptCache | None) -> tuple[float, list[Any], str]:
        """Seconds from the prompt to the first token, the cache, and where its prefix came from."""
        start = time.perf_counter()
        taken, reused = cache.take(self.prompt, "n") if cache else (None, 0)
        state = taken or make_prompt_cache(self.model)
        for at in range(reused, len(self.prompt) - 1, CHUNK):
            part = self.prompt[at : min(at + CHUNK, len(self.prompt) - 1)]
            self.model(mx.array([part]), cache=state)
            mx.eval([each.state for each in state])
        mx.eval(mx.argmax(self.model(mx.array([self.prompt[-1:]]), cache=state)[0, -1]))
        seconds = time.perf_counter() - start
        return seconds, state, cache.last_take.tier if cache else "none"

    def decode_step(self, state: list[Any]) -> float:
        """Seconds of one decode step."""
        start = time.perf_counter()
        mx.eval(self.model(mx.array([[65]]), cache=state))
        return time.perf_counter() - start


def timed(runs: int, act: Callable[[], Any]) -> list[float]:
    """Seconds of each run, sorted."""
    found: list[float] = []
    for _ in range(runs):
        start = time.perf_counter()
        act()
        found.append(time.perf_counter() - start)
    return sorted(found)


def run(spec: ModelSpec | Path, tokens: int, runs: int) -> dict[str, Any]:
    """All legs; every time is the median of the runs in seconds."""
    with tempfile.TemporaryDirectory(prefix="mi") as name:
        place = Path(name)
        folder = spec if isinstance(spec, Path) else build_model(place / "model", spec)
        bench = Bench(folder, tokens, place / "cache")
        bench.first_token(None)  # kernels, page faults
        results = _legs(bench, runs) | _off(bench, runs)
        results |= _rivals(bench, place, runs)
        results |= _choice(bench, results)
    results["restore_over_cold"] = results["restart_s"] / results["cold_s"]
    results["load_rival_over_ours"] = results["mlx_lm_load_s"] / results["restore_s"]
    return results


def _legs(bench: Bench, runs: int) -> dict[str, Any]:
    cache, _ = bench.open()
    state: list[Any] = []
    cold: dict[str, list[float]] = {"off_cold_s": [], "cold_s": []}
    for _ in range(runs):  # in turns: a machine that slows down slows both
        cold["off_cold_s"].append(_hit(bench, bench.open_off(), "none")[0])
        seconds, state = _hit(bench, cache, "none")
        cold["cold_s"].append(seconds)
    steps = sorted(bench.decode_step(state) for _ in range(5))
    for part in state:
        part.trim(6)  # back to the prompt without its last token
    start = time.perf_counter()
    cache.put(bench.prompt[:-1], state, "n", "assistant")
    put_s = time.perf_counter() - start
    start = time.perf_counter()
    evidence = cache.flush(600)
    save_s = time.perf_counter() - start
    assert evidence.durable, evidence
    ram = [_hit(bench, cache, "ram")[0] for _ in range(runs)]
    ssd: list[float] = []
    restores: list[float] = []
    for _ in range(runs):
        cache.trim_to(0)
        _drop_all(bench.root)
        ssd.append(_hit(bench, cache, "ssd")[0])
        restores.append(cache.last_take.restore_s)
    cache.close(60)
    restart: list[float] = []
    entries = 0
    for _ in range(runs):
        _drop_all(bench.root)
        again, store = bench.open()
        entries = store.stats().entries
        restart.append(_hit(bench, again, "ssd")[0])
        again.close(60)
    restore_s = statistics.median(restores)
    size = next(bench.root.rglob("*.safetensors")).stat().st_size
    return {
        "tokens": len(bench.prompt),
        "entry_mb": size / 1e6,
        **{name: statistics.median(each) for name, each in cold.items()},
        "step_s": statistics.median(steps),
        "ram_hit_s": statistics.median(ram),
        "ssd_hit_s": statistics.median(ssd),
        "restart_s": statistics.median(restart),
        "restart_p99_s": max(restart),
        "entries_found_at_start": entries,
        "put_s": put_s,
        "save_s": save_s,
        "restore_s": restore_s,
        "restore_mb_per_s": size / 1e6 / restore_s,
        "flush_evidence": {name: getattr(evidence, name) for name in evidence.__struct_fields__},
    }


def _off(bench: Bench, runs: int) -> dict[str, Any]:
    """Warm and restart without the SSD tier."""
    found: dict[str, list[float]] = {"warm": [], "restart": []}
    for _ in range(runs):
        cache = bench.open_off()
        _, state = _hit(bench, cache, "none")
        for part in state:
            part.trim(1)
        cache.put(bench.prompt[:-1], state, "n", "assistant")
        found["warm"].append(_hit(bench, cache, "ram")[0])
        found["restart"].append(_hit(bench, bench.open_off(), "none")[0])
    return {f"off_{name}_s": statistics.median(each) for name, each in found.items()}


def _choice(bench: Bench, results: dict[str, Any]) -> dict[str, Any]:
    """What `--ssd-restore auto` makes of this run's rates, and the first token's time of it."""
    choice = RestoreChoice("auto")
    choice.note_prefill(results["tokens"], results["cold_s"])
    choice.note_restore(int(results["entry_mb"] * 1e6), results["restore_s"])
    cache, _ = bench.open(choice)
    _drop_all(bench.root)
    seconds, _, _ = bench.first_token(cache)
    cache.close(60)
    return {"auto_chose": cache.last_take.reason, "auto_s": seconds}


def table(results: dict[str, Any]) -> str:
    """Seconds to the first token, and how many entries a restart found: off and on."""
    entries = results["entries_found_at_start"]
    rows = [
        ("", "cold", "warm", "restart", "entries found at the start"),
        ("off", *(f"{results[f'off_{leg}_s']:.4f}" for leg in ("cold", "warm", "restart")), "0"),
        ("on", *(f"{results[n]:.4f}" for n in ("cold_s", "ram_hit_s", "restart_s")), str(entries)),
    ]
    return "\n".join("  ".join(f"{cell:>10}" for cell in row) for row in rows)


def _hit(bench: Bench, cache: PromptCache, tier: str) -> tuple[float, list[Any]]:
    """Seconds to the first token and the cache then, of a prefix that came from this tier."""
    seconds, state, came_from = bench.first_token(cache)
    assert came_from == tier, f"meant to measure {tier}, measured {came_from}"
    return seconds, state


def _drop_all(root: Path) -> None:
    for path in root.rglob("*.safetensors"):
        drop_pages(path)


def _rivals(bench: Bench, place: Path, runs: int) -> dict[str, Any]:
    """The same entry through mlx-lm's functions, and a plain read of our file."""
    cache, _ = bench.open()
    state, _ = cache.take(bench.prompt, "n")
    cache.close(60)
    theirs = place / "theirs.safetensors"

    def save() -> None:
        save_prompt_cache(str(theirs), state or [], {"model": "m"})
        descriptor = os.open(theirs, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def load() -> None:
        drop_pages(theirs)
        loaded: Any = load_prompt_cache(str(theirs))
        mx.eval([part.state for part in loaded])

    ours = next(bench.root.rglob("*.safetensors"))
    buffer = bytearray(8 << 20)

    def read() -> None:
        drop_pages(ours)
        with ours.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    saves, loads, reads = timed(runs, save), timed(runs, load), timed(runs, read)
    return {
        "mlx_lm_save_s": statistics.median(saves),
        "mlx_lm_load_s": statistics.median(loads),
        "plain_read_s": statistics.median(reads),
        "plain_read_mb_per_s": ours.stat().st_size / 1e6 / statistics.median(reads),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print the parameters, the legs and the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", action="store_true", help="larger model, longer prompt")
    parser.add_argument("--model", type=Path, help="a model folder of your own")
    parser.add_argument(
        "--tokens", type=int, help="length of the prompt (600; 3000 for a larger model)"
    )
    parser.add_argument("--runs", type=int, default=5, help="times each leg runs (default 5)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args(argv)
    tokens = arguments.tokens or (3000 if arguments.real or arguments.model else 600)
    spec = arguments.model or (REAL if arguments.real else SMALL)
    results = run(spec, tokens, arguments.runs)
    results |= machine("mlx", "mlx-lm") | {"device": str(mx.default_device())}
    if arguments.json:
        print(json.dumps(results))
        return
    print("Seconds to the first token, with the SSD tier")
    print(table(results), end="\n\n")
    for name, value in results.items():
        print(f"{name:24} {value:.4f}" if isinstance(value, float) else f"{name:24} {value}")


if __name__ == "__main__":
    with leaving_nothing():
        main()
