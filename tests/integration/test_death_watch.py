"""How early a dying process is known, with real processes that hold memory."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import IO

import pytest
import uvloop

from mlx_isolate_supervisor.engines.death_watch import DeathWatch, read_dying_status
from tests.waiting import wait_for, wait_until

DEADLINE_S = 20.0
# So much that the kernel needs many times longer to drop it than a loop to hear of the death.
MEMORY_MB = 1024
VICTIM = """
import mmap, os, signal, sys, threading
memory = mmap.mmap(-1, max(1, int(sys.argv[1])) << 20)
memory.madvise(mmap.MADV_NOHUGEPAGE)
for page in range(0, int(sys.argv[1]) << 20, mmap.PAGESIZE):
    memory[page] = 1
leave = threading.Event()
for number in range(int(sys.argv[2])):
    # The oldest one ends by itself when it is told to.
    wait = leave.wait if number == 0 else threading.Event().wait
    threading.Thread(target=wait, daemon=True).start()
signal.signal(signal.SIGUSR1, lambda *_: os._exit(3))
print("ready", flush=True)
for line in sys.stdin:
    leave.set()
"""


def tells_early() -> bool:
    """Whether this system has handles of threads (Linux 6.9)."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid(), os.O_EXCL))
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not tells_early(), reason="the kernel has no handles of threads")


class Victim:
    """A child with memory and so many threads beside its main one, watched from a loop."""

    def __init__(self, memory_mb: int = 0, threads: int = 2) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-c", VICTIM, str(memory_mb), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.stdin, stdout = self._pipes()
        assert stdout.readline() == b"ready\n"
        # What was told, in order: a wait status, or None for the process's end.
        self.told: list[int | None] = []
        self.was_whole_when_told = False

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self.child.stdin is not None and self.child.stdout is not None
        return self.child.stdin, self.child.stdout

    def watch(self) -> DeathWatch:
        def on_dying(status: int) -> None:
            self.was_whole_when_told = not self.is_ended()
            self.told.append(status)

        watch = DeathWatch(
            self.child.pid, on_dying=on_dying, on_ended=lambda: self.told.append(None)
        )
        watch.watch_threads()
        return watch

    def is_ended(self) -> bool:
        """Whether it could be reaped; it is not."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.child.pid, flags) is not None

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        for pipe in self._pipes():
            pipe.close()


@pytest.fixture
def large() -> Iterator[Victim]:
    victim = Victim(MEMORY_MB)
    yield victim
    victim.close()


@pytest.fixture
def small() -> Iterator[Victim]:
    victim = Victim()
    yield victim
    victim.close()


def run_watched(victim: Victim, end: int, expected: list[int | None]) -> None:
    """Signal a watched process; what is told must be `expected`, and no descriptor may stay."""

    async def main() -> None:
        before = len(os.listdir("/proc/self/fd"))
        watch = victim.watch()
        victim.child.send_signal(end)
        await wait_until(lambda: None in victim.told, DEADLINE_S, "the process has ended")
        watch.close()
        assert len(os.listdir("/proc/self/fd")) == before
        assert sorted(victim.told, key=str) == sorted(expected, key=str)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@pytest.mark.parametrize(
    ("end", "code"), [("SIGKILL", -9), ("SIGSEGV", -11), ("SIGABRT", -6), ("SIGUSR1", 3)]
)
def test_a_death_is_told_with_its_cause_while_the_kernel_drops_the_memory(
    large: Victim, end: str, code: int
) -> None:
    number = signal.Signals[end]
    status = code << 8 if code > 0 else -code
    # A kernel that is told to dump cores says that it would have.
    seen: list[int | None] = []

    async def main() -> None:
        watch = large.watch()
        large.child.send_signal(number)
        await wait_until(lambda: None in large.told, DEADLINE_S, "the process has ended")
        watch.close()
        seen.extend(large.told)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    assert seen in ([status, None], [status | 0x80, None])
    assert os.waitstatus_to_exitcode(seen[0] or 0) == code
    assert large.was_whole_when_told
    assert large.child.wait() == code


def test_no_descriptor_stays_behind(small: Victim) -> None:
    run_watched(small, signal.SIGKILL, [signal.SIGKILL, None])


def test_a_process_of_one_thread_is_only_told_to_have_ended() -> None:
    victim = Victim(threads=0)
    try:
        run_watched(victim, signal.SIGKILL, [None])
    finally:
        victim.close()


def test_a_thread_that_ends_by_itself_is_no_death_and_is_replaced(small: Victim) -> None:
    async def main() -> None:
        watch = small.watch()
        threads = len(os.listdir(f"/proc/{small.child.pid}/task"))
        small.stdin.write(b"leave\n")
        small.stdin.flush()

        def has_left() -> bool:
            return len(os.listdir(f"/proc/{small.child.pid}/task")) == threads - 1

        await wait_until(has_left, DEADLINE_S, "one thread has ended")
        watch.watch_threads()
        assert small.told == []
        small.child.kill()
        await wait_until(lambda: None in small.told, DEADLINE_S, "the process has ended")
        watch.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    assert small.told[-1] is None


def test_a_stopped_process_is_not_dying_until_it_is_killed(small: Victim) -> None:
    small.child.send_signal(signal.SIGSTOP)
    wait_for(lambda: os.waitid(os.P_PID, small.child.pid, os.WSTOPPED), DEADLINE_S, "it stopped")
    assert read_dying_status(small.child.pid) is None
    run_watched(small, signal.SIGKILL, [signal.SIGKILL, None])


def test_a_process_that_lives_or_is_none_is_not_dying() -> None:
    assert read_dying_status(os.getpid()) is None
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert read_dying_status(child.pid) is None
