"""Kills at random moments of writing: no wrong answer, no crash, nothing left half done."""

import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_isolate_engine.cache.directory import CacheDirectory
from mlx_isolate_engine.cache.kv_check import verify
from mlx_isolate_engine.cache.ssd_store import SsdStore
from mlx_isolate_engine.cache.token_index import token_key
from tests.fakes.cache_writer import IDENTITY, kind_of, tokens_of
from tests.fakes.toy_caches import KINDS, assert_same, feed
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
SEED = 20260101
# Gates that a writer passes before it is killed: within the first file or after dozens of them.
GATES_MAX = 150


class Forker:
    """The importing process, and what its current writer has printed."""

    def __init__(self) -> None:
        path = os.pathsep.join(str(ROOT / side) for side in ("engine", "shared"))
        self.child = subprocess.Popen(
            [sys.executable, "-P", str(ROOT / "tests/fakes/cache_writer.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )

    def kill_after(self, root: Path, seed: int, gates: int) -> None:
        """Start a writer and kill it once it has passed so many gates."""
        assert self.child.stdin is not None and self.child.stdout is not None
        self.child.stdin.write(f"{root} {seed}\n".encode())
        self.child.stdin.flush()
        out = self.child.stdout.fileno()
        text = b""
        while text.count(b"\n") < 2 or text.count(b".") < gates:
            assert select.select([out], [], [], 60)[0], f"the writer stands still: {text!r}"
            data = os.read(out, 4096)
            assert data, "the writer died by itself"
            text += data
        digits = bytes(c for c in text if c not in b".").split()
        pid = int(digits[0])
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), 20, "the writer is gone")
        while select.select([out], [], [], 0)[0]:
            os.read(out, 4096)


@pytest.fixture
def forker() -> Iterator[Forker]:
    running = Forker()
    yield running
    with running.child:  # closes both pipes, which ends it, and waits
        pass


def check_everything(root: Path) -> int:
    """Open the store as a starting engine does, and restore each entry; returns how many."""
    store = SsdStore(root, IDENTITY, bytes_max=3_000_000, verify=True)
    store.open()
    assert [f for f in CacheDirectory(root).files() if f.owner is not None] == []
    assert store.damage == {}, "a kill left a file that only looks whole"
    restored = 0
    for number in range(200):
        tokens = tokens_of(number)
        found = store.find(kind_of(number), token_key([*tokens, 9999]), length_max=len(tokens))
        if found is None or found.length < len(tokens):
            continue
        steps = store.restore(found, room_for=len(tokens))
        while True:
            try:
                next(steps)
            except StopIteration as end:
                cold = KINDS[kind_of(number)]()
                feed(cold, tokens, 0, 7)
                assert_same(end.value, cold)
                restored += 1
                break
    for file in CacheDirectory(root).files():
        verify(file.path)
    return restored


def kill_and_check(forker: Forker, root: Path, kills: int) -> None:
    source = random.Random(SEED)
    restored = 0
    for number in range(kills):
        gates = source.randrange(1, GATES_MAX)
        forker.kill_after(root, seed=SEED + number, gates=gates)
        restored += check_everything(root)
    assert restored > 0, "nothing was ever durable, so this proves nothing"


@pytest.mark.skipif(sys.platform != "linux", reason="watches /proc")
def test_ten_kills_while_writing_leave_only_whole_entries(forker: Forker, tmp_path: Path) -> None:
    kill_and_check(forker, tmp_path / "cache", 10)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux", reason="watches /proc")
def test_two_hundred_kills_while_writing_leave_only_whole_entries(
    forker: Forker, tmp_path: Path
) -> None:
    kill_and_check(forker, tmp_path / "cache", 200)
