"""A hostile process of this machine at an engine's socket: kept out, or at worst without effect."""

import asyncio
import os
import random
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.engine_process import REAL, EngineProcess
from tests.faults.test_fuzz_bytes import assail
from tests.material.models import ModelSpec
from tests.raw_http import ask
from tests.running_daemon import REAL as REAL_DAEMON
from tests.running_daemon import RunningDaemon

HIS_USER = 65534
HIS_CONNECTIONS = 200
FUZZED = ModelSpec(kind="full", context=128, template="tools")
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def engine(model_folder: Callable[[ModelSpec], Path]) -> Iterator[EngineProcess]:
    with EngineProcess(REAL) as process:
        process.start(str(model_folder(FUZZED)))
        process.wait_ready()
        yield process


def answer_of(engine: EngineProcess) -> str:
    response = asyncio.run(
        asyncio.wait_for(ask(engine.socket_path, "/v1/chat/completions", CHAT), 30)
    )
    assert response.status == 200, response.body
    text: str = response.json["choices"][0]["message"]["content"]
    return text


def assail_engine(engine: EngineProcess, examples: int, seed: int) -> None:
    before = answer_of(engine)
    process = psutil.Process(engine.child.pid)
    descriptors = process.num_fds()
    # What is no HTTP at all is answered in plain text here: the supervisor never sends it.
    asyncio.run(
        assail(lambda: asyncio.open_unix_connection(engine.socket_path), examples, seed, False)
    )
    assert engine.child.poll() is None, engine.log[-2000:]
    assert answer_of(engine) == before
    assert process.num_fds() <= descriptors + 8
    assert engine.progress_now().active == 0
    # Its HTTP library logs what it cannot parse; nothing of its own goes wrong.
    assert "ERROR engine" not in engine.log
    assert "Unhandled" not in engine.log


def test_400_hostile_connections_leave_the_engine_as_it_was(engine: EngineProcess) -> None:
    assail_engine(engine, 400, seed=6)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_20000_hostile_connections_leave_the_engine_as_it_was(engine: EngineProcess) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    assail_engine(engine, 20_000, seed)


def test_connections_that_say_nothing_or_never_read_hold_nobody_up(engine: EngineProcess) -> None:
    before = answer_of(engine)
    his: list[socket.socket] = []
    try:
        for number in range(HIS_CONNECTIONS):
            one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            one.settimeout(10)
            one.connect(engine.socket_path)
            his.append(one)
            if number % 2:
                # Asks for page after page and reads none of them.
                one.sendall(b"GET /v1/models HTTP/1.1\r\nHost: engine\r\n\r\n" * 20)
        assert answer_of(engine) == before
    finally:
        for one in his:
            one.close()
    assert answer_of(engine) == before


INTRUDER = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
folder, path = sys.argv[2], sys.argv[3]
refused = []
for name, act in {
    "list": lambda: os.listdir(folder),
    "connect": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).connect(path),
    "remove": lambda: os.unlink(path),
    "plant": lambda: os.symlink("/etc/passwd", os.path.join(folder, "x.sock")),
    "report": lambda: os.listdir(f"/proc/{sys.argv[4]}/fd"),
}.items():
    try:
        act()
    except PermissionError:
        refused.append(name)
print(" ".join(refused))
"""


@pytest.fixture(scope="module")
def daemon(
    model_folder: Callable[[ModelSpec], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningDaemon]:
    home = tmp_path_factory.mktemp("neighbour")
    model = str(model_folder(FUZZED))
    with RunningDaemon(home, model, program=REAL_DAEMON) as running:
        running.wait_state("ready", deadline_s=120)
        yield running


def test_sockets_and_their_folder_belong_to_the_user_alone(daemon: RunningDaemon) -> None:
    path = Path(daemon.status()["models"][0]["socket"])
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.lstat().st_mode) == 0o700
    assert path.lstat().st_uid == path.parent.lstat().st_uid == os.getuid()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_user_reaches_neither_socket_nor_report(daemon: RunningDaemon) -> None:
    model = daemon.status()["models"][0]
    path = Path(model["socket"])
    # The run directory's own parents let him pass.
    done = subprocess.run(
        [sys.executable, "-c", INTRUDER, str(HIS_USER), path.parent, path, str(model["pid"])],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.split() == ["list", "connect", "remove", "plant", "report"], done
    assert daemon.chat().status == 200
