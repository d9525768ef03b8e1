"""What it costs when something ends early: a client that leaves, a server that is killed.

The daemon (with its cache on disk) against a rival as its users keep it up: a shell loop that starts
it again at once. Both serve one model of random weights, taking turns:

* a client leaves - a stream, a long prompt that is still read, an answer asked for whole: until the
  process that holds the model is idle;
* kill -9 of that process: until a request is answered again, and how many failed until then, each
  asked as soon as the one before has failed or got no answer in ten seconds; what is not back after
  a minute has the rest of its processes killed too, as its user would;
* the first token of a long prompt: cold, repeated, and repeated after that kill;
* memory after many requests of four clients, with fresh servers: of all processes (ours has a
  supervisor and, where there is room, a spare engine) and of the one with the model; and the same of
  ours without its disk, since what waits to be written there is memory until the engine has a pause.

Not measured: speed (bench_serving), a kill of the supervisor itself, and requests that were running
when the kill came (both lose them; ours says so).

    python -m bench.bench_outages            # the real size
    python -m bench.bench_outages --small    # the size that the tests run
    python -m bench.bench_outages --rival vllm-mlx=ENVIRONMENT/bin/vllm-mlx
"""

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from tests.material.models import ModelSpec, build_model

from bench.leaving import leaving_nothing
from bench.machine import machine
from bench.paired import Pair, compare
from bench.serving_calls import Caller
from bench.serving_load import prompt, turn
from bench.serving_rivals import MLX_LM, OURS, RIVALS, Rival, memory_bytes, ours, theirs

SERVING_S = 60.0
# Longest time in which what was left is worked off.
IDLE_S = 600.0
# A process is idle from the last moment before this long without work, seen by looks this often;
# one look that finds it at work may be a glance at a clock.
QUIET_S = 0.4
QUIET_LOOKS = 1
LOOK_S = 0.02
# Time without requests before a kill, in which a cache may be written.
SETTLE_S = 3.0
RETRY_S = 0.02
MEMORY_CLIENTS = 4
MEMORY_WORDS = (16, 32, 64, 128)


@dataclass(frozen=True)
class Size:
    """How much is measured; MEANINGS says of what."""

    hidden: int
    layers: int
    long_words: int
    left_tokens: int
    rounds: int
    requests: int


MEANINGS = {
    "hidden": "width of the random model",
    "layers": "depth of the random model",
    "long_words": "words of the long prompt, each about 6 tokens",
    "left_tokens": "tokens of an answer whose client leaves",
    "rounds": "turns that each rival takes",
    "requests": f"requests before memory is read, a multiple of {MEMORY_CLIENTS}",
}
SMALL = Size(hidden=64, layers=2, long_words=60, left_tokens=200, rounds=1, requests=8)
REAL = Size(hidden=512, layers=8, long_words=400, left_tokens=400, rounds=5, requests=500)

Figures = dict[str, list[float]]


class Side:
    """One rival with what was measured of it."""

    def __init__(self, rival: Rival, model: str, size: Size) -> None:
        self.rival = rival
        self.figures: Figures = {}
        self._call = Caller(rival.port, model)
        self._size = size

    def _note(self, figure: str, value: float) -> None:
        self.figures.setdefault(figure, []).append(value)

    def begin(self) -> None:
        """Wait until it answers: some are healthy before they can."""
        while not self._call.answers(prompt(0, 4, warm=False)):
            time.sleep(RETRY_S)

    def leave(self, number: int) -> None:
        """A client leaves in each of three ways."""
        size = self._size
        # What a leg leaves running, the next one waits for: each ends with a process at rest.
        ways = {
            "idle after a stream is left, s": (24, True, 5),
            "idle after a long prompt is left, s": (3 * size.long_words, True, 0),
            "idle after a whole answer is left, s": (24, False, 0),
        }
        for place, (figure, (words, stream, events)) in enumerate(ways.items()):
            messages = prompt(10 * number + place, words, warm=False)
            left = self._call.leave(
                messages, tokens=size.left_tokens, stream=stream, after_events=events
            )
            self._note(figure, max(0.0, idle_since(self.rival.serving()) - left))

    def kill(self, number: int) -> None:
        """A long prompt before and after a kill, and how long it takes until it can be asked."""
        messages = prompt(1_000_000 + number, self._size.long_words, warm=False)
        self._note("TTFT of a long prompt, cold, s", self._call.first_text(messages).ttft_s)
        self._note("TTFT of a long prompt, repeated, s", self._call.first_text(messages).ttft_s)
        time.sleep(SETTLE_S)
        self.rival.serving().kill()
        began, failed = time.perf_counter(), 0
        patience_s = SERVING_S
        while not self._call.answers(prompt(number, 4, warm=False)):
            failed += 1
            if time.perf_counter() - began > patience_s:
                if patience_s > SERVING_S:
                    raise RuntimeError(f"{self.rival.name} did not come back:\n{self.rival.log}")
                self.rival.kill_all_served()
                patience_s = 2 * SERVING_S
            time.sleep(RETRY_S)
        self._note("kill to serving, s", time.perf_counter() - began)
        self._note("requests that failed until then", failed)
        again = self._call.first_text(messages).ttft_s
        self._note("TTFT of a long prompt, after the kill, s", again)

    async def fill(self, model: str) -> None:
        """Memory after the first request and after all of them."""
        requests = self._size.requests
        first = 0.0
        for number in range(0, requests, MEMORY_CLIENTS):
            prompts = [
                prompt(2_000_000 + number + place, words, warm=False)
                for place, words in enumerate(MEMORY_WORDS)
            ]
            await turn(self.rival.url, model, prompts, 16)
            first = first or self.rival.memory_bytes() / 1e6
        last = self.rival.memory_bytes() / 1e6
        self._note(f"memory after {requests} requests, MB", last)
        own = memory_bytes([self.rival.serving()]) / 1e6
        self._note("of that the process with the model, MB", own)
        self._note("of that since the first four, MB", last - first)


def idle_since(process: psutil.Process) -> float:
    """When a process last worked, on the clock of `perf_counter`; waits until it rests."""
    began = now = time.perf_counter()
    worked: list[float] = []
    while now - began < IDLE_S:
        now = time.perf_counter()
        if works(process):
            worked.append(now)
        recent = [moment for moment in worked if moment > now - QUIET_S]
        if now - began >= QUIET_S and len(recent) <= QUIET_LOOKS:
            return max((moment for moment in worked if moment not in recent), default=began)
        time.sleep(LOOK_S)
    raise RuntimeError("it does not come to rest")


def works(process: psutil.Process) -> bool:
    """Whether any of its threads runs or would if a processor were free.

    Not processor time: on a busy machine a process that works may get none for a while.
    """
    tasks = Path(f"/proc/{process.pid}/task")
    if not tasks.exists():
        return bool(process.status() == psutil.STATUS_RUNNING)
    for task in os.listdir(tasks):
        try:
            state = (tasks / task / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue  # a thread that has just ended
        if state == "R":
            return True
    return False


Start = Callable[[], Rival]


def run(model: Path, size: Size, rival: str = MLX_LM) -> dict[str, Pair]:
    """Everything, in turns."""

    def start_ours() -> Rival:
        return ours(model, "--ssd-cache-dir", str(model.parent / "ssd"))

    def start_without_disk() -> Rival:
        return ours(model)

    def start_theirs() -> Rival:
        return theirs(model, rival, is_looped=True)

    with start_ours() as mine, start_theirs() as other:
        sides = (Side(mine, mine.model_name(), size), Side(other, str(model), size))
        for side in sides:
            side.begin()
        for number in range(size.rounds):
            for side in sides if number % 2 else sides[::-1]:
                side.leave(number)
                side.kill(number)
    filled, without_disk, other_filled = (
        fill(start, model, size) for start in (start_ours, start_without_disk, start_theirs)
    )
    without_disk = {f"{name}, nothing on disk": values for name, values in without_disk.items()}
    return {
        figure: compare(values, theirs_too, higher_is_better=False)
        for figure, values, theirs_too in (
            *((name, values, sides[1].figures[name]) for name, values in sides[0].figures.items()),
            *((name, values, other_filled[name]) for name, values in filled.items()),
            *zip(without_disk, without_disk.values(), other_filled.values(), strict=True),
        )
    }


def fill(start: Start, model: Path, size: Size) -> Figures:
    """Memory of a fresh server after many requests."""
    with start() as rival:
        name = rival.model_name() if rival.name == OURS else str(model)
        side = Side(rival, name, size)
        side.begin()
        asyncio.run(side.fill(name))
        return side.figures


def table(pairs: dict[str, Pair], rival: str) -> str:
    """The figures as a person reads them: medians, lowest and highest."""
    lines = [f"{'figure':58} {'ours':>29} {rival:>29} {'ratio':>8}"]
    for figure, pair in pairs.items():
        ratio = "–" if pair.ratio is None else f"{pair.ratio:.2f}"
        ours_too, theirs_too = (
            f"{middle:.3f} ({low:.3f} to {high:.3f})"
            for middle, (low, high) in (
                (pair.ours, pair.ours_range),
                (pair.theirs, pair.theirs_range),
            )
        )
        lines.append(f"{figure:58} {ours_too:>29} {theirs_too:>29} {ratio:>8}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Measure, print the table, write JSON where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="the size that the tests run")
    parser.add_argument(
        "--rival",
        default=MLX_LM,
        help=f"{', '.join(RIVALS)}, or NAME=PROGRAM where its program is not on the path",
    )
    for name, what in MEANINGS.items():
        default = f"{what} (default {getattr(REAL, name)})"
        parser.add_argument("--" + name.replace("_", "-"), type=int, help=default)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    asked = {name: value for name, value in vars(options).items() if name in Size.__annotations__}
    size = dataclasses.replace(
        SMALL if options.small else REAL, **{k: v for k, v in asked.items() if v is not None}
    )
    facts = machine("mlx", "mlx-lm", "mlx-isolate")
    with tempfile.TemporaryDirectory(prefix="mi") as folder:
        spec = ModelSpec(kind="full", hidden=size.hidden, layers=size.layers, context=32768)
        pairs = run(build_model(Path(folder) / "random", spec), size, options.rival)
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    print(f"size: {size}\n" + table(pairs, options.rival.partition("=")[0]))
    if options.json is not None:
        figures = {name: asdict(pair) for name, pair in pairs.items()}
        options.json.write_text(json.dumps({"machine": facts, "figures": figures}, indent=1))
    return 0


if __name__ == "__main__":
    with leaving_nothing():
        sys.exit(main(sys.argv[1:]))
