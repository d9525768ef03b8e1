"""A real child process that speaks the spawn contract and serves made-up answers on its socket.

Run as `python -P tests/fakes/fake_engine.py --id M --incarnation N --spec-fd A --report-fd B
--lifeline-fd C`. It knows the project's wire types only, so it starts fast; its faults are in
`fake_faults.py`.
"""

import argparse
import asyncio
import ctypes
import faulthandler
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mlx_isolate_shared import wire
from tests.fakes import fake_http
from tests.fakes.fake_faults import StartFaults, standby_faults, start_faults

PROGRESS_S = 0.1
MB = 1_000_000
FACTS = wire.ModelFacts(
    architecture="fake",
    parameters=1000,
    weights_bytes=4000,
    dtype="float32",
    context_length=4096,
    vocab_size=256,
    backend="none",
    has_chat_template=True,
)


def die(how: str) -> NoReturn:
    """End this process as told: `exit:N` or a signal's name."""
    if how.startswith("exit:"):
        os._exit(int(how[5:]))
    os.kill(os.getpid(), signal.Signals[how])
    while True:
        time.sleep(1)


class Report:
    """The write end of the report pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def send(self, message: wire.Report) -> None:
        self.raw(wire.encode_line(message))

    def raw(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def close(self) -> None:
        os.close(self._fd)


class Standby:
    """What was done ahead of the start."""

    def __init__(self, report: Report, lifeline_fd: int) -> None:
        self._report = report
        self._lifeline_fd = lifeline_fd
        self.prepared: list[str] = []

    def prepare(self, prepare: wire.Prepare) -> None:
        """Pretend to import and to load a tokenizer, with whatever is to go wrong meanwhile."""
        if not self.prepared:
            watch_lifeline(self._lifeline_fd)
        faults = standby_faults()
        time.sleep(faults.prepare_s)
        if faults.die is not None and (prepare.model or not faults.only_for_models):
            die(faults.die)
        self.prepared.append(prepare.model or "imports")
        self._report.send(wire.Loading(stage="prepared"))


def read_start(fd: int, standby: Standby) -> wire.Start:
    """Wait for `start` on the spec pipe; its end before that means that we are not needed."""
    with os.fdopen(fd, "rb") as spec:
        for line in spec:
            match wire.decode_spec(line):
                case wire.Start() as start:
                    return start
                case wire.Prepare() as prepare:
                    standby.prepare(prepare)
    sys.exit(0)


def watch_lifeline(fd: int) -> None:
    """End with the supervisor: by the pipe's end, and on Linux by a parent-death signal."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)

    def wait() -> None:
        while os.read(fd, 1):
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def tell_lies(report: Report, faults: StartFaults) -> None:
    """Write what a broken or hostile engine might write."""
    for lie in faults.lies:
        if lie == "garbage":
            report.raw(b'\x00\xff{"tag": nonsense\n\n[1,2]\n{"type":"progress","active":"many"}\n')
        elif lie == "overlong":
            report.raw(b'{"type":"loading","stage":"' + b"x" * (3 << 20) + b'"}\n')
        elif lie == "flood":
            report.raw(wire.encode_line(wire.Loading(stage="flood")) * 20_000)
        elif lie == "unknown_tag":
            report.raw(b'{"type":"from_the_future","x":1}\n')


def file_bytes(path: str | None) -> bytes:
    """All of a file; nothing of none."""
    return b"" if path is None else Path(path).read_bytes()


def hold_memory(megabytes: int) -> mmap.mmap:
    """So much memory in small pages, all of them touched, as a model's weights are."""
    memory = mmap.mmap(-1, max(1, megabytes) << 20)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    for page in range(0, megabytes << 20, mmap.PAGESIZE):
        memory[page] = 1
    return memory


def load(report: Report, faults: StartFaults) -> None:
    """Pretend to load, with whatever is to go wrong meanwhile."""
    for line in faults.say:
        print(line, file=sys.stderr, flush=True)
    for number in range(faults.say_many):
        print(f"line {number}", file=sys.stderr)
    tell_lies(report, faults)
    report.raw(file_bytes(faults.report_before))
    if not faults.silent:
        report.send(wire.Loading(stage="import"))
    stages = (("download", faults.download_s), ("weights", faults.load_s))
    for stage, seconds in stages:
        for step in range(10 if seconds else 0):
            time.sleep(seconds / 10)
            if not faults.silent:
                report.send(wire.Loading(stage=stage, fraction=(step + 1) / 10))
    while faults.hang_load:
        time.sleep(1)
    if faults.failed is not None:
        report.send(wire.Failed(code=faults.failed[0], message=faults.failed[1]))
    if faults.die is not None and faults.die_after_ready_s is None:
        die(faults.die)
    if faults.close_report:
        report.close()
        while True:
            time.sleep(1)


async def report_progress(report: Report, counters: fake_http.Counters) -> None:
    """A progress line at a steady pace, until the process ends."""
    while True:
        try:
            report.send(counters.line())
        except BrokenPipeError:
            return
        await asyncio.sleep(PROGRESS_S)


async def serve(start: wire.Start, report: Report, faults: StartFaults, ready: wire.Ready) -> None:
    """Listen, report ready, and go on until a signal."""
    after = file_bytes(faults.report_after)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    if not faults.ignore_term:
        loop.add_signal_handler(signal.SIGTERM, stop.set)
    counters = fake_http.Counters(faults.mlx_mb * MB, faults.device_free_mb * MB)
    server = None
    if not faults.no_socket:
        server = await asyncio.start_unix_server(
            fake_http.Service(start, counters, die).connected, start.socket_path
        )
        os.chmod(start.socket_path, 0o600)
    report.send(ready)
    if "double_ready" in faults.lies:
        report.send(ready)
    report.raw(after)
    if faults.die is not None and faults.die_after_ready_s is not None:
        loop.call_later(faults.die_after_ready_s, die, faults.die)
    progress = asyncio.create_task(report_progress(report, counters))
    await stop.wait()
    await asyncio.sleep(faults.term_s)
    progress.cancel()
    if server is not None:
        server.close()
    os._exit(0)


def main() -> None:
    """Speak the spawn contract from the first line to the last."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--id", required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    for name in ("--spec-fd", "--report-fd", "--lifeline-fd"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--nice", type=int, default=0)
    given = parser.parse_args()
    faulthandler.enable()
    # A way for a test to have the engine itself exit, at any moment.
    signal.signal(signal.SIGUSR2, lambda _number, _frame: os._exit(1))
    report = Report(given.report_fd)
    standby = Standby(report, given.lifeline_fd)
    start = read_start(given.spec_fd, standby)
    began = time.monotonic()
    faults = start_faults(start.model, start.incarnation)
    if faults.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if faults.ignore_lifeline:
        # What the kernel sends to a stopped process whose parent has gone.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    elif not standby.prepared:
        watch_lifeline(given.lifeline_fd)
    if faults.fork_helper:
        subprocess.Popen(["sleep", "600"])
    load(report, faults)
    memory = hold_memory(faults.memory_mb)
    # A real engine has more than one thread beside its main one.
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    ready = wire.Ready(
        pid=os.getpid(),
        socket_path=start.socket_path,
        load_s=time.monotonic() - began,
        # What was prepared ahead is told where a test can read it.
        facts=msgspec.structs.replace(
            FACTS,
            warnings=tuple(standby.prepared),
            backend=faults.backend,
            device_memory_bytes=faults.device_mb * MB,
        ),
    )
    with memory:
        asyncio.run(serve(start, report, faults, ready))


if __name__ == "__main__":
    main()
