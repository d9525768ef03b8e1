"""What the SSD tier costs while tokens are generated: decode speed with it on over off.

Two engines in turn, as processes of their own, with and without `--ssd-cache-dir`, answer the same
chats in pairs whose order alternates, so that a drift of the machine meets both. Each engine's own
timings (`predicted_per_second`) are compared pair by pair. A third chat of each round runs on the
engine with the tier while somebody waits for a flush, and is compared with that engine's other one.
Between two chats of one engine lies the other's, so that its writes happen while it is idle, as
they would.

Run `python -m bench.bench_cache_overhead` (`--pairs N`, `--model FOLDER`). Does not measure: the
one evaluation at the end of a completion (bench_cache prints it as put_s), other disks, GPUs.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.engine_process import REAL, EngineProcess
from tests.material.models import FULL, SLOW, ModelSpec, build_model
from tests.raw_http import ask

from bench.leaving import leaving_nothing
from bench.machine import machine
from bench.paired import compare
from mlx_isolate_shared.config import EngineSettings

SMALL = FULL


def speed(engine: EngineProcess, number: int, tokens: int) -> float:
    """Tokens per second of one chat's decoding, by the engine's own clock."""
    body = {
        "messages": [{"role": "user", "content": f"Chat number {number}, and go on for long."}],
        "temperature": 0,
        "max_tokens": tokens,
    }
    response = asyncio.run(ask(engine.socket_path, "/v1/chat/completions", body))
    assert response.status == 200, response.body
    measured: float = response.json["timings"]["predicted_per_second"]
    return measured


async def speed_during_flush(engine: EngineProcess, number: int, tokens: int) -> float:
    """As `speed`, with a flush asked for at the same moment, which must end durable."""
    chat = asyncio.to_thread(speed, engine, number, tokens)
    flush = ask(engine.socket_path, "/admin/cache/flush?timeout_s=60", method="POST")
    measured, flushed = await asyncio.gather(chat, flush)
    assert flushed.status == 200, flushed.body
    return measured


def run(spec: ModelSpec | Path, pairs: int, tokens: int) -> dict[str, Any]:
    """The ratio on/off of each pair, and what the tier did meanwhile."""
    with tempfile.TemporaryDirectory(prefix="mi") as name:
        place = Path(name)
        folder = spec if isinstance(spec, Path) else build_model(place / "model", spec)
        with EngineProcess(REAL) as on, EngineProcess(REAL) as off:
            on.start(str(folder), EngineSettings(ssd_cache_dir=str(place / "cache")))
            on.wait_ready(120)
            off.start(str(folder))
            off.wait_ready(120)
            for engine in (on, off):
                speed(engine, -1, tokens)
            ratios: list[float] = []
            during_flush: list[float] = []
            speeds: dict[str, list[float]] = {"on": [], "off": []}
            for number in range(pairs):
                order = [("on", on), ("off", off)]
                for word, engine in order if number % 2 else reversed(order):
                    speeds[word].append(speed(engine, number, tokens))
                ratios.append(speeds["on"][-1] / speeds["off"][-1])
                flushed = asyncio.run(speed_during_flush(on, pairs + number, tokens))
                during_flush.append(flushed)
            flush = asyncio.run(ask(on.socket_path, "/admin/cache/flush", method="POST"))
    ordered = sorted(ratios)
    on_over_off = compare(speeds["on"], speeds["off"], higher_is_better=True)
    flush_over_on = compare(during_flush, speeds["on"], higher_is_better=True)
    return {
        "pairs": pairs,
        "tokens": tokens,
        "on_over_off_median": on_over_off.ratio,
        "on_over_off_95_low": on_over_off.ratio_low,
        "on_over_off_p10": ordered[len(ordered) // 10],
        "on_over_off_p90": ordered[-1 - len(ordered) // 10],
        "flush_over_on_median": flush_over_on.ratio,
        "flush_over_on_95_low": flush_over_on.ratio_low,
        "on_tokens_per_s": statistics.median(speeds["on"]),
        "off_tokens_per_s": statistics.median(speeds["off"]),
        "flush": flush.json,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print the parameters and the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=20, help="pairs of chats (default 20)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of an answer (default 200)")
    parser.add_argument("--model", type=Path, help="a model folder of your own")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args(argv)
    results = run(arguments.model or SLOW, arguments.pairs, arguments.tokens)
    results |= machine("mlx", "mlx-lm")
    if arguments.json:
        print(json.dumps(results))
        return
    for name, value in results.items():
        print(f"{name:24} {value:.4f}" if isinstance(value, float) else f"{name:24} {value}")


if __name__ == "__main__":
    with leaving_nothing():
        main()
