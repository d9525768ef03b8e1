"""What the token loop costs over mlx-lm's bare BatchGenerator, in tokens per second.

Both generate the same greedy tokens from the same prompts on one model of random weights, in one
process, in turn. The rival does nothing with its tokens; ours assembles text and brings every
delta to the event loop, where a sink takes it. Not measured: HTTP, JSON, the supervisor, prefill.
CPU time is given beside the clock, since it holds on a machine that others use too.

    python -m bench.bench_tokenloop            # the real size
    python -m bench.bench_tokenloop --small    # the size that the tests run
    python -m bench.bench_tokenloop --model FOLDER
"""

import argparse
import asyncio
import json
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx_lm.generate import BatchGenerator
from tests.integration.generation_rig import load_tiny
from tests.material.models import ModelSpec, build_model

from bench.leaving import leaving_nothing
from bench.machine import machine
from mlx_isolate_engine.completion.events import ContentDelta, Event
from mlx_isolate_engine.completion.request import CompletionRequest, TokensPrompt
from mlx_isolate_engine.completion.service import ModelCompletionService
from mlx_isolate_engine.generation.thread import GenerationThread
from mlx_isolate_shared.config import EngineSettings

PROMPT = [65 + number % 50 for number in range(16)]


@dataclass(frozen=True)
class Size:
    """What one run measures."""

    hidden: int
    layers: int
    tokens: int
    rounds: int
    rows: tuple[int, ...]


SMALL = Size(hidden=64, layers=2, tokens=100, rounds=5, rows=(1, 4))
REAL = Size(hidden=512, layers=8, tokens=100, rounds=7, rows=(1, 4, 16))


@dataclass(frozen=True)
class Result:
    """One number of rows: tokens per second of each side, and their ratio over the rounds."""

    rows: int
    bare_tokens_per_s: float
    ours_tokens_per_s: float
    ratio_p50: float
    ratio_worst: float
    added_us_per_token: float
    added_cpu_us_per_token: float


@dataclass(frozen=True)
class Span:
    """Seconds from the first token to the last: by the clock, and of this process's CPU."""

    wall_s: float
    cpu_s: float


class Stopwatch:
    """Starts at the first token."""

    def __init__(self) -> None:
        self._start: tuple[float, float] | None = None

    def start(self) -> None:
        """Begin, if it has not begun."""
        if self._start is None:
            self._start = (time.perf_counter(), time.process_time())

    def read(self) -> Span:
        """The time since."""
        assert self._start is not None, "no token came"
        wall, cpu = self._start
        return Span(time.perf_counter() - wall, time.process_time() - cpu)


class BareLoop:
    """mlx-lm's BatchGenerator on a thread of its own, driven as fast as it goes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._orders: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Span] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def measure(self, rows: int, tokens: int) -> Span:
        """From the first token to the last."""
        self._orders.put((rows, tokens))
        return self._answers.get()

    def close(self) -> None:
        """End the thread."""
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        import mlx.core as mx

        model = load_tiny(self._folder).model
        while (order := self._orders.get()) is not None:
            self._answers.put(self._generate(model, *order))
        del model
        mx.synchronize()
        mx.clear_streams()

    def _generate(self, model: Any, rows: int, tokens: int) -> Span:
        generator = BatchGenerator(model, completion_batch_size=rows, prefill_batch_size=rows)
        generator.insert([list(PROMPT) for _ in range(rows)], [tokens] * rows)
        watch = Stopwatch()
        made = 0
        while made < rows * tokens:
            _, responses = generator.next()
            made += len(responses)
            if responses:
                watch.start()
        span = watch.read()
        generator.close()
        return span


async def measure_ours(service: ModelCompletionService, rows: int, tokens: int) -> Span:
    """From the first delta at the sink to the last summary."""
    watch = Stopwatch()

    async def sink(event: Event) -> None:
        if isinstance(event, ContentDelta):
            watch.start()

    request = CompletionRequest(
        request_id="bench", prompt=TokensPrompt(tokens=tuple(PROMPT)), max_tokens=tokens
    )
    prepared = [await service.prepare(request) for _ in range(rows)]
    await asyncio.gather(*(each.execute(sink) for each in prepared))
    return watch.read()


async def compare(folder: Path, size: Size, show: Callable[[str], None]) -> list[Result]:
    """Both sides in turn, for every number of rows."""
    settings = EngineSettings(decode_concurrency=max(size.rows), prompt_concurrency=max(size.rows))
    thread = GenerationThread(settings, lambda: load_tiny(folder))
    await thread.start()
    service = ModelCompletionService(thread, settings)
    bare = BareLoop(folder)
    results: list[Result] = []
    for rows in size.rows:
        pairs: list[tuple[Span, Span]] = []
        for _ in range(size.rounds + 1):
            ours = await measure_ours(service, rows, size.tokens)
            pairs.append((await asyncio.to_thread(bare.measure, rows, size.tokens), ours))
        result = summarize(rows, size.tokens, pairs[1:])  # the first round warms both up
        show(
            f"{rows:4d} rows: bare {result.bare_tokens_per_s:8.1f} tok/s, ours "
            f"{result.ours_tokens_per_s:8.1f} tok/s, ratio p50 {result.ratio_p50:.3f} "
            f"(worst {result.ratio_worst:.3f}), {result.added_us_per_token:+.1f} us/token "
            f"(CPU {result.added_cpu_us_per_token:+.1f})"
        )
        results.append(result)
    bare.close()
    await service.close()
    await thread.stop()
    return results


def summarize(rows: int, tokens: int, pairs: list[tuple[Span, Span]]) -> Result:
    """Medians over the rounds; a ratio above 1 means that ours is faster."""
    made = rows * tokens
    ratios = [bare.wall_s / ours.wall_s for bare, ours in pairs]
    bare_s = statistics.median(bare.wall_s for bare, _ in pairs)
    ours_s = statistics.median(ours.wall_s for _, ours in pairs)
    added_cpu_s = statistics.median(ours.cpu_s - bare.cpu_s for bare, ours in pairs)
    return Result(
        rows=rows,
        bare_tokens_per_s=made / bare_s,
        ours_tokens_per_s=made / ours_s,
        ratio_p50=statistics.median(ratios),
        ratio_worst=min(ratios),
        added_us_per_token=(ours_s - bare_s) / made * 1e6,
        added_cpu_us_per_token=added_cpu_s / made * 1e6,
    )


def main(arguments: list[str] | None = None) -> list[Result]:
    """Print the table; with --json also write it to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="the size that the tests run")
    parser.add_argument("--model", type=Path, help="a model folder instead of random weights")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    size = SMALL if options.small else REAL
    print("; ".join(f"{name} {value}" for name, value in machine("mlx", "mlx-lm").items()))
    print(asdict(size))
    with tempfile.TemporaryDirectory() as home:
        spec = ModelSpec(kind="full", hidden=size.hidden, layers=size.layers)
        folder = options.model or build_model(Path(home) / "m", spec)
        results = asyncio.run(compare(folder, size, print))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return results


if __name__ == "__main__":
    with leaving_nothing():
        main()
