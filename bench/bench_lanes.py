"""Whether one client decodes as fast in the continuous lane as in the strictly serial one.

Two engines of one process take turns on one model of random weights: one with its defaults, one
with --decode-concurrency 1. Each round is a greedy answer of each; the ratio is of both turns of a
round. Not measured: HTTP, the supervisor, prefill, more clients.

    python -m bench.bench_lanes            # the real size
    python -m bench.bench_lanes --small    # the size that the tests run
    python -m bench.bench_lanes --model FOLDER
"""

import argparse
import asyncio
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from tests.integration.generation_rig import load_tiny
from tests.material.models import ModelSpec, build_model

from bench.bench_tokenloop import Size, measure_ours
from bench.leaving import leaving_nothing
from bench.machine import machine
from bench.paired import Pair, compare
from mlx_isolate_engine.completion.service import ModelCompletionService
from mlx_isolate_engine.generation.thread import GenerationThread
from mlx_isolate_shared.config import EngineSettings

SMALL = Size(hidden=64, layers=2, tokens=40, rounds=6, rows=(1,))
REAL = Size(hidden=768, layers=12, tokens=100, rounds=20, rows=(1,))


async def run(folder: Path, size: Size) -> tuple[Pair, Pair]:
    """Tokens per second of both lanes by the clock, and per second of CPU; continuous is ours."""
    settings = {1: EngineSettings(decode_concurrency=1), 32: EngineSettings()}
    threads = {
        rows: GenerationThread(each, lambda: load_tiny(folder)) for rows, each in settings.items()
    }
    services: dict[int, ModelCompletionService] = {}
    for rows, thread in threads.items():
        await thread.start()
        services[rows] = ModelCompletionService(thread, settings[rows])
    assert [thread.placement for thread in threads.values()] == ["serial", "continuous"]
    wall: dict[int, list[float]] = {1: [], 32: []}
    cpu: dict[int, list[float]] = {1: [], 32: []}
    for number in range(size.rounds + 1):
        for rows in (1, 32) if number % 2 else (32, 1):
            span = await measure_ours(services[rows], 1, size.tokens)
            if number:  # the first round warms both up
                wall[rows].append((size.tokens - 1) / span.wall_s)
                cpu[rows].append((size.tokens - 1) / span.cpu_s)
    for rows, thread in threads.items():
        await services[rows].close()
        await thread.stop()
    return (
        compare(wall[32], wall[1], higher_is_better=True),
        compare(cpu[32], cpu[1], higher_is_better=True),
    )


def main(arguments: list[str] | None = None) -> tuple[Pair, Pair]:
    """Print both ratios; with --json also write them to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="the size that the tests run")
    parser.add_argument("--model", type=Path, help="a model folder instead of random weights")
    parser.add_argument(
        "--rounds", type=int, help=f"turns of each lane that count (default {REAL.rounds})"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    base = SMALL if options.small else REAL
    size = replace(base, rounds=options.rounds or base.rounds)
    with tempfile.TemporaryDirectory() as home:
        spec = ModelSpec(kind="full", hidden=size.hidden, layers=size.layers)
        folder = options.model or build_model(Path(home) / "m", spec)
        pairs = asyncio.run(run(folder, size))
    print("\n".join(f"{name}: {value}" for name, value in machine("mlx", "mlx-lm").items()))
    print(f"size: {size}")
    for name, pair in zip(("clock", "CPU time"), pairs, strict=True):
        low = "–" if pair.ratio_low is None else f"{pair.ratio_low:.3f}"
        print(
            f"tokens/s by {name}: continuous {pair.ours:.1f}, serial {pair.theirs:.1f}, "
            f"ratio {pair.ratio:.3f} (95 % low {low})"
        )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(pair) for pair in pairs], indent=1))
    return pairs


if __name__ == "__main__":
    with leaving_nothing():
        main()
