"""What a supervisor spends on 1 to 8 models that are all loaded: start, memory, pages, requests.

The engines are fakes, which answer at once and weigh nothing, so that what grows is the supervisor's
own. The rival, in the same run and in turns, is the same daemon with one model. Not measured: the
engines' own loads, and models that take turns in memory (tests/integration/test_pool_rooms.py).

    python -m bench.bench_many_models            # the real size
    python -m bench.bench_many_models --small    # the size that the tests run
"""

import argparse
import http.client
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.running_daemon import RunningDaemon, fake_model
from tests.waiting import wait_for

from bench.leaving import leaving_nothing
from bench.machine import machine
from mlx_isolate_supervisor.engines.memory import footprint

# (numbers of models, turns, requests a turn)
SMALL = ((1, 2), 1, 20)
REAL = ((1, 2, 4, 8), 5, 400)
START_S = 120.0
SETTLE_S = 2.0
# What is promised of pages, whatever the engines do.
STATUS_P99_S_MAX = 0.01

Figures = dict[str, float]


def measure(home: Path, count: int, requests: int) -> Figures:
    """One daemon with `count` models."""
    folders = [str(fake_model(home / f"m{number}")) for number in range(count)]
    began = time.perf_counter()
    with RunningDaemon(home / "home", *folders) as daemon:

        def all_ready() -> bool:
            return all(model["state"] == "ready" for model in daemon.status()["models"])

        wait_for(all_ready, START_S, "all models are ready")
        ready_s = time.perf_counter() - began
        names = [model["id"] for model in daemon.status()["models"]]
        assert len(names) == count
        connection = daemon.connect()
        chats = [chat_s(connection, names[number % count]) for number in range(requests)]
        time.sleep(SETTLE_S)
        pages = [page_s(connection, "/status") for _ in range(requests)]
        connection.close()
        memory = footprint(daemon.process.pid)
        assert memory is not None
    return {
        "start to all ready, s": ready_s,
        "supervisor's memory, MB": memory[0] / 1e6,
        "/status p50, ms": statistics.median(pages) * 1000,
        "/status p99, ms": percentile(pages) * 1000,
        "small request p50, ms": statistics.median(chats) * 1000,
        "small request p99, ms": percentile(chats) * 1000,
    }


def percentile(values: list[float]) -> float:
    """The 99th."""
    return sorted(values)[int(len(values) * 0.99)]


def chat_s(connection: http.client.HTTPConnection, model: str) -> float:
    """Seconds of one small answer."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}]})
    began = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    assert response.status == 200, answer
    return time.perf_counter() - began


def page_s(connection: http.client.HTTPConnection, path: str) -> float:
    """Seconds of one page."""
    began = time.perf_counter()
    connection.request("GET", path)
    response = connection.getresponse()
    response.read()
    assert response.status == 200
    return time.perf_counter() - began


def run(counts: tuple[int, ...], rounds: int, requests: int) -> dict[int, Figures]:
    """Medians of all turns, by the number of models."""
    taken: dict[int, list[Figures]] = {count: [] for count in counts}
    for _ in range(rounds):
        for count in counts:
            home = Path(tempfile.mkdtemp(prefix="mi"))
            try:
                taken[count].append(measure(home, count, requests))
            finally:
                shutil.rmtree(home, ignore_errors=True)
    return {
        count: {name: statistics.median(one[name] for one in turns) for name in turns[0]}
        for count, turns in taken.items()
    }


def table(results: dict[int, Figures]) -> str:
    """The figures as a person reads them, each with its ratio to one model."""
    counts = list(results)
    lines = [f"{'models':26}" + "".join(f"{count:>17}" for count in counts)]
    for name, alone in results[counts[0]].items():
        cells = (
            f"{results[count][name]:.2f} ({results[count][name] / alone:.2f} ×)" for count in counts
        )
        lines.append(f"{name:26}" + "".join(f"{cell:>17}" for cell in cells))
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Measure, print the table, fail where a page is too slow."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="the size that the tests run")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    counts, rounds, requests = SMALL if options.small else REAL
    facts = machine("aiohttp", "uvloop", "mlx-isolate")
    results = run(counts, rounds, requests)
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    print(f"{rounds} turns of {requests} requests\n" + table(results))
    if options.json is not None:
        figures = {str(count): one for count, one in results.items()}
        options.json.write_text(json.dumps({"machine": facts, "figures": figures}, indent=1))
    worst = max(one["/status p99, ms"] for one in results.values())
    kept = options.small or worst <= STATUS_P99_S_MAX * 1000
    print("promise kept" if kept else "the promise is broken")
    return 0 if kept else 1


if __name__ == "__main__":
    with leaving_nothing():
        sys.exit(main(sys.argv[1:]))
