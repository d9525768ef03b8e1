"""Measures how long a start takes until requests are answered, and an idle supervisor's size.

`python -m bench.bench_start [--starts N] [--json FILE]`. The rival, in the same run and
alternating, is the smallest aiohttp server that answers one page. Engines are fakes, so their
loading is not measured, and neither is the first start after a boot (cold files).
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from tests.free_port import free_port

from bench.leaving import leaving_nothing
from bench.machine import machine
from mlx_isolate_supervisor.engines.memory import footprint

ROOT = Path(__file__).resolve().parents[1]
# What is promised.
LISTENING_S_MAX = 0.7
IDLE_BYTES_MAX = 60_000_000
DEADLINE_S = 30.0
SETTLE_S = 1.0

BARE = """
import asyncio, sys
from aiohttp import web
async def page(request):
    return web.Response(text="alive")
app = web.Application()
app.router.add_get("/livez", page)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
"""


def wait_answer(port: int, began: float) -> float:
    """Seconds from `began` until /livez has answered."""
    while time.perf_counter() - began < DEADLINE_S:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as client:
                client.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
                if b"alive" in client.recv(4096):
                    return time.perf_counter() - began
        except OSError:
            time.sleep(0.002)
    raise SystemExit("it does not answer")


def measure(command: Sequence[str], port: int, environment: dict[str, str]) -> dict[str, float]:
    """One start: time to the first answer, processor time until then, memory when idle."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        answer_s = wait_answer(port, began)
        spent = psutil.Process(process.pid).cpu_times()
        time.sleep(SETTLE_S)
        memory = footprint(process.pid)
        assert memory is not None
        return {
            "answer_s": answer_s,
            "cpu_s": spent.user + spent.system,
            "idle_bytes": float(memory[0]),
        }
    finally:
        process.terminate()
        process.wait()


def run(starts: int) -> dict[str, Any]:
    """All starts, ours and the rival's alternating."""
    home = Path(tempfile.mkdtemp(prefix="mi"))
    model = home / "m"
    model.mkdir()
    (model / "config.json").write_text("{}")
    environment = os.environ | {
        "HOME": str(home),
        "MLX_ISOLATE_LOG_DIR": str(home / "logs"),
        "MLX_ISOLATE_CACHE_DIR": str(home / "cache"),
    }
    taken: dict[str, list[dict[str, float]]] = {"mlx-isolate": [], "bare aiohttp": []}
    try:
        for number in range(starts):
            port = free_port()
            ours = [sys.executable, "-m", "tests.fakes.daemon", "serve", str(model)]
            ours += ["--port", str(port), "--run-dir", str(home / f"r{number}")]
            taken["mlx-isolate"].append(measure(ours, port, environment))
            port = free_port()
            bare = [sys.executable, "-c", BARE, str(port)]
            taken["bare aiohttp"].append(measure(bare, port, environment))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return {
        "machine": machine("aiohttp", "uvloop"),
        "starts": starts,
        "results": {name: summary(rounds) for name, rounds in taken.items()},
    }


def summary(rounds: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median and worst of each figure."""
    return {
        figure: {
            "p50": statistics.median(row[figure] for row in rounds),
            "max": max(row[figure] for row in rounds),
        }
        for figure in rounds[0]
    }


def lines(report: dict[str, Any]) -> list[str]:
    """The table for a person."""
    facts = "; ".join(f"{name} {value}" for name, value in report["machine"].items())
    shown = [f"{facts}; {report['starts']} starts each"]
    for name, figures in report["results"].items():
        shown.append(
            f"{name:13} first answer p50 {figures['answer_s']['p50']:.3f} s "
            f"max {figures['answer_s']['max']:.3f} s, cpu p50 {figures['cpu_s']['p50']:.2f} s, "
            f"idle {figures['idle_bytes']['p50'] / 1e6:.1f} MB"
        )
    ours, bare = report["results"]["mlx-isolate"], report["results"]["bare aiohttp"]
    for figure in ours:
        shown.append(f"ratio of {figure}: {ours[figure]['p50'] / bare[figure]['p50']:.2f}")
    return shown


def main() -> int:
    """Measure, print, and fail where a promise is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--starts", type=int, default=10, help="starts of each rival (default 10)")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    report = run(args.starts)
    print("\n".join(lines(report)))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n")
    ours = report["results"]["mlx-isolate"]
    kept = (
        ours["answer_s"]["p50"] <= LISTENING_S_MAX and ours["idle_bytes"]["p50"] <= IDLE_BYTES_MAX
    )
    print("promises kept" if kept else "a promise is broken")
    return 0 if kept else 1


if __name__ == "__main__":
    with leaving_nothing():
        sys.exit(main())
