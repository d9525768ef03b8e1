"""A bench that is told to end takes along what it started."""

import signal
import subprocess
import sys

import psutil
import pytest

from tests.running_daemon import ROOT
from tests.waiting import wait_for

# What it starts leaves a process behind when it is ended alone, and nothing here ends either.
BENCH = """
import asyncio, subprocess, time
from bench.leaving import leaving_nothing
def rest():
    print("begun", flush=True)
    time.sleep(600)
async def rest_on_a_loop():
    print("begun", flush=True)
    await asyncio.sleep(600)
with leaving_nothing():
    child = subprocess.Popen(
        ["/bin/sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True
    )
    try:
        print(child.stdout.readline(), end="", flush=True)
        {work}
    finally:
        print("unwound", flush=True)
"""
# Programs that start nothing which could outlive them, or see to it themselves.
NO_BENCH = {
    "random_model.py",
    "relay_daemon.py",
    "relay_source.py",
    "soak_daemon.py",
    "soak_engine.py",
}


@pytest.mark.parametrize(
    ("number", "work"),
    [
        (signal.SIGTERM, "rest()"),
        (signal.SIGTERM, "import uvloop; uvloop.run(rest_on_a_loop())"),
        (signal.SIGINT, "import uvloop; uvloop.run(rest_on_a_loop())"),
    ],
)
def test_a_signal_unwinds_a_bench_and_ends_what_it_started(
    number: signal.Signals, work: str
) -> None:
    bench = subprocess.Popen(
        [sys.executable, "-c", BENCH.format(work=work)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert bench.stdout is not None
    left = psutil.Process(int(bench.stdout.readline()))
    # Before that, a coroutine may be there that nothing has awaited yet.
    assert bench.stdout.readline() == b"begun\n"
    bench.send_signal(number)
    assert bench.communicate(timeout=20) == (b"unwound\n", b"")
    assert bench.returncode == 128 + number
    wait_for(lambda: has_ended(left), 10.0, "the process below its child ends")


def has_ended(process: psutil.Process) -> bool:
    """Also one that nobody has reaped yet."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_every_bench_leaves_nothing() -> None:
    for path in (ROOT / "bench").glob("*.py"):
        _, is_program, end = path.read_text().partition('\nif __name__ == "__main__":\n')
        leaves_nothing = end.startswith("    with leaving_nothing():\n")
        assert leaves_nothing == (bool(is_program) and path.name not in NO_BENCH), path
